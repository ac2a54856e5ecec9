#include "optim/gradients.h"

#include <algorithm>
#include <cmath>

namespace lm {

Gradients::Gradients(const ModelLayout& layout, DType dtype, const Kernels& kernels, StreamView stream,
                     Store* store)
    : layout_(layout),
      dtype_(dtype),
      kernels_(kernels),
      stream_(stream),
      store_(store),
      sums_(stream.device, layout.flat_elements / kGranule * static_cast<int64_t>(sizeof(double))) {
  int64_t granule = 0;
  for (const BlockLayout& block : layout.blocks) {
    const bool far = store != nullptr && store->holds(static_cast<int64_t>(blocks_.size()));
    blocks_.emplace_back(stream.device,
                         far ? 0 : block.flat_elements * static_cast<int64_t>(dtype_size(dtype)));
    first_granule_.push_back(granule);
    granule += block.flat_elements / kGranule;
  }
}

std::byte* Gradients::block(int64_t b) const {
  return streamed(b) ? store_->use(b) : blocks_[static_cast<size_t>(b)].data();
}

void Gradients::begin(int64_t b) {
  if (!streamed(b)) return;
  const BlockLayout& layout = layout_.blocks[static_cast<size_t>(b)];
  const auto size = static_cast<int64_t>(dtype_size(dtype_));
  std::byte* const memory = block(b);
  int64_t end = 0;  // elements so far; trainable tensors lie in ascending order
  const auto gap = [&](int64_t next) { zero_bytes(memory + end * size, (next - end) * size, stream_); };
  for (const TensorPlace& place : layout.tensors) {
    if (place.frozen) continue;
    gap(place.offset);
    end = place.offset + place.parameter.elements();
  }
  gap(layout.flat_elements);
}

void Gradients::zero(int64_t b) {
  const Memory& memory = blocks_[static_cast<size_t>(b)];
  zero_bytes(memory.data(), memory.size(), stream_);
}

void Gradients::reduce(int64_t b) {
  const auto index = static_cast<size_t>(b);
  kernels_.granule_norms({.x = block(b),
                          .sums = reinterpret_cast<double*>(sums_.data()) + first_granule_[index],
                          .granules = layout_.blocks[index].flat_elements / kGranule,
                          .dtype = dtype_},
                         stream_);
}

double Gradients::block_square(int64_t b) const {
  const auto index = static_cast<size_t>(b);
  const int64_t granules = layout_.blocks[index].flat_elements / kGranule;
  std::vector<double> host(static_cast<size_t>(granules));
  // Pageable host memory: the copy returns only when it is complete, so no further wait is needed.
  if (granules > 0) {
    copy_bytes(host.data(), sums_.data() + first_granule_[index] * static_cast<int64_t>(sizeof(double)),
               granules * static_cast<int64_t>(sizeof(double)), stream_);
  }
  double sum = 0;
  for (const double s : host) sum += s;
  return sum;
}

double Gradients::total_square() const {
  double sum = 0;
  for (size_t b = 0; b < blocks_.size(); ++b) sum += block_square(static_cast<int64_t>(b));
  return sum;
}

float clip_factor(double norm, double limit) {
  return static_cast<float>(std::min(1.0, limit / (norm + 1e-6)));
}

}  // namespace lm
