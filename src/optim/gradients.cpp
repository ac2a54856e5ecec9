#include "optim/gradients.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"

namespace lm {

Gradients::Gradients(const ModelLayout& layout, DType dtype, const Kernels& kernels, StreamView stream,
                     std::span<std::byte> host_sums, Store* store, bool cut_head)
    : layout_(layout),
      dtype_(dtype),
      kernels_(kernels),
      stream_(stream),
      store_(store),
      units_(layout.units(cut_head)),
      sums_(stream.device, norm_bytes(layout)),
      host_sums_(reinterpret_cast<double*>(host_sums.empty() ? sums_.data() : host_sums.data())) {
  LM_CHECK(stream.device == DeviceType::kCpu || std::ssize(host_sums) >= sums_.size(),
           "host memory for norms");
  for (const Unit& unit : units_) {
    const bool off_device = store != nullptr && store->holds(static_cast<int64_t>(memory_.size()));
    memory_.emplace_back(stream.device,
                         off_device ? 0 : unit.elements * static_cast<int64_t>(dtype_size(dtype)));
  }
  int64_t granule = 0;
  for (const BlockLayout& block : layout.blocks) {
    first_granule_.push_back(granule);
    granule += block.flat_elements / kGranule;
  }
}

std::byte* Gradients::unit(int64_t u) const {
  return through_slots(u) ? store_->use(u) : memory_[static_cast<size_t>(u)].data();
}

void Gradients::begin(int64_t u) {
  if (!through_slots(u)) return;
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

void Gradients::granule_norms(int64_t u) {
  const Unit& range = units_[static_cast<size_t>(u)];
  const int64_t granule = first_granule_[static_cast<size_t>(range.block)] + range.first / kGranule;
  kernels_.granule_norms({.x = unit(u),
                          .sums = reinterpret_cast<double*>(sums_.data()) + granule,
                          .granules = range.elements / kGranule,
                          .dtype = dtype_},
                         stream_);
}

int64_t Gradients::norm_bytes(const ModelLayout& layout) {
  return layout.flat_elements / kGranule * static_cast<int64_t>(sizeof(double));
}

void Gradients::send(int64_t first, int64_t count) const {
  if (stream_.device == DeviceType::kCpu || count == 0) return;
  const auto* const from = reinterpret_cast<const double*>(sums_.data()) + first;
  copy_bytes(host_sums_ + first, from, count * static_cast<int64_t>(sizeof(double)), stream_);
}

std::span<const double> Gradients::sums(int64_t b) const {
  const auto index = static_cast<size_t>(b);
  return {host_sums_ + first_granule_[index],
          static_cast<size_t>(layout_.blocks[index].flat_elements / kGranule)};
}

double Gradients::sum(int64_t b) const {
  const std::span<const double> all = sums(b);
  return std::accumulate(all.begin(), all.end(), 0.0);
}

double Gradients::block_square(int64_t b) const {
  const auto index = static_cast<size_t>(b);
  send(first_granule_[index], layout_.blocks[index].flat_elements / kGranule);
  synchronize(stream_);
  return sum(b);
}

void Gradients::send_squares() const {
  send(0, sums_.size() / static_cast<int64_t>(sizeof(double)));
}

double Gradients::total_square() const {
  double total = 0;
  for (size_t b = 0; b < layout_.blocks.size(); ++b) total += sum(static_cast<int64_t>(b));
  return total;
}

std::optional<NonFinite> Gradients::find_non_finite() const {
  // What is no number spreads on its way back: it began in the last block that has it.
  for (int64_t b = std::ssize(layout_.blocks) - 1; b >= 0; --b) {
    if (const auto found = find_non_finite(b)) return found;
  }
  return std::nullopt;
}

std::optional<NonFinite> Gradients::find_non_finite(int64_t b) const {
  // A square of a finite fp32 number is finite in fp64, and so is a granule's sum of them.
  const std::span<const double> all = sums(b);
  for (int64_t granule = std::ssize(all) - 1; granule >= 0; --granule) {
    if (!std::isfinite(all[static_cast<size_t>(granule)])) return find_in_granule(b, granule);
  }
  return std::nullopt;
}

NonFinite Gradients::find_in_granule(int64_t b, int64_t granule) const {
  const int64_t first = granule * kGranule;
  const auto unit = std::find_if(units_.begin(), units_.end(), [&](const Unit& u) {
    return u.block == b && first >= u.first && first < u.first + u.elements;
  });
  const auto size = static_cast<int64_t>(dtype_size(dtype_));
  std::vector<std::byte> bytes(static_cast<size_t>(kGranule * size));
  read(unit - units_.begin(), (first - unit->first) * size, bytes);
  std::vector<float> elements(kGranule);
  kernels(DeviceType::kCpu)
      .accumulate({.to = elements.data(),
                   .from = bytes.data(),
                   .elements = kGranule,
                   .to_dtype = DType::kF32,
                   .from_dtype = dtype_,
                   .overwrite = true},
                  StreamView{});
  const auto wrong =
      std::find_if(elements.rbegin(), elements.rend(), [](float x) { return !std::isfinite(x); });
  if (wrong == elements.rend()) return {"of " + layout_.name(*unit), "finite, with a norm that is not"};
  const int64_t at = first + (elements.rend() - wrong) - 1;
  for (const TensorPlace& place : layout_.blocks[static_cast<size_t>(b)].tensors) {
    if (!place.frozen && at >= place.offset && at < place.offset + place.parameter.elements())
      return {place.parameter.name, std::isnan(*wrong) ? "nan" : "inf"};
  }
  return {layout_.name(*unit) + ", between its tensors", std::isnan(*wrong) ? "nan" : "inf"};
}

void Gradients::read(int64_t u, int64_t offset, std::span<std::byte> out) const {
  if (through_slots(u)) return store_->read(u, offset, out);
  copy_bytes(out.data(), memory_[static_cast<size_t>(u)].data() + offset, std::ssize(out), stream_);
  synchronize(stream_);
}

float clip_factor(double norm, double limit) {
  return static_cast<float>(std::min(1.0, limit / (norm + 1e-6)));
}

}  // namespace lm
