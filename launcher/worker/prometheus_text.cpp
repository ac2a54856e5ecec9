#include "launcher/worker/prometheus_text.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>

namespace lm {
namespace {

using Labels = std::vector<std::pair<const char*, std::string>>;

std::string number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  return fmt::format("{}", value);
}

std::string label_text(const Labels& labels) {
  std::string out;
  for (const auto& [name, value] : labels) {
    out += (out.empty() ? "{" : ",") + std::string(name) + "=\"";
    for (const char c : value)
      out += c == '\n' ? "\\n" : c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
    out += "\"";
  }
  return out.empty() ? "" : out + "}";
}

class Text {
 public:
  void family(const char* name, const char* type, const char* help) {
    name_ = std::string("lmlaunch_") + name;
    out_ += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name_, help, name_, type);
  }
  void value(double value, const Labels& labels = {}) {
    out_ += name_ + label_text(labels) + " " + number(value) + "\n";
  }
  void one(const char* name, const char* type, const char* help, double of) {
    family(name, type, help);
    value(of);
  }
  void by(const char* name, const char* type, const char* help, const char* label,
          const std::map<std::string, int64_t>& values) {
    if (values.empty()) return;
    family(name, type, help);
    for (const auto& [key, one] : values) value(static_cast<double>(one), {{label, key}});
  }
  std::string take() { return std::move(out_); }

 private:
  std::string name_, out_;
};

void add_steps(const RunMetrics& m, Text& text) {
  text.one("loss", "gauge", "Training loss of the last step.", m.loss);
  text.one("gradient_norm", "gauge", "Gradient norm of the last step, before clipping.", m.grad_norm);
  text.one("learning_rate", "gauge", "Learning rate of the last step.", m.lr);
  text.one("tokens_per_second", "gauge", "Tokens per second of the last step, of all ranks.", m.tokens_per_s);
  text.one("step_duration_seconds", "gauge", "Duration of the last step.", m.step_seconds);
  text.one("utilization_ratio", "gauge", "Share of the last step that its arithmetic takes at peak rate.",
           m.utilization);
  text.one("last_step_timestamp_seconds", "gauge", "When the last step ended, since 1970.", m.last_step_time);
}

void add_gpus(const std::vector<GpuReading>& gpus, Text& text) {
  const auto all = [&](const char* name, const char* help, std::optional<double> GpuReading::*field) {
    bool any = false;
    for (const GpuReading& gpu : gpus) {
      if (!(gpu.*field)) continue;
      if (!std::exchange(any, true)) text.family(name, "gauge", help);
      text.value(*(gpu.*field), {{"uuid", gpu.uuid}, {"name", gpu.name}});
    }
  };
  all("gpu_utilization_ratio", "Share of time in which a kernel ran, as the driver samples it.",
      &GpuReading::utilization);
  all("gpu_power_watts", "Power draw of the GPU.", &GpuReading::watts);
  all("gpu_temperature_celsius", "Temperature of the GPU.", &GpuReading::celsius);
}

}  // namespace

std::string prometheus_text(const RunMetrics& m) {
  Text text;
  text.family("run_info", "gauge", "The run; its value is 1.");
  text.value(1, {{"run", m.run}, {"version", m.version}});
  text.one("step", "gauge", "Optimizer steps done.", static_cast<double>(m.step));
  text.one("planned_steps", "gauge", "Optimizer steps that the run will have done at its end.",
           static_cast<double>(m.total_steps));
  if (m.last_step_time > 0) add_steps(m, text);  // no zeros that look like a loss
  text.one("tokens_total", "counter", "Tokens trained on since this start.", static_cast<double>(m.tokens));
  text.one("skipped_steps_total", "counter", "Steps without an update since this start.",
           static_cast<double>(m.skipped_steps));
  if (!m.eval_loss.empty()) text.family("eval_loss", "gauge", "Loss of the last evaluation.");
  for (const auto& [set, loss] : m.eval_loss) text.value(loss, {{"set", set}});
  text.one("checkpoint_step", "gauge", "Step of the newest committed checkpoint; 0: none.",
           static_cast<double>(m.checkpoint_step));
  text.one("heartbeat_age_seconds", "gauge", "Time since the progress counter of rank 0 has moved.",
           m.heartbeat_age);
  text.by("memory_bytes", "gauge", "Memory in use, of rank 0.", "tier", m.memory);
  text.by("planned_memory_bytes", "gauge", "Memory at the peak by the plan, of a rank.", "tier",
          m.planned_memory);
  text.by("link_bytes_total", "counter", "Bytes moved by rank 0 since this start.", "link", m.link_bytes);
  add_gpus(m.gpus, text);
  return text.take();
}

}  // namespace lm
