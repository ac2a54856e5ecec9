#include "comm/shard_store.h"

#include <algorithm>

#include "base/error.h"

namespace lm {

ShardStore::ShardStore(ShardStoreSetup setup) : setup_(std::move(setup)) {
  int64_t longest = 0;
  for (size_t a = 0; a < setup_.bytes.size(); ++a) {
    Array array(setup_.stream.device);
    array.bytes = setup_.bytes[a];
    if (array.bytes > 0) {
      array.shards = setup_.shards(static_cast<int64_t>(a));
      array.home = Memory(setup_.stream.device, own(array).bytes);
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

void ShardStore::fetch(int64_t array, int64_t slot) {
  enter(array, slot);
  Array& a = at(array);
  Slot& to = slot_of(a);
  setup_.group.begin_after(setup_.stream);  // with it, what the slot was used for
  if (a.fresh) {
    zero_bytes(to.memory.data(), a.bytes, way());
    return to.moved.record(way());
  }
  const ByteRange mine = own(a);
  if (mine.bytes > 0) copy_bytes(to.memory.data() + mine.begin, a.home.data(), mine.bytes, way());
  a.moved.record(way());
  if (setup_.gathers) setup_.group.share("gather of an array", to.memory.data(), a.shards);
  to.moved.record(way());
}

void ShardStore::claim(int64_t array, int64_t slot) {
  enter(array, slot);
}

void ShardStore::write_back(int64_t array) {
  Array& a = at(array);
  LM_CHECK(a.slot >= 0, setup_.name(array) + " is written back from no slot");
  const ByteRange mine = own(a);
  Slot& from = slot_of(a);
  setup_.group.begin_after(setup_.stream);
  if (mine.bytes > 0) copy_bytes(a.home.data(), from.memory.data() + mine.begin, mine.bytes, way());
  from.moved.record(way());
  a.moved.record(way());
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

std::byte* ShardStore::use_home(int64_t array) {
  Array& a = at(array);
  a.moved.wait(setup_.stream);
  a.slot = -1;
  a.fresh = false;
  if (own(a).bytes == 0) return slots_.front().memory.data();  // nobody looks there
  return reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(a.home.data()) -
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
  if (from < to) take(from - begin, to - from, a.home.data() + (from - mine.begin));
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
