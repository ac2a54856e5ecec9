// A sum over the ranks of several machines in two levels: each machine adds up what its ranks have, in their
// order, and these sums are added in the order of machines. Between machines a machine then sends, of each
// other one's shards, one sum in fp32, however many ranks it has. Ranks are numbered machine by machine,
// equally many on each; how many that are decides the order of additions, and so the bits. It need not be
// how they are spread now: a run keeps the order that it began with.
//
// Owns the memory of partial sums, where the arrays lie; borrows the group. Called by the rank's compute
// thread, by all ranks in the same order, as a Group is, and enqueues where a Group does; throws what that
// throws.
#pragma once

#include <functional>
#include <span>

#include "base/arena.h"
#include "comm/group.h"

namespace lm {

// What adds, of elements of some type, in the order of `from`.
struct TwoLevelAdd {
  int64_t element_bytes = 4;
  // to[0, elements) = the sum of a machine's ranks.
  std::function<void(float* to, int64_t elements, std::span<const std::byte* const> from)> inside;
  // The sum of machines, of this rank's shard from its element `first` on.
  std::function<void(int64_t first, int64_t elements, std::span<const std::byte* const> from)> across;
};

class TwoLevels {
 public:
  // `each`: ranks of a machine, which divide the group's. `partial`: bytes of partial sums.
  TwoLevels(Group& group, int each, DeviceType device, int64_t partial);

  // Of every rank's array of the same size, shards[r] is added up at rank r. The sum may be made where the
  // array is.
  void reduce_scatter(const char* what, const std::byte* data, std::span<const ByteRange> shards,
                      const TwoLevelAdd& add);

 private:
  int machines() const { return static_cast<int>(across_.ranks.size()); }
  int each() const { return static_cast<int>(inside_.ranks.size()); }
  float* sums_of(int machine) const { return reinterpret_cast<float*>(partial_.data()) + machine * room_; }
  void add_inside(const char* what, const std::byte* data, std::span<const ByteRange> parts,
                  const TwoLevelAdd& add);
  void add_across(const char* what, std::span<const ByteRange> parts, int64_t first, const TwoLevelAdd& add);

  Group& group_;
  Members inside_, across_;  // this machine's ranks; of each machine, the one with this one's place on it
  int64_t room_;             // elements of a shard at once
  Memory partial_;  // fp32 (machines, room_): of this rank's shard of each machine, this machine's sum
};

}  // namespace lm
