// Gradients of one optimizer step: a flat array per unit (a block, or a segment of a vocabulary-chunked
// head), laid out like its weights, accumulated by the backward pass on the compute device; then the norm
// over all of them and the clip factor. Offloaded arrays are fetched for every accumulation, so that the sums
// do not depend on the tier. With updates inside backward blocks share one slot, as long as the longest of
// them, which a gradient occupies until the next one begins.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/arena.h"
#include "comm/collective_names.h"
#include "comm/two_levels.h"
#include "config/config.h"
#include "kernels/kernels.h"
#include "offload/store.h"
#include "spec/block_layout.h"

namespace lm {

// A non-finite element of a gradient.
struct NonFinite {
  std::string tensor;
  const char* kind;     // "nan" or "inf"
  bool element = true;  // false: only its granule's norm is known, as the sum is on another rank
};

// The placement of gradients without their own memory.
struct GradientPlaces {
  Store* store = nullptr;       // borrowed; may be null; has the gradients of units that it holds
  std::vector<char> in_slot;    // per block: it shares the slot; empty: none does
  bool slot_elsewhere = false;  // the caller lends memory for the slot (lend_slot)
  bool chunked_head = false;    // the head's units are segments of its vocabulary
};

class Gradients {
 public:
  // `host_sums`: borrowed host memory for the norms of granules, norm_bytes(layout), registered with the GPU;
  // on the CPU empty.
  Gradients(const ModelLayout& layout, DType dtype, const Kernels& kernels, StreamView stream,
            std::span<std::byte> host_sums = {}, GradientPlaces places = {});
  static int64_t norm_bytes(const ModelLayout& layout);

  // Lends device memory for the slot, enough for the longest block in it.
  void lend_slot(std::byte* memory) { slot_memory_ = memory; }

  bool through_slots(int64_t u) const { return places_.store != nullptr && places_.store->holds(u); }
  // The memory of a unit's gradient; of an offloaded one, its slot. Throws Error(70) if the shared slot has
  // another block's gradient.
  std::byte* unit(int64_t u) const;
  // Prepares for the step's first accumulation into the unit, which overwrites it. Zeros the padding between
  // tensors, which is undefined in a slot.
  void begin(int64_t u);
  DType dtype() const { return dtype_; }
  int64_t bytes() const;  // of its own memory
  // The same for a unit that is accumulated sparsely.
  void zero(int64_t u);

  // Reduces the unit's final gradients over all ranks (reduce_scatter), in fp32 and in the order of ranks;
  // with `machine_ranks` > 1 first over so many at a time and then over these sums (comm/two_levels.h). A
  // rank adds up its part; where there are copies of a shard, the ranks that have it share their parts. So
  // the result is the rank's own shard, which with groups of one rank is the whole unit. With a group of GPUs
  // it runs in the group's stream, as do the norms after it: a reader of either waits for that
  // (Group::end_before).
  void reduce_scatter(int64_t u, Group& group, const Sharding& sharding, int machine_ranks);
  // Enqueues the granule norms of the unit's final gradient; with sharded gradients the ranks exchange theirs
  // by all_gather.
  void granule_norms(int64_t u, Group& group, const Sharding& sharding);
  // Squared norm of block b: granules in index order, in fp64. Waits for the stream.
  double block_square(int64_t b) const;
  // The total over all blocks, in two steps, so that one wait serves this and other results: send, wait for
  // the stream, then read.
  void send_squares() const;
  double total_square() const;
  // For a decision on the device: norms of granules, each block's first one and behind them their number,
  // and the gradients' memory, in the order of granules; if all is resident, it stays where it is.
  bool resident() const;
  const double* granule_sums() const { return reinterpret_cast<const double*>(sums_.data()); }
  const std::vector<int64_t>& first_granules() const { return first_granule_; }
  std::vector<GradientArray> arrays() const;
  // The tensor that it names; nullopt if no gradient's norm was at fault.
  std::optional<NonFinite> non_finite(const StepDecision& decision) const;
  // After reading norms: the first block in the order of backward whose norm is not finite.
  std::optional<int64_t> non_finite_block() const;
  // A tensor with the non-finite value in this block, on any tier. Waits. nullopt if the norm is finite.
  std::optional<NonFinite> find_non_finite(int64_t b) const;

 private:
  // Copies granule norms [first, first + count) to host memory, in stream order.
  void send(int64_t first, int64_t count) const;
  double sum(int64_t b) const;
  std::span<const double> sums(int64_t b) const;  // of its granules
  std::optional<int64_t> non_finite_granule(int64_t b) const;
  // to[0, elements) = the sum over ranks, or over machines, in fp32.
  void add_up(float* to, int64_t elements, DType from_dtype, std::span<const std::byte* const> from,
              StreamView stream) const;
  // The same, rounded once to the gradient's type.
  void add_into(std::byte* to, int64_t elements, DType from_dtype, std::span<const std::byte* const> from,
                StreamView stream);
  // The unit's memory for the group's stream; leave_to_compute keeps compute off the unit until that stream
  // is done with it.
  std::byte* unit_in_group(int64_t u) const;
  void leave_to_compute(int64_t u, Group& group) const;
  NonFinite find_in_granule(int64_t b, int64_t granule) const;
  // The last element of a granule of block b that is not finite; -1 if all are.
  NonFinite name_element(int64_t b, int64_t granule, int64_t element, bool is_nan) const;
  std::vector<Unit>::const_iterator unit_of_granule(int64_t b, int64_t granule) const;
  bool in_slot(int64_t block) const {
    return static_cast<size_t>(block) < places_.in_slot.size() &&
           places_.in_slot[static_cast<size_t>(block)] != 0;
  }
  // Reads bytes of a unit's gradient into host memory, from any tier. Waits.
  void read(int64_t u, int64_t offset, std::span<std::byte> out) const;

  const ModelLayout& layout_;
  DType dtype_;
  const Kernels& kernels_;
  StreamView stream_;
  GradientPlaces places_;
  std::vector<Unit> units_;
  CollectiveNames reduce_scatters_, shares_, norms_;  // of units
  std::vector<Memory> memory_;                        // per unit; empty if it is offloaded or in a slot
  Memory slot_;                         // shared by blocks in turn, laid out as the current block
  std::byte* slot_memory_;              // the same, or the lent memory
  int64_t slot_block_ = -1;             // the block whose gradient is in it
  Memory sums_;                         // fp64 [granules of all blocks]
  double* host_sums_;                   // their copy for the host
  std::vector<int64_t> first_granule_;  // of each block, and the end
  Memory sum_;                          // fp32 sums of ranks' bf16 gradients, for some granules
  std::optional<TwoLevels> levels_;     // of the group, from the first reduce_scatter that needs them
};

// The clip factor for a gradient of this norm: min(1, limit / (norm + 1e-6)), in fp32.
float clip_factor(double norm, double limit);

}  // namespace lm
