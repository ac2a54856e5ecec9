// The tensors of a model directory, over a single model.safetensors or the parts that
// model.safetensors.index.json names. Every name inside a file is data, never a path: parts are plain names
// of regular files in the directory itself (links as in the hub's cache are fine). Owns the open files;
// reading is safe from many threads. Errors are Error(11), "FILE-22" for an invalid index.
//
// A directory of a model with more tokens than its files have (launcher/grown_model.h) has
// added_rows.safetensors beside links to these: for each matrix of the vocabulary, under its name, the last
// rows that it has there. Whoever reads such a tensor reads it whole.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "weights/safetensors.h"
#include "weights/tensor_names.h"

namespace lm {

inline constexpr const char* kAddedRows = "added_rows.safetensors";

class ModelFiles {
 public:
  struct Tensor {
    const SafetensorsEntry* entry = nullptr;  // with the file's own name
    const SafetensorsFile* file = nullptr;
    std::string name = {};  // as the program calls it (weights/tensor_names.h)
    TensorUse use = TensorUse::kText;
  };

  // Opens model.safetensors, else the parts of the index. With `single` (adapter_model.safetensors), only it.
  // Two tensors that the program would call the same are an error.
  explicit ModelFiles(const std::string& directory, const std::string& single = "");

  const std::string& directory() const { return directory_; }
  const std::vector<Tensor>& tensors() const { return tensors_; }  // in the order of `name`, each once
  std::optional<Tensor> find(const std::string& name) const;       // by the program's name
  // Plain names of the files: the index if there is one, then the parts.
  const std::vector<std::string>& names() const { return names_; }

 private:
  void read_index(const std::string& path);
  void read_added_rows(const std::string& path);

  std::string directory_;
  std::vector<std::string> names_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::unique_ptr<SafetensorsFile> added_;  // null: the files have all rows
  std::vector<Tensor> tensors_;
};

// Names of the tensors of a directory as the program calls them, without opening the parts that an index
// names: they need not be there. None where there are no files.
std::vector<std::string> tensor_names(const std::string& directory);

// Writes `tensors` below `directory` as model.safetensors or, past `part_bytes`, as parts with an index.
// `fill` is called once per tensor and passes its bytes to the sink, in chunks of any size. `directory` must
// exist.
using TensorSink = std::function<void(std::span<const std::byte>)>;
inline constexpr int64_t kPartBytes = 5'000'000'000;
void write_model_files(const std::string& directory, const std::vector<TensorInfo>& tensors,
                       const std::function<void(const std::string& name, const TensorSink& sink)>& fill,
                       int64_t part_bytes = kPartBytes);

}  // namespace lm
