// A sum over the ranks of several machines in two levels: each machine adds up what its ranks have, in their
// order, and these sums are added in the order of machines. Between machines a machine then sends, of each
// other one's shards, one sum in fp32, however many ranks it has. Ranks are numbered machine by machine,
// equally many on each; how many that are decides the order of additions, and so the bits.
//
// No run uses it yet: groups of one machine's ranks, and of one rank of each machine, are still to be made.
//
// Owns the memory of partial sums; borrows both groups. Called by the rank's compute thread, by all ranks in
// the same order, as a Group is; throws what these throw.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "comm/group.h"

namespace lm {

// What adds, of elements of some type, in the order of `from`.
struct TwoLevelAdd {
  int64_t element_bytes = 4;
  // to[0, elements) = the sum of a machine's ranks.
  std::function<void(float* to, int64_t elements, std::span<const std::byte* const> from)> inside;
  // The sum of machines, of this rank's shard from its element `first` on.
  std::function<void(int64_t first, int64_t elements, std::span<const float* const> from)> across;
};

class TwoLevels {
 public:
  // `inside`: the ranks of this machine. `across`: of each machine the rank with this one's number on its
  // machine, in the order of machines. `staging`: bytes of partial sums.
  TwoLevels(Group& inside, Group& across, int64_t staging = int64_t{4} << 20);

  int rank() const { return rank_of(across_.rank(), inside_.rank()); }
  int ranks() const { return across_.ranks() * inside_.ranks(); }

  // Of every rank's array of the same size, shards[r] is added up at rank r. The sum may be made where the
  // array is.
  void exchange(const char* what, const std::byte* data, std::span<const ByteRange> shards,
                const TwoLevelAdd& add);

  int64_t sent_between_machines() const { return across_.sent_bytes(); }

 private:
  int rank_of(int machine, int place) const { return machine * inside_.ranks() + place; }
  void add_inside(const char* what, const std::byte* data, std::span<const ByteRange> parts,
                  const TwoLevelAdd& add);
  void add_across(const char* what, std::span<const ByteRange> parts, int64_t first, const TwoLevelAdd& add);

  Group& inside_;
  Group& across_;
  const int64_t room_;          // elements of a shard at once
  std::vector<float> partial_;  // (machines, room_): of this rank's shard of each machine, this machine's sum
};

}  // namespace lm
