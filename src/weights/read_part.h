// One tensor of the files as the program holds it: row-major [rows, columns], whichever way the file has it
// (ParameterPart::transposed). The caller owns the memory; any thread.
#pragma once

#include <optional>

#include "base/encoding_kind.h"
#include "spec/parameter.h"
#include "weights/model_files.h"

namespace lm {

struct FilePart {
  const SafetensorsEntry* entry = nullptr;
  const SafetensorsFile* file = nullptr;
  int64_t rows = 0, columns = 0;
  bool transposed = false;               // the file has [columns, rows]
  int64_t column = 0, file_columns = 0;  // as ParameterPart; 0: the file has no other columns
  int64_t step = 1;
  int64_t begin = 0;  // elements of the file's tensor before it, of a stack
  // Of MXFP4 (weights/mxfp4.h), whose codes are `entry`.
  std::optional<ModelFiles::Tensor> scales = {};

  // What so many elements are in the file.
  int64_t stored_bytes(int64_t elements) const {
    if (scales) return elements / 2 + elements / kMxBlock;
    return elements * static_cast<int64_t>(dtype_size(entry->dtype));
  }
};

// A part that the files have, unquantized.
FilePart file_part(const ModelFiles& files, const Parameter& parameter, const ParameterPart& part);

// Reads elements [first, first + elements), counted in the program's order, and converts them to `dtype`. Of
// a transposed tensor, and of some columns, it reads a run of each row of the file, and holds at most 1 MiB
// or one run. Of columns with others between them it reads those, too.
void read_part(const FilePart& part, int64_t first, int64_t elements, DType dtype, std::byte* to);

}  // namespace lm
