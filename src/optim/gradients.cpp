#include "optim/gradients.h"

#include <algorithm>
#include <cmath>

namespace lm {

Gradients::Gradients(const ModelLayout& layout, DType dtype, const Kernels& kernels, StreamView stream)
    : layout_(layout),
      dtype_(dtype),
      kernels_(kernels),
      stream_(stream),
      sums_(stream.device, layout.flat_elements / kGranule * static_cast<int64_t>(sizeof(double))) {
  int64_t granule = 0;
  for (const BlockLayout& block : layout.blocks) {
    blocks_.emplace_back(stream.device, block.flat_elements * static_cast<int64_t>(dtype_size(dtype)));
    first_granule_.push_back(granule);
    granule += block.flat_elements / kGranule;
  }
}

void Gradients::zero(int64_t b) {
  const Memory& memory = blocks_[static_cast<size_t>(b)];
  zero_bytes(memory.data(), memory.size(), stream_);
}

void Gradients::reduce(int64_t b) {
  const auto index = static_cast<size_t>(b);
  kernels_.granule_norms({.x = blocks_[index].data(),
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
