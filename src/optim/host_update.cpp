#include "optim/host_update.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace lm {

HostUpdate::HostUpdate(StreamView compute, std::span<std::byte> staging, DType gradient_dtype,
                       DType weight_dtype, DeviceClock* clock)
    : compute_(compute),
      clock_(clock),
      down_(compute.device),
      up_(compute.device),
      ready_(compute.device),
      gradient_size_(static_cast<int64_t>(dtype_size(gradient_dtype))),
      weight_size_(static_cast<int64_t>(dtype_size(weight_dtype))) {
  const int64_t each = std::ssize(staging) / kSlots;
  for (int64_t s = 0; s < kSlots; ++s) {
    Slot& slot = slots_.emplace_back(compute.device);
    slot.gradients = staging.data() + s * each;
    slot.weights = slot.gradients + each / (gradient_size_ + weight_size_) * gradient_size_;
  }
}

HostUpdate::~HostUpdate() {
  try {
    down_.synchronize();
    up_.synchronize();
  } catch (const Error&) {
    // The caller that needed the bytes got the error.
  }
}

void HostUpdate::begin(std::vector<Range> ranges, bool ready) {
  LM_CHECK(given_ == ranges_.size(), "a block's update begins before the last one's end");
  ranges_ = std::move(ranges);
  staged_ = given_ = 0;
  if (ready) return;
  ready_.record(compute_);
  ready_.wait(down_.view());
}

void HostUpdate::abandon() {
  down_.synchronize();
  up_.synchronize();
  staged_ = given_ = ranges_.size();
}

void HostUpdate::copy(DeviceClock::Kind kind, void* to, const void* from, int64_t bytes, StreamView way) {
  if (clock_ == nullptr) return copy_bytes(to, from, bytes, way);
  const int64_t span = clock_->begin(kind, way, bytes, [] { return "update by the CPU"; });
  copy_bytes(to, from, bytes, way);
  clock_->end(span, way);
}

// One slot is left out: its weights are being copied back.
void HostUpdate::stage_ahead() {
  for (; staged_ < std::min(given_ + kSlots - 1, ranges_.size()); ++staged_) {
    const Range& range = ranges_[staged_];
    Slot& slot = slots_[staged_ % kSlots];
    slot.left.synchronize();
    constexpr auto kDown = DeviceClock::Kind::kFromDevice;
    copy(kDown, slot.gradients, range.gradients, range.elements * gradient_size_, down_.view());
    copy(kDown, slot.weights, range.weights, range.elements * weight_size_, down_.view());
    slot.arrived.record(down_.view());
  }
}

HostUpdate::Range HostUpdate::next() {
  LM_CHECK(given_ < ranges_.size(), "a tile that begin() did not list");
  stage_ahead();
  Slot& slot = slots_[given_ % kSlots];
  slot.arrived.synchronize();
  return {slot.gradients, slot.weights, ranges_[given_].elements};
}

void HostUpdate::send() {
  Slot& slot = slots_[given_ % kSlots];
  const Range& range = ranges_[given_++];
  copy(DeviceClock::Kind::kToDevice, range.weights, slot.weights, range.elements * weight_size_, up_.view());
  slot.left.record(up_.view());
  if (given_ < ranges_.size()) return;
  const int64_t span = clock_ == nullptr ? 0 : clock_->begin(DeviceClock::Kind::kStall, compute_, 0, [] {
    return "wait for new weights";
  });
  slot.left.wait(compute_);
  if (clock_ != nullptr) clock_->end(span, compute_);
}

}  // namespace lm
