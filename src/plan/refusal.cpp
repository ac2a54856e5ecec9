#include "plan/refusal.h"

#include <fmt/format.h>
#include <algorithm>
#include <bit>
#include <functional>
#include <optional>

#include "base/bytes.h"
#include "plan/parallel_experts.h"
#include "plan/what_if.h"

namespace lm {
namespace {

constexpr int64_t kShortest = 256;  // data.max_length is not advised below
constexpr int kMostSettings = 3;

using Settings = std::vector<Setting>;

// The least intrusive first.
Settings candidates(const PlanInput& in, const Plan& plan) {
  const NumericsPlan& n = plan.numerics;
  const bool bf16 = n.trained_dtype() == DType::kBF16, full = in.adapter == nullptr;
  const bool all = in.config.train.only.empty();  // of the model's tensors may be trained
  Settings out;
  const auto add = [&](bool possible, std::string text, std::function<void(Config&)> apply) {
    if (possible) out.push_back({{std::move(text)}, std::move(apply)});
  };
  const auto add_disk = [&] {
    add(may_use_disk(in.config.offload), "offload.paths = [\"a directory on a fast disk\"]",
        [](Config& c) { c.offload.paths = {"."}; });
  };
  if (!in.trains()) {
    add_disk();
    return out;
  }
  add(!in.config.train.sample_prompts.empty(), "train.sample_prompts = []",
      [](Config& c) { c.train.sample_prompts.clear(); });
  add(!in.config.eval.generate.data.empty(), "eval.generate.data = []",
      [](Config& c) { c.eval.generate = {}; });
  add(in.config.zero.group == ZeroGroup::kMachine && in.world.nodes > 1, "zero.group = \"all\"",
      [](Config& c) { c.zero.group = ZeroGroup::kAll; });
  const bool replicated = in.config.zero.experts == ZeroExperts::kReplicated && in.world.ranks > 1;
  add(replicated && !full && divides_experts(in.spec, in.world.ranks), "zero.experts = \"parallel\"",
      [](Config& c) { c.zero.experts = ZeroExperts::kParallel; });
  add(!plan.recompute().whole(), "train.recompute = \"block\"",
      [](Config& c) { c.train.recompute = Recompute::kBlock; });
  add(in.config.train.update == UpdateTime::kAfter && full, "train.update = \"auto\"",
      [](Config& c) { c.train.update = UpdateTime::kAuto; });
  add_disk();
  add(n.micro_batch > 1, "train.micro_batch = 1", [](Config& c) { c.train.micro_batch = 1; });
  add(bf16 && n.gradient_dtype == DType::kF32, "train.gradients = \"bf16\"",
      [](Config& c) { c.train.gradients = GradientDType::kBF16; });
  add(bf16 && n.master == Master::kF32, "optimizer.master = \"split\"",
      [](Config& c) { c.optimizer.master = Master::kSplit; });
  const bool fp16 = n.trained_dtype() == DType::kF16;
  add((bf16 && n.master == Master::kSplit) || (fp16 && n.master == Master::kF32),
      "optimizer.master = \"none\"", [](Config& c) { c.optimizer.master = Master::kNone; });
  // The largest power of two below.
  const auto shorter = static_cast<int64_t>(
      std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(in.config.data.max_length - 1, 1))));
  add(shorter >= kShortest, fmt::format("data.max_length = {}", shorter),
      [shorter](Config& c) { c.data.max_length = shorter; });
  add(n.fp32_adapters && n.dtype == DType::kBF16, "lora.dtype = \"bf16\" with optimizer.master = \"split\"",
      [](Config& c) { c.lora.dtype = LoraDType::kBF16, c.optimizer.master = Master::kSplit; });
  add(n.dtype == DType::kF32, "model.dtype = \"bf16\"", [](Config& c) { c.model.dtype = ModelDType::kBF16; });
  const bool adapters = all && (!full || may_train_adapters(in.config));
  add(full && adapters, "train.method = \"lora\"", [](Config& c) { c.train.method = Method::kLora; });
  add(adapters && in.config.model.quantize == Quantize::kNone && in.spec.stored == EncodingKind::kPlain,
      full ? "train.method = \"qlora\"" : "model.quantize = \"nf4\"", [](Config& c) {
        if (c.train.method == Method::kFull) c.train.method = Method::kLora;
        c.model.quantize = Quantize::kNf4;
      });
  return out;
}

// Of the memory that is too small.
int64_t need(const Plan& plan, TierId tier_id) {
  for (const Tier& tier : plan.tiers) {
    if (tier.tier_id == tier_id) return tier.bytes;
  }
  return 0;
}

std::string list(const Settings& settings, const char* between) {
  std::string out;
  for (const Setting& one : settings)
    out += (out.empty() ? "" : between) + one.text.front() + " (saves " + format_bytes(one.saves) + ")";
  return out;
}

// What saves some of a tier's memory, and what makes a plan fit.
class Advice {
 public:
  Advice(const PlanInput& in, const Plan& plan, TierId tier_id)
      : in_(in), tier_id_(tier_id), closest_need_(need(plan, tier_id)) {
    for (Setting& one : candidates(in, plan)) {
      const std::optional<Alternative> changed = plan_with(in, {one}, Estimated::kNothing);
      one.saves = changed ? closest_need_ - need(changed->plan, tier_id) : 0;
      if (one.saves <= 0) continue;
      saving_.push_back(std::move(one));
      if (changed->plan.fits && std::popcount(alone_) < kMostSettings) alone_ |= 1U << (saving_.size() - 1);
    }
  }

  // Of those that save anything, the ones that save most.
  Settings best() const {
    Settings out = saving_;
    std::ranges::stable_sort(out, std::greater(), &Setting::saves);
    out.resize(std::min<size_t>(out.size(), kMostSettings));
    return out;
  }

  std::string text() {
    const uint32_t together = fitting_together(~alone_, kMostSettings - std::popcount(alone_));
    std::string out;
    if (together != 0) out = "set together " + list(chosen(together), ", ");
    if (alone_ != 0) out += (out.empty() ? "set " : ", or set ") + list(chosen(alone_), ", or ");
    if (!out.empty()) return out;
    if (closest_ == 0) return "use a machine with more memory";
    return "use a machine with more memory: even with " + list(chosen(closest_), ", ") + " it needs " +
           format_bytes(closest_need_);
  }

 private:
  Settings chosen(uint32_t bits) const {
    Settings out;
    for (size_t i = 0; i < saving_.size(); ++i) {
      if ((bits >> i & 1U) != 0) out.push_back(saving_[i]);
    }
    return out;
  }

  // Whether those chosen make it fit; the ones that come closest are kept.
  bool fits_with(uint32_t bits) {
    const std::optional<Alternative> changed = plan_with(in_, chosen(bits), Estimated::kNothing);
    if (!changed) return false;
    const int64_t needed = need(changed->plan, tier_id_);
    if (needed < closest_need_) closest_ = bits, closest_need_ = needed;
    return changed->plan.fits;
  }

  // One more, and once more, each the one that saves most beside those before it.
  void come_closer(uint32_t among, int most) {
    for (int count = 0; count < most; ++count) {
      const uint32_t before = closest_;
      for (size_t i = 0; i < saving_.size(); ++i) {
        const uint32_t bits = before | 1U << i;
        if (bits != before && (bits & ~among) == 0) fits_with(bits);
      }
      if (closest_ == before) return;
    }
  }

  // Of those in `among`, at most `most` together that make it fit: the least intrusive first (the highest
  // bit decides). Otherwise 0, and some that come close.
  uint32_t fitting_together(uint32_t among, int most) {
    if (most < 2) return 0;
    // Where all of them do not help, a few do not, and there are hundreds of ways to choose these.
    const std::optional<Alternative> most_modest = plan_with(in_, chosen(among), Estimated::kNothing);
    if (most_modest && !most_modest->plan.fits) {
      come_closer(among, most);
      return 0;
    }
    for (uint32_t bits = 1; bits < 1U << saving_.size(); ++bits) {
      const int count = std::popcount(bits);
      if (count >= 2 && count <= most && (bits & ~among) == 0 && fits_with(bits)) return bits;
    }
    return 0;
  }

  const PlanInput& in_;
  TierId tier_id_;
  Settings saving_;
  uint32_t alone_ = 0;    // as bits: the first few that make it fit alone
  uint32_t closest_ = 0;  // likewise; 0: none comes closer than what is configured
  int64_t closest_need_;
};

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
  if (tier_row(tier.tier_id).medium == Medium::kDisk) return disk_have(in);
  const std::string usable = format_bytes(tier.usable);
  if (tier.capacity <= 0) return usable + " are free";
  return usable + " of " + format_bytes(tier.capacity) + " may be used";
}

std::string other_ways(const PlanInput& in) {
  if (!in.trains()) return "";
  const std::string fitting = name_alternatives(advised_alternatives(in, in.machine, in.world));
  return fitting.empty() ? "" : "; of `lmlaunch plan --compare` these fit: " + fitting;
}

}  // namespace

std::string less_memory(const PlanInputs& inputs, const Machine& machine, const World& world,
                        TierId tier_id) {
  const PlanInput in{inputs, machine, world, PlanPurpose::kTrain};
  return list(Advice(in, draft_plan(inputs, machine, world), tier_id).best(), ", or ");
}

ErrorText explain_refusal(const PlanInput& in, const Plan& plan) {
  const auto full = std::find_if(plan.tiers.begin(), plan.tiers.end(),
                                 [](const Tier& tier) { return tier.bytes > tier.usable; });
  LM_CHECK(full != plan.tiers.end(), "a plan that fits needs no refusal");
  std::string table;
  for (const ClassBytes& row : plan.classes) {
    if (row.tier_id != full->tier_id || row.bytes == 0) continue;
    table += "\n    " + row.name + ": " + format_bytes(row.bytes) +
             (row.note.empty() ? "" : " (" + row.note + ")");
  }
  const TierRow& words = tier_row(full->tier_id);
  return {.area = words.area,
          .what = std::string(in.trains() ? "the run" : "this") + " does not fit: it needs " +
                  format_bytes(full->bytes) + " of " + words.memory + ", " + have(in, *full) + table,
          .place = "",
          .next = (words.medium == Medium::kDisk ? disk_advice(in, *full)
                                                 : Advice(in, plan, full->tier_id).text()) +
                  other_ways(in),
          .kept = "nothing was started or written"};
}

}  // namespace lm
