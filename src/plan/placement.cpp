#include "plan/placement.h"

#include <algorithm>
#include <cstdio>

#include "base/bytes.h"
#include "plan/forecast.h"

namespace lm {
namespace {

// Three slots: one in use, one on its way in, one on its way out.
constexpr int64_t kSlots = 3;
constexpr int64_t kUpdateSlots = 3;  // of an update's gradients and weights (optim/host_update.h)
// A tile should be long enough for the disk to reach its rate (some MiB) and short beside the state, so that
// the pipeline fills at once.
constexpr int64_t kLeastTile = 4 * kMiB, kMostTile = 32 * kMiB, kTilesPerStep = 64;
// Staging more of the optimizer's state than this does not shorten a step: the rest is read under the
// forward.
constexpr double kStagedShare = 0.4;
constexpr double kStagingOfSpare = 0.5;
// Left free of what is spent on staging and on arrays that stay on the device.
constexpr int64_t kMargin = 64 * kMiB;

int64_t size_of(DType type) {
  return static_cast<int64_t>(dtype_size(type));
}

bool is_off_device(Home home, DeviceType device) {
  return home == Home::kNvme || (home == Home::kHost && device == DeviceType::kCuda);
}

int64_t last_block(const PlanInput& in) {
  return static_cast<int64_t>(in.layout.blocks.size()) - 1;
}

// What can live off the device of weights and gradients: the transformer blocks, and an untied head's matrix
// by segments. The embedding is looked up at its home, without a slot, and a final norm is too small to be
// worth a transfer.
std::vector<Unit> units_for_slots(const PlanInput& in, Home home) {
  std::vector<Unit> units = in.layout.units(is_off_device(home, in.device));
  for (Unit& unit : units) {
    if (unit.role != UnitRole::kBody && !unit.segment()) unit = {};
  }
  return units;
}

PoolPlan make_pool(Home home, std::vector<int64_t> bytes, int64_t slots, DeviceType device) {
  PoolPlan pool;
  pool.home = home;
  pool.bytes = std::move(bytes);
  pool.off_device.assign(pool.bytes.size(), 0);
  if (!is_off_device(home, device)) return pool;
  int64_t count = 0;
  for (size_t a = 0; a < pool.bytes.size(); ++a) {
    if (pool.bytes[a] == 0) continue;
    pool.off_device[a] = 1;
    ++count;
    pool.slot_bytes = std::max(pool.slot_bytes, round_up(pool.bytes[a], kSlotAlignment));
  }
  pool.slots = std::min(slots, count);
  return pool;
}

void place_weights(const PlanInput& in, Home home, Plan& plan) {
  std::vector<int64_t> bytes;
  // Adapters stay on the device; of LoRA's weights the frozen base may leave it.
  for (const Unit& unit : units_for_slots(in, home))
    bytes.push_back(in.adapter != nullptr ? unit.frozen_bytes : unit.elements * size_of(plan.numerics.dtype));
  plan.placement.pool(Pool::kWeights) = make_pool(home, std::move(bytes), kSlots, in.device);
  // A tied embedding is the head's matrix too, which every row is multiplied by: it stays on the device.
  const bool leaves = in.device == DeviceType::kCuda && is_off_device(home, in.device) && !in.spec.tied;
  const BlockLayout& embedding = in.layout.blocks.front();
  plan.placement.embedding_in_host =
      !leaves ? 0 : embedding.frozen_bytes + embedding.flat_elements * size_of(plan.numerics.dtype);
}

void place_gradients(const PlanInput& in, Home home, Plan& plan) {
  std::vector<int64_t> bytes;
  for (const Unit& unit : units_for_slots(in, home))
    bytes.push_back(in.adapter != nullptr ? 0 : unit.elements * size_of(plan.numerics.gradient_dtype));
  plan.placement.pool(Pool::kGradients) = make_pool(home, std::move(bytes), kSlots, in.device);
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

// Cuts optimizer state into tiles.
class TileCutter {
 public:
  // `each`: granules of a tile; 0: a unit is one tile.
  TileCutter(PlacementPlan& placement, int64_t each, int64_t granule_bytes)
      : placement_(placement), each_(each), granule_bytes_(granule_bytes) {}

  void begin_block() { placement_.first_tile.push_back(std::ssize(bytes_)); }
  void begin_unit() { placement_.segment_tiles.push_back(std::ssize(bytes_) - placement_.first_tile.back()); }
  void cut(const Unit& unit) {
    const int64_t begin = unit.first / kGranule, end = begin + unit.elements / kGranule;
    const int64_t each = each_ > 0 ? each_ : end - begin;
    for (int64_t first = begin; first < end; first += each) {
      placement_.first_granule.push_back(first);
      bytes_.push_back(std::min(each, end - first) * granule_bytes_);
    }
  }
  std::vector<int64_t> take() { return std::move(bytes_); }

 private:
  PlacementPlan& placement_;
  int64_t each_, granule_bytes_;
  std::vector<int64_t> bytes_;  // of each tile
};

void place_optimizer(const PlanInput& in, Home home, Plan& plan) {
  PlacementPlan& placement = plan.placement;
  const int64_t granule_bytes = placement.granule_bytes = plan.numerics.state().bytes(kGranule);
  const int64_t state = in.layout.flat_elements / kGranule * granule_bytes;
  const bool off_device = is_off_device(home, in.device);
  int64_t tile = std::clamp(state / kTilesPerStep, kLeastTile, kMostTile);
  if (in.config.io.tile) tile = in.config.io.tile->bytes;
  placement.tile_granules = off_device ? std::max<int64_t>(tile / granule_bytes, 1) : 0;
  placement.first_tile.clear();
  placement.first_granule.clear();
  placement.segment_tiles.clear();
  const std::vector<Unit> units = in.layout.units(placement.head_segments() > 0);
  if (off_device && rule_text(plan.numerics.rule).whole_tensors) {
    for (const Unit& unit : units)
      placement.tile_granules = std::max(placement.tile_granules, unit.elements / kGranule);
  }
  TileCutter tiles(placement, placement.tile_granules, granule_bytes);
  // A tile of a cut head lies in one segment: its update needs no other. Tiles follow the block's array, in
  // which the matrix comes before the norm.
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
  placement.pool(Pool::kOptimizer) = make_pool(home, tiles.take(), kSlots + 1, in.device);
  if (!placement.update_on_host) return;
  limit_slots(placement, Pool::kOptimizer);
  placement.update_sends = size_of(plan.numerics.dtype);
  placement.update_brings = size_of(plan.numerics.gradient_dtype) + placement.update_sends;
  placement.update_staging = kUpdateSlots * placement.tile_granules * kGranule * placement.update_brings;
}

void place_activations(const PlanInput& in, Home home, Plan& plan) {
  const int64_t each = micro_rows(in, plan.numerics) * in.spec.hidden * size_of(plan.numerics.dtype);
  const bool off_device = is_off_device(home, in.device) && plan.numerics.recompute;
  std::vector<int64_t> bytes;
  if (off_device) bytes.assign(static_cast<size_t>(last_block(in) * plan.placement.group), each);
  // In and out of a block are held at once.
  plan.placement.pool(Pool::kActivations) = make_pool(home, std::move(bytes), kSlots + 1, in.device);
}

Tier* tier_of(Plan& plan, Home home) {
  for (Tier& tier : plan.tiers) {
    if (tier.home == home) return &tier;
  }
  return nullptr;
}

// Bytes that a tier has to give, after the margin.
int64_t spare(Plan& plan, Home home) {
  const Tier* tier = tier_of(plan, home);
  return tier == nullptr ? 0 : std::max<int64_t>(tier->usable - tier->bytes - kMargin, 0);
}

void stage_more(const PlanInput& in, Plan& plan) {
  PoolPlan& pool = plan.placement.pool(Pool::kOptimizer);
  if (pool.slots == 0) return;
  const auto wanted = static_cast<int64_t>(kStagedShare * static_cast<double>(pool.off_device_bytes()));
  auto room = static_cast<int64_t>(kStagingOfSpare * static_cast<double>(spare(plan, Home::kHost)));
  if (in.device == DeviceType::kCuda && !plan.placement.update_on_host)
    room = std::min(room,
                    static_cast<int64_t>(kStagingOfSpare * static_cast<double>(spare(plan, Home::kDevice))));
  pool.slots += std::min(wanted, room) / pool.slot_bytes;
  limit_slots(plan.placement, Pool::kOptimizer);
  size_plan(in, plan);
}

// The earliest arrays of a class stay on the device, as many as fit beside the slots that the others need:
// shorter ones where only segments of a head are left.
void keep_on_device(const PlanInput& in, Plan& plan, Pool which) {
  PoolPlan& pool = plan.placement.pool(which);
  const bool slots_on_device = which != Pool::kOptimizer || !plan.placement.update_on_host;
  const int64_t room = spare(plan, asked_home(OffloadHome::kNone, in.device)) +
                       (slots_on_device ? pool.slots * pool.slot_bytes : 0);
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

// With a GPU and a disk: of what is off the device, the earliest arrays live in host memory, as many as fit.
void keep_in_host(const PlanInput& in, Plan& plan, Pool which) {
  PoolPlan& pool = plan.placement.pool(which);
  if (in.device != DeviceType::kCuda || pool.home != Home::kNvme || pool.slots == 0) return;
  int64_t room = spare(plan, Home::kHost);
  for (size_t a = 0; a < pool.bytes.size(); ++a) {
    const int64_t bytes = pool.off_device[a] != 0 ? round_up(pool.bytes[a], kSlotAlignment) : 0;
    if (bytes > room) break;
    room -= bytes;
    pool.kept_in_host = static_cast<int64_t>(a) + 1;
  }
  limit_slots(plan.placement, which);
  size_plan(in, plan);
}

void keep_what_fits(const PlanInput& in, Plan& plan) {
  const OffloadConfig offload = in.offload();
  if (offload.weights == OffloadHome::kAuto) keep_on_device(in, plan, Pool::kWeights);
  if (offload.gradients == OffloadHome::kAuto) keep_on_device(in, plan, Pool::kGradients);
  if (offload.optimizer == OffloadHome::kAuto) keep_on_device(in, plan, Pool::kOptimizer);
  if (offload.weights == OffloadHome::kAuto &&
      plan.placement.embedding_in_host <= spare(plan, Home::kDevice)) {
    plan.placement.embedding_in_host = 0;
    size_plan(in, plan);
  }
  if (offload.weights == OffloadHome::kAuto) keep_in_host(in, plan, Pool::kWeights);
  if (offload.gradients == OffloadHome::kAuto) keep_in_host(in, plan, Pool::kGradients);
  if (offload.optimizer == OffloadHome::kAuto) keep_in_host(in, plan, Pool::kOptimizer);
}

}  // namespace

Home asked_home(OffloadHome choice, DeviceType device) {
  const Home nearest = device == DeviceType::kCuda ? Home::kDevice : Home::kHost;
  switch (choice) {
    case OffloadHome::kHost:
      return Home::kHost;
    case OffloadHome::kNvme:
      return Home::kNvme;
    default:
      return nearest;
  }
}

std::vector<HomeChoice> home_candidates(const PlanInput& in) {
  const OffloadConfig offload = in.offload();
  HomeChoice homes{asked_home(offload.optimizer, in.device), asked_home(offload.gradients, in.device),
                   asked_home(offload.weights, in.device), asked_home(offload.activations, in.device)};
  std::vector<HomeChoice> out = {homes};
  const auto move = [&](OffloadHome choice, Home& home, Home to) {
    if (choice != OffloadHome::kAuto) return;
    home = to;
    out.push_back(homes);
  };
  const bool may_recompute = in.config.train.recompute != Recompute::kNone;
  const auto move_all = [&](Home to) {
    move(offload.optimizer, homes.optimizer, to);
    if (in.adapter == nullptr) move(offload.gradients, homes.gradients, to);
    move(offload.weights, homes.weights, to);
    if (may_recompute) move(offload.activations, homes.activations, to);
  };
  if (in.device == DeviceType::kCuda) move_all(Home::kHost);
  if (!offload.paths.empty()) move_all(Home::kNvme);
  return out;
}

void place(const PlanInput& in, const HomeChoice& homes, Plan& plan, int64_t most_group) {
  PlacementPlan& p = plan.placement;
  p.device = in.device;  // first: the rehearsal asks
  const auto set = [&](StateClass state, Home home) { p.home[static_cast<size_t>(state)] = home; };
  set(StateClass::kWeights, homes.weights);
  set(StateClass::kFrozenWeights, homes.weights);
  set(StateClass::kGradients, homes.gradients);
  set(StateClass::kOptimizer, homes.optimizer);
  set(StateClass::kActivations, homes.activations);
  // Weights and gradients off the device cross once per group: the largest group is the cheapest, if its
  // inputs fit.
  const bool off_device =
      is_off_device(homes.weights, in.device) || is_off_device(homes.gradients, in.device);
  p.group = off_device && plan.numerics.recompute && in.trains()
                ? std::min(plan.numerics.micro_batches, most_group)
                : 1;
  p.frozen_weights = in.adapter != nullptr;
  p.blocks = std::ssize(in.layout.blocks);
  place_weights(in, homes.weights, plan);
  place_gradients(in, homes.gradients, plan);
  place_optimizer(in, homes.optimizer, plan);
  for (;; p.group = ceil_div(p.group, 2)) {
    place_activations(in, homes.activations, plan);
    size_plan(in, plan);
    if (p.group == 1 || fits_capacity(plan)) break;
  }
}

void use_spare_memory(const PlanInput& in, Plan& plan) {
  Plan staged = plan;
  stage_more(in, staged);
  keep_what_fits(in, staged);
  if (!staged.fits) return keep_what_fits(in, plan);
  plan = std::move(staged);
}

void explain_homes(const PlanInput& in, Plan& plan) {
  const OffloadConfig offload = in.offload();
  const PlacementPlan& p = plan.placement;
  if (in.adapter != nullptr && is_off_device(asked_home(offload.gradients, in.device), in.device)) {
    plan.choices.push_back(
        {"offload.gradients", "none",
         "an adapter's gradients stay on the device: they are small, and the base has none"});
  }
  if (!p.transfers().any() && !p.update_on_host) return;
  const auto explain = [&](const char* key, OffloadHome choice, Pool which) {
    const PoolPlan& pool = p.pool(which);
    if (choice != OffloadHome::kAuto || pool.bytes.empty()) return;
    const auto count = std::count(pool.off_device.begin(), pool.off_device.end(), 1);
    const auto all = std::count_if(pool.bytes.begin(), pool.bytes.end(), [](int64_t b) { return b > 0; });
    if (count == 0) return plan.choices.push_back({key, "none", "all of it fits on the device"});
    const int64_t host = pool.home == Home::kNvme ? pool.off_device_bytes(Home::kHost) : 0;
    plan.choices.push_back({key, home_name(pool.home),
                            std::to_string(count) + " of " + std::to_string(all) +
                                " arrays do not fit on the device" +
                                (host > 0 ? ", " + format_bytes(host) + " of them fit in host memory" : "") +
                                (pool.slots > 0 ? "; " + std::to_string(pool.slots) + " slots, fetched " +
                                                      std::to_string(pool.slots - 1) + " ahead"
                                                : "")});
  };
  explain("offload.optimizer", offload.optimizer, Pool::kOptimizer);
  explain("offload.gradients", offload.gradients, Pool::kGradients);
  explain("offload.weights", offload.weights, Pool::kWeights);
  explain("offload.activations", offload.activations, Pool::kActivations);
  if (!in.config.io.tile && p.tile_granules > 0)
    plan.choices.push_back({"io.tile", format_bytes(p.pool(Pool::kOptimizer).slot_bytes),
                            "long enough for a disk's rate, short beside the state"});
  if (p.group > 1)
    plan.choices.push_back({"group", std::to_string(p.group),
                            "what is off the device crosses its link once per pass and group"});
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
void choose_update_site(const PlanInput& in, const HomeChoice& homes, int64_t most_group, Plan& plan) {
  const bool choice = in.device == DeviceType::kCuda && homes.optimizer != Home::kDevice;
  Plan on_host = plan;
  use_spare_memory(in, plan);
  if (!choice) return;
  on_host.placement.update_on_host = true;
  place(in, homes, on_host, most_group);
  if (!fits_memory(on_host)) return;
  use_spare_memory(in, on_host);
  if (!on_host.fits) return;
  if (!plan.fits && in.update_on_host.value_or(true)) {
    plan = on_host;
    return plan.choices.push_back({"update of state off the GPU", "cpu", "takes less room on the disk"});
  }
  Plan gpu = plan, cpu = on_host;
  forecast(in, gpu);
  forecast(in, cpu);
  const bool host = in.update_on_host.value_or(cpu.step_seconds < gpu.step_seconds);
  if (host) plan = on_host;
  char reason[96];
  std::snprintf(reason, sizeof reason, "%.3g s per step, %.3g s if the %s did it",
                host ? cpu.step_seconds : gpu.step_seconds, host ? gpu.step_seconds : cpu.step_seconds,
                host ? "GPU" : "CPU");
  plan.choices.push_back({"update of state off the GPU", host ? "cpu" : "gpu", reason});
}

// What fits in memory with whole classes off the device: now as much of them as fits stays there, and the
// rest is for the disk. Where that is too small, smaller groups leave fewer block inputs on it.
void spend_and_fit_disk(const PlanInput& in, const HomeChoice& homes, Plan& plan) {
  for (;;) {
    Plan spent = plan;
    choose_update_site(in, homes, plan.placement.group, spent);
    if (spent.fits || plan.placement.group == 1) {
      plan = std::move(spent);
      return;
    }
    place(in, homes, plan, ceil_div(plan.placement.group, 2));
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
  const std::vector<HomeChoice> candidates = home_candidates(in);
  size_t chosen = 0;
  for (; chosen < candidates.size(); ++chosen) {
    place(in, candidates[chosen], plan);
    if (fits_capacity(plan)) break;
  }
  chosen = std::min(chosen, candidates.size() - 1);
  for (; !fits_memory(plan) && chosen + 1 < candidates.size(); ++chosen)
    place(in, candidates[chosen + 1], plan);
  if (fits_memory(plan)) spend_and_fit_disk(in, candidates[chosen], plan);
  // What is left now may hold code, which is made again otherwise.
  Plan more = plan;
  more.placement.every_gemm_shape = true;
  size_plan(in, more);
  if (more.fits) plan = std::move(more);
  explain_homes(in, plan);
}

}  // namespace lm
