#include "train/device_decision.h"

#include "base/bytes.h"
#include "base/error.h"

namespace lm {

DeviceDecision::DeviceDecision(const Gradients& gradients, const Kernels& kernels, StreamView stream,
                               std::span<std::byte> host)
    : gradients_(gradients),
      kernels_(kernels),
      stream_(stream),
      blocks_(std::ssize(gradients.first_granules()) - 1),
      host_(reinterpret_cast<StepDecision*>(host.data())) {
  LM_CHECK(std::ssize(host) >= kInFlight * static_cast<int64_t>(sizeof(StepDecision)),
           "host memory for decisions");
  const std::vector<GradientArray> arrays = gradients.arrays();
  const std::vector<int64_t>& starts = gradients.first_granules();
  arrays_ = std::ssize(arrays);
  constexpr int64_t kAligned = 64;
  const auto bytes = [](const auto& list) {
    return round_up(std::ssize(list) * static_cast<int64_t>(sizeof list[0]), kAligned);
  };
  starts_at_ = round_up(static_cast<int64_t>(sizeof(StepDecision)), kAligned);
  arrays_at_ = starts_at_ + bytes(starts);
  squares_at_ = arrays_at_ + bytes(arrays);
  memory_ = Memory(stream.device, squares_at_ + blocks_ * static_cast<int64_t>(sizeof(double)));
  copy_bytes(memory_.data() + starts_at_, starts.data(), std::ssize(starts) * 8, stream);
  copy_bytes(memory_.data() + arrays_at_, arrays.data(),
             arrays_ * static_cast<int64_t>(sizeof(GradientArray)), stream);
  synchronize(stream);  // the list of arrays ends here
  for (int64_t i = 0; i < kInFlight; ++i) arrived_.emplace_back(stream.device);
}

void DeviceDecision::enqueue(const LossSums& sums, const RouterFigures* routers, const Limits& limits) {
  LM_CHECK(unread() < kInFlight, "the results of earlier steps have not been read");
  auto* const out = reinterpret_cast<StepDecision*>(memory_.data());
  kernels_.decide({.sums = gradients_.granule_sums(),
                   .first_granule = reinterpret_cast<const int64_t*>(memory_.data() + starts_at_),
                   .squares = reinterpret_cast<double*>(memory_.data() + squares_at_),
                   .blocks = blocks_,
                   .arrays = reinterpret_cast<const GradientArray*>(memory_.data() + arrays_at_),
                   .array_count = arrays_,
                   .nll = &sums.nll,
                   .correct = &sums.correct,
                   .routers = routers,
                   .divisor = limits.divisor,
                   .loss_scale = limits.loss_scale,
                   .max_grad_norm = limits.max_grad_norm,
                   .out = out,
                   .gradient_dtype = gradients_.dtype()},
                  stream_);
  const int64_t place = enqueued_++ % kInFlight;
  copy_bytes(host_ + place, out, static_cast<int64_t>(sizeof(StepDecision)), stream_);
  arrived_[static_cast<size_t>(place)].record(stream_);
}

StepDecision DeviceDecision::read() {
  LM_CHECK(unread() > 0, "no decision to read");
  const int64_t place = read_++ % kInFlight;
  const Event& arrived = arrived_[static_cast<size_t>(place)];
  if (!arrived.done()) arrived.synchronize();
  return host_[place];
}

}  // namespace lm
