#include "optim/gradients.h"

#include <algorithm>
#include <cmath>

namespace lm {

Gradients::Gradients(const ModelLayout& layout, DType dtype, const Kernels& kernels, StreamView stream,
                     Store* store, bool cut_head)
    : layout_(layout),
      dtype_(dtype),
      kernels_(kernels),
      stream_(stream),
      store_(store),
      units_(layout.units(cut_head)),
      sums_(stream.device, layout.flat_elements / kGranule * static_cast<int64_t>(sizeof(double))) {
  for (const Unit& unit : units_) {
    const bool far = store != nullptr && store->holds(static_cast<int64_t>(memory_.size()));
    memory_.emplace_back(stream.device, far ? 0 : unit.elements * static_cast<int64_t>(dtype_size(dtype)));
  }
  int64_t granule = 0;
  for (const BlockLayout& block : layout.blocks) {
    first_granule_.push_back(granule);
    granule += block.flat_elements / kGranule;
  }
}

std::byte* Gradients::unit(int64_t u) const {
  return streamed(u) ? store_->use(u) : memory_[static_cast<size_t>(u)].data();
}

void Gradients::begin(int64_t u) {
  if (!streamed(u)) return;
  const Unit& range = units_[static_cast<size_t>(u)];
  const auto size = static_cast<int64_t>(dtype_size(dtype_));
  std::byte* const memory = unit(u);
  int64_t end = range.first;  // elements so far; trainable tensors lie in ascending order
  const auto gap = [&](int64_t next) {
    zero_bytes(memory + (end - range.first) * size, (next - end) * size, stream_);
  };
  const int64_t past = range.first + range.elements;
  for (const TensorPlace& place : layout_.blocks[static_cast<size_t>(range.block)].tensors) {
    const int64_t from = std::max(place.offset, range.first),
                  to = std::min(place.offset + place.parameter.elements(), past);
    if (place.frozen || from >= to) continue;
    gap(from);
    end = to;
  }
  gap(past);
}

void Gradients::zero(int64_t u) {
  const Memory& memory = memory_[static_cast<size_t>(u)];
  zero_bytes(memory.data(), memory.size(), stream_);
}

void Gradients::reduce(int64_t u) {
  const Unit& range = units_[static_cast<size_t>(u)];
  const int64_t granule = first_granule_[static_cast<size_t>(range.block)] + range.first / kGranule;
  kernels_.granule_norms({.x = unit(u),
                          .sums = reinterpret_cast<double*>(sums_.data()) + granule,
                          .granules = range.elements / kGranule,
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
  for (size_t b = 0; b < layout_.blocks.size(); ++b) sum += block_square(static_cast<int64_t>(b));
  return sum;
}

float clip_factor(double norm, double limit) {
  return static_cast<float>(std::min(1.0, limit / (norm + 1e-6)));
}

}  // namespace lm
