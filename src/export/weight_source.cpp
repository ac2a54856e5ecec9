#include "export/weight_source.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/host_device.h"
#include "weights/convert.h"

namespace lm {
namespace {

constexpr int64_t kChunkElements = int64_t{1} << 20;
constexpr int64_t kTransposedElements = int64_t{1} << 21;

// Columns of some rows, as rows of the file.
struct Band {
  std::byte* memory = nullptr;
  DType dtype = DType::kF32;
  int64_t column = 0, columns = 0;
  int64_t rows = 0;  // of the part: a row of the file
};

// Row `row` of the part, its elements in the band's type, `Element`.
template <class Element>
void put_elements(const Band& band, int64_t row, const std::byte* from) {
  const auto* const elements = reinterpret_cast<const Element*>(from);
  auto* const to = reinterpret_cast<Element*>(band.memory) + row;
  for (int64_t c = 0; c < band.columns; ++c) to[c * band.rows] = elements[c];
}

// The same from elements of `dtype`, of which `from` is the row's first.
void put_row(const Band& band, int64_t row, const std::byte* from, DType dtype,
             std::vector<std::byte>& line) {
  line.resize(static_cast<size_t>(band.columns) * dtype_size(band.dtype));
  convert_elements(from + band.column * static_cast<int64_t>(dtype_size(dtype)), dtype, line.data(),
                   band.dtype, band.columns);
  band.dtype == DType::kF32 ? put_elements<float>(band, row, line.data())
                            : put_elements<uint16_t>(band, row, line.data());
}

// Elements of type `from_type`, to the sink in `to_type`.
void pass_on(const std::byte* from, DType from_type, DType to_type, int64_t elements,
             const TensorSink& sink) {
  const auto from_size = static_cast<int64_t>(dtype_size(from_type));
  if (from_type == to_type) return sink({from, static_cast<size_t>(elements * from_size)});
  std::vector<std::byte> buffer(static_cast<size_t>(std::min(elements, kChunkElements)) *
                                dtype_size(to_type));
  for (int64_t first = 0; first < elements; first += kChunkElements) {
    const int64_t n = std::min(kChunkElements, elements - first);
    convert_elements(from + first * from_size, from_type, buffer.data(), to_type, n);
    sink(std::span(buffer).first(static_cast<size_t>(n) * dtype_size(to_type)));
  }
}

// Elements of a row, each `step`-th of the file's.
void put_columns(const std::byte* from, DType from_type, std::byte* to, DType to_type, int64_t columns,
                 int64_t step) {
  if (step == 1) return convert_elements(from, from_type, to, to_type, columns);
  const auto from_size = static_cast<int64_t>(dtype_size(from_type)),
             to_size = static_cast<int64_t>(dtype_size(to_type));
  for (int64_t c = 0; c < columns; ++c)
    convert_elements(from + c * from_size, from_type, to + c * step * to_size, to_type, 1);
}

}  // namespace

void for_each_view(const WeightSource& source, size_t block, const TensorPlace& place, int64_t first,
                   int64_t end, const TakeRows& take) {
  const Parameter& parameter = place.parameter;
  for (int64_t row = first; row < end;) {
    const WeightView view = source(block, place, row);
    const int64_t last = std::min(end, view.rows > 0 ? view.first_row + view.rows : parameter.rows);
    LM_CHECK(view.memory != nullptr && view.first_row <= row && row < last, parameter.name);
    const int64_t offset = (row - view.first_row) * parameter.columns;
    take(row, last - row, view.memory + offset * static_cast<int64_t>(dtype_size(view.dtype)), view.dtype);
    row = last;
  }
}

OutgoingTensors::OutgoingTensors(const ModelLayout& layout, What what, DType dtype, WeightSource source,
                                 const TensorTypes& own_types)
    : source_(std::move(source)) {
  LM_CHECK(dtype == DType::kF32 || dtype_size(dtype) == 2, dtype_name(dtype));
  for (size_t b = 0; b < layout.blocks.size(); ++b) {
    for (const TensorPlace& place : layout.blocks[b].tensors) {
      // A head that is trained beside adapters is the merged model's, under its own name.
      const bool head = place.parameter.role == TrainableRole::kWhole && what == What::kModel;
      if (is_start(place.parameter.role)) continue;  // plain_adapter.h makes them a part of A and B
      if (!head && in_adapter(place.parameter.role) != (what == What::kAdapter)) continue;
      for (const ParameterPart& part : place.parameter.parts) {
        const std::string name = head ? part.name.substr(kAdapterPrefix.size()) : part.tensor();
        const auto own = own_types.find(name);
        const Tensor empty{own == own_types.end() ? dtype : own->second};
        const auto [it, first] = made_of_.try_emplace(name, empty);
        LM_CHECK(first || !part.file.empty(), name);
        Tensor& tensor = it->second;
        if (first)
          tensors_.push_back(
              {.name = name, .dtype = tensor.dtype, .shape = place.parameter.file_shape(part)});
        tensor.parts.push_back({b, &place, &part});
      }
    }
  }
}

void OutgoingTensors::fill(const std::string& name, const TensorSink& sink) const {
  const auto it = made_of_.find(name);
  LM_CHECK(it != made_of_.end(), name);
  const Tensor& tensor = it->second;
  const Part& part = tensor.parts.front();
  if (part.part->slices > 0) return fill_slices(tensor, sink);
  if (!part.part->file.empty()) return fill_columns(tensor, sink);
  fill_part(part, tensor.dtype, sink);
}

void OutgoingTensors::fill_part(const Part& part, DType to_type, const TensorSink& sink) const {
  if (part.part->transposed) return fill_transposed(part, to_type, sink);
  const int64_t first = part.part->first, columns = part.place->parameter.columns;
  for_each_view(source_, part.block, *part.place, first, first + part.part->rows,
                [&](int64_t, int64_t rows, const std::byte* from, DType dtype) {
                  pass_on(from, dtype, to_type, rows * columns, sink);
                });
}

void OutgoingTensors::fill_transposed(const Part& part, DType to_type, const TensorSink& sink) const {
  const int64_t first = part.part->first, rows = part.part->rows, columns = part.place->parameter.columns;
  const auto size = static_cast<int64_t>(dtype_size(to_type));
  const int64_t most = std::clamp<int64_t>(kTransposedElements / rows, 1, columns);
  std::vector<std::byte> memory(static_cast<size_t>(most * rows * size)), line;
  for (int64_t column = 0; column < columns; column += most) {
    const Band band{memory.data(), to_type, column, std::min(most, columns - column), rows};
    for_each_view(source_, part.block, *part.place, first, first + rows,
                  [&](int64_t row, int64_t count, const std::byte* from, DType dtype) {
                    const int64_t stride = columns * static_cast<int64_t>(dtype_size(dtype));
                    for (int64_t r = 0; r < count; ++r)
                      put_row(band, row - first + r, from + r * stride, dtype, line);
                  });
    sink(std::span(memory).first(static_cast<size_t>(band.columns * rows * size)));
  }
}

// Where only some experts are trained, the layout has the others behind them: the file has them by number.
void OutgoingTensors::fill_slices(const Tensor& tensor, const TensorSink& sink) const {
  std::vector<Part> parts = tensor.parts;
  std::ranges::sort(parts, {}, [](const Part& part) { return part.part->slice; });
  LM_CHECK(std::ssize(parts) == parts.front().part->slices, parts.front().part->file);
  for (const Part& part : parts) fill_part(part, tensor.dtype, sink);
}

// Such tensors are an adapter's, and small.
void OutgoingTensors::fill_columns(const Tensor& tensor, const TensorSink& sink) const {
  const ParameterPart& any = *tensor.parts.front().part;
  const auto size = static_cast<int64_t>(dtype_size(tensor.dtype));
  std::vector<std::byte> memory(static_cast<size_t>(any.rows * any.file_columns * size));
  for (const Part& part : tensor.parts) {
    const int64_t first = part.part->first, columns = part.place->parameter.columns;
    for_each_view(source_, part.block, *part.place, first, first + part.part->rows,
                  [&](int64_t row, int64_t rows, const std::byte* from, DType dtype) {
                    const int64_t stride = columns * static_cast<int64_t>(dtype_size(dtype));
                    for (int64_t r = 0; r < rows; ++r) {
                      const int64_t at = (row - first + r) * any.file_columns + part.part->column;
                      put_columns(from + r * stride, dtype, memory.data() + at * size, tensor.dtype, columns,
                                  part.part->step);
                    }
                  });
  }
  sink(memory);
}

}  // namespace lm
