// Gradients of one optimizer step: a flat array per unit (a block, or a segment of a cut head), laid out as
// its weights, added up by the backward pass on the compute device; then the norm over all of them and what
// clipping makes of it. Arrays that live in a store come back for every addition, so that the sums are
// the same wherever they live. With updates inside backward blocks share one slot, as long as the longest of
// them, in which a gradient is from its beginning to that of the next.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/arena.h"
#include "comm/two_levels.h"
#include "config/config.h"
#include "kernels/kernels.h"
#include "offload/store.h"
#include "spec/block_layout.h"

namespace lm {

// An element of a gradient that is no number.
struct NonFinite {
  std::string tensor;
  const char* kind;     // "nan" or "inf"
  bool element = true;  // false: only its granule's norm says so, as the sum is on another rank
};

// Where gradients live that do not have memory of their own.
struct GradientHomes {
  Store* store = nullptr;       // borrowed; may be null. Units that it holds live there.
  std::vector<char> in_slot;    // per block: it shares the slot; empty: none does
  bool slot_elsewhere = false;  // memory for the slot comes from somebody else (lend_slot)
};

class Gradients {
 public:
  // `host_sums`: borrowed host memory for the norms of granules, norm_bytes(layout), registered with the GPU;
  // on the CPU empty.
  Gradients(const ModelLayout& layout, DType dtype, const Kernels& kernels, StreamView stream,
            std::span<std::byte> host_sums = {}, GradientHomes homes = {}, bool cut_head = false);
  static int64_t norm_bytes(const ModelLayout& layout);

  // Memory for the slot, of the device, as long as a block that lies in it needs.
  void lend_slot(std::byte* memory) { slot_memory_ = memory; }

  bool through_slots(int64_t u) const { return homes_.store != nullptr && homes_.store->holds(u); }
  // Where a unit's gradient begins; of one in the store, in its slot. Throws Error(70) where the slot that
  // blocks share has another's.
  std::byte* unit(int64_t u) const;
  // The step's first addition to the unit comes next and overwrites it. What lies between tensors must be
  // zero, and in a slot it is whatever was there before.
  void begin(int64_t u);
  DType dtype() const { return dtype_; }
  int64_t bytes() const;  // of memory that is theirs
  // The same for a unit that is added to in places.
  void zero(int64_t u);

  // Every rank's gradient of the unit has come to its end: the sum over all of them, in the order of ranks,
  // where `machine_ranks` > 1 of so many at a time and then of these sums (comm/two_levels.h), in fp32. Of a
  // rank's own shard where `sharded`, else of the whole unit. With a group of GPUs in its stream, as the
  // norms that follow: who reads either waits for it (Group::end_before).
  void exchange(int64_t u, Group& group, bool sharded, int machine_ranks);
  // The unit's gradient is final: its granule norms are enqueued; where each rank has its shard alone, those
  // of the others come from them.
  void granule_norms(int64_t u, Group& group, bool sharded);
  // Squared norm of block b: granules in index order, in fp64. Waits for the stream.
  double block_square(int64_t b) const;
  // Of all blocks, in two steps, so that one wait serves this and other results: send, wait for the stream,
  // then read.
  void send_squares() const;
  double total_square() const;
  // Once norms were read: the block that backward reached first of those whose norm is not finite.
  std::optional<int64_t> non_finite_block() const;
  // A tensor that makes the norm of this block so, wherever the gradient lives. Waits. None where the norm is
  // finite.
  std::optional<NonFinite> find_non_finite(int64_t b) const;

 private:
  // Granule norms [first, first + count) to host memory, in stream order.
  void send(int64_t first, int64_t count) const;
  double sum(int64_t b) const;
  std::span<const double> sums(int64_t b) const;  // of its granules
  std::optional<int64_t> non_finite_granule(int64_t b) const;
  // to[0, elements) = the sum of ranks, or of machines, in fp32.
  void add_up(float* to, int64_t elements, DType from_dtype, std::span<const std::byte* const> from,
              StreamView stream) const;
  // The same, rounded once to the gradient's type.
  void add_into(std::byte* to, int64_t elements, DType from_dtype, std::span<const std::byte* const> from,
                StreamView stream);
  // For the group's stream; afterwards, compute does not touch the unit before that is done with it.
  std::byte* unit_in_group(int64_t u) const;
  void leave_to_compute(int64_t u, Group& group) const;
  NonFinite find_in_granule(int64_t b, int64_t granule) const;
  bool in_slot(int64_t block) const {
    return static_cast<size_t>(block) < homes_.in_slot.size() &&
           homes_.in_slot[static_cast<size_t>(block)] != 0;
  }
  // Bytes of a unit's gradient into host memory, wherever it lives. Waits.
  void read(int64_t u, int64_t offset, std::span<std::byte> out) const;

  const ModelLayout& layout_;
  DType dtype_;
  const Kernels& kernels_;
  StreamView stream_;
  GradientHomes homes_;
  std::vector<Unit> units_;
  std::vector<Memory> memory_;          // of each unit; empty where it is off the device or in a slot
  Memory slot_;                         // that blocks share: one after another, laid out as the block
  std::byte* slot_memory_;              // the same, or what was lent
  int64_t slot_block_ = -1;             // whose gradient is in it
  Memory sums_;                         // fp64 [granules of all blocks]
  double* host_sums_;                   // the same where the host reads them
  std::vector<int64_t> first_granule_;  // of each block
  Memory sum_;                          // fp32, of ranks' bf16 gradients, of some granules
  std::optional<TwoLevels> levels_;     // of the group, from the first exchange that needs them
};

// The factor that clipping gives a gradient of this norm: min(1, limit / (norm + 1e-6)), in fp32.
float clip_factor(double norm, double limit);

}  // namespace lm
