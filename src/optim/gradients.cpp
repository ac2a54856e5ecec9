#include "optim/gradients.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/staging.h"
#include "kernels/decision_formula.h"
#include "optim/shards.h"

namespace lm {

Gradients::Gradients(const ModelLayout& layout, DType dtype, const Kernels& kernels, StreamView stream,
                     std::span<std::byte> host_sums, GradientPlaces places)
    : layout_(layout),
      dtype_(dtype),
      kernels_(kernels),
      stream_(stream),
      places_(std::move(places)),
      units_(layout.units(places_.chunked_head)),
      reduce_scatters_("reduce_scatter of gradients of unit", units_.size()),
      shares_("all_gather of gradients of unit", units_.size()),
      norms_("all_gather of gradient norms of unit", units_.size()),
      sums_(stream.device, norm_bytes(layout)),
      host_sums_(reinterpret_cast<double*>(host_sums.empty() ? sums_.data() : host_sums.data())) {
  LM_CHECK(stream.device == DeviceType::kCpu || std::ssize(host_sums) >= sums_.size(),
           "host memory for norms");
  const auto size = static_cast<int64_t>(dtype_size(dtype));
  for (const Unit& unit : units_) {
    const bool in_slots = through_slots(std::ssize(memory_)) || in_slot(unit.block);
    memory_.emplace_back(stream.device, in_slots ? 0 : unit.elements * size);
  }
  int64_t granule = 0, longest = 0;  // elements of a block in the slot
  for (const BlockLayout& block : layout.blocks) {
    if (in_slot(std::ssize(first_granule_))) longest = std::max(longest, block.flat_elements);
    first_granule_.push_back(granule);
    granule += block.flat_elements / kGranule;
  }
  first_granule_.push_back(granule);
  if (!places_.slot_elsewhere) slot_ = Memory(stream.device, longest * size);
  slot_memory_ = slot_.data();
}

std::byte* Gradients::unit(int64_t u) const {
  const Unit& range = units_[static_cast<size_t>(u)];
  if (through_slots(u)) return places_.store->use(u);
  if (!in_slot(range.block)) return memory_[static_cast<size_t>(u)].data();
  LM_CHECK(slot_block_ == range.block,
           fmt::format("the gradient of block {} is requested, but the slot has block {}'s", range.block,
                       slot_block_));
  return slot_memory_ + range.first * static_cast<int64_t>(dtype_size(dtype_));
}

int64_t Gradients::bytes() const {
  int64_t sum = slot_.size();
  for (const Memory& memory : memory_) sum += memory.size();
  return sum;
}

void Gradients::begin(int64_t u) {
  const Unit& range = units_[static_cast<size_t>(u)];
  if (in_slot(range.block)) {
    slot_block_ = range.block;
  } else if (!through_slots(u)) {
    return;
  }
  const auto size = static_cast<int64_t>(dtype_size(dtype_));
  std::byte* const memory = unit(u);
  int64_t end = range.first;  // elements so far; trainable tensors are in ascending order
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
  const Unit& range = units_[static_cast<size_t>(u)];
  if (in_slot(range.block)) slot_block_ = range.block;
  zero_bytes(unit(u), range.elements * static_cast<int64_t>(dtype_size(dtype_)), stream_);
}

std::byte* Gradients::unit_in_group(int64_t u) const {
  return through_slots(u) ? places_.store->use_in_group(u) : unit(u);
}

void Gradients::leave_to_compute(int64_t u, Group& group) const {
  const bool passes_on =
      through_slots(u) ? !places_.store->used_in_group(u) : in_slot(units_[static_cast<size_t>(u)].block);
  if (passes_on) group.end_before(stream_);
}

void Gradients::add_up(float* to, int64_t elements, DType from_dtype, std::span<const std::byte* const> from,
                       StreamView stream) const {
  Accumulate add{.to = to, .elements = elements, .from_dtype = from_dtype, .overwrite = true};
  for (const std::byte* const one : from) {
    add.from = one;
    kernels_.accumulate(add, stream);
    add.overwrite = false;
  }
}

void Gradients::add_into(std::byte* to, int64_t elements, DType from_dtype,
                         std::span<const std::byte* const> from, StreamView stream) {
  if (dtype_ == DType::kF32) return add_up(reinterpret_cast<float*>(to), elements, from_dtype, from, stream);
  const int64_t bytes = elements * static_cast<int64_t>(sizeof(float));
  if (sum_.size() < bytes) sum_ = Memory(stream.device, bytes);
  auto* const sum = reinterpret_cast<float*>(sum_.data());
  add_up(sum, elements, from_dtype, from, stream);
  kernels_.accumulate({.to = to, .from = sum, .elements = elements, .to_dtype = dtype_, .overwrite = true},
                      stream);
}

void Gradients::reduce_scatter(int64_t u, Group& group, const Sharding& sharding, int machine_ranks) {
  const auto size = static_cast<int64_t>(dtype_size(dtype_));
  const std::vector<ByteRange> ranges = part_bytes(units_[static_cast<size_t>(u)], sharding, size);
  std::byte* const all = unit_in_group(u);
  std::byte* const own = all + ranges[static_cast<size_t>(group.rank())].begin;
  group.begin_after(stream_);
  const StreamView stream = group.stream(stream_);
  if (machine_ranks > 1) {
    if (!levels_) levels_.emplace(group, machine_ranks, stream.device, partial_sum_bytes(stream.device));
    levels_->reduce_scatter(
        reduce_scatters_.of(u), all, ranges,
        {.element_bytes = size,
         .inside =
             [&](float* to, int64_t elements, std::span<const std::byte* const> from) {
               add_up(to, elements, dtype_, from, stream);
             },
         .across =
             [&](int64_t first, int64_t elements, std::span<const std::byte* const> from) {
               add_into(own + first * size, elements, DType::kF32, from, stream);
             }});
  } else {
    group.reduce_scatter(reduce_scatters_.of(u), all, ranges,
                         [&](int64_t offset, int64_t bytes, std::span<const std::byte* const> from) {
                           add_into(own + offset, bytes / size, dtype_, from, stream);
                         });
  }
  if (sharding.copies() > 1) group.share_copies(sharding.group, shares_.of(u), all, ranges);
  leave_to_compute(u, group);
}

void Gradients::granule_norms(int64_t u, Group& group, const Sharding& sharding) {
  const Unit& range = units_[static_cast<size_t>(u)];
  auto* const sums = reinterpret_cast<double*>(sums_.data()) +
                     first_granule_[static_cast<size_t>(range.block)] + range.first / kGranule;
  const Shard own = shard_of(range, sharding, sharding.place(group.rank()));
  const int64_t skipped = own.first - range.first;
  const std::byte* const gradient = unit_in_group(u);
  group.begin_after(stream_);
  kernels_.granule_norms({.x = gradient + skipped * static_cast<int64_t>(dtype_size(dtype_)),
                          .sums = sums + skipped / kGranule,
                          .granules = own.elements / kGranule,
                          .dtype = dtype_},
                         group.stream(stream_));
  leave_to_compute(u, group);
  if (sharding.group == 1) return;
  std::vector<ByteRange> ranges = shard_bytes(range, sharding, sizeof(double));
  for (ByteRange& one : ranges) one.begin /= kGranule, one.bytes /= kGranule;
  group.all_gather(norms_.of(u), reinterpret_cast<std::byte*>(sums), ranges);
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

std::optional<int64_t> Gradients::non_finite_block() const {
  // Non-finite values spread in backward: they began in the last block that has them.
  for (int64_t b = std::ssize(layout_.blocks) - 1; b >= 0; --b) {
    if (non_finite_granule(b)) return b;
  }
  return std::nullopt;
}

std::optional<NonFinite> Gradients::find_non_finite(int64_t b) const {
  const std::optional<int64_t> granule = non_finite_granule(b);
  return granule ? std::optional(find_in_granule(b, *granule)) : std::nullopt;
}

std::optional<int64_t> Gradients::non_finite_granule(int64_t b) const {
  // A square of a finite fp32 number is finite in fp64, and so is a granule's sum of them.
  const std::span<const double> all = sums(b);
  for (int64_t granule = std::ssize(all) - 1; granule >= 0; --granule) {
    if (!std::isfinite(all[static_cast<size_t>(granule)])) return granule;
  }
  return std::nullopt;
}

std::vector<Unit>::const_iterator Gradients::unit_of_granule(int64_t b, int64_t granule) const {
  const int64_t first = granule * kGranule;
  return std::find_if(units_.begin(), units_.end(), [&](const Unit& u) {
    return u.block == b && first >= u.first && first < u.first + u.elements;
  });
}

NonFinite Gradients::find_in_granule(int64_t b, int64_t granule) const {
  const auto unit = unit_of_granule(b, granule);
  const auto size = static_cast<int64_t>(dtype_size(dtype_));
  std::vector<std::byte> bytes(static_cast<size_t>(kGranule * size));
  read(unit - units_.begin(), (granule * kGranule - unit->first) * size, bytes);
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
  const bool found = wrong != elements.rend();
  return name_element(b, granule, elements.rend() - wrong - 1, found && std::isnan(*wrong));
}

NonFinite Gradients::name_element(int64_t b, int64_t granule, int64_t element, bool is_nan) const {
  const std::string unit = layout_.name(*unit_of_granule(b, granule));
  if (element < 0) return {"of " + unit, "finite, but with a norm that is not", false};
  const int64_t at = granule * kGranule + element;
  for (const TensorPlace& place : layout_.blocks[static_cast<size_t>(b)].tensors) {
    if (!place.frozen && at >= place.offset && at < place.offset + place.parameter.elements())
      return {place.parameter.name, is_nan ? "nan" : "inf"};
  }
  return {unit + ", between its tensors", is_nan ? "nan" : "inf"};
}

bool Gradients::resident() const {
  for (size_t u = 0; u < units_.size(); ++u) {
    if (units_[u].elements > 0 && memory_[u].data() == nullptr) return false;
  }
  return true;
}

std::vector<GradientArray> Gradients::arrays() const {
  std::vector<GradientArray> out;
  for (size_t u = 0; u < units_.size(); ++u) {
    const Unit& unit = units_[u];
    if (unit.elements > 0)
      out.push_back(
          {memory_[u].data(), first_granule_[static_cast<size_t>(unit.block)] + unit.first / kGranule});
  }
  std::ranges::sort(out, {}, &GradientArray::first_granule);
  return out;
}

std::optional<NonFinite> Gradients::non_finite(const StepDecision& decision) const {
  if (decision.granule < 0) return std::nullopt;
  int64_t b = std::ssize(layout_.blocks) - 1;
  while (first_granule_[static_cast<size_t>(b)] > decision.granule) --b;
  return name_element(b, decision.granule - first_granule_[static_cast<size_t>(b)], decision.element,
                      decision.is_nan != 0);
}

void Gradients::read(int64_t u, int64_t offset, std::span<std::byte> out) const {
  if (through_slots(u)) return places_.store->read(u, offset, out);
  copy_bytes(out.data(), unit(u) + offset, std::ssize(out), stream_);
  synchronize(stream_);
}

float clip_factor(double norm, double limit) {
  return clipped_scale(norm, limit);
}

}  // namespace lm
