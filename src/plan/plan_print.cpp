#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "plan/estimate.h"
#include "plan/plan.h"
#include "plan/recompute_level.h"
#include "plan/step_lanes.h"

namespace lm {
namespace {

using Json = nlohmann::ordered_json;

// A line without the blanks at its end.
std::string row(const std::string& name, const std::string& value, const std::string& note) {
  char text[256];
  std::snprintf(text, sizeof text, "  %-18s %12s   %s", name.c_str(), value.c_str(), note.c_str());
  std::string line = text;
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

std::string duration(double seconds) {
  return seconds < 1 ? fmt::format("{:.1f} ms", seconds * 1e3) : fmt::format("{:.2f} s", seconds);
}

// "3.11 T", "870 G": FLOP or bytes in powers of 1000.
std::string amount(double value, const std::string& unit) {
  constexpr const char* kPrefixes[] = {"", "k", "M", "G", "T", "P", "E"};
  size_t prefix = 0;
  while (value >= 1000 && prefix + 1 < std::size(kPrefixes)) value /= 1000, ++prefix;
  return fmt::format("{:.3g} {}{}", value, kPrefixes[prefix], unit);
}

// Utilization that the plan estimates, in percent.
double planned_utilization(const Plan& plan) {
  return 100 * plan.peak_seconds_per_token * tokens_per_second(plan) / plan.world.ranks;
}

bool known(int64_t bytes) {
  return bytes < std::numeric_limits<int64_t>::max();
}

std::string tier_table(const Plan& plan, const Tier& tier) {
  const TierRow& words = tier_row(tier.tier_id);
  std::string out = std::string(words.title) + "\n";
  for (const ClassBytes& entry : plan.classes) {
    if (entry.tier_id == tier.tier_id && entry.bytes > 0)
      out += row(entry.name, format_bytes(entry.bytes), entry.note);
  }
  std::string note = words.note;
  if (known(tier.usable)) note += "; " + format_bytes(tier.usable) + " may be used";
  if (tier.bytes > tier.usable) note += ": DOES NOT FIT";
  return out + row("peak", format_bytes(tier.bytes), note);
}

std::string traffic_rows(const RankTraffic& traffic) {
  std::string out;
  const auto add = [&](const char* name, double bytes, const char* note) {
    if (bytes > 0) out += row(name, amount(bytes, "B"), note);
  };
  add("gradients sent", traffic.gradient_bytes, "to other ranks, by each per step");
  add("weights sent", traffic.weight_bytes, "the same");
  add("rows sent", traffic.expert_bytes, "to other ranks' experts and back");
  add("votes sent", traffic.vote_bytes, "losses, norms, whether to stop");
  return out;
}

Json traffic_json(const Plan& plan) {
  const RankTraffic& t = plan.traffic;
  return {{"gradient_bytes", t.gradient_bytes},
          {"weight_bytes", t.weight_bytes},
          {"vote_bytes", t.vote_bytes},
          {"expert_bytes", t.expert_bytes},
          {"between_machines_share", t.between_share},
          {"calls", t.calls},
          {"seconds", t.seconds}};
}

std::string step_lines(const Plan& plan) {
  const NumericsPlan& n = plan.numerics;
  const std::string rate = fmt::format("{:.0f} tokens/s, {:.0f} % utilization, bound by {}",
                                       tokens_per_second(plan), planned_utilization(plan), plan.binding);
  std::string out =
      fmt::format("step: {} x {} sequences, at most {} tokens at once, recompute {}{}{}\n",
                  plan.step.micro_batches, n.micro_batch, plan.micro_tokens, recompute_text(plan.recompute()),
                  plan.placement.in_backward() ? ", updates inside backward" : "",
                  n.products == Products::kTF32 ? ", fp32 products as TF32" : "");
  if (plan.placement.group > 1)
    out += row("group", std::to_string(plan.placement.group), "micro-batches pass a block before the next");
  for (const LinkTime& link : plan.links)
    out += row(link.name, duration(link.seconds), amount(link.amount, link.unit));
  if (plan.world.ranks > 1) out += traffic_rows(plan.traffic);
  if (plan.sequence_tokens > 0)
    out +=
        row("sequence", fmt::format("{:.0f} tokens", plan.sequence_tokens), "on average, as the data's are");
  out += row("estimated step", duration(plan.step_seconds), rate);
  if (!plan.placement.on_disk()) return out;
  out += row("waiting", duration(plan.timeline.waiting_seconds),
             plan.world.ranks > 1 ? "of it, for transfers and other ranks" : "of it, for transfers");
  const double terabytes = plan.timeline.disk_written_bytes * 1000 / 1e12;
  if (terabytes <= 0) return out;
  return out + row("disk wear", amount(terabytes * 1e12, "B"),
                   fmt::format("written per 1,000 steps; a 600-TBW drive lasts {:.0f} thousand steps",
                               600 / terabytes));
}

// Where a pool's arrays come from: shards have their own pool, unless they are in the device's memory.
TierId pool_tier(const PlacementPlan& placement, Pool which) {
  const PoolPlan& pool = placement.pool(which);
  if (pool.shards == 1) return pool.tier_id;
  const std::optional<Pool> shards = shards_of(which);
  if (shards && placement.pool(*shards).off_device_bytes() > 0) return placement.pool(*shards).tier_id;
  return placement.device == DeviceType::kCuda ? TierId::kDevice : TierId::kHost;
}

Json placement_json(const PlacementPlan& placement) {
  Json tier_names = Json::object();
  for (int i = 0; i < kStateClasses; ++i) {
    tier_names[state_class_name(static_cast<StateClass>(i))] = tier_row(placement.tier_id[i]).name;
  }
  Json pools = Json::object();
  for (int i = 0; i < kPools; ++i) {
    const PoolPlan& pool = placement.pools[static_cast<size_t>(i)];
    if (pool.slots == 0) continue;
    pools[pool_name(static_cast<Pool>(i))] = {
        {"home", tier_row(pool_tier(placement, static_cast<Pool>(i))).name},
        {"shards", pool.shards},
        {"arrays", pool.bytes.size()},
        {"off_device", std::count(pool.off_device.begin(), pool.off_device.end(), 1)},
        {"off_device_bytes", pool.off_device_bytes()},
        {"slots", pool.slots},
        {"slot_bytes", pool.slot_bytes}};
  }
  return {{"device", placement.device == DeviceType::kCpu ? "cpu" : "cuda"},
          {"homes", tier_names},
          {"pools", pools},
          {"group", placement.group},
          {"tile_granules", placement.tile_granules},
          {"update", placement.in_backward() ? "in_backward" : "after"},
          {"update_on_host", placement.update_on_host},
          {"host_share", placement.host_share},
          {"optimizer_threads", placement.optimizer_threads}};
}

Json tier_json(const Plan& plan, const Tier& tier) {
  Json classes = Json::array();
  for (const ClassBytes& entry : plan.classes) {
    if (entry.tier_id != tier.tier_id) continue;
    classes.push_back({{"name", entry.name}, {"bytes", entry.bytes}, {"note", entry.note}});
  }
  Json out = {{"name", tier_row(tier.tier_id).name}, {"bytes", tier.bytes}};
  out["capacity_bytes"] = tier.capacity > 0 ? Json(tier.capacity) : Json();
  out["usable_bytes"] = known(tier.usable) ? Json(tier.usable) : Json();
  out["classes"] = std::move(classes);
  return out;
}

Json phases_json(const StepEstimate& estimate) {
  Json out = Json::object();
  for (int i = 0; i < kOperationKinds; ++i) {
    const double seconds = estimate.by_kind[static_cast<size_t>(i)];
    if (seconds > 0) out[operation_name(static_cast<OperationKind>(i))] = seconds;
  }
  return out;
}

// To a nanosecond.
Json timeline_json(const std::vector<StepLane>& lanes) {
  const auto rounded = [](double seconds) { return std::round(seconds * 1e9) / 1e9; };
  Json out = Json::array();
  for (const StepLane& lane : lanes) {
    Json spans = Json::array();
    for (const StepSpan& span : lane.spans)
      spans.push_back({rounded(span.start), rounded(span.end), span.name, span.kind});
    out.push_back({{"lane", lane.name}, {"spans", spans}});
  }
  return out;
}

// Slots alone do not tell: shards that a rank has in its own memory are gathered through them, too.
bool offloads(const Plan& plan) {
  const PlacementPlan& p = plan.placement;
  const auto leaves = [&](const PoolPlan& pool) {
    const auto in_tier = [&](const Tier& tier) {
      return is_off_device(tier.tier_id, p.device) && pool.off_device_bytes(tier.tier_id) > 0;
    };
    return pool.shards == 1 && std::ranges::any_of(plan.tiers, in_tier);
  };
  return p.embedding_in_host > 0 || std::ranges::any_of(p.pools, leaves);
}

}  // namespace

std::string step_line(const Plan& plan) {
  return fmt::format("step: {:.0f} tokens a sequence on average, {} and {:.0f} tokens/s planned",
                     plan.sequence_tokens, duration(plan.step_seconds), tokens_per_second(plan));
}

std::string print_plan(const Plan& plan) {
  const bool cpu = plan.placement.device == DeviceType::kCpu;
  std::string out = offloads(plan)
                        ? "plan: offloaded state is streamed through slots, computed on the " +
                              std::string(cpu ? "CPU\n" : "GPU\n")
                        : std::string("plan: all state stays in ") +
                              (cpu ? "host memory, computed on the CPU\n" : "GPU memory, computed there\n");
  for (const Tier& tier : plan.tiers) out += tier_table(plan, tier);
  out += step_lines(plan);
  for (const Choice& choice : plan.choices) {
    out += "  " + choice.key + " = " + choice.value + ": " + choice.reason + "\n";
  }
  return out;
}

std::string plan_json(const Plan& plan, const std::vector<StepLane>& lanes) {
  Json tiers = Json::array(), links = Json::array(), choices = Json::array();
  for (const Tier& tier : plan.tiers) tiers.push_back(tier_json(plan, tier));
  for (const LinkTime& link : plan.links) {
    links.push_back(
        {{"name", link.name}, {"seconds", link.seconds}, {"amount", link.amount}, {"unit", link.unit}});
  }
  for (const Choice& choice : plan.choices) {
    choices.push_back({{"key", choice.key}, {"value", choice.value}, {"reason", choice.reason}});
  }
  Json out{
      {"fits", plan.fits},
      {"peak",
       {{"device_bytes", plan.peak.device}, {"host_bytes", plan.peak.host}, {"disk_bytes", plan.peak.disk}}},
      {"step_seconds", plan.step_seconds},
      {"tokens_per_s", tokens_per_second(plan)},
      {"sequence_tokens", plan.sequence_tokens},
      {"sol_pct", planned_utilization(plan)},
      {"binding", plan.binding},
      {"tiers", tiers},
      {"links", links},
      {"disk_read_bytes", plan.timeline.disk_read_bytes},
      {"disk_written_bytes", plan.timeline.disk_written_bytes},
      {"waiting_seconds", plan.timeline.waiting_seconds},
      {"ranks", plan.world.ranks},
      {"nodes", plan.world.nodes},
      {"traffic", traffic_json(plan)},
      {"phases", phases_json(plan.estimate)},
      {"numerics", Json::parse(numerics_json(plan.recorded_numerics()))},
      {"placement", placement_json(plan.placement)},
      {"choices", choices}};
  if (!lanes.empty()) out["timeline"] = timeline_json(lanes);
  return out.dump(2, ' ', false, Json::error_handler_t::replace);
}

std::string plan_json(const Plan& plan) {
  return plan_json(plan, {});
}

}  // namespace lm
