#include "plan/scaling.h"

#include <fmt/format.h>
#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "plan/estimate.h"
#include "plan/parallel_experts.h"
#include "plan/planned_layout.h"

namespace lm {
namespace {

// Numbers of ranks that fill machines, ascending.
std::vector<int> numbers(const World& most, int64_t sequences) {
  const int each = most.ranks_per_node();
  std::vector<int> out;
  for (int ranks = 1; ranks <= std::min(each, most.ranks); ++ranks) out.push_back(ranks);
  for (int nodes = 2; nodes <= most.nodes; ++nodes) out.push_back(nodes * each);
  std::erase_if(out, [&](int ranks) { return ranks > sequences; });
  return out;
}

// Plans for numbers of ranks, each made once.
class Rows {
 public:
  Rows(const PlanInputs& inputs, const Machine& node, const World& most)
      : inputs_(inputs), node_(node), each_(most.ranks_per_node()), share_memory_(most.share_memory) {}

  const ScalingRow& of(int ranks) {
    const auto [place, fresh] = rows_.try_emplace(ranks);
    if (!fresh) return place->second;
    World world{ranks, static_cast<int>(ceil_div(ranks, each_))};
    world.share_memory = share_memory_;
    const Machine share = share_of_machine(node_, world.ranks_per_node());
    const Plan plan = shares_experts_ ? plan_with_layout(share, world) : draft_plan(inputs_, share, world);
    ScalingRow& row = place->second;
    row = {.world = world,
           .fits = plan.fits,
           .peak = plan.peak,
           .step_seconds = plan.step_seconds,
           .call_seconds = plan.traffic.seconds,
           .tokens_per_second = lm::tokens_per_second(plan),
           .efficiency = 0,
           .binding = plan.binding};
    return row;
  }

  std::vector<ScalingRow> take() const {
    std::vector<ScalingRow> out;
    for (const auto& [ranks, row] : rows_) out.push_back(row);
    return out;
  }

 private:
  // What a rank keeps of the experts depends on how many there are.
  Plan plan_with_layout(const Machine& share, const World& world) const {
    const PlanInputs& in = inputs_;
    const ModelLayout layout =
        planned_layout(in.config, in.spec, in.adapter, expert_share(in.config, world, 0));
    const PlanInputs own{in.config, in.spec, in.adapter,        layout,
                         in.device, in.data, in.update_on_host, in.recorded};
    return draft_plan(own, share, world);
  }

  const PlanInputs& inputs_;
  const Machine& node_;
  int each_;
  bool share_memory_;
  bool shares_experts_ = inputs_.config.zero.experts == ZeroExperts::kParallel;
  std::map<int, ScalingRow> rows_;
};

bool power_of_two(int n) {
  return (n & (n - 1)) == 0;
}

// The fewest that fit among `all`: doubled until some do, then halved in between. More ranks need less each.
int find_fewest(const std::vector<int>& all, Rows& rows) {
  size_t low = 0, high = 0;  // all before `low` do not fit
  while (high < all.size() && !rows.of(all[high]).fits)
    low = high + 1, high = std::min(2 * high + 1, all.size());
  if (high == all.size() && (all.empty() || !rows.of(all.back()).fits)) return 0;
  high = std::min(high, all.size() - 1);
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (rows.of(all[middle]).fits) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return all[high];
}

}  // namespace

Scaling estimate_scaling(const PlanInputs& inputs, const Machine& node, const World& most) {
  std::vector<int> all = numbers(most, inputs.config.train.global_batch);
  if (inputs.config.zero.experts == ZeroExperts::kParallel)
    std::erase_if(all, [&](int ranks) { return !divides_experts(inputs.spec, ranks); });
  Rows rows(inputs, node, most);
  Scaling out;
  out.fewest = find_fewest(all, rows);
  for (const int ranks : all) {
    if (power_of_two(ranks) || ranks == all.back()) rows.of(ranks);
  }
  for (ScalingRow& row : rows.take()) {
    const int ranks = row.world.ranks;
    if (power_of_two(ranks) || ranks == all.back() || ranks == out.fewest) out.rows.push_back(std::move(row));
  }
  // What a rank does beside the rank that does most: few of them may have little room, and wait for disks.
  const auto of_rank = [](const ScalingRow& row) { return row.tokens_per_second / row.world.ranks; };
  double best = 0;
  for (const ScalingRow& row : out.rows) best = std::max(best, row.fits ? of_rank(row) : 0);
  for (ScalingRow& row : out.rows) {
    if (row.fits && (out.fewest == 0 || row.world.ranks < out.fewest)) out.fewest = row.world.ranks;
    if (row.fits && best > 0) row.efficiency = of_rank(row) / best;
  }
  return out;
}

std::vector<std::string> scaling_notes(const Plan& plan) {
  std::vector<std::string> notes;
  const bool gpu = plan.placement.device == DeviceType::kCuda;
  if (gpu) notes.emplace_back("no run of several GPUs has been measured yet: an estimate");
  if (!gpu) notes.emplace_back("ranks on the CPU compute or exchange, never both at once");
  const PlacementPlan& p = plan.placement;
  if (const RuleText& rule = rule_text(plan.numerics.rule); rule.whole_tensors && p.sharded)
    notes.push_back(std::string(rule.name) +
                    " updates whole matrices: each is on one rank, and shards are as even as that allows");
  const auto whole_on_disk = [&](Pool pool) {
    return p.pool(pool).shards == 1 && p.pool(pool).off_device_bytes(Medium::kDisk) > 0;
  };
  if (whole_on_disk(Pool::kWeights))
    notes.emplace_back("every rank has all weights on its disk: zero.stage = 3 shards them");
  if (whole_on_disk(Pool::kGradients))
    notes.emplace_back(
        "every rank has all gradients on its disk: zero.stage = 2 shards them where all micro-batches of a "
        "step "
        "pass a block together");
  return notes;
}

namespace {

// "4 GPUs or more"; where some of more ranks do not fit, those that do.
std::string fitting_text(const Scaling& scaling, const char* unit) {
  std::string some;
  bool all = true;  // from the fewest on
  for (const ScalingRow& row : scaling.rows) {
    if (row.fits) some += (some.empty() ? "" : ", ") + std::to_string(row.world.ranks);
    all = all && (row.fits || row.world.ranks < scaling.fewest);
  }
  if (scaling.fewest == 0) return "fits on none of these";
  if (!all) return fmt::format("fits on {} {}, of these", some, unit);
  const std::string one(unit, std::string_view(unit).size() - 1);
  return fmt::format("fits on {} {} or more", scaling.fewest, scaling.fewest == 1 ? one : unit);
}

}  // namespace

std::string print_scaling(const Scaling& scaling, const Plan& plan) {
  const bool gpu = plan.placement.device == DeviceType::kCuda;
  const char* const unit = gpu ? "GPUs" : "ranks";
  char line[200];
  std::snprintf(
      line, sizeof line,
      "scaling (of a rank; the same train.global_batch)\n  %6s %8s %12s %12s %12s %9s %9s %10s %10s  %s\n",
      unit, "machines", gpu ? "GPU memory" : "", "host memory", "disk", "step", "exchange", "tokens/s",
      "efficiency", "bound by");
  std::string out = line;
  for (const ScalingRow& row : scaling.rows) {
    const std::string efficiency = row.fits ? fmt::format("{:.0f}%", 100 * row.efficiency) : "-";
    std::snprintf(line, sizeof line, "  %6d %8d %12s %12s %12s %7.2f s %7.2f s %10.0f %10s  %s\n",
                  row.world.ranks, row.world.nodes, gpu ? format_bytes(row.peak.device).c_str() : "",
                  format_bytes(row.peak.host).c_str(), format_bytes(row.peak.disk).c_str(), row.step_seconds,
                  row.call_seconds, row.tokens_per_second, efficiency.c_str(),
                  row.fits ? row.binding.c_str() : "DOES NOT FIT");
    out += line;
  }
  out += "  " + fitting_text(scaling, unit) + "\n";
  for (const std::string& note : scaling_notes(plan)) out += "  note: " + note + "\n";
  return out;
}

std::string scaling_json(const Scaling& scaling) {
  using Json = nlohmann::ordered_json;
  Json rows = Json::array();
  for (const ScalingRow& row : scaling.rows) {
    rows.push_back({{"ranks", row.world.ranks},
                    {"nodes", row.world.nodes},
                    {"fits", row.fits},
                    {"device_bytes", row.peak.device},
                    {"host_bytes", row.peak.host},
                    {"disk_bytes", row.peak.disk},
                    {"step_seconds", row.step_seconds},
                    {"exchange_seconds", row.call_seconds},
                    {"tokens_per_s", row.tokens_per_second},
                    {"efficiency", row.efficiency},
                    {"binding", row.binding}});
  }
  return Json{{"fewest_ranks", scaling.fewest}, {"rows", rows}}.dump();
}

}  // namespace lm
