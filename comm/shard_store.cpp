#include "comm/shard_store.h"

#include <algorithm>

#include "base/error.h"

namespace lm {

ShardStore::ShardStore(ShardStoreSetup setup)
    : setup_(std::move(setup)), gathers_("gather of array", setup_.bytes.size()) {
  int64_t longest = 0;
  for (size_t a = 0; a < setup_.bytes.size(); ++a) {
    Array array(setup_.stream.device);
    array.bytes = setup_.bytes[a];
    if (array.bytes > 0) {
      array.shards = setup_.shards(static_cast<int64_t>(a));
      array.on_tier = setup_.tier != nullptr && setup_.tier->holds(static_cast<int64_t>(a));
      array.own_shard = Memory(setup_.stream.device, array.on_tier ? 0 : own(array).bytes);
      longest = std::max(longest, array.bytes);
    }
    arrays_.push_back(std::move(array));
  }
  for (int64_t s = 0; s < setup_.slots; ++s) slots_.emplace_back(setup_.stream.device, longest);
}

void ShardStore::enter(int64_t array, int64_t slot) {
  for (Array& other : arrays_) {
    if (other.slot == slot) other.slot = -1;
  }
  at(array).slot = slot;
}

// After what the slot was used for, and moved for.
void ShardStore::begin_copies(const Array& array, Slot& slot) {
  if (copies_in_compute(array)) slot.moved.wait(setup_.stream);
  setup_.group.begin_after(setup_.stream);
}

// The group's stream goes on behind them.
void ShardStore::end_copies(Array& array) {
  if (copies_in_compute(array)) setup_.group.begin_after(setup_.stream);
  if (!array.on_tier) array.moved.record(way());
}

// Within a step the schedule has the shard in a slot of its tier. Outside of one these are empty: the first
// serves.
void ShardStore::copy_from_shard(int64_t array, std::byte* to) {
  Array& a = at(array);
  const ByteRange mine = own(a);
  if (mine.bytes == 0) return;
  if (!a.on_tier) return copy_bytes(to, a.own_shard.data(), mine.bytes, way());
  const bool brings = !setup_.tier->in_slot(array);
  if (brings) setup_.tier->fetch(array, 0);
  copy_bytes(to, setup_.tier->use(array), mine.bytes, copies(a));
  if (brings) setup_.tier->forget(array);
}

void ShardStore::copy_to_shard(int64_t array, const std::byte* from) {
  Array& a = at(array);
  const ByteRange mine = own(a);
  if (mine.bytes == 0) return;
  if (!a.on_tier) return copy_bytes(a.own_shard.data(), from, mine.bytes, way());
  const bool writes = !setup_.tier->in_slot(array);
  if (writes) setup_.tier->allocate_slot(array, 0);
  copy_bytes(setup_.tier->use(array), from, mine.bytes, copies(a));
  if (!writes) return;
  setup_.tier->write_back(array);
  setup_.tier->forget(array);
}

void ShardStore::fetch(int64_t array, int64_t slot) {
  enter(array, slot);
  Array& a = at(array);
  Slot& to = slot_of(a);
  begin_copies(a, to);
  if (a.fresh) {
    zero_bytes(to.memory.data(), a.bytes, way());
    return to.moved.record(way());
  }
  copy_from_shard(array, to.memory.data() + own(a).begin);
  end_copies(a);
  if (setup_.gathers) setup_.group.all_gather(gathers_.of(array), to.memory.data(), a.shards);
  to.moved.record(way());
}

void ShardStore::allocate_slot(int64_t array, int64_t slot) {
  enter(array, slot);
}

void ShardStore::write_back(int64_t array) {
  Array& a = at(array);
  LM_CHECK(a.slot >= 0, setup_.name(array) + " is written back from no slot");
  Slot& from = slot_of(a);
  begin_copies(a, from);
  copy_to_shard(array, from.memory.data() + own(a).begin);
  end_copies(a);
  from.moved.record(way());
  a.fresh = false;
}

void ShardStore::forget(int64_t array) {
  at(array).slot = -1;
}

std::byte* ShardStore::use(int64_t array) {
  std::byte* const memory = use_in_group(array);
  slot_of(at(array)).moved.wait(setup_.stream);
  return memory;
}

std::byte* ShardStore::use_in_place(int64_t array) {
  Array& a = at(array);
  a.moved.wait(setup_.stream);
  a.slot = -1;
  a.fresh = false;
  if (own(a).bytes == 0) return slots_.front().memory.data();  // nobody looks there
  std::byte* const own_shard = a.on_tier ? setup_.tier->use(array) : a.own_shard.data();
  return reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(own_shard) -
                                      static_cast<uintptr_t>(own(a).begin));
}

std::byte* ShardStore::use_in_group(int64_t array) {
  const Array& a = at(array);
  LM_CHECK(a.slot >= 0, setup_.name(array) + " is used and in no slot");
  return slot_of(a).memory.data();
}

bool ShardStore::used_in_group(int64_t array) {
  slot_of(at(array)).moved.record(way());
  return true;
}

std::byte* ShardStore::use_unchecked(int64_t array, Arrival* arrival) {
  *arrival = at(array).fresh ? Arrival::kZeros : Arrival::kKnown;
  return use(array);
}

void ShardStore::read(int64_t array, int64_t begin, std::span<std::byte> out) {
  const Array& a = at(array);
  setup_.group.end_before(setup_.stream);
  const auto take = [&](int64_t from, int64_t bytes, const std::byte* source) {
    copy_bytes(out.data() + from, source, bytes, setup_.stream);
    synchronize(setup_.stream);
    setup_.group.check();
  };
  if (a.slot >= 0) return take(0, std::ssize(out), slot_of(a).memory.data() + begin);
  std::ranges::fill(out, std::byte{0});
  if (a.fresh) return;
  const ByteRange mine = own(a);
  const int64_t from = std::max(begin, mine.begin),
                to = std::min(begin + std::ssize(out), mine.begin + mine.bytes);
  if (from >= to) return;
  if (!a.on_tier) return take(from - begin, to - from, a.own_shard.data() + (from - mine.begin));
  setup_.tier->read(array, from - mine.begin,
                    out.subspan(static_cast<size_t>(from - begin), static_cast<size_t>(to - from)));
}

void ShardStore::reset() {
  for (Array& array : arrays_) array.slot = -1, array.fresh = true;
}

void ShardStore::resize(int64_t array, int64_t bytes) {
  LM_CHECK(bytes == at(array).bytes, setup_.name(array) + " has shards of one length");
}

bool ShardStore::holds(int64_t array) const {
  return array >= 0 && array < std::ssize(arrays_) && at(array).bytes > 0;
}

}  // namespace lm
