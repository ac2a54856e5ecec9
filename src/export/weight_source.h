// Tensors for export: the Hugging Face tensors of a layout, and their bytes from the caller's memory,
// converted in bounded chunks; where the files have [columns, rows], so many rows of the file at once as fit
// into 8 MiB of fp32. Borrows the layout and the source's memory; one thread.
#pragma once

#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "spec/block_layout.h"
#include "weights/file_types.h"
#include "weights/model_files.h"

namespace lm {

// Row-major memory of one parameter, or of some of its rows; fp32 or bf16.
struct WeightView {
  const std::byte* memory = nullptr;
  DType dtype = DType::kBF16;
  int64_t first_row = 0;  // the row at `memory`
  int64_t rows = 0;       // 0: all
};

// Returns a view of a parameter from `row` on; called for each of its tensors until all rows are written. The
// view has at least that row, and must stay valid until the next call.
using WeightSource = std::function<WeightView(size_t block, const TensorPlace& place, int64_t row)>;

// Calls take(row, rows, memory, dtype) for rows [first, end) of a parameter, as the source has them.
using TakeRows = std::function<void(int64_t row, int64_t rows, const std::byte* memory, DType dtype)>;
void for_each_view(const WeightSource& source, size_t block, const TensorPlace& place, int64_t first,
                   int64_t end, const TakeRows& take);

class OutgoingTensors {
 public:
  enum class What { kModel, kAdapter };
  // `dtype` is the files', but for the tensors in `own_types`; a tied head is not among the tensors, as the
  // layout has none.
  OutgoingTensors(const ModelLayout& layout, What what, DType dtype, WeightSource source,
                  const TensorTypes& own_types = {});

  const std::vector<TensorInfo>& tensors() const { return tensors_; }  // in block order
  void fill(const std::string& name, const TensorSink& sink) const;

 private:
  struct Part {
    size_t block;
    const TensorPlace* place;
    const ParameterPart* part;
  };
  // The type of a tensor of the files, and the parts of which it is made: one, columns beside each other, or
  // matrices one behind another.
  struct Tensor {
    DType dtype;
    std::vector<Part> parts = {};
  };
  // A part that lies in the file without gaps, rounded to `to_type`.
  void fill_part(const Part& part, DType to_type, const TensorSink& sink) const;
  void fill_transposed(const Part& part, DType to_type, const TensorSink& sink) const;
  void fill_slices(const Tensor& tensor, const TensorSink& sink) const;
  void fill_columns(const Tensor& tensor, const TensorSink& sink) const;
  WeightSource source_;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string, Tensor> made_of_;
};

}  // namespace lm
