// Loads a model's or an adapter's tensors into the caller's memory: checks that the files have every tensor
// with its shape and no other one, then reads and converts with several threads in bounded chunks. The caller
// owns the memory; a call returns when everything is in place (on a GPU: when the copies are enqueued), or
// throws Error(11) listing the first 20 differences before anything is read.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/staging.h"
#include "spec/block_layout.h"
#include "weights/encode.h"
#include "weights/model_files.h"

namespace lm {

// Row-major memory for a parameter (its parts one after another), or for some of its rows; `memory` null: the
// tensor is checked but not read (another call reads it).
struct LoadTarget {
  std::byte* memory = nullptr;
  DType dtype = DType::kBF16;  // bf16, fp16 or fp32
  int64_t first_row = 0;       // the row at `memory`
  int64_t rows = 0;            // 0: all
  // Not null: the first component is at `memory`, and `dtype` is the type to quantize from.
  const TensorPlace* encoded = nullptr;
};

using FindTarget = std::function<LoadTarget(size_t block, const TensorPlace& place)>;

struct LoadOptions {
  int threads = 1;
  // Not null: targets are memory of its device, bytes are copied through it, and complete after its finish().
  Staging* staging = nullptr;
  // For an adapter: its base model, copies of whose matrices the file may have, and that model's directory;
  // "": unknown, and copies of its tensors are not compared.
  const ModelSpec* base = nullptr;
  std::string base_directory = {};
};

// The adapter's parameters of `layout`. Returns the bytes read.
int64_t load_adapter_tensors(const ModelFiles& files, const ModelLayout& layout, const FindTarget& target,
                             const LoadOptions& options);

// The base model's parameters, target by target. A head that is stored although it is tied must equal the
// embedding. Tensors of a wrapper's towers, GPT-2's masks and frequencies of RoPE are left alone.
int64_t load_model(const ModelFiles& files, const ModelSpec& spec, const ModelLayout& layout,
                   const FindTarget& target, const LoadOptions& options);

// Modules whose tensors published files have and nobody reads: keys and values of layers that borrow those of
// others. They are not loaded, and copied into a full export.
std::vector<std::string> unread_modules(const ModelSpec& spec);
bool belongs_to(const std::string& tensor, const std::vector<std::string>& modules);

// A parameter of the model under the base's names, which it does not have where it is trained whole beside an
// adapter.
Parameter stored_in_base(Parameter parameter);

// The tensors of the base that are trained whole beside an adapter, but a head of scores that the files do
// not have. REQUIRES: load_model has checked the files.
int64_t load_whole_tensors(const ModelFiles& files, const ModelSpec& spec, const ModelLayout& layout,
                           const FindTarget& target, const LoadOptions& options);

// A part's elements in `dtype`, in the program's order. `files` outlives the result.
MatrixElements elements_of(const ModelFiles& files, const Parameter& parameter, size_t part, DType dtype);

// Compares names, shapes and types with the model without reading data; throws as load_model does.
void check_model_files(const ModelFiles& files, const ModelSpec& spec);

}  // namespace lm
