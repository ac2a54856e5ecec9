// Gradients of one optimizer step: a flat array per unit (a block, or a segment of a cut head), laid out as
// its weights, added up by the backward pass on the compute device; then the norm over all of them and what
// clipping makes of it. Arrays that live in a store come back for every addition, so that the sums are
// the same wherever they live.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/arena.h"
#include "config/config.h"
#include "kernels/kernels.h"
#include "offload/store.h"
#include "spec/block_layout.h"

namespace lm {

// An element of a gradient that is no number.
struct NonFinite {
  std::string tensor;
  const char* kind;  // "nan" or "inf"
};

class Gradients {
 public:
  // Units that `store` (may be null) holds live there. `host_sums`: borrowed host memory for the norms of
  // granules, norm_bytes(layout), registered with the GPU; on the CPU empty.
  Gradients(const ModelLayout& layout, DType dtype, const Kernels& kernels, StreamView stream,
            std::span<std::byte> host_sums = {}, Store* store = nullptr, bool cut_head = false);
  static int64_t norm_bytes(const ModelLayout& layout);

  bool through_slots(int64_t u) const { return store_ != nullptr && store_->holds(u); }
  // Where a unit's gradient begins; of one in the store, in its slot.
  std::byte* unit(int64_t u) const;
  // The step's first addition to the unit comes next and overwrites it. What lies between tensors must be
  // zero, and in a slot it is whatever was there before.
  void begin(int64_t u);
  DType dtype() const { return dtype_; }
  void zero(int64_t u);

  // The unit's gradient is final: its granule norms are enqueued.
  void granule_norms(int64_t u);
  // Squared norm of block b: granules in index order, in fp64. Waits for the stream.
  double block_square(int64_t b) const;
  // Of all blocks, in two steps, so that one wait serves this and other results: send, wait for the stream,
  // then read.
  void send_squares() const;
  double total_square() const;
  // Once norms were read and are not finite: a tensor of the block that backward reached first, wherever the
  // gradient lives, or of this block. Waits. None where the norms are finite.
  std::optional<NonFinite> find_non_finite() const;
  std::optional<NonFinite> find_non_finite(int64_t b) const;

 private:
  // Granule norms [first, first + count) to host memory, in stream order.
  void send(int64_t first, int64_t count) const;
  double sum(int64_t b) const;
  std::span<const double> sums(int64_t b) const;  // of its granules
  NonFinite find_in_granule(int64_t b, int64_t granule) const;
  // Bytes of a unit's gradient into host memory, wherever it lives. Waits.
  void read(int64_t u, int64_t offset, std::span<std::byte> out) const;

  const ModelLayout& layout_;
  DType dtype_;
  const Kernels& kernels_;
  StreamView stream_;
  Store* store_;
  std::vector<Unit> units_;
  std::vector<Memory> memory_;          // of each unit; empty where the store has it
  Memory sums_;                         // fp64 [granules of all blocks]
  double* host_sums_;                   // the same where the host reads them
  std::vector<int64_t> first_granule_;  // of each block
};

// The factor that clipping gives a gradient of this norm: min(1, limit / (norm + 1e-6)), in fp32.
float clip_factor(double norm, double limit);

}  // namespace lm
