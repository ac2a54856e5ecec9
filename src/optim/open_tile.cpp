#include "optim/open_tile.h"

#include <bit>
#include <cstring>
#include <vector>

#include "base/host_device.h"

namespace lm {

OpenTile::OpenTile(const StateStreams& streams, MasterForm form, const BlockLayout& block, TileRange range,
                   const std::byte* data, bool host, Store* store, int64_t array)
    : streams_(streams),
      form_(form),
      block_(block),
      range_(range),
      data_(data),
      host_(host),
      store_(store != nullptr && !store->fresh(array) ? store : nullptr),
      array_(array) {
  if (store_ == nullptr) return;
  store_->fetch(array, 0);
  data_ = store_->use(array);
}

OpenTile::~OpenTile() {
  if (store_ != nullptr) store_->forget(array_);
}

void OpenTile::read(size_t stream, int64_t from, int64_t to, const std::byte* weights, Staging& staging,
                    const Staging::Take& take) const {
  const int64_t size = bytes(stream, from, to);
  if (size == 0) return;
  if (data_ == nullptr) {
    std::vector<std::byte> zeros(static_cast<size_t>(size));
    if (master(stream) && has_fp32_master(form_))
      read_master(from, to, weights, reinterpret_cast<float*>(zeros.data()), staging);
    return take(0, zeros);
  }
  const std::byte* const source = data_ + streams_.offset(stream, block_.count(range_.first, range_.end())) +
                                  bytes(stream, range_.first, from);
  if (!host_) return staging.read(source, size, take);
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
  const size_t last = streams_.size() - 1;
  if (form_ == MasterForm::kWeight) return staging.read_into(out, weights, (to - from) * 4);
  if (has_fp32_master(form_) && data_ != nullptr) return read(last, from, to, weights, staging, copy_to(out));
  std::vector<uint16_t> high(static_cast<size_t>(to - from)), low(high.size(), 0);
  staging.read_into(high.data(), weights, (to - from) * 2);
  if (weight_type(form_) == DType::kF16) {
    for (const uint16_t bits : high) *out++ = to_float(Fp16{bits});
    return;
  }
  if (form_ == MasterForm::kSplit) read(last, from, to, weights, staging, copy_to(low.data()));
  join_masters(high, low, out);
}

}  // namespace lm
