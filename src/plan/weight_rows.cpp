#include "plan/weight_rows.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "base/bytes.h"

namespace lm {
namespace {

// Of the trained or the frozen weights.
OffDeviceBytes offloaded(const PlacementPlan& p, PoolPlan pool, PoolPlan shards, bool frozen) {
  for (PoolPlan* const of : {&pool, &shards}) {
    for (size_t a = 0; a < of->off_device.size(); ++a)
      if (p.frozen_array(static_cast<int64_t>(a)) != frozen) of->off_device[a] = 0;
  }
  return off_device_bytes(pool, shards);
}

// What experts have of `all`: of each array their part, as it is of the whole unit.
OffDeviceBytes experts_of(const PlanInput& in, const PlacementPlan& p, bool frozen,
                          const OffDeviceBytes& all) {
  PoolPlan pool = p.pool(Pool::kWeights), shards = p.pool(Pool::kWeightShards);
  for (PoolPlan* const of : {&pool, &shards}) {
    for (size_t a = 0; a < of->bytes.size(); ++a) {
      // Arrays are units: the embedding, the layers, and what is behind them.
      const BlockLayout& block = in.layout.blocks[std::min(a, in.layout.blocks.size() - 1)];
      const ExpertBytes experts = expert_bytes(block);
      const int64_t own = p.pool(Pool::kWeights).shards > 1 ? block.own_bytes : 0;  // in no array
      const double whole = static_cast<double>(frozen ? block.frozen_bytes - own : block.flat_elements);
      const double part = static_cast<double>(frozen ? experts.frozen - own : experts.trained);
      const auto scale = [&](int64_t& bytes) {
        bytes = whole > 0 ? static_cast<int64_t>(static_cast<double>(bytes) * part / whole) : 0;
      };
      scale(of->bytes[a]);
      if (a < of->shard_bytes.size()) scale(of->shard_bytes[a]);
      if (part == 0) of->off_device[a] = 0;
    }
  }
  OffDeviceBytes out = offloaded(p, pool, shards, frozen);
  // Each array is filled up by itself: what is left to the others is never less than nothing.
  out.whole = std::min(out.whole, all.whole);
  out.shard = std::min(out.shard, all.shard);
  for (size_t t = 0; t < kTierCount; ++t) out.at[t] = std::min(out.at[t], all.at[t]);
  return out;
}

OffDeviceBytes without(OffDeviceBytes all, const OffDeviceBytes& part) {
  all.whole -= part.whole;
  all.shard -= part.shard;
  for (size_t t = 0; t < kTierCount; ++t) all.at[t] -= part.at[t];
  return all;
}

// "bf16", or every encoding with its bytes: of what is frozen of experts, or of the rest.
std::string encodings_of(const PlanInput& in, DType dtype, bool experts) {
  std::map<std::string, int64_t> bytes;
  for (const BlockLayout& block : in.layout.blocks)
    for (const TensorPlace& place : block.tensors)
      if (place.parameter.of_expert() == experts)
        for (const FrozenPiece& piece : place.pieces)
          bytes[piece.encoding->name] += frozen_piece_bytes(piece);
  if (bytes.size() == 1) return bytes.begin()->first;
  if (bytes.empty()) return dtype_name(dtype);
  std::string out;
  for (const auto& [name, size] : bytes) out += (out.empty() ? "" : ", ") + name + " " + format_bytes(size);
  return out;
}

struct Mixture {
  const ExpertsSpec* spec = nullptr;  // of a layer that has some
  ExpertBytes bytes;
};
Mixture all_experts(const PlanInput& in) {
  Mixture out;
  for (int64_t i = 0; i < in.spec.layer_count(); ++i) {
    const auto* const here = in.spec.layer(i).find<ExpertsSpec>();
    if (here == nullptr) continue;
    const ExpertBytes bytes = expert_bytes(in.layout.blocks[static_cast<size_t>(i) + 1]);
    out.spec = here;
    out.bytes.trained += bytes.trained;
    out.bytes.frozen += bytes.frozen;
  }
  return out;
}

}  // namespace

ExpertBytes expert_bytes(const BlockLayout& block) {
  ExpertBytes out;
  for (const TensorPlace& place : block.tensors) {
    if (!place.parameter.of_expert()) continue;
    if (!place.frozen) out.trained += round_up(place.parameter.elements(), kTensorStart);
    for (const FrozenPiece& piece : place.pieces) out.frozen += frozen_piece_bytes(piece);
  }
  out.trained = std::min(out.trained, block.flat_elements);
  return out;
}

namespace {

// A row of weights. Of what ranks of a machine have in common each of them has its part.
struct WeightRow {
  std::string name;
  int64_t bytes = 0;
  OffDeviceBytes off;
  std::string note;
};
void add_row(WeightRow row, int sharers, ClassTable& table) {
  const auto one_copy = [&] {
    return row.note + fmt::format(", one copy for the {} ranks of a machine", sharers);
  };
  if (sharers == 1) return table.add(row.name, row.bytes, row.off, row.note);
  if (table.of_gpu()) {
    const int64_t common = std::exchange(row.off.at[tier_index(TierId::kHost)], 0);
    table.add(row.name, row.bytes, row.off, row.note);
    if (common > 0) table.host(row.name, ceil_div(common, sharers), one_copy());
    return;
  }
  const int64_t here = row.bytes - row.off.whole;
  if (here == 0) return table.add(row.name, row.bytes, row.off, row.note);
  table.device(row.name, ceil_div(here, sharers), one_copy());
  if (row.off.whole > 0) table.add(row.name, row.off.whole, row.off, row.note);
}

}  // namespace

void add_weights(const PlanInput& in, const PlacedPlan& plan, ClassTable& table) {
  const NumericsPlan& n = plan.numerics;
  const PlacementPlan& p = plan.placement;
  const Mixture experts = all_experts(in);
  const bool frozen_embedding = in.layout.blocks.front().frozen_bytes > 0;  // what of it is in host memory
  for (const bool frozen : {false, true}) {
    const int64_t size = frozen ? 1 : size_of(n.trained_dtype());
    const int64_t embedding = frozen == frozen_embedding ? p.embedding_in_host : 0;
    const int64_t all = (frozen ? in.layout.frozen_bytes : in.layout.flat_elements * size) - embedding;
    const int64_t of_experts = frozen ? experts.bytes.frozen : experts.bytes.trained * size;
    const OffDeviceBytes off = offloaded(p, p.pool(Pool::kWeights), p.pool(Pool::kWeightShards), frozen);
    const auto note = [&](bool part) {
      if (frozen) return encodings_of(in, n.dtype, part);
      return fmt::format("{}, {} B per parameter", dtype_name(n.trained_dtype()), size);
    };
    const std::string name = state_class_name(frozen ? StateClass::kFrozenWeights : StateClass::kWeights);
    const bool own = !frozen || (table.of_gpu() && off.in_shards);
    const int sharers = own ? 1 : p.frozen_sharers;
    if (of_experts == 0) {
      add_row({name, all, off, note(false)}, sharers, table);
      continue;
    }
    const OffDeviceBytes part = experts_of(in, p, frozen, off);
    add_row({name, all - of_experts, without(off, part), note(false)}, sharers, table);
    add_row({frozen ? "frozen experts" : "experts", of_experts, part, note(true)}, sharers, table);
  }
}

namespace {

bool any_routed(const PlanInput& in, const SizedPlan& plan) {
  for (int64_t i = 0; i < in.spec.layer_count(); ++i) {
    const auto* const experts = in.spec.layer(i).find<ExpertsSpec>();
    if (experts != nullptr && routes_experts(plan, i + 1, *experts, in.layout.experts)) return true;
  }
  return false;
}

}  // namespace

std::optional<Choice> explain_streamed_experts(const PlanInput& in, const SizedPlan& plan) {
  const Mixture experts = all_experts(in);
  if (experts.spec == nullptr) return {};
  int64_t off = 0;
  for (const bool frozen : {false, true}) {
    const PlacementPlan& p = plan.placement;
    const OffDeviceBytes all = offloaded(p, p.pool(Pool::kWeights), p.pool(Pool::kWeightShards), frozen);
    off += experts_of(in, p, frozen, all).whole;
  }
  if (off == 0) return {};
  const int64_t tokens =
      plan.micro_tokens * plan.step.group * in.layout.experts.ranks;  // for which a block is fetched once
  const double share = expected_expert_share(*experts.spec, static_cast<double>(tokens));
  const char* const fetched =
      any_routed(in, plan) ? "these are fetched when the router has chosen" : "a whole block is fetched";
  return Choice{"experts off the device", fmt::format("{} a pass", format_bytes(off)),
                fmt::format("{} tokens that choose evenly meet {:.3g} % of the experts, {} of these; {}",
                            tokens, 100 * share,
                            format_bytes(static_cast<int64_t>(share * static_cast<double>(off))), fetched)};
}

bool fetches_by_routing(const ExpertsSpec& spec, int64_t tokens) {
  constexpr double kMost = 0.5;
  return expected_expert_share(spec, static_cast<double>(tokens)) <= kMost;
}

int64_t router_result_bytes(const ModelSpec& spec) {
  int64_t most = 0;  // where the rows of each expert start, and where the last one's end
  for (int64_t i = 0; i < spec.layer_count(); ++i)
    if (const auto* const experts = spec.layer(i).find<ExpertsSpec>())
      most = std::max(most, experts->experts + 1);
  return most * static_cast<int64_t>(sizeof(int32_t));
}

bool routes_experts(const SizedPlan& plan, int64_t unit, const ExpertsSpec& spec, const ExpertShare& share) {
  const PlacementPlan& p = plan.placement;
  return p.pool(Pool::kWeights).shards == 1 && p.frozen_array(unit) &&
         plan.step.pool(Pool::kWeights).holds(unit) &&
         fetches_by_routing(spec, plan.step.micro_rows * plan.step.group * share.ranks);
}

double expected_expert_share(const ExpertsSpec& spec, double tokens) {
  const double missed = 1 - static_cast<double>(spec.chosen) / static_cast<double>(spec.experts);
  return 1 - std::pow(missed, tokens);
}

}  // namespace lm
