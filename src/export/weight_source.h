// The way out: which Hugging Face tensors a layout consists of, and their bytes out of memory that the caller
// lends, converted in bounded chunks. Borrows the layout and whatever the source returns; one thread.
#pragma once

#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "spec/block_layout.h"
#include "weights/model_files.h"

namespace lm {

// Row-major memory of one parameter of ours, or of some rows of it; fp32 or bf16.
struct WeightView {
  const std::byte* memory = nullptr;
  DType dtype = DType::kBF16;
  int64_t first_row = 0;  // that `memory` begins with
  int64_t rows = 0;       // 0: all
};

// Asked for a parameter, from a row on, each time one of its tensors is written: for what is left of it until
// nothing is. The view holds at least that row, and must stay valid until the next call.
using WeightSource = std::function<WeightView(size_t block, const TensorPlace& place, int64_t row)>;

class OutgoingTensors {
 public:
  enum class What { kModel, kAdapter };
  // `dtype` (fp32 or bf16) is the files'; a tied head is not among the tensors, as the layout has none.
  OutgoingTensors(const ModelLayout& layout, What what, DType dtype, WeightSource source);

  const std::vector<TensorInfo>& tensors() const { return tensors_; }  // in block order
  void fill(const std::string& name, const TensorSink& sink) const;

 private:
  struct Part {
    size_t block;
    const TensorPlace* place;
    const ParameterPart* part;
  };
  void pass_on(const std::byte* from, DType dtype, int64_t elements, const TensorSink& sink) const;
  DType dtype_;
  WeightSource source_;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string, Part> parts_;
};

}  // namespace lm
