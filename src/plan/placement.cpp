#include "plan/placement.h"

#include <fmt/format.h>
#include <algorithm>
#include <optional>
#include <utility>

#include "base/arena.h"
#include "base/bytes.h"
#include "plan/activation_arrays.h"
#include "plan/estimate.h"
#include "plan/limits.h"
#include "plan/tile_cutter.h"
#include "plan/unit_pools.h"
#include "plan/update_site.h"
#include "plan/update_work.h"

namespace lm {
namespace {

constexpr int64_t kUpdateSlots = 3;  // of an update's gradients and weights (optim/host_update.h)
// A tile should be long enough for the disk to reach its rate (some MiB) and short beside the state, so that
// the pipeline fills at once.
constexpr int64_t kLeastTile = 4 * kMiB, kMostTile = 32 * kMiB, kTilesPerStep = 64;
// Micro-batches that share what crosses a link: beyond that it is next to nothing beside their compute.
constexpr int64_t kEnoughInGroup = 128;
// Staging more of the optimizer's state than this does not shorten a step: the rest is read under the
// forward.
constexpr double kStagedShare = 0.4;
constexpr double kStagingOfSpare = 0.5;
// Left free of what is spent on staging and on arrays that stay on the device.
constexpr int64_t kMargin = 64 * kMiB;

// No more slots than arrays that pass through them, and no longer ones than these need.
void limit_slots(PlacementPlan& placement, Pool which) {
  const std::vector<char> through_slots = placement.through_slots(which);
  PoolPlan& pool = placement.pool(which);
  pool.slots = std::min<int64_t>(pool.slots, std::count(through_slots.begin(), through_slots.end(), 1));
  if (pool.slots == 0 || placement.slots_of_any_rank(which)) return;
  pool.slot_bytes = 0;
  for (size_t a = 0; a < through_slots.size(); ++a) {
    if (through_slots[a] != 0)
      pool.slot_bytes = std::max(pool.slot_bytes, round_up(pool.bytes[a], kSlotAlignment));
  }
}

// The tiles that the CPU updates of those that it shares with the GPU: by turns, so that both always have
// some.
std::vector<char> shared_tiles(const PlacementPlan& placement) {
  std::vector<char> out;
  double due = 0;  // granules that the CPU has not been given yet
  for (const int64_t granules : placement.granules) {
    due += placement.host_share * static_cast<double>(granules);
    const bool given = due >= static_cast<double>(granules) / 2;
    if (given) due -= static_cast<double>(granules);
    out.push_back(given ? 1 : 0);
  }
  return out;
}

// The pool of optimizer state and its tiles; after the pools whose units they follow.
void place_optimizer(const PlanInput& in, const NumericsPlan& n, TierId tier_id, PlacementPlan& placement) {
  placement.ranks = n.ranks;
  const Sharding sharding = sharding_of(in);
  placement.sharded = sharding.group > 1 && in.config.zero.stage >= 1;
  placement.copies = placement.sharded ? sharding.copies() : 1;
  placement.whole_tensors = sharding.whole;
  const int64_t state = state_bytes(in.layout, n.state());
  const int64_t granule_bytes = placement.granule_bytes =
      ceil_div(state, std::max<int64_t>(in.layout.flat_elements / kGranule, 1));
  const bool off_device = is_off_device(tier_id, in.device);
  const int64_t least = ceil_div(state, kMostTiles);
  const int64_t usual = std::max(std::clamp(state / kTilesPerStep, kLeastTile, kMostTile), least);
  const int64_t tile = in.config.io.tile ? std::max(in.config.io.tile->bytes, granule_bytes) : usual;
  if (off_device) refuse_short_tiles(tile, least);
  const std::vector<Unit> units = in.layout.units(placement.head_segments() > 0);
  int64_t longest = 1;  // no tile crosses a unit's end
  for (const Unit& unit : units) longest = std::max(longest, unit.elements / kGranule);
  const int64_t each = std::clamp<int64_t>(tile / std::max<int64_t>(granule_bytes, 1), 1, longest);
  TileCutter tiles(placement, in.layout, n, off_device ? each : 0);
  // A tile of a chunked head lies in one segment: its update needs no other. Tiles follow the block's array,
  // in which the matrix comes before the norm.
  for (const Unit& unit : units) {
    if (unit.segment()) continue;
    tiles.begin_block();
    for (const Unit& segment : units) {
      if (segment.segment() && segment.block == unit.block) tiles.begin_unit(), tiles.cut(segment);
    }
    if (unit.role == UnitRole::kFinalNorm) tiles.begin_unit();
    tiles.cut(unit);
    if (unit.role == UnitRole::kFinalNorm) tiles.begin_unit();
  }
  tiles.begin_block();
  placement.tile_granules = off_device ? tiles.longest_granules() : 0;
  PoolPlan& pool = placement.pool(Pool::kOptimizer) =
      make_pool(tier_id, tiles.bytes(), kSlots + 1, in.device);
  pool.places = tiles.take_places();
  if (pool.slots > 0) pool.slot_bytes = round_up(tiles.longest_bytes(), kSlotAlignment);
  if (!placement.update_on_host) return;
  if (placement.host_share > 0) placement.host_tiles = shared_tiles(placement);
  limit_slots(placement, Pool::kOptimizer);
  placement.update_sends = size_of(n.trained_dtype());
  placement.update_brings = size_of(n.gradient_dtype) + placement.update_sends;
  placement.update_staging = kUpdateSlots * placement.tile_granules * kGranule * placement.update_brings;
}

PoolPlan activation_pool(const PlanInput& in, TierId tier_id, const PlacedPlan& plan) {
  const bool off_device =
      in.trains() && is_off_device(tier_id, in.device) && plan.placement.group <= kMostInGroup;
  // In and out of a block are held at once.
  return make_pool(tier_id, off_device ? activation_arrays(in, plan) : std::vector<int64_t>(), kSlots + 1,
                   in.device);
}

// Bytes that a tier has to give, after the margin.
int64_t spare(const PlanSizes& sizes, TierId tier_id, int64_t Tier::*limit = &Tier::usable) {
  const auto tier = std::ranges::find(sizes.tiers, tier_id, &Tier::tier_id);
  return tier == sizes.tiers.end() ? 0 : std::max<int64_t>((*tier).*limit - tier->bytes - kMargin, 0);
}

SizedPlan stage_more(const PlanInput& in, SizedPlan plan) {
  PoolPlan& pool = plan.placement.pool(Pool::kOptimizer);
  if (pool.slots == 0) return plan;
  const auto wanted = static_cast<int64_t>(kStagedShare * static_cast<double>(pool.off_device_bytes()));
  auto room = static_cast<int64_t>(kStagingOfSpare * static_cast<double>(spare(plan, TierId::kHost)));
  if (in.device == DeviceType::kCuda && (!plan.placement.update_on_host || plan.placement.shares_updates()))
    room = std::min(
        room, static_cast<int64_t>(kStagingOfSpare * static_cast<double>(spare(plan, TierId::kDevice))));
  pool.slots += std::min(wanted, room) / pool.slot_bytes;
  limit_slots(plan.placement, Pool::kOptimizer);
  return sized(in, std::move(plan));
}

// With the bytes that each array takes of a rank's part of that tier: of frozen ones the ranks of a machine
// may have one copy.
PoolPlan as_kept(const PlacementPlan& placement, Pool which, TierId tier) {
  PoolPlan out = placement.pool(which);
  for (size_t a = 0; a < out.bytes.size(); ++a)
    out.bytes[a] = ceil_div(out.bytes[a], placement.sharers(which, a, tier));
  return out;
}

// The earliest arrays of a class stay on the device, as many as fit beside the slots that the others need:
// shorter ones where only segments of a head are left.
SizedPlan keep_on_device(const PlanInput& in, SizedPlan plan, Pool which,
                         int64_t Tier::*limit = &Tier::usable) {
  PoolPlan& pool = plan.placement.pool(which);
  if (pool.bytes.empty()) return plan;
  const bool slots_on_device =
      which != Pool::kOptimizer || !plan.placement.update_on_host || plan.placement.shares_updates();
  const int64_t room =
      spare(plan, nearest_tier(in.device), limit) + (slots_on_device ? pool.slots * pool.slot_bytes : 0);
  // Arrays that do not stay, and what a slot of theirs needs.
  int64_t others = 0, longest = plan.placement.slots_of_any_rank(which) ? pool.slot_bytes : 0;
  const PoolPlan on_device = as_kept(plan.placement, which, nearest_tier(in.device));
  BytesOfPlaces kept(on_device);   // of what stays
  size_t end = pool.bytes.size();  // arrays before it stay
  const auto slots = [&] { return slots_on_device ? std::min(pool.slots, others) * longest : 0; };
  for (; end > 0 && kept.most() + slots() > room; --end) {
    if (pool.off_device[end - 1] == 0) continue;
    kept.remove(on_device, end - 1, false);
    longest = std::max(longest, round_up(pool.bytes[end - 1], kSlotAlignment));
    ++others;
  }
  std::fill(pool.off_device.begin(), pool.off_device.begin() + static_cast<std::ptrdiff_t>(end), 0);
  limit_slots(plan.placement, which);
  return sized(in, std::move(plan));
}

// Of what is off the device, the earliest arrays live in tiers that are nearer than the pool's farthest, as
// many as fit.
SizedPlan keep_nearer(const PlanInput& in, SizedPlan plan, Pool which) {
  size_t a = 0;
  for (size_t t = tier_index(nearest_tier(in.device)) + 1; t < tier_index(plan.placement.pool(which).tier_id);
       ++t) {
    PoolPlan& pool = plan.placement.pool(which);
    if (pool.slots == 0) return plan;
    const int64_t room = spare(plan, static_cast<TierId>(t));
    const PoolPlan there = as_kept(plan.placement, which, static_cast<TierId>(t));
    BytesOfPlaces near;
    for (; a < pool.bytes.size(); ++a) {
      if (pool.off_device[a] != 0) near.add(there, a, true);
      if (near.most() > room) break;
    }
    pool.kept[t] = static_cast<int64_t>(a);
    limit_slots(plan.placement, which);
    plan = sized(in, std::move(plan));
  }
  return plan;
}

// What shards take of a tier is little beside what else is there: the device may have room for all of them
// where the tier has not.
SizedPlan keep_shards_on_device(const PlanInput& in, SizedPlan plan) {
  const OffloadConfig offload = in.offload();
  if (offload.weights == OffloadTier::kAuto)
    plan = keep_on_device(in, std::move(plan), Pool::kWeightShards, &Tier::allowed);
  if (offload.gradients == OffloadTier::kAuto)
    plan = keep_on_device(in, std::move(plan), Pool::kGradientShards, &Tier::allowed);
  return plan;
}

SizedPlan keep_what_fits(const PlanInput& in, SizedPlan plan) {
  const OffloadConfig offload = in.offload();
  const std::pair<OffloadTier, Pool> classes[] = {
      {offload.weights, tier_pool(plan.placement, Pool::kWeights)},
      {offload.gradients, tier_pool(plan.placement, Pool::kGradients)},
      {offload.optimizer, Pool::kOptimizer}};
  for (const auto& [choice, pool] : classes)
    if (choice == OffloadTier::kAuto) plan = keep_on_device(in, std::move(plan), pool);
  if (offload.weights == OffloadTier::kAuto &&
      plan.placement.embedding_in_host <= spare(plan, TierId::kDevice)) {
    plan.placement.embedding_in_host = 0;
    plan = sized(in, std::move(plan));
  }
  for (const auto& [choice, pool] : classes)
    if (choice == OffloadTier::kAuto) plan = keep_nearer(in, std::move(plan), pool);
  return plan;
}

// The largest group that fits, of those that are possible.
SizedPlan with_group(const PlanInput& in, TierId activations, bool one_group, PlacedPlan plan) {
  for (int64_t& group = plan.placement.group;; group = ceil_div(group, 2)) {
    plan.placement.pool(Pool::kActivations) = activation_pool(in, activations, plan);
    PlanSizes sizes = size_plan(in, plan);
    if (group == 1 || one_group || fits_capacity(sizes)) return {std::move(plan), std::move(sizes)};
  }
}

// `shards`: gradients are in shards, so that all micro-batches pass a block together.
SizedPlan place_with(const PlanInput& in, const PlacedPlan& start, const TierChoice& tier_choice, bool shards,
                     int64_t most_group) {
  const NumericsPlan& n = start.numerics;
  PlacedPlan plan = start;
  PlacementPlan& p = plan.placement;
  p.device = in.device;  // first: the dry run asks
  const auto set = [&](StateClass state, TierId tier_id) { p.tier_id[static_cast<size_t>(state)] = tier_id; };
  set(StateClass::kWeights, tier_choice.weights);
  set(StateClass::kFrozenWeights, tier_choice.weights);
  set(StateClass::kGradients, tier_choice.gradients);
  // What has no bytes is on the device.
  const TierId optimizer = state_bytes(in.layout, n.state()) == 0 ? TierId::kDevice : tier_choice.optimizer;
  set(StateClass::kOptimizer, optimizer);
  set(StateClass::kActivations, tier_choice.activations);
  // Weights and gradients off the device cross once per group: the largest group is the cheapest, if its
  // inputs fit.
  const bool off_device =
      is_off_device(tier_choice.weights, in.device) || is_off_device(tier_choice.gradients, in.device);
  const bool one_group = tier_choice.in_backward || shards;
  if (one_group) {
    p.group = n.micro_batches;
  } else if (off_device && plan.recompute().whole() && in.trains()) {
    p.group = std::min({n.micro_batches, most_group, kEnoughInGroup});
  }
  if (tier_choice.in_backward) p.gradients_in_slot.assign(in.layout.blocks.size(), 1);
  p.defer_tied_gradient = tier_choice.defer_tied_gradient;
  // A tied embedding's gradient is begun by the head, unless it is made last, and complete at the end alone.
  if (tier_choice.in_backward && in.spec.tied && !p.defer_tied_gradient) p.gradients_in_slot.front() = 0;
  p.blocks = std::ssize(in.layout.blocks);
  p.inputs = {in.first_trained()};
  p.frozen_arrays = frozen_arrays(in, n, tier_choice.weights);
  p.frozen_sharers = frozen_sharers(in);
  p.embedding_in_host = embedding_in_host(in, n, tier_choice.weights);
  UnitPools weights = weight_pools(in, n, tier_choice.weights),
            gradients = gradient_pools(in, n, tier_choice.gradients, shards);
  p.pool(Pool::kWeights) = std::move(weights.whole), p.pool(Pool::kWeightShards) = std::move(weights.shards);
  p.pool(Pool::kGradients) = std::move(gradients.whole);
  p.pool(Pool::kGradientShards) = std::move(gradients.shards);
  place_optimizer(in, n, optimizer, p);
  return with_group(in, tier_choice.activations, one_group, std::move(plan));
}

}  // namespace

SizedPlan place(const PlanInput& in, const PlacedPlan& start, const TierChoice& tier_choice,
                int64_t most_group) {
  const bool off_device = is_off_device(tier_choice.gradients, in.device);
  const bool shards = !tier_choice.in_backward && shards_gradients(in, start.numerics, start.recompute()) &&
                      (!off_device || start.numerics.micro_batches <= most_group);
  SizedPlan plan = place_with(in, start, tier_choice, shards, most_group);
  if (fits_capacity(plan) || !plan.step.moves_shards()) return plan;
  SizedPlan other = keep_shards_on_device(in, plan);
  // Whole gradients on their tier allow smaller groups, whose block inputs may fit.
  if (!fits_capacity(other) && shards && off_device)
    other = place_with(in, start, tier_choice, false, most_group);
  if (fits_capacity(other)) return other;
  return plan;
}

bool has_room_for_one(const PlanInput& in, const NumericsPlan& numerics, const TierChoice& tier_choice,
                      int64_t sequences) {
  NumericsPlan one = numerics;
  one.micro_batch = sequences;
  one.micro_batches = 1;  // what grows with their number is least: lists, groups, the order of tokens
  return fits_capacity(place(in, {one, {}, {}}, tier_choice));
}

SizedPlan use_spare_memory(const PlanInput& in, const SizedPlan& plan) {
  SizedPlan staged = keep_what_fits(in, stage_more(in, plan));
  if (!staged.fits) return keep_what_fits(in, plan);
  return staged;
}

namespace {

// How each `auto` was resolved; nothing if all state is on the device.
std::vector<Choice> explain_tiers(const PlanInput& in, const SizedPlan& plan) {
  std::vector<Choice> out;
  const OffloadConfig offload = in.offload();
  const PlacementPlan& p = plan.placement;
  if (in.adapter != nullptr && is_off_device(asked_tier(offload.gradients, in.device), in.device)) {
    out.push_back({"offload.gradients", "none",
                   "an adapter's gradients stay on the device, and what is frozen has none"});
  }
  if (in.config.train.update == UpdateTime::kAuto && p.in_backward()) {
    out.push_back(
        {"train.update", "in_backward",
         std::string("gradients of all blocks do not fit") +
             (plan.step.two_pass_clip() && in.offload().paths.empty() ? "" : " in the nearest tier")});
  }
  if (p.defer_tied_gradient)
    out.push_back({"gradient of the tied table", "made last",
                   "it does not fit beside activations; logits are computed once more for it"});
  if (!plan.step.uses_slots() && !p.update_on_host) return out;
  const auto explain = [&](const char* key, OffloadTier choice, Pool which) {
    const PoolPlan& pool = p.pool(tier_pool(p, which));
    if (choice != OffloadTier::kAuto || pool.bytes.empty()) return;
    const auto count = std::count(pool.off_device.begin(), pool.off_device.end(), 1);
    const auto all = std::count_if(pool.bytes.begin(), pool.bytes.end(), [](int64_t b) { return b > 0; });
    if (count == 0) return out.push_back({key, "none", "all of it fits on the device"});
    std::string nearer;
    for (size_t t = 0; t < tier_index(pool.tier_id); ++t) {
      if (const int64_t there = pool.off_device_bytes(static_cast<TierId>(t)); there > 0)
        nearer += ", " + format_bytes(there) + " of them fit in " + kTiers[t].memory;
    }
    out.push_back(
        {key, tier_row(pool.tier_id).name,
         fmt::format(
             "{} of {} arrays do not fit on the device{}{}", count, all, nearer,
             pool.slots > 0 ? fmt::format("; {} slots, fetched {} ahead", pool.slots, pool.slots - 1) : "")});
  };
  explain("offload.optimizer", offload.optimizer, Pool::kOptimizer);
  if (!p.in_backward()) explain("offload.gradients", offload.gradients, Pool::kGradients);
  explain("offload.weights", offload.weights, Pool::kWeights);
  explain("offload.activations", offload.activations, Pool::kActivations);
  if (!in.config.io.tile && p.tile_granules > 0)
    out.push_back({"io.tile", format_bytes(p.pool(Pool::kOptimizer).slot_bytes),
                   "long enough for a disk's rate, short beside the state"});
  if (p.group > 1)
    out.push_back(
        {"group", std::to_string(p.group), "what passes through slots does so once per pass and group"});
  if (!p.on_disk()) return out;
  if (!in.config.io.block)
    out.push_back({"io.block", format_bytes(p.io_block), "longer requests are no faster"});
  if (!in.config.io.depth)
    out.push_back({"io.depth", std::to_string(p.io_depth), "keeps reads and writes busy at once"});
  return out;
}

// What no candidate changes.
PlacedPlan unplaced(const PlanInput& in, const NumericsPlan& numerics, std::optional<RecomputeChoice> level) {
  PlacedPlan out{numerics, {}, {}};
  PlacementPlan& p = out.placement;
  p.recompute = level;
  p.optimizer_threads = static_cast<int>(in.config.optimizer.threads.value_or(numerics.threads));
  if (!in.config.optimizer.threads && in.trains())
    out.choices.push_back({"optimizer.threads", std::to_string(p.optimizer_threads), "as run.threads"});
  const IoConfig& io = in.config.io;
  p.engine = io.engine;
  if (io.block) p.io_block = io.block->bytes;
  if (io.depth) p.io_depth = static_cast<int>(*io.depth);
  p.io_timeout = io.timeout;
  p.verify = in.config.offload.verify;
  return out;
}

int64_t missing_memory(const PlanSizes& sizes) {
  int64_t sum = 0;
  for (const Tier& tier : sizes.tiers)
    sum +=
        tier_row(tier.tier_id).medium == Medium::kDisk ? 0 : std::max<int64_t>(tier.bytes - tier.usable, 0);
  return sum;
}

// Nothing fits: of `plan` and of the farthest tiers with updates after backward and inside it those that lack
// least.
SizedPlan place_nearest_miss(const PlanInput& in, const PlacedPlan& start,
                             const std::vector<TierChoice>& candidates, SizedPlan plan) {
  for (const bool in_backward : {false, true}) {
    const auto farthest =
        std::find_if(candidates.rbegin(), candidates.rend(),
                     [&](const TierChoice& tier_choice) { return tier_choice.in_backward == in_backward; });
    if (farthest == candidates.rend()) continue;
    SizedPlan other = place(in, start, *farthest);
    const int64_t more = missing_memory(other) - missing_memory(plan);
    if (more < 0 || (more == 0 && !in_backward)) plan = std::move(other);
  }
  return plan;
}

// What fits in memory with whole classes off the device: now as much of them as fits stays there, and the
// rest is for the disk. Where that is too small, smaller groups leave fewer block inputs on it.
SizedPlan spend_and_fit_disk(const PlanInput& in, const PlacedPlan& start, const TierChoice& tier_choice,
                             SizedPlan plan) {
  for (;;) {
    SizedPlan spent = choose_update_site(in, start, tier_choice, plan);
    const int64_t group = plan.placement.group;
    if (spent.fits || group == 1) return spent;
    plan = place(in, start, tier_choice, ceil_div(group, 2));
    if (plan.placement.group >= group) return spent;  // all micro-batches have to pass a block together
  }
}

}  // namespace

SizedPlan choose_placement(const PlanInput& in, const NumericsPlan& numerics,
                           std::optional<RecomputeChoice> level) {
  std::vector<TierChoice> candidates = tier_candidates(in);
  if (numerics.micro_batches > kMostInGroup)
    std::erase_if(candidates, [](const TierChoice& tier_choice) { return tier_choice.in_backward; });
  if (candidates.empty()) refuse_large_group(numerics.micro_batches);
  const PlacedPlan start = unplaced(in, numerics, level);
  SizedPlan plan;
  size_t chosen = 0;
  for (; chosen < candidates.size(); ++chosen) {
    plan = place(in, start, candidates[chosen]);
    if (fits_capacity(plan)) break;
  }
  chosen = std::min(chosen, candidates.size() - 1);
  for (; !fits_memory(plan) && chosen + 1 < candidates.size(); ++chosen)
    plan = place(in, start, candidates[chosen + 1]);
  plan = fits_memory(plan) ? spend_and_fit_disk(in, start, candidates[chosen], std::move(plan))
                           : place_nearest_miss(in, start, candidates, std::move(plan));
  // What is left now may hold code, which is made again otherwise.
  PlacedPlan more = plan;
  more.placement.every_gemm_shape = true;
  if (SizedPlan larger = sized(in, std::move(more)); larger.fits) plan = std::move(larger);
  const std::vector<Choice> tiers = explain_tiers(in, plan);
  plan.choices.insert(plan.choices.end(), tiers.begin(), tiers.end());
  return plan;
}

}  // namespace lm
