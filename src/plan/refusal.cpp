#include "plan/refusal.h"

#include <fmt/format.h>
#include <algorithm>
#include <bit>
#include <functional>
#include <optional>

#include "base/bytes.h"
#include "plan/alternatives.h"
#include "plan/changed.h"

namespace lm {
namespace {

constexpr int64_t kShortest = 256;  // data.max_length is not advised below
constexpr int kMostKnobs = 3;

struct Knob {
  std::string setting;
  std::function<void(Config&)> apply;
  int64_t saves = 0;
};

// What may be turned, the least intrusive first.
std::vector<Knob> knobs(const PlanInput& in, const Plan& plan) {
  const NumericsPlan& n = plan.numerics;
  const bool bf16 = n.trained_dtype() == DType::kBF16;
  std::vector<Knob> out;
  if (!in.trains()) {
    if (may_use_disk(in.config.offload))
      out.push_back(
          {"offload.paths = [\"a directory on a fast disk\"]", [](Config& c) { c.offload.paths = {"."}; }});
    return out;
  }
  if (plan.cache_positions > 0) {
    out.push_back({"train.sample_prompts = []", [](Config& c) { c.train.sample_prompts.clear(); }});
  }
  if (!n.recompute) {
    out.push_back({"train.recompute = \"block\"", [](Config& c) { c.train.recompute = Recompute::kBlock; }});
  }
  if (in.config.train.update == UpdateTime::kAfter && in.adapter == nullptr) {
    out.push_back({"train.update = \"auto\"", [](Config& c) { c.train.update = UpdateTime::kAuto; }});
  }
  if (may_use_disk(in.config.offload)) {
    out.push_back(
        {"offload.paths = [\"a directory on a fast disk\"]", [](Config& c) { c.offload.paths = {"."}; }});
  }
  if (n.micro_batch > 1) {
    out.push_back({"train.micro_batch = 1", [](Config& c) { c.train.micro_batch = 1; }});
  }
  if (bf16 && n.gradient_dtype == DType::kF32) {
    out.push_back(
        {"train.gradients = \"bf16\"", [](Config& c) { c.train.gradients = GradientDType::kBF16; }});
  }
  if (bf16 && n.master == Master::kF32) {
    out.push_back({"optimizer.master = \"split\"", [](Config& c) { c.optimizer.master = Master::kSplit; }});
  }
  if (bf16 && n.master == Master::kSplit) {
    out.push_back({"optimizer.master = \"none\"", [](Config& c) { c.optimizer.master = Master::kNone; }});
  }
  // The largest power of two below.
  const auto shorter = static_cast<int64_t>(
      std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(in.config.data.max_length - 1, 1))));
  if (shorter >= kShortest) {
    out.push_back({fmt::format("data.max_length = {}", shorter),
                   [shorter](Config& c) { c.data.max_length = shorter; }});
  }
  if (n.fp32_adapters)
    out.push_back({"lora.dtype = \"bf16\" with optimizer.master = \"split\"",
                   [](Config& c) { c.lora.dtype = LoraDType::kBF16, c.optimizer.master = Master::kSplit; }});
  if (n.dtype == DType::kF32) {
    out.push_back({"model.dtype = \"bf16\"", [](Config& c) { c.model.dtype = ModelDType::kBF16; }});
  }
  if (in.adapter == nullptr) {
    out.push_back({"train.method = \"lora\"", [](Config& c) { c.train.method = Method::kLora; }});
  }
  if (in.config.model.quantize == Quantize::kNone && in.spec.stored == EncodingKind::kPlain) {
    const char* const setting =
        in.adapter == nullptr ? "train.method = \"qlora\"" : "model.quantize = \"nf4\"";
    out.push_back({setting, [](Config& c) {
                     c.train.method = Method::kLora;
                     c.model.quantize = Quantize::kNf4;
                   }});
  }
  return out;
}

// Of the memory that is too small.
int64_t need(const Plan& plan, Home home) {
  for (const Tier& tier : plan.tiers) {
    if (tier.home == home) return tier.bytes;
  }
  return 0;
}

std::optional<ChangedPlan> plan_with(const PlanInput& in, const std::vector<Knob>& all, uint32_t chosen) {
  Config config = in.config;
  for (size_t i = 0; i < all.size(); ++i) {
    if ((chosen >> i & 1U) != 0) all[i].apply(config);
  }
  return plan_changed(in, config, Foretold::kNothing);
}

std::string list(const std::vector<Knob>& all, uint32_t chosen, const char* between) {
  std::string out;
  for (size_t i = 0; i < all.size(); ++i) {
    if ((chosen >> i & 1U) == 0) continue;
    out += (out.empty() ? "" : between) + all[i].setting + " (saves " + format_bytes(all[i].saves) + ")";
  }
  return out;
}

// One knob more, and once more, each the one that saves most beside those before it.
void come_closer(const PlanInput& in, const std::vector<Knob>& all, uint32_t among, int most, Home home,
                 std::pair<uint32_t, int64_t>* closest) {
  for (int count = 0; count < most; ++count) {
    const uint32_t before = closest->first;
    for (size_t i = 0; i < all.size(); ++i) {
      const uint32_t chosen = before | 1U << i;
      if (chosen == before || (chosen & ~among) != 0) continue;
      const std::optional<ChangedPlan> changed = plan_with(in, all, chosen);
      if (!changed) continue;
      const int64_t needed = need(changed->plan, home);
      if (needed < closest->second) *closest = {chosen, needed};
    }
    if (closest->first == before) return;
  }
}

// Of the knobs in `among`, at most `most` together that make it fit: the least intrusive first (the highest
// bit decides). Otherwise 0, and in `closest` some that come close.
uint32_t fitting_together(const PlanInput& in, const std::vector<Knob>& all, uint32_t among, int most,
                          Home home, std::pair<uint32_t, int64_t>* closest) {
  if (most < 2) return 0;
  // Where all of them do not help, a few do not, and there are hundreds of ways to choose these.
  const std::optional<ChangedPlan> most_modest = plan_with(in, all, among);
  if (most_modest && !most_modest->plan.fits) {
    come_closer(in, all, among, most, home, closest);
    return 0;
  }
  for (uint32_t chosen = 1; chosen < 1U << all.size(); ++chosen) {
    const int count = std::popcount(chosen);
    if (count < 2 || count > most || (chosen & ~among) != 0) continue;
    const std::optional<ChangedPlan> changed = plan_with(in, all, chosen);
    if (!changed) continue;
    if (changed->plan.fits) return chosen;
    const int64_t needed = need(changed->plan, home);
    if (needed < closest->second) *closest = {chosen, needed};
  }
  return 0;
}

// Those that save anything, and of them as bits the first few that make it fit alone.
std::vector<Knob> saving_knobs(const PlanInput& in, const Plan& plan, Home home, uint32_t* alone) {
  std::vector<Knob> all;
  for (Knob& knob : knobs(in, plan)) {
    Config config = in.config;
    knob.apply(config);
    const std::optional<ChangedPlan> changed = plan_changed(in, config, Foretold::kNothing);
    if (!changed || need(changed->plan, home) >= need(plan, home)) continue;
    knob.saves = need(plan, home) - need(changed->plan, home);
    all.push_back(std::move(knob));
    if (changed->plan.fits && std::popcount(*alone) < kMostKnobs) *alone |= 1U << (all.size() - 1);
  }
  return all;
}

std::string advice(const PlanInput& in, const Plan& plan, Home home) {
  uint32_t alone = 0;
  const std::vector<Knob> all = saving_knobs(in, plan, home, &alone);
  std::pair<uint32_t, int64_t> closest{0, need(plan, home)};
  const uint32_t together =
      fitting_together(in, all, ~alone, kMostKnobs - std::popcount(alone), home, &closest);
  std::string out;
  if (together != 0) out = "set together " + list(all, together, ", ");
  if (alone != 0) out += (out.empty() ? "set " : ", or set ") + list(all, alone, ", or ");
  if (!out.empty()) return out;
  if (closest.first == 0) return "use a machine with more memory";
  return "use a machine with more memory: even with " + list(all, closest.first, ", ") + " it needs " +
         format_bytes(closest.second);
}

// Of each path: what may be used, and why not more.
std::string disk_have(const PlanInput& in) {
  std::string out;
  for (const Disk& disk : in.machine.disks) {
    const int64_t room = path_room(in.config.offload, disk);
    out += (out.empty() ? "" : ", ") + format_bytes(room) + " may be used in " + disk.path + " (" +
           (room < disk.free_bytes ? "offload.disk_limit; " : "") + format_bytes(disk.free_bytes) + " free)";
  }
  return out.empty() ? "offload.paths names no disk" : out;
}

std::string disk_advice(const PlanInput& in, const Tier& tier) {
  int64_t free_bytes = 0;
  for (const Disk& disk : in.machine.disks) free_bytes += disk.free_bytes;
  if (free_bytes >= tier.bytes && in.config.offload.disk_limit)
    return "raise offload.disk_limit, which counts for each path, or add a directory on another disk to "
           "offload.paths";
  return "free disk space, or add a directory on another disk to offload.paths";
}

std::string have(const PlanInput& in, const Tier& tier) {
  if (tier.home == Home::kNvme) return disk_have(in);
  const std::string usable = format_bytes(tier.usable);
  if (tier.capacity <= 0) return usable + " are free";
  return usable + " of " + format_bytes(tier.capacity) + " may be used";
}

std::string other_ways(const PlanInput& in) {
  if (!in.trains()) return "";
  const std::string fitting = name_alternatives(alternatives(in, in.machine, in.world, Foretold::kWhatFits));
  return fitting.empty() ? "" : "; of `lmlaunch plan --compare` these fit: " + fitting;
}

}  // namespace

std::string memory_savers(const PlanInput& in, const Plan& plan, Home home) {
  uint32_t ignored = 0;
  std::vector<Knob> all = saving_knobs(in, plan, home, &ignored);
  std::stable_sort(all.begin(), all.end(), [](const Knob& a, const Knob& b) { return a.saves > b.saves; });
  all.resize(std::min<size_t>(all.size(), kMostKnobs));
  return list(all, ~0U, ", or ");
}

ErrorText explain_refusal(const PlanInput& in, const Plan& plan) {
  const auto full = std::find_if(plan.tiers.begin(), plan.tiers.end(),
                                 [](const Tier& tier) { return tier.bytes > tier.usable; });
  LM_CHECK(full != plan.tiers.end(), "a plan that fits needs no refusal");
  std::string table;
  for (const ClassBytes& row : plan.classes) {
    if (row.home != full->home || row.bytes == 0) continue;
    table += "\n    " + row.name + ": " + format_bytes(row.bytes) +
             (row.note.empty() ? "" : " (" + row.note + ")");
  }
  constexpr const char* kAreas[] = {"MEM-15", "MEM-16", "DISK-33"};
  constexpr const char* kKinds[] = {"GPU memory", "host memory", "disk space"};
  const auto kind = static_cast<size_t>(full->home);
  return {.area = kAreas[kind],
          .what = std::string(in.trains() ? "the run" : "this") + " does not fit: it needs " +
                  format_bytes(full->bytes) + " of " + kKinds[kind] + ", " + have(in, *full) + table,
          .place = "",
          .next = (full->home == Home::kNvme ? disk_advice(in, *full) : advice(in, plan, full->home)) +
                  other_ways(in),
          .kept = "nothing was started or written"};
}

}  // namespace lm
