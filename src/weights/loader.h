// Loads a model's or an adapter's tensors into memory that the caller gives: checks that every tensor is
// there with its shape and that none is left over, then reads with several threads in bounded chunks and
// converts on the way. The caller owns the memory; a call returns when everything is in place (on a GPU: is
// on its way there), or throws Error(11) listing the first 20 differences before anything is read.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/staging.h"
#include "spec/block_layout.h"
#include "weights/encode.h"
#include "weights/model_files.h"

namespace lm {

// Row-major memory for a parameter of ours (its parts one after another), or for some rows of it; `memory`
// null: the tensor is checked but not read (it is someone else's).
struct LoadTarget {
  std::byte* memory = nullptr;
  DType dtype = DType::kBF16;  // bf16 or fp32
  int64_t first_row = 0;       // that `memory` begins with
  int64_t rows = 0;            // 0: all
  // Not null: `memory` begins with its pieces, and `dtype` is what it is quantised from.
  const TensorPlace* encoded = nullptr;
};

using FindTarget = std::function<LoadTarget(size_t block, const TensorPlace& place)>;

struct LoadOptions {
  int threads = 1;
  // Not null: targets are memory of its device, and bytes pass through it, complete once it is finished.
  Staging* staging = nullptr;
};

// The adapter's parameters of `layout`. Returns the bytes read.
int64_t load_adapter_tensors(const ModelFiles& files, const ModelLayout& layout, const FindTarget& target,
                             const LoadOptions& options);

// The base model's, target by target. A head that is stored although it is tied must equal the embedding.
int64_t load_model(const ModelFiles& files, const ModelSpec& spec, const ModelLayout& layout,
                   const FindTarget& target, const LoadOptions& options);

// Of a tensor of the files, as elements of `dtype`. `files` outlives what is returned.
MatrixElements elements_of(const ModelFiles& files, const std::string& name, DType dtype);

// Compares names, shapes and types with the model without reading data; throws as load_model does.
void check_model_files(const ModelFiles& files, const ModelSpec& spec);

}  // namespace lm
