#include "weights/mxfp4.h"

#include <fmt/format.h>
#include <algorithm>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "kernels/encoding_tables.h"
#include "weights/convert.h"

namespace lm {
namespace {

constexpr int64_t kBlockBytes = kMxBlock / 2;
constexpr int64_t kBlocksAtOnce = 1024;

void require(const ModelFiles::Tensor& tensor, const std::vector<int64_t>& shape) {
  if (tensor.entry->dtype == DType::kU8 && tensor.entry->shape == shape) return;
  throw Error(Exit::kInput,
              {.area = "FILE-23",
               .what = fmt::format("{} is {} {}, but these experts need {} {}", tensor.name,
                                   safetensors_dtype(tensor.entry->dtype), shape_text(tensor.entry->shape),
                                   safetensors_dtype(DType::kU8), shape_text(shape)),
               .place = tensor.file->path(),
               .next = "get the model again, or use its bf16 version"});
}

// Reusable memory of a thread.
struct Buffers {
  std::vector<std::byte> codes, scales;
  std::vector<float> values;
};

// Blocks [first, first + count) of the tensor into buffers.values.
void read_blocks(const Mxfp4Tensors& tensors, int64_t first, int64_t count, Buffers& buffers) {
  buffers.codes.resize(static_cast<size_t>(count * kBlockBytes));
  buffers.scales.resize(static_cast<size_t>(count));
  buffers.values.resize(static_cast<size_t>(count * kMxBlock));
  tensors.codes.file->read(*tensors.codes.entry, first * kBlockBytes, buffers.codes);
  tensors.scales.file->read(*tensors.scales.entry, first, buffers.scales);
  float* to = buffers.values.data();
  for (int64_t block = 0; block < count; ++block) {
    const float scale = mx_half_scale(static_cast<uint8_t>(buffers.scales[static_cast<size_t>(block)]));
    for (int64_t i = 0; i < kBlockBytes; ++i) {
      const auto two = static_cast<uint8_t>(buffers.codes[static_cast<size_t>(block * kBlockBytes + i)]);
      *to++ = kMxTwice[two & 15] * scale;
      *to++ = kMxTwice[two >> 4] * scale;
    }
  }
}

}  // namespace

std::optional<Mxfp4Tensors> find_mxfp4(const ModelFiles& files, const ParameterPart& part, int64_t columns) {
  if (part.slices == 0 || columns % kMxBlock != 0) return std::nullopt;
  const auto codes = files.find(part.file + "_blocks"), scales = files.find(part.file + "_scales");
  if (!codes || !scales || files.find(part.file)) return std::nullopt;
  require(*codes, {part.slices, part.rows, columns / kMxBlock, kBlockBytes});
  require(*scales, {part.slices, part.rows, columns / kMxBlock});
  return Mxfp4Tensors{*codes, *scales};
}

void read_mxfp4(const Mxfp4Tensors& tensors, const Mxfp4Range& range, DType dtype, std::byte* to) {
  static thread_local Buffers buffers;
  const auto size = static_cast<int64_t>(dtype_size(dtype));
  const int64_t end = range.first + range.elements;
  for (int64_t at = range.first; at < end;) {
    const int64_t block = at / kMxBlock;
    const int64_t count = std::min(ceil_div(end, kMxBlock) - block, kBlocksAtOnce);
    read_blocks(tensors, block, count, buffers);
    const int64_t next = std::min(end, (block + count) * kMxBlock);
    convert_elements(reinterpret_cast<const std::byte*>(buffers.values.data() + (at - block * kMxBlock)),
                     DType::kF32, to + (at - range.first) * size, dtype, next - at);
    at = next;
  }
}

}  // namespace lm
