// The types that a model's tensors have in its files. Most tensors have one type, in whose place a run puts
// its own (model.dtype); others are kept in another one, often norms, routers or a head in fp32, and come
// back in it. Reads headers only, unless it says otherwise; the caller owns the files.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "spec/block_layout.h"
#include "weights/model_files.h"

namespace lm {

using TensorTypes = std::map<std::string, DType>;  // by the program's names

struct FileTypes {
  std::optional<DType> common = {};  // of most elements; none: the files have no such tensor
  TensorTypes others = {};           // the tensors of another type
};

// Of the model's tensors in `layout`, an adapter's left out. Buffers and quantized matrices are not counted.
FileTypes file_types(const ModelFiles& files, const ModelLayout& layout);

// Which of `tensors` have values that `dtype` cannot hold. Reads them.
std::vector<std::string> rounded_tensors(const ModelFiles& files, const TensorTypes& tensors, DType dtype);

}  // namespace lm
