// Safetensors files: a reader that checks the whole header when it opens the file and reads by pread, and a
// writer that streams tensors in order and renames the file only when it is complete and durable. The caller
// owns all memory; reading is safe from many threads, writing from one. Sizes in bytes.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "weights/safetensors_header.h"

namespace lm {

class SafetensorsFile {
 public:
  // Throws Error(11): not a regular file, too short, or a header that parse_safetensors_header refuses.
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const std::vector<SafetensorsEntry>& entries() const { return header_.entries; }  // in name order
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  const SafetensorsEntry* find(const std::string& name) const;  // null when absent

  // Tensor `name` [n, H] keeps its rows before those of the tensor of that name in `more` [m, H], and
  // continues with these: it has `rows` in all afterwards. Throws Error(11) if the two do not fit. `more` is
  // borrowed.
  void continue_tensor(const std::string& name, const SafetensorsFile& more, int64_t rows);

  // Part of a tensor, from byte `offset` of it; inside it (checked).
  void read(const SafetensorsEntry& entry, int64_t offset, std::span<std::byte> bytes) const;

 private:
  File file_;
  SafetensorsHeader header_;
  int64_t data_start_ = 0;
  // Tensors that continue in another file, from byte `split` of theirs on.
  struct Continued {
    const SafetensorsEntry* entry = nullptr;
    int64_t split = 0;
    const SafetensorsFile* file = nullptr;
    const SafetensorsEntry* rest = nullptr;
  };
  std::vector<Continued> continued_;
};

struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  int64_t bytes() const;  // throws Error(70) on overflow: our shapes never do
};

// The beginning of a file with these tensors in this order, contiguous: length and JSON, padded with blanks
// to a multiple of `alignment`.
std::string safetensors_beginning(std::span<const TensorInfo> tensors,
                                  const std::map<std::string, std::string>& metadata, int64_t alignment = 8);

class SafetensorsWriter {
 public:
  // Writes the header for `tensors`; other readers require "format": "pt".
  SafetensorsWriter(const std::string& path, std::vector<TensorInfo> tensors,
                    const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

  // The order in which data must be written: descending element size, then name, so that every tensor is
  // aligned.
  const std::vector<TensorInfo>& order() const { return tensors_; }
  // The next bytes of tensor `name`, in chunks of any size; a tensor must be complete before the next begins.
  void write(const std::string& name, std::span<const std::byte> bytes);
  // Every tensor must be complete. Flushes and renames.
  void commit();

 private:
  std::vector<TensorInfo> tensors_;
  NewFile file_;
  size_t current_ = 0;
  int64_t left_ = 0;  // bytes that tensors_[current_] still needs
};

}  // namespace lm
