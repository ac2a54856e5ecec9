#include "export/gguf.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"

namespace lm {
namespace {

constexpr uint32_t kVersion = 3;
constexpr int64_t kAlignment = 32;
// The format's numbers of value types.
constexpr uint32_t kUint32 = 4, kInt32 = 5, kFloat32 = 6, kBool = 7, kText = 8, kList = 9;

template <class T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void put_text(std::string& out, std::string_view text) {
  put<uint64_t>(out, text.size());
  out += text;
}

// Nearest, ties to even; beyond the largest, infinity.
uint16_t half_bits(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  uint32_t rest = bits & 0x7fffffff;
  if (rest >= 0x47800000) return static_cast<uint16_t>(sign | (rest > 0x7f800000 ? 0x7e00 : 0x7c00));
  if (rest < 0x38800000) {  // below the smallest normal: adding 0.5 leaves 2^-24 as the last place
    const float shifted = std::bit_cast<float>(rest) + 0.5F;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000));
  }
  rest += 0xc8000fff + ((rest >> 13) & 1);
  return static_cast<uint16_t>(sign | (rest >> 13));
}

uint16_t bf16_bits(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 64);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Like the reference of gguf and ggml: rounds half away from zero, and rounds the scale to fp16 only when it
// is stored.
bool write_block(std::span<const float> from, std::byte* to) {
  float most = 0;
  for (const float value : from) most = std::max(most, std::abs(value));
  const float scale = most / 127, inverse = scale == 0 ? 0 : 1 / scale;
  const uint16_t stored = half_bits(scale);
  std::memcpy(to, &stored, sizeof stored);
  for (size_t i = 0; i < from.size(); ++i) {
    const auto code = static_cast<int8_t>(std::round(from[i] * inverse));
    std::memcpy(to + sizeof stored + i, &code, 1);
  }
  return stored < 0x7c00;
}

}  // namespace

int64_t gguf_bytes(GgufType type, int64_t elements) {
  switch (type) {
    case GgufType::kF32:
      return 4 * elements;
    case GgufType::kF16:
    case GgufType::kBF16:
      return 2 * elements;
    case GgufType::kQ8_0:
      LM_CHECK(elements % kGgufBlock == 0, "whole blocks");
      return elements / kGgufBlock * (2 + kGgufBlock);
  }
  return 0;
}

bool gguf_convert(std::span<const float> from, GgufType type, std::vector<std::byte>& to) {
  to.resize(static_cast<size_t>(gguf_bytes(type, std::ssize(from))));
  bool good = true;
  if (type == GgufType::kF32) {
    std::memcpy(to.data(), from.data(), to.size());
  } else if (type == GgufType::kQ8_0) {
    for (size_t i = 0, at = 0; i < from.size(); i += kGgufBlock, at += 2 + kGgufBlock)
      good = write_block(from.subspan(i, kGgufBlock), to.data() + at) && good;
  } else {
    for (size_t i = 0; i < from.size(); ++i) {
      const uint16_t bits = type == GgufType::kF16 ? half_bits(from[i]) : bf16_bits(from[i]);
      if (type == GgufType::kF16) good = good && ((bits & 0x7fff) < 0x7c00 || !std::isfinite(from[i]));
      std::memcpy(to.data() + 2 * i, &bits, sizeof bits);
    }
  }
  return good;
}

void GgufValues::begin(const std::string& name, uint32_t type) {
  put_text(bytes_, name);
  put(bytes_, type);
  ++count_;
}

void GgufValues::begin_list(const std::string& name, uint32_t type, size_t size) {
  begin(name, kList);
  put(bytes_, type);
  put<uint64_t>(bytes_, size);
}

void GgufValues::add(const std::string& name, const std::string& value) {
  begin(name, kText);
  put_text(bytes_, value);
}
void GgufValues::add(const std::string& name, uint32_t value) {
  begin(name, kUint32);
  put(bytes_, value);
}
void GgufValues::add(const std::string& name, float value) {
  begin(name, kFloat32);
  put(bytes_, value);
}
void GgufValues::add(const std::string& name, bool value) {
  begin(name, kBool);
  put<uint8_t>(bytes_, value ? 1 : 0);
}
void GgufValues::add(const std::string& name, const std::vector<std::string>& values) {
  begin_list(name, kText, values.size());
  for (const std::string& value : values) put_text(bytes_, value);
}
void GgufValues::add(const std::string& name, const std::vector<int32_t>& values) {
  begin_list(name, kInt32, values.size());
  for (const int32_t value : values) put(bytes_, value);
}
void GgufValues::add(const std::string& name, const std::vector<float>& values) {
  begin_list(name, kFloat32, values.size());
  for (const float value : values) put(bytes_, value);
}

void GgufValues::add(const std::string& name, const std::vector<bool>& values) {
  begin_list(name, kBool, values.size());
  for (const bool value : values) put<uint8_t>(bytes_, value ? 1 : 0);
}

int64_t GgufTensor::elements() const {
  int64_t out = 1;
  for (const int64_t size : shape) out *= size;
  return out;
}

GgufWriter::GgufWriter(const std::string& path, const GgufValues& values, std::vector<GgufTensor> tensors)
    : tensors_(std::move(tensors)), file_(path) {
  std::string head = "GGUF";
  put(head, kVersion);
  put<uint64_t>(head, tensors_.size());
  put(head, values.count());
  head += values.bytes();
  int64_t offset = 0;
  for (const GgufTensor& tensor : tensors_) {
    put_text(head, tensor.name);
    put<uint32_t>(head, static_cast<uint32_t>(tensor.shape.size()));
    for (size_t i = tensor.shape.size(); i-- > 0;)
      put<uint64_t>(head, static_cast<uint64_t>(tensor.shape[i]));
    put<uint32_t>(head, static_cast<uint32_t>(tensor.type));
    put<uint64_t>(head, static_cast<uint64_t>(offset));
    offset += round_up(gguf_bytes(tensor.type, tensor.elements()), kAlignment);
  }
  head.resize(static_cast<size_t>(round_up(std::ssize(head), kAlignment)));
  file_.write(head);
}

void GgufWriter::write(std::span<const float> weights) {
  const GgufTensor& tensor = tensors_.at(current_);
  LM_CHECK(std::ssize(weights) % tensor.columns() == 0, tensor.name + ": whole rows");
  if (!gguf_convert(weights, tensor.type, bytes_))
    throw Error(Exit::kInput, {.area = "FILE-26",
                               .what = "a weight of " + tensor.name + " is beyond the range of 16-bit floats",
                               .place = "--gguf",
                               .next = "use --gguf bf16"});
  file_.write(std::span<const std::byte>(bytes_));
  written_ += std::ssize(weights);
  if (written_ < tensor.elements()) return;
  LM_CHECK(written_ == tensor.elements(), tensor.name);
  const int64_t bytes = gguf_bytes(tensor.type, written_);
  file_.write(std::string(static_cast<size_t>(round_up(bytes, kAlignment) - bytes), '\0'));
  written_ = 0;
  ++current_;
}

void GgufWriter::commit() {
  LM_CHECK(current_ == tensors_.size(), "every tensor");
  file_.commit();
}

}  // namespace lm
