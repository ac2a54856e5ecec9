// Experts' matrices in MXFP4, as gpt-oss was published: NAME_blocks [experts, rows, columns / 32, 16], two
// codes in a byte, and NAME_scales [experts, rows, columns / 32], exponents, in place of NAME. They lie as
// [rows, columns] of our matrix, while NAME itself is [experts, columns, rows]. Files are untrusted: an
// inconsistency is Error(11) "FILE-23" with file and tensor.
#pragma once

#include <cstddef>
#include <optional>

#include "spec/parameter.h"
#include "weights/model_files.h"

namespace lm {

struct Mxfp4Tensors {
  ModelFiles::Tensor codes, scales;
};

// nullopt if the part is not stored so.
std::optional<Mxfp4Tensors> find_mxfp4(const ModelFiles& files, const ParameterPart& part, int64_t columns);

// Elements of the tensor of all experts.
struct Mxfp4Range {
  int64_t first = 0, elements = 0;
};
// Reads and dequantizes them, exactly, and rounds to `dtype` (bf16 and fp32 hold the values). Any thread.
void read_mxfp4(const Mxfp4Tensors& tensors, const Mxfp4Range& range, DType dtype, std::byte* to);

}  // namespace lm
