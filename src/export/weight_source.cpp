#include "export/weight_source.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "weights/convert.h"

namespace lm {
namespace {
constexpr int64_t kChunkElements = int64_t{1} << 20;
}

OutgoingTensors::OutgoingTensors(const ModelLayout& layout, What what, DType dtype, WeightSource source)
    : dtype_(dtype), source_(std::move(source)) {
  LM_CHECK(dtype == DType::kF32 || dtype == DType::kBF16, dtype_name(dtype));
  for (size_t b = 0; b < layout.blocks.size(); ++b) {
    for (const TensorPlace& place : layout.blocks[b].tensors) {
      if (in_adapter(place.parameter.role) != (what == What::kAdapter)) continue;
      for (const ParameterPart& part : place.parameter.parts) {
        tensors_.push_back({.name = part.name, .dtype = dtype, .shape = place.parameter.shape(part)});
        parts_.emplace(part.name, Part{b, &place, &part});
      }
    }
  }
}

void OutgoingTensors::fill(const std::string& name, const TensorSink& sink) const {
  const auto it = parts_.find(name);
  LM_CHECK(it != parts_.end(), name);
  const Part& part = it->second;
  const Parameter& parameter = part.place->parameter;
  const int64_t columns = parameter.columns, end = part.part->first + part.part->rows;
  for (int64_t row = part.part->first; row < end;) {
    const WeightView view = source_(part.block, *part.place, row);
    const int64_t last = std::min(end, view.rows > 0 ? view.first_row + view.rows : parameter.rows);
    LM_CHECK(view.memory != nullptr && view.first_row <= row && row < last, name);
    const int64_t offset = (row - view.first_row) * columns;
    pass_on(view.memory + offset * static_cast<int64_t>(dtype_size(view.dtype)), view.dtype,
            (last - row) * columns, sink);
    row = last;
  }
}

void OutgoingTensors::pass_on(const std::byte* from, DType dtype, int64_t elements,
                              const TensorSink& sink) const {
  const auto from_size = static_cast<int64_t>(dtype_size(dtype));
  if (dtype == dtype_) return sink({from, static_cast<size_t>(elements * from_size)});
  std::vector<std::byte> buffer(static_cast<size_t>(std::min(elements, kChunkElements)) * dtype_size(dtype_));
  for (int64_t first = 0; first < elements; first += kChunkElements) {
    const int64_t n = std::min(kChunkElements, elements - first);
    convert_elements(from + first * from_size, dtype, buffer.data(), dtype_, n);
    sink(std::span(buffer).first(static_cast<size_t>(n) * dtype_size(dtype_)));
  }
}

}  // namespace lm
