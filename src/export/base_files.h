// What a full export takes from the files of its base model: their names for the tensors, the types of those
// that are not stored as most are, and, byte for byte, what nobody trains: the towers of a wrapper, buffers,
// and frozen tensors of such a type. Owns the open files; one thread. Errors are those of ModelFiles.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "spec/block_layout.h"
#include "weights/file_types.h"
#include "weights/model_files.h"

namespace lm {

class BaseFiles {
 public:
  // A directory without weights, or "", has no names: `wrapped` chooses those of the wrapper classes of
  // transformers 5, else the program's are taken.
  BaseFiles(const std::string& directory, bool wrapped);

  // Of the tensors of `layout`, those that a model of `dtype` has in a type of their own: the base's, where
  // most of its tensors have another. In fp32 only what is not trained keeps it, since others hold more than
  // it has.
  TensorTypes own_types(const ModelLayout& layout, DType dtype) const;

  // `ours` under the base's names, what nobody trains of `layout` in the type that the base has it in, then
  // its towers, what old files hold, and the tensors of modules that nobody reads. Throws Error(11) if a
  // tower is quantized: the exported config.json says that nothing is.
  std::vector<TensorInfo> outgoing(std::vector<TensorInfo> ours, const ModelLayout& layout,
                                   const std::vector<std::string>& unread);

  // The base's name of a tensor of the text model.
  std::string name_of(const std::string& ours) const;

  // By the program's name: whether a tensor of that list is the base's own, and its bytes.
  bool copies(const std::string& name) const { return copied_.contains(name); }
  void copy(const std::string& name, const TensorSink& sink) const;

 private:
  bool wrapped_;
  std::unique_ptr<ModelFiles> files_;  // null: there are none
  std::set<std::string> copied_;       // by the program's names
};

}  // namespace lm
