#include "launcher/worker/progress.h"

#include <fmt/format.h>
#include <algorithm>
#include <cctype>
#include <cmath>
#include <string_view>

#include "base/bytes.h"
#include "base/log.h"
#include "launcher/worker/progress_line.h"

namespace lm {
namespace {

DiskStep planned_disks(const Plan& plan) {
  DiskStep out{.seconds = plan.step_seconds};
  for (const LinkTime& link : plan.links) {
    if (!link.name.starts_with("disk ")) continue;
    out.disk_seconds = std::max(out.disk_seconds, link.seconds);  // both ways at once
    out.bytes += static_cast<int64_t>(link.amount);
  }
  return out;
}

}  // namespace

Progress::Progress(const Config& config, const Plan& plan, int64_t total_steps, bool evaluates)
    : every_(config.log.every),
      eval_every_(evaluates ? config.train.eval_every : 0),
      checkpoint_(config.checkpoint.every),
      total_(total_steps),
      disks_(planned_disks(plan)) {}

void Progress::begin(bool gpu) const {
  log_line(
      std::string("progress: `% utilization` (`% hw` on a narrow terminal) is the share of a "
                  "step's time that "
                  "its arithmetic takes at ") +
      (gpu ? "the GPU's peak rate by its data sheet" : "the rate of this machine's fastest matrix product") +
      "; memory is " + (gpu ? "the GPU's" : "this process's"));
}

double Progress::seconds_to_save(int64_t step, double mean_seconds, double since_save) const {
  if (checkpoint_.seconds > 0) return std::max(0.0, static_cast<double>(checkpoint_.seconds) - since_save);
  const int64_t every = checkpoint_.steps;
  return every > 0 ? static_cast<double>(every - step % every) * mean_seconds : -1;
}

void Progress::show(const StepRow& row, double since_save) {
  seconds_ += row.step_ms / 1e3;
  ++steps_;
  host_bytes_ += static_cast<double>(row.host_bytes);
  device_bytes_ += static_cast<double>(row.device_bytes);
  const double mean = seconds_ / static_cast<double>(steps_);
  const double left = mean * static_cast<double>(total_ - row.step);
  // No evaluation or save follows the last step.
  const auto before_the_end = [left](double seconds) { return seconds < left ? seconds : -1; };
  const double eval = eval_every_ > 0 ? static_cast<double>(eval_every_ - row.step % eval_every_) * mean : -1;
  show_step({.step = row.step,
             .total = total_,
             .loss = row.loss,
             .grad_norm = row.grad_norm,
             .lr = row.lr,
             .tokens_per_s = row.tokens_per_s,
             .sol_pct = row.sol_pct,
             .memory_bytes = row.device_bytes > 0 ? row.device_bytes : row.host_bytes,
             .seconds_left = left,
             .seconds_to_eval = before_the_end(eval),
             .seconds_to_save = before_the_end(seconds_to_save(row.step, mean, since_save))},
            every_);
  watch_disks(row);
}

// Warns once that the run is slower than planned.
void Progress::watch_disks(const StepRow& row) {
  const auto slow = disks_.see({.seconds = row.step_ms / 1e3,
                                .disk_seconds = row.disk_seconds,
                                .wait_seconds = row.wait_seconds,
                                .bytes = row.read_bytes + row.written_bytes});
  if (slow) log_warning("SLOW-29", *slow);
}

void Progress::finish(const TrainerResult& result) {
  log_line(fmt::format("{} after {} steps: {} tokens in {}, {:.0f} tokens/s",
                       result.stopped ? "stopped on request" : "done", result.steps, result.tokens,
                       duration_text(result.seconds),
                       result.seconds > 0 ? static_cast<double>(result.tokens) / result.seconds : 0.0));
  if (steps_ == 0) return;
  const auto mean = [this](double sum) {
    return format_bytes(std::llround(sum / static_cast<double>(steps_)));
  };
  log_line("mean resident memory " + mean(host_bytes_) +
           (device_bytes_ > 0 ? ", of the GPU's " + mean(device_bytes_) : ""));
}

namespace {

// Quoted for a shell's command line.
std::string quoted(const std::string& path) {
  const bool plain = std::all_of(path.begin(), path.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 ||
           std::string_view("/._-+,@%").find(static_cast<char>(c)) != std::string_view::npos;
  });
  if (plain && path[0] != '-') return path;
  std::string out = path[0] == '-' ? "'./" : "'";
  for (const char c : path) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

// "1.21 GiB (planned 1.25 GiB)"; on a GPU (device_bytes is not 0) followed by ", of the GPU's 20.1 GiB
// (planned 20.9 GiB)".
std::string format_peak(const Plan& plan, const TrainerResult& result) {
  // Where memory is short, pages that are common to ranks are swapped out while others arrive.
  const int64_t most = std::max(peak_resident_bytes() - result.memory_of_others, result.host_bytes);
  const std::string host = format_bytes(most) + " (planned " + format_bytes(plan.peak.host) + ")";
  if (result.device_bytes == 0) return host;
  return host + ", of the GPU's " + format_bytes(result.device_bytes) + " (planned " +
         format_bytes(plan.peak.device) + ")";
}

}  // namespace

void show_result(const Plan& plan, bool lora, const TrainerResult& result, const std::string& run) {
  log_line("peak resident memory " + format_peak(plan, result));
  const std::string name = quoted(run);
  const std::string third =
      lora ? "lmlaunch export " + name + " -o DIR --merge    the adapter merged into its base model"
           : "lmlaunch verify " + name + "    a hash of the trained weights";
  log_line("the trained " + std::string(lora ? "adapter" : "model") + " is in " + run +
           "/model; next:\n  lmlaunch generate " + name +
           " --prompt \"...\"    what it answers\n  lmlaunch report " + name +
           "    its curves, memory and settings as a page\n  " + third);
}

}  // namespace lm
