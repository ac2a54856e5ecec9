#include "optim/open_tile.h"

#include <bit>
#include <cstring>
#include <vector>

#include "base/host_device.h"

namespace lm {

OpenTile::OpenTile(const TileSource& source) : at_(source) {
  if (at_.store != nullptr && at_.store->fresh(at_.array)) at_.store = nullptr;
  if (at_.store == nullptr) return;
  at_.store->fetch(at_.array, 0);
  at_.data = at_.store->use(at_.array);
}

OpenTile::~OpenTile() {
  if (at_.store != nullptr) at_.store->forget(at_.array);
}

void OpenTile::read(size_t stream, int64_t from, int64_t to, const std::byte* weights, Staging& staging,
                    const Staging::Take& take) const {
  const int64_t size = bytes(stream, from, to);
  if (size == 0) return;
  if (at_.data == nullptr) {
    std::vector<std::byte> zeros(static_cast<size_t>(size));
    if (master(stream) && has_fp32_master(at_.form))
      read_master(from, to, weights, reinterpret_cast<float*>(zeros.data()), staging);
    return take(0, zeros);
  }
  const std::byte* const source =
      at_.data + at_.streams.offset(stream, at_.block.count(at_.range.first, at_.range.end())) +
      bytes(stream, at_.range.first, from);
  if (!at_.host) return staging.read(source, size, take);
  take(0, {source, static_cast<size_t>(size)});
}

void join_masters(std::span<const uint16_t> weights, std::span<const uint16_t> low, float* out) {
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto top = static_cast<uint32_t>(weights[i] - (low[i] >= 0x8000 ? 1 : 0)) & 0xFFFF;
    out[i] = std::bit_cast<float>(top << 16 | low[i]);
  }
}

void OpenTile::read_master(int64_t from, int64_t to, const std::byte* weights, float* out,
                           Staging& staging) const {
  const auto copy_to = [](void* target) {
    return [target](int64_t offset, std::span<const std::byte> bytes) {
      std::memcpy(static_cast<std::byte*>(target) + offset, bytes.data(), bytes.size());
    };
  };
  const size_t last = at_.streams.size() - 1;
  if (at_.form == MasterForm::kWeight) return staging.read_into(out, weights, (to - from) * 4);
  if (has_fp32_master(at_.form) && at_.data != nullptr)
    return read(last, from, to, weights, staging, copy_to(out));
  std::vector<uint16_t> high(static_cast<size_t>(to - from)), low(high.size(), 0);
  staging.read_into(high.data(), weights, (to - from) * 2);
  if (weight_type(at_.form) == DType::kF16) {
    for (const uint16_t bits : high) *out++ = to_float(Fp16{bits});
    return;
  }
  if (at_.form == MasterForm::kSplit) read(last, from, to, weights, staging, copy_to(low.data()));
  join_masters(high, low, out);
}

}  // namespace lm
