#include "weights/loans.h"

#include <fmt/format.h>
#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"

namespace lm {
namespace {

// What of a unit is in memory of its own on the device.
struct OnDevice {
  int64_t trainable = 0, frozen = 0;  // bytes
  bool moves_frozen = false;          // if the unit is offloaded
};

OnDevice on_device(const ModelLayout& layout, DType dtype, const WeightPlaces& places, const Unit& unit,
                   int64_t index) {
  const bool in_host = index == 0 && places.embedding != nullptr;
  const bool off_device = in_host || (places.store != nullptr && places.store->holds(index));
  const bool frozen = in_host ? unit.frozen_bytes > 0
                              : moves_frozen(layout.blocks[static_cast<size_t>(unit.block)], unit, dtype);
  const int64_t own = places.shards ? unit.own_bytes : 0;
  const int64_t trainable = unit.elements * static_cast<int64_t>(dtype_size(dtype));
  return {off_device && !frozen ? 0 : trainable, off_device && frozen ? own : unit.frozen_bytes, frozen};
}

// Units begin at pages, as they do in memory of their own.
int64_t whole_pages(int64_t bytes) {
  constexpr int64_t kPage = 4096;
  return round_up(bytes, kPage);
}

}  // namespace

Loan::Loan(WeightStore& store, int64_t unit)
    : store_(&store), unit_(unit), version_(store.places_[static_cast<size_t>(unit)].version) {
  ++store.places_[static_cast<size_t>(unit)].loans;
}

Loan::Loan(Loan&& other) noexcept
    : store_(std::exchange(other.store_, nullptr)), unit_(other.unit_), version_(other.version_) {}

Loan::~Loan() {
  if (store_ != nullptr) --store_->places_[static_cast<size_t>(unit_)].loans;
}

std::byte* Loan::trainable() const {
  const auto& unit_place = store_->places_[static_cast<size_t>(unit_)];
  LM_CHECK(unit_place.version == version_, fmt::format("a loan of unit {} outlived an update", unit_));
  return store_->trainable(unit_);
}

std::byte* Loan::frozen() const {
  return store_->frozen(unit_);
}

std::byte* Loan::own() const {
  return store_->own(unit_);
}

OpenUnit::OpenUnit(WeightStore& store, int64_t unit, bool changes)
    : store_(&store), unit_(unit), changes_(changes) {}

OpenUnit::OpenUnit(OpenUnit&& other) noexcept
    : store_(std::exchange(other.store_, nullptr)),
      unit_(other.unit_),
      changes_(other.changes_),
      brought_(other.brought_) {}

OpenUnit::~OpenUnit() {
  if (store_ != nullptr && brought_) store_->off_device_->forget(unit_);
}

void OpenUnit::close() {
  if (!brought_) return;
  if (changes_) store_->off_device_->write_back(unit_);
  store_->off_device_->forget(unit_);
  brought_ = false;
}

void OpenUnit::bring() const {
  if (!brought_) store_->off_device_->fetch(unit_, 0);
  brought_ = true;
}

std::byte* OpenUnit::trainable() const {
  if (store_->trainable_off_device(unit_)) bring();
  return store_->trainable(unit_);
}

std::byte* OpenUnit::frozen() const {
  if (store_->frozen_off_device(unit_)) bring();
  return store_->frozen(unit_);
}

std::byte* OpenUnit::tensor(const TensorPlace& place) const {
  const Unit& unit = store_->units_[static_cast<size_t>(unit_)];
  std::byte* const own = store_->own(unit_);
  if (place.frozen && own != nullptr && place.offset >= unit.common_bytes())
    return own + (place.offset - unit.common_bytes());
  if (place.frozen) return frozen() + std::max<int64_t>(place.offset - unit.first_frozen_byte, 0);
  return trainable() +
         std::max<int64_t>(place.offset - unit.first, 0) * static_cast<int64_t>(dtype_size(store_->dtype_));
}

int64_t WeightStore::frozen_in_memory(const ModelLayout& layout, DType dtype, const WeightPlaces& places) {
  int64_t sum = 0, index = 0;
  for (const Unit& unit : layout.units(places.chunked_head))
    sum += whole_pages(on_device(layout, dtype, places, unit, index++).frozen);
  return sum;
}

WeightStore::WeightStore(const ModelLayout& layout, DType dtype, DeviceType device,
                         const WeightPlaces& places)
    : layout_(layout),
      dtype_(dtype),
      off_device_(places.store),
      embedding_(places.embedding),
      shards_(places.shards),
      loads_embedding_(places.loads_embedding),
      loads_frozen_(places.loads_frozen),
      units_(layout.units(places.chunked_head)) {
  std::span<std::byte> shared = places.frozen;
  for (const Unit& unit : units_) {
    const OnDevice here = on_device(layout, dtype, places, unit, std::ssize(places_));
    UnitPlace& place = places_.emplace_back();
    place.trainable = Memory(device, here.trainable);
    place.moves_frozen = here.moves_frozen;
    if (places.frozen.empty() || here.frozen == 0) {
      place.frozen = Memory(device, here.frozen);
      continue;
    }
    const auto bytes = static_cast<size_t>(whole_pages(here.frozen));
    LM_CHECK(bytes <= shared.size(), "memory that ranks have in common is too small");
    place.frozen_elsewhere = shared.data();
    shared = shared.subspan(bytes);
  }
}

std::vector<int64_t> WeightStore::units_of(int64_t block, const TensorPlace& place) const {
  if (units_[static_cast<size_t>(block)].holds(place)) return {block};
  std::vector<int64_t> out;
  for (int64_t u = std::ssize(layout_.blocks); u < std::ssize(units_); ++u) out.push_back(u);
  return out;
}

bool WeightStore::frozen_off_device(int64_t unit) const {
  return through_slots(unit) && places_[static_cast<size_t>(unit)].moves_frozen;
}

bool WeightStore::loads_frozen(int64_t unit) const {
  if (frozen_off_device(unit)) return off_device_->fills(unit);
  return unit == 0 && embedding_ != nullptr ? loads_embedding_ : loads_frozen_;
}

bool WeightStore::trainable_off_device(int64_t unit) const {
  return through_slots(unit) && !frozen_off_device(unit);
}

std::byte* WeightStore::trainable(int64_t unit) const {
  if (trainable_off_device(unit)) return off_device_->use(unit);
  return in_host_memory(unit) ? embedding_ : places_[static_cast<size_t>(unit)].trainable.data();
}

std::byte* WeightStore::frozen(int64_t unit) const {
  if (frozen_off_device(unit)) return off_device_->use(unit);
  const bool in_host = unit == 0 && embedding_ != nullptr && units_[0].frozen_bytes > 0;
  const UnitPlace& place = places_[static_cast<size_t>(unit)];
  if (place.frozen_elsewhere != nullptr) return place.frozen_elsewhere;
  return in_host ? embedding_ : place.frozen.data();
}

std::byte* WeightStore::own(int64_t unit) const {
  const bool apart = shards_ && units_[static_cast<size_t>(unit)].own_bytes > 0 && frozen_off_device(unit);
  return apart ? places_[static_cast<size_t>(unit)].frozen.data() : nullptr;
}

std::byte* WeightStore::trainable_in_place(int64_t unit) {
  const UnitPlace& unit_place = places_[static_cast<size_t>(unit)];
  LM_CHECK(unit_place.loans == 0, fmt::format("unit {} is on loan", unit));
  return in_shards(unit) ? off_device_->use_in_place(unit) : trainable(unit);
}

}  // namespace lm
