#include "plan/placement.h"

#include <fmt/format.h>
#include <algorithm>
#include <cstdio>

#include "base/arena.h"
#include "base/bytes.h"
#include "plan/activation_arrays.h"
#include "plan/estimate.h"
#include "plan/limits.h"
#include "plan/tile_cutter.h"
#include "plan/unit_pools.h"
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

int64_t size_of(DType type) {
  return static_cast<int64_t>(dtype_size(type));
}

// No more slots than arrays that pass through them, and no longer ones than these need.
void limit_slots(PlacementPlan& placement, Pool which) {
  const std::vector<char> through_slots = placement.through_slots(which);
  PoolPlan& pool = placement.pool(which);
  pool.slots = std::min<int64_t>(pool.slots, std::count(through_slots.begin(), through_slots.end(), 1));
  if (pool.slots == 0) return;
  pool.slot_bytes = 0;
  for (size_t a = 0; a < through_slots.size(); ++a) {
    if (through_slots[a] != 0)
      pool.slot_bytes = std::max(pool.slot_bytes, round_up(pool.bytes[a], kSlotAlignment));
  }
}

void place_optimizer(const PlanInput& in, TierId tier_id, Plan& plan) {
  PlacementPlan& placement = plan.placement;
  placement.ranks = plan.numerics.ranks;
  const Sharding sharding = sharding_of(in);
  placement.sharded =
      sharding.group > 1 && in.config.zero.stage >= 1 && !rule_text(plan.numerics.rule).whole_tensors;
  placement.copies = placement.sharded ? sharding.copies() : 1;
  const int64_t state = state_bytes(in.layout, plan.numerics.state());
  const int64_t granule_bytes = placement.granule_bytes =
      ceil_div(state, std::max<int64_t>(in.layout.flat_elements / kGranule, 1));
  const bool off_device = is_off_device(tier_id, in.device);
  const int64_t least = ceil_div(state, kMostTiles);
  const int64_t usual = std::max(std::clamp(state / kTilesPerStep, kLeastTile, kMostTile), least);
  const int64_t tile = in.config.io.tile ? std::max(in.config.io.tile->bytes, granule_bytes) : usual;
  if (off_device) refuse_short_tiles(tile, least);
  for (auto* list :
       {&placement.first_tile, &placement.first_granule, &placement.granules, &placement.segment_tiles})
    list->clear();
  const std::vector<Unit> units = in.layout.units(placement.head_segments() > 0);
  int64_t longest = 1;  // no tile crosses a unit's end
  for (const Unit& unit : units) longest = std::max(longest, unit.elements / kGranule);
  const int64_t each = std::clamp<int64_t>(tile / std::max<int64_t>(granule_bytes, 1), 1, longest);
  TileCutter tiles(placement, in.layout, plan.numerics, off_device ? each : 0);
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
  placement.tile_granules = 0;
  for (const int64_t granules : placement.granules)
    if (off_device) placement.tile_granules = std::max(placement.tile_granules, granules);
  placement.pool(Pool::kOptimizer) = make_pool(tier_id, tiles.take(), kSlots + 1, in.device);
  if (!placement.update_on_host) return;
  limit_slots(placement, Pool::kOptimizer);
  placement.update_sends = size_of(plan.numerics.trained_dtype());
  placement.update_brings = size_of(plan.numerics.gradient_dtype) + placement.update_sends;
  placement.update_staging = kUpdateSlots * placement.tile_granules * kGranule * placement.update_brings;
}

void place_activations(const PlanInput& in, TierId tier_id, Plan& plan) {
  const bool off_device =
      in.trains() && is_off_device(tier_id, in.device) && plan.placement.group <= kMostInGroup;
  plan.placement.inputs = {in.first_trained()};
  // In and out of a block are held at once.
  plan.placement.pool(Pool::kActivations) = make_pool(
      tier_id, off_device ? activation_arrays(in, plan) : std::vector<int64_t>(), kSlots + 1, in.device);
}

Tier* tier_of(Plan& plan, TierId tier_id) {
  for (Tier& tier : plan.tiers) {
    if (tier.tier_id == tier_id) return &tier;
  }
  return nullptr;
}

// Bytes that a tier has to give, after the margin.
int64_t spare(Plan& plan, TierId tier_id, int64_t Tier::*limit = &Tier::usable) {
  const Tier* tier = tier_of(plan, tier_id);
  return tier == nullptr ? 0 : std::max<int64_t>(tier->*limit - tier->bytes - kMargin, 0);
}

void stage_more(const PlanInput& in, Plan& plan) {
  PoolPlan& pool = plan.placement.pool(Pool::kOptimizer);
  if (pool.slots == 0) return;
  const auto wanted = static_cast<int64_t>(kStagedShare * static_cast<double>(pool.off_device_bytes()));
  auto room = static_cast<int64_t>(kStagingOfSpare * static_cast<double>(spare(plan, TierId::kHost)));
  if (in.device == DeviceType::kCuda && !plan.placement.update_on_host)
    room = std::min(
        room, static_cast<int64_t>(kStagingOfSpare * static_cast<double>(spare(plan, TierId::kDevice))));
  pool.slots += std::min(wanted, room) / pool.slot_bytes;
  limit_slots(plan.placement, Pool::kOptimizer);
  size_plan(in, plan);
}

// The earliest arrays of a class stay on the device, as many as fit beside the slots that the others need:
// shorter ones where only segments of a head are left.
void keep_on_device(const PlanInput& in, Plan& plan, Pool which, int64_t Tier::*limit = &Tier::usable) {
  PoolPlan& pool = plan.placement.pool(which);
  if (pool.bytes.empty()) return;
  const bool slots_on_device = which != Pool::kOptimizer || !plan.placement.update_on_host;
  const int64_t room =
      spare(plan, nearest_tier(in.device), limit) + (slots_on_device ? pool.slots * pool.slot_bytes : 0);
  int64_t kept = 0, others = 0, longest = 0;  // bytes that stay; arrays that do not, and the longest of them
  for (size_t a = 0; a < pool.bytes.size(); ++a) kept += pool.off_device[a] != 0 ? pool.bytes[a] : 0;
  size_t end = pool.bytes.size();  // arrays before it stay
  const auto slots = [&] { return slots_on_device ? std::min(pool.slots, others) * longest : 0; };
  for (; end > 0 && kept + slots() > room; --end) {
    if (pool.off_device[end - 1] == 0) continue;
    kept -= pool.bytes[end - 1];
    longest = std::max(longest, round_up(pool.bytes[end - 1], kSlotAlignment));
    ++others;
  }
  std::fill(pool.off_device.begin(), pool.off_device.begin() + static_cast<std::ptrdiff_t>(end), 0);
  limit_slots(plan.placement, which);
  size_plan(in, plan);
}

// Of what is off the device, the earliest arrays live in tiers that are nearer than the pool's farthest, as
// many as fit.
void keep_nearer(const PlanInput& in, Plan& plan, Pool which) {
  PoolPlan& pool = plan.placement.pool(which);
  size_t a = 0;
  for (size_t t = tier_index(nearest_tier(in.device)) + 1; t < tier_index(pool.tier_id); ++t) {
    if (pool.slots == 0) return;
    int64_t room = spare(plan, static_cast<TierId>(t));
    for (; a < pool.bytes.size(); ++a) {
      const int64_t bytes = pool.off_device[a] != 0 ? round_up(pool.bytes[a], kSlotAlignment) : 0;
      if (bytes > room) break;
      room -= bytes;
    }
    pool.kept[t] = static_cast<int64_t>(a);
    limit_slots(plan.placement, which);
    size_plan(in, plan);
  }
}

// What shards take of a tier is little beside what else is there: the device may have room for all of them
// where the tier has not.
void keep_shards_on_device(const PlanInput& in, Plan& plan) {
  const OffloadConfig offload = in.offload();
  if (offload.weights == OffloadTier::kAuto) keep_on_device(in, plan, Pool::kWeightShards, &Tier::allowed);
  if (offload.gradients == OffloadTier::kAuto)
    keep_on_device(in, plan, Pool::kGradientShards, &Tier::allowed);
}

void keep_what_fits(const PlanInput& in, Plan& plan) {
  const OffloadConfig offload = in.offload();
  const Pool weights = tier_pool(plan.placement, Pool::kWeights),
             gradients = tier_pool(plan.placement, Pool::kGradients);
  if (offload.weights == OffloadTier::kAuto) keep_on_device(in, plan, weights);
  if (offload.gradients == OffloadTier::kAuto) keep_on_device(in, plan, gradients);
  if (offload.optimizer == OffloadTier::kAuto) keep_on_device(in, plan, Pool::kOptimizer);
  if (offload.weights == OffloadTier::kAuto &&
      plan.placement.embedding_in_host <= spare(plan, TierId::kDevice)) {
    plan.placement.embedding_in_host = 0;
    size_plan(in, plan);
  }
  if (offload.weights == OffloadTier::kAuto) keep_nearer(in, plan, weights);
  if (offload.gradients == OffloadTier::kAuto) keep_nearer(in, plan, gradients);
  if (offload.optimizer == OffloadTier::kAuto) keep_nearer(in, plan, Pool::kOptimizer);
}

// `shards`: gradients are in shards, so that all micro-batches pass a block together.
void place_with(const PlanInput& in, const TierChoice& tier_choice, bool shards, int64_t most_group,
                Plan& plan) {
  PlacementPlan& p = plan.placement;
  p.device = in.device;  // first: the dry run asks
  const auto set = [&](StateClass state, TierId tier_id) { p.tier_id[static_cast<size_t>(state)] = tier_id; };
  set(StateClass::kWeights, tier_choice.weights);
  set(StateClass::kFrozenWeights, tier_choice.weights);
  set(StateClass::kGradients, tier_choice.gradients);
  // What has no bytes is on the device.
  const TierId optimizer =
      state_bytes(in.layout, plan.numerics.state()) == 0 ? TierId::kDevice : tier_choice.optimizer;
  set(StateClass::kOptimizer, optimizer);
  set(StateClass::kActivations, tier_choice.activations);
  // Weights and gradients off the device cross once per group: the largest group is the cheapest, if its
  // inputs fit.
  const bool off_device =
      is_off_device(tier_choice.weights, in.device) || is_off_device(tier_choice.gradients, in.device);
  p.group = off_device && plan.recompute().whole() && in.trains()
                ? std::min({plan.numerics.micro_batches, most_group, kEnoughInGroup})
                : 1;
  p.gradients_in_slot.clear();
  if (tier_choice.in_backward) p.gradients_in_slot.assign(in.layout.blocks.size(), 1);
  p.defer_tied_gradient = tier_choice.defer_tied_gradient;
  // A tied embedding's gradient is begun by the head, unless it is made last, and complete at the end alone.
  if (tier_choice.in_backward && in.spec.tied && !p.defer_tied_gradient) p.gradients_in_slot.front() = 0;
  const bool one_group = tier_choice.in_backward || shards;
  if (one_group) p.group = plan.numerics.micro_batches;
  p.blocks = std::ssize(in.layout.blocks);
  place_weights(in, tier_choice.weights, plan);
  place_gradients(in, tier_choice.gradients, shards, plan);
  place_optimizer(in, optimizer, plan);
  for (;; p.group = ceil_div(p.group, 2)) {
    place_activations(in, tier_choice.activations, plan);
    size_plan(in, plan);
    if (p.group == 1 || one_group || fits_capacity(plan)) break;
  }
}

}  // namespace

void place(const PlanInput& in, const TierChoice& tier_choice, Plan& plan, int64_t most_group) {
  const bool off_device = is_off_device(tier_choice.gradients, in.device);
  const bool shards = !tier_choice.in_backward && shards_gradients(in, plan) &&
                      (!off_device || plan.numerics.micro_batches <= most_group);
  place_with(in, tier_choice, shards, most_group, plan);
  if (fits_capacity(plan) || !plan.step.moves_shards()) return;
  Plan other = plan;
  keep_shards_on_device(in, other);
  if (!fits_capacity(other) && shards && off_device) {
    // Whole gradients on their tier allow smaller groups, whose block inputs may fit.
    other = plan;
    place_with(in, tier_choice, false, most_group, other);
  }
  if (fits_capacity(other)) plan = std::move(other);
}

void use_spare_memory(const PlanInput& in, Plan& plan) {
  Plan staged = plan;
  stage_more(in, staged);
  keep_what_fits(in, staged);
  if (!staged.fits) return keep_what_fits(in, plan);
  plan = std::move(staged);
}

void explain_tiers(const PlanInput& in, Plan& plan) {
  const OffloadConfig offload = in.offload();
  const PlacementPlan& p = plan.placement;
  if (in.adapter != nullptr && is_off_device(asked_tier(offload.gradients, in.device), in.device)) {
    plan.choices.push_back({"offload.gradients", "none",
                            "an adapter's gradients stay on the device, and what is frozen has none"});
  }
  if (in.config.train.update == UpdateTime::kAuto && p.in_backward()) {
    plan.choices.push_back(
        {"train.update", "in_backward",
         std::string("gradients of all blocks do not fit") +
             (plan.step.two_pass_clip() && in.offload().paths.empty() ? "" : " in the nearest tier")});
  }
  if (p.defer_tied_gradient)
    plan.choices.push_back({"gradient of the tied table", "made last",
                            "it does not fit beside activations; logits are computed once more for it"});
  if (!plan.step.uses_slots() && !p.update_on_host) return;
  const auto explain = [&](const char* key, OffloadTier choice, Pool which) {
    const PoolPlan& pool = p.pool(tier_pool(p, which));
    if (choice != OffloadTier::kAuto || pool.bytes.empty()) return;
    const auto count = std::count(pool.off_device.begin(), pool.off_device.end(), 1);
    const auto all = std::count_if(pool.bytes.begin(), pool.bytes.end(), [](int64_t b) { return b > 0; });
    if (count == 0) return plan.choices.push_back({key, "none", "all of it fits on the device"});
    std::string nearer;
    for (size_t t = 0; t < tier_index(pool.tier_id); ++t) {
      if (const int64_t there = pool.off_device_bytes(static_cast<TierId>(t)); there > 0)
        nearer += ", " + format_bytes(there) + " of them fit in " + kTiers[t].memory;
    }
    plan.choices.push_back(
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
    plan.choices.push_back({"io.tile", format_bytes(p.pool(Pool::kOptimizer).slot_bytes),
                            "long enough for a disk's rate, short beside the state"});
  if (p.group > 1)
    plan.choices.push_back(
        {"group", std::to_string(p.group), "what passes through slots does so once per pass and group"});
  if (!p.on_disk()) return;
  if (!in.config.io.block)
    plan.choices.push_back({"io.block", format_bytes(p.io_block), "longer requests are no faster"});
  if (!in.config.io.depth)
    plan.choices.push_back({"io.depth", std::to_string(p.io_depth), "keeps reads and writes busy at once"});
}

namespace {

void choose_io(const PlanInput& in, Plan& plan) {
  const IoConfig& io = in.config.io;
  plan.placement.engine = io.engine;
  if (io.block) plan.placement.io_block = io.block->bytes;
  if (io.depth) plan.placement.io_depth = static_cast<int>(*io.depth);
  plan.placement.io_timeout = io.timeout;
  plan.placement.verify = in.config.offload.verify;
}

// With a GPU, state off it is updated by the CPU where it lies or passes through the GPU: whichever fits, and
// makes the shorter step. Spends spare memory either way.
void choose_update_site(const PlanInput& in, const TierChoice& tier_choice, int64_t most_group, Plan& plan) {
  const bool choice = in.device == DeviceType::kCuda && tier_choice.optimizer != TierId::kDevice;
  Plan on_host = plan;
  use_spare_memory(in, plan);
  if (!choice) return;
  if (is_muon(plan.numerics.rule))
    return plan.choices.push_back(
        {"update of state off the GPU", "gpu", "products have other bits on the CPU"});
  on_host.placement.update_on_host = true;
  place(in, tier_choice, on_host, most_group);
  if (!fits_memory(on_host)) return;
  use_spare_memory(in, on_host);
  if (!on_host.fits) return;
  if (!plan.fits && in.update_on_host.value_or(true)) {
    plan = on_host;
    return plan.choices.push_back({"update of state off the GPU", "cpu", "takes less room on the disk"});
  }
  Plan gpu = plan, cpu = on_host;
  estimate_plan(in, gpu);
  estimate_plan(in, cpu);
  const bool host = in.update_on_host.value_or(cpu.step_seconds < gpu.step_seconds);
  if (host) plan = on_host;
  char reason[96];
  std::snprintf(reason, sizeof reason, "%.3g s per step, %.3g s if the %s did it",
                host ? cpu.step_seconds : gpu.step_seconds, host ? gpu.step_seconds : cpu.step_seconds,
                host ? "GPU" : "CPU");
  plan.choices.push_back({"update of state off the GPU", host ? "cpu" : "gpu", reason});
}

int64_t missing_memory(const Plan& plan) {
  int64_t sum = 0;
  for (const Tier& tier : plan.tiers)
    sum +=
        tier_row(tier.tier_id).medium == Medium::kDisk ? 0 : std::max<int64_t>(tier.bytes - tier.usable, 0);
  return sum;
}

// Nothing fits: of the farthest tiers with updates after backward and inside it those that lack less.
void place_nearest_miss(const PlanInput& in, const std::vector<TierChoice>& candidates, Plan& plan) {
  for (const bool in_backward : {false, true}) {
    const auto farthest =
        std::find_if(candidates.rbegin(), candidates.rend(),
                     [&](const TierChoice& tier_choice) { return tier_choice.in_backward == in_backward; });
    if (farthest == candidates.rend()) continue;
    Plan other = plan;
    place(in, *farthest, other);
    const int64_t more = missing_memory(other) - missing_memory(plan);
    if (more < 0 || (more == 0 && !in_backward)) plan = std::move(other);
  }
}

// What fits in memory with whole classes off the device: now as much of them as fits stays there, and the
// rest is for the disk. Where that is too small, smaller groups leave fewer block inputs on it.
void spend_and_fit_disk(const PlanInput& in, const TierChoice& tier_choice, Plan& plan) {
  for (;;) {
    Plan spent = plan;
    choose_update_site(in, tier_choice, plan.placement.group, spent);
    const int64_t group = plan.placement.group;
    if (spent.fits || group == 1) {
      plan = std::move(spent);
      return;
    }
    place(in, tier_choice, plan, ceil_div(group, 2));
    if (plan.placement.group < group) continue;
    plan = std::move(spent);  // all micro-batches have to pass a block together
    return;
  }
}

}  // namespace

void choose_placement(const PlanInput& in, Plan& plan) {
  plan.placement.optimizer_threads =
      static_cast<int>(in.config.optimizer.threads.value_or(plan.numerics.threads));
  if (!in.config.optimizer.threads && in.trains())
    plan.choices.push_back(
        {"optimizer.threads", std::to_string(plan.placement.optimizer_threads), "as run.threads"});
  choose_io(in, plan);
  std::vector<TierChoice> candidates = tier_candidates(in);
  if (plan.numerics.micro_batches > kMostInGroup)
    std::erase_if(candidates, [](const TierChoice& tier_choice) { return tier_choice.in_backward; });
  if (candidates.empty()) refuse_large_group(plan.numerics.micro_batches);
  size_t chosen = 0;
  for (; chosen < candidates.size(); ++chosen) {
    place(in, candidates[chosen], plan);
    if (fits_capacity(plan)) break;
  }
  chosen = std::min(chosen, candidates.size() - 1);
  for (; !fits_memory(plan) && chosen + 1 < candidates.size(); ++chosen)
    place(in, candidates[chosen + 1], plan);
  if (fits_memory(plan)) {
    spend_and_fit_disk(in, candidates[chosen], plan);
  } else {
    place_nearest_miss(in, candidates, plan);
  }
  // What is left now may hold code, which is made again otherwise.
  Plan more = plan;
  more.placement.every_gemm_shape = true;
  size_plan(in, more);
  if (more.fits) plan = std::move(more);
  explain_tiers(in, plan);
}

}  // namespace lm
