#include "weights/read_part.h"

#include <algorithm>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/host_device.h"
#include "weights/convert.h"
#include "weights/mxfp4.h"

namespace lm {
namespace {

constexpr int64_t kBandBytes = 1 * kMiB;  // of rows of a file that are read at once

// A range of a part, and the memory for it.
struct Range {
  int64_t first = 0, elements = 0;
  std::byte* to = nullptr;
};

// Some rows of the file, of each the run that begins at row `begin` of the part.
struct Band {
  const std::byte* values = nullptr;  // of the result's type; a row's run begins `stride` behind the last one
  int64_t column = 0, columns = 0;    // rows of the file: columns of the part
  int64_t begin = 0, run = 0, stride = 0;
};

// `Element`: of the result.
template <class Element>
void scatter(const Band& band, int64_t columns, const Range& range) {
  const auto* const from = reinterpret_cast<const Element*>(band.values);
  auto* const to = reinterpret_cast<Element*>(range.to);
  for (int64_t r = 0; r < band.run; ++r) {
    const int64_t row = (band.begin + r) * columns + band.column - range.first;
    // The first and the last row may be there in part.
    const int64_t begin = std::clamp<int64_t>(-row, 0, band.columns);
    const int64_t end = std::clamp<int64_t>(range.elements - row, begin, band.columns);
    for (int64_t c = begin; c < end; ++c) to[row + c] = from[c * band.stride + r];
  }
}

void read_transposed(const FilePart& part, DType dtype, const Range& range) {
  static thread_local std::vector<std::byte> raw, converted;
  const DType stored = part.entry->dtype;
  const auto size = static_cast<int64_t>(dtype_size(stored)), out = static_cast<int64_t>(dtype_size(dtype));
  const int64_t begin = range.first / part.columns;
  const int64_t run = ceil_div(range.first + range.elements, part.columns) - begin;
  // Where most of a row of the file is wanted, several are read at once, and what lies between the runs, too.
  const int64_t together = 2 * run >= part.rows ? std::max<int64_t>(kBandBytes / (part.rows * size), 1) : 1;
  for (int64_t column = 0; column < part.columns; column += together) {
    const int64_t columns = std::min(together, part.columns - column);
    const int64_t n = (columns - 1) * part.rows + run;
    raw.resize(static_cast<size_t>(n * size));
    part.file->read(*part.entry, (part.begin + column * part.rows + begin) * size, raw);
    converted.resize(static_cast<size_t>(n * out));
    convert_elements(raw.data(), stored, converted.data(), dtype, n);
    const Band band{converted.data(), column, columns, begin, run, part.rows};
    if (dtype == DType::kF32) {
      scatter<float>(band, part.columns, range);
    } else {
      scatter<uint16_t>(band, part.columns, range);
    }
  }
}

void read_columns(const FilePart& part, DType dtype, const Range& range) {
  FilePart whole = part;
  whole.file_columns = 0;
  const auto size = static_cast<int64_t>(dtype_size(dtype));
  for (int64_t done = 0; done < range.elements;) {
    const int64_t row = (range.first + done) / part.columns, column = (range.first + done) % part.columns;
    const int64_t run = std::min(part.columns - column, range.elements - done);
    read_part(whole, row * part.file_columns + part.column + column, run, dtype, range.to + done * size);
    done += run;
  }
}

// The columns between the part's are read with them: rows of the file at once, up to 1 MiB or one row.
void read_spread_columns(const FilePart& part, DType dtype, const Range& range) {
  FilePart whole = part;
  whole.file_columns = 0;
  whole.step = 1;
  const auto size = static_cast<int64_t>(dtype_size(dtype));
  const int64_t most = std::max<int64_t>(kBandBytes / (part.file_columns * size), 1);
  const int64_t end = ceil_div(range.first + range.elements, part.columns);
  std::vector<std::byte> band;
  for (int64_t row = range.first / part.columns; row < end; row += most) {
    const int64_t rows = std::min(most, end - row);
    band.resize(static_cast<size_t>(rows * part.file_columns * size));
    read_part(whole, row * part.file_columns, rows * part.file_columns, dtype, band.data());
    const int64_t first = std::max(range.first, row * part.columns);
    const int64_t last = std::min(range.first + range.elements, (row + rows) * part.columns);
    for (int64_t i = first; i < last; ++i) {
      const int64_t from =
          (i / part.columns - row) * part.file_columns + part.column + i % part.columns * part.step;
      std::memcpy(range.to + (i - range.first) * size, band.data() + from * size, static_cast<size_t>(size));
    }
  }
}

// Of MXFP4.
void read_codes(const FilePart& part, DType dtype, const Range& range) {
  Mxfp4Tensors tensors;
  tensors.codes.entry = part.entry;
  tensors.codes.file = part.file;
  tensors.scales = *part.scales;
  read_mxfp4(tensors, {part.begin + range.first, range.elements}, dtype, range.to);
}

}  // namespace

FilePart file_part(const ModelFiles& files, const Parameter& parameter, const ParameterPart& part) {
  if (const auto codes = find_mxfp4(files, part, parameter.columns)) {
    return {.entry = codes->codes.entry,
            .file = codes->codes.file,
            .rows = part.rows,
            .columns = parameter.columns,
            .begin = part.slice * part.rows * parameter.columns,
            .scales = codes->scales};
  }
  const auto tensor = files.find(part.tensor());
  LM_CHECK(tensor.has_value(), part.name);
  return {.entry = tensor->entry,
          .file = tensor->file,
          .rows = part.rows,
          .columns = parameter.columns,
          .transposed = part.transposed,
          .column = part.column,
          .file_columns = part.file_columns,
          .step = part.step,
          .begin = part.slices > 0 ? part.slice * part.rows * parameter.columns : 0};
}

void read_part(const FilePart& part, int64_t first, int64_t elements, DType dtype, std::byte* to) {
  static thread_local std::vector<std::byte> buffer;
  if (elements == 0) return;
  if (part.scales) return read_codes(part, dtype, {first, elements, to});
  if (part.transposed) return read_transposed(part, dtype, {first, elements, to});
  if (part.step > 1) return read_spread_columns(part, dtype, {first, elements, to});
  if (part.file_columns > 0) return read_columns(part, dtype, {first, elements, to});
  const DType stored = part.entry->dtype;
  const size_t bytes = static_cast<size_t>(elements) * dtype_size(stored);
  const int64_t offset = (part.begin + first) * static_cast<int64_t>(dtype_size(stored));
  if (stored == dtype) return part.file->read(*part.entry, offset, {to, bytes});
  buffer.resize(std::max(buffer.size(), bytes));
  part.file->read(*part.entry, offset, std::span(buffer).first(bytes));
  convert_elements(buffer.data(), stored, to, dtype, elements);
}

}  // namespace lm
