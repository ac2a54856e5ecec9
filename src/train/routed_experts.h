// Frozen experts off the device are fetched by routing where a pass meets few of them: the list's fetch of
// their block brings what every token meets, and the block's mixer asks here for the experts that its router
// has chosen, once it has. They come into the slot that the list gave the block, in their places: slots, list
// and bits are those of whole fetches, and what crosses the link depends on the tokens. On a GPU the host
// waits for the choice, and with offload.verify for the arrival of what was chosen: once for each micro-batch
// that passes a layer after a fetch of its block, however many passes of it follow. Owned by the step, used
// by the rank's compute thread.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "base/byte_range.h"
#include "base/cuda.h"
#include "model/context.h"
#include "model/expert_fetch.h"
#include "offload/store.h"
#include "weights/loans.h"

namespace lm {

// Of a block, in its frozen bytes.
struct ExpertParts {
  std::vector<std::vector<ByteRange>> experts;  // what is frozen of each one's matrices and biases
  std::vector<ByteRange> others;                // all that is frozen beside these
};
// Of the layer's block. No experts: it has none that are frozen.
ExpertParts expert_parts(const ExpertsSpec& spec, int64_t layer, const BlockLayout& block);

// What routers have asked for.
struct RoutedCounts {
  int64_t waits = 0;  // passes of a micro-batch through a layer that waited for a choice and what was chosen
  int64_t bytes = 0;  // that these brought, in whole chunks
};

class RoutedExperts : public ExpertFetch {
 public:
  // Borrows all; `store` has the weights that are off the device, null: there are none. `host_starts`: on a
  // GPU registered memory of router_result_bytes (plan/weight_rows.h).
  RoutedExperts(const Context& context, const ModelLayout& layout, const WeightStore& weights, Store* store,
                std::span<std::byte> host_starts);

  // Fetches from here on are for passes of so many tokens at once, those of all ranks where these divide the
  // experts (plan/weight_rows.h: fetches_by_routing).
  void expect_tokens(int64_t tokens) { tokens_ = tokens; }
  // The list's fetch of a unit's weights.
  void fetch(int64_t unit, int64_t slot);
  // Whom the mixer of a unit's block asks; null: nobody, its experts are never fetched by routing.
  ExpertFetch* of(int64_t unit) { return experts_of(unit) != nullptr ? this : nullptr; }

  int64_t bring(int64_t layer, const int32_t* start, int64_t brought) override;
  int64_t bring_for_ranks(int64_t layer, std::span<const int32_t> rows, int64_t brought) override;
  bool there(int64_t layer, int64_t expert) const override;

  // Since the last call.
  RoutedCounts take_counts() { return std::exchange(counts_, {}); }

 private:
  struct Block {
    const ExpertsSpec* spec = nullptr;
    ExpertParts parts;
    bool in_parts = false;         // the list's last fetch of it has left experts out
    int64_t fetch = 0;             // the number of that fetch, over all blocks: never one of before
    std::vector<char> there = {};  // of each expert: brought since
  };
  const int32_t* on_host(const int32_t* start, int64_t count);
  // Whether the block has been fetched in parts, and its chosen experts have not been brought since. Else
  // nobody waits for what the router has chosen.
  bool asks(const Block& block, int64_t brought) const { return block.in_parts && brought != block.fetch; }
  // Brings what is missing of the chosen experts.
  template <class Chosen>
  int64_t bring_chosen(int64_t layer, const Chosen& chosen);
  Block* experts_of(int64_t unit) {
    const auto u = static_cast<size_t>(unit);
    return u < blocks_.size() && blocks_[u].spec != nullptr ? &blocks_[u] : nullptr;
  }

  const Context& context_;
  Store* store_;
  std::vector<Block> blocks_;         // by unit, up to the last transformer block
  std::span<std::byte> host_starts_;  // to which a GPU copies those of a layer's experts
  Event copied_;
  int64_t tokens_ = 0, fetches_ = 0;
  RoutedCounts counts_;
};

}  // namespace lm
