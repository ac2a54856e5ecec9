#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "plan/plan.h"

namespace lm {
namespace {

std::string format(const char* pattern, const std::string& a, const std::string& b, const std::string& c) {
  char line[256];
  std::snprintf(line, sizeof line, pattern, a.c_str(), b.c_str(), c.c_str());
  return line;
}

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, value < 1 ? "%.0f ms" : "%.2f s", value < 1 ? value * 1e3 : value);
  return text;
}

double tokens_per_second(const Plan& plan) {
  return static_cast<double>(plan.micro_tokens * plan.numerics.micro_batches) / plan.step_seconds;
}

}  // namespace

std::string print_plan(const Plan& plan) {
  const bool cpu = plan.placement.device == DeviceType::kCpu;
  std::string out = cpu ? "plan: everything in host memory, computed on the CPU\n"
                        : "plan: everything in GPU memory, computed there\n";
  for (const ClassBytes& row : plan.classes) {
    if (row.bytes > 0) out += format("  %-16s %12s   %s\n", row.name, format_bytes(row.bytes), row.note);
  }
  out += format("  %-16s %12s   %s\n", "peak", format_bytes(cpu ? plan.peak.host : plan.peak.device),
                cpu ? "resident memory of the rank's process" : "of the GPU");
  const NumericsPlan& n = plan.numerics;
  out += "  step: " + std::to_string(n.micro_batches) + " x " + std::to_string(n.micro_batch) +
         " sequences, at most " + std::to_string(plan.micro_tokens) + " tokens at once, recompute " +
         (n.recompute ? "block" : "none") + "\n";
  for (const LinkTime& link : plan.links)
    out += format("  %-18s %10s %s\n", link.name, seconds(link.seconds), "");
  char line[160];
  std::snprintf(line, sizeof line, "  predicted step     %10s   %.0f tokens/s, bound by %s\n",
                seconds(plan.step_seconds).c_str(), tokens_per_second(plan), plan.binding.c_str());
  out += line;
  for (const Choice& choice : plan.choices) {
    out += "  " + choice.key + " = " + choice.value + ": " + choice.reason + "\n";
  }
  return out;
}

std::string plan_json(const Plan& plan) {
  using Json = nlohmann::ordered_json;
  Json classes = Json::array(), links = Json::array(), choices = Json::array();
  for (const ClassBytes& row : plan.classes) {
    classes.push_back({{"name", row.name}, {"bytes", row.bytes}, {"note", row.note}});
  }
  for (const LinkTime& link : plan.links) links.push_back({{"name", link.name}, {"seconds", link.seconds}});
  for (const Choice& choice : plan.choices) {
    choices.push_back({{"key", choice.key}, {"value", choice.value}, {"reason", choice.reason}});
  }
  const bool cpu = plan.placement.device == DeviceType::kCpu;
  const NumericsPlan& n = plan.numerics;
  const Json tiers = Json::array({{{"name", cpu ? "host" : "device"}, {"classes", classes}}});
  return Json{
      {"fits", true},
      {"peak",
       {{"device_bytes", plan.peak.device}, {"host_bytes", plan.peak.host}, {"disk_bytes", plan.peak.disk}}},
      {"step_seconds", plan.step_seconds},
      {"tokens_per_s", tokens_per_second(plan)},
      {"binding", plan.binding},
      {"tiers", tiers},
      {"links", links},
      {"numerics",
       {{"dtype", dtype_name(n.dtype)},
        {"gradients", dtype_name(n.gradient_dtype)},
        {"micro_batch", n.micro_batch},
        {"micro_batches", n.micro_batches},
        {"row_chunk", n.row_chunk},
        {"recompute", n.recompute ? "block" : "none"},
        {"threads", n.threads}}},
      {"choices", choices}}
      .dump(2);
}

}  // namespace lm
