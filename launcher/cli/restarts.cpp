#include "launcher/cli/restarts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace lm {
namespace {

bool has(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

// The GPUs of `of` that are not in `there`. None if all are missing: then the names cannot be compared (NVML
// may not answer any more), and the start itself reports what is wrong.
std::vector<std::string> missing(const std::vector<std::string>& of, const std::vector<std::string>& there) {
  std::vector<std::string> out;
  for (const std::string& gpu : of) {
    if (!has(there, gpu)) out.push_back(gpu);
  }
  return out.size() == of.size() ? std::vector<std::string>() : out;
}

}  // namespace

// Returns why ranks were left out; "": none was.
std::string Restarts::change_ranks(const RunStatus& status, const std::vector<std::string>& there) {
  const std::vector<std::string> gone = missing(ranks_.gpus, there);
  std::string why = gone.empty() ? "" : fmt::format("{} gone", fmt::join(gone, ", "));
  const std::optional<int> killed =
      status.step == 0 && status.killed_rank >= 0 ? std::optional(status.killed_rank) : std::nullopt;
  if (gone.empty() && killed && killed == killed_early_ && ranks_.count > 1) {
    why = fmt::format("rank {} was killed before its first step, twice in a row", *killed);
    if (ranks_.gpus.empty()) {
      ++left_out_;
    } else {
      broken_.push_back(ranks_.gpus[static_cast<size_t>(*killed)]);
      why += ", on " + broken_.back();
    }
  }
  StartWorkers next = first_;
  next.count -= left_out_;
  const std::vector<std::string> absent = missing(first_.gpus, there);
  std::erase_if(next.gpus, [&](const std::string& gpu) { return has(absent, gpu) || has(broken_, gpu); });
  if (!first_.gpus.empty() && !next.gpus.empty()) next.count = static_cast<int>(next.gpus.size());
  const bool usable = next.gpus.empty() == first_.gpus.empty();
  const bool same = !usable || next == ranks_;
  killed_early_ = same ? killed : std::nullopt;  // the others have new numbers
  if (!same) ranks_ = std::move(next);
  return why;
}

bool Restarts::again(const RunStatus& status, const AskGpus& visible) {
  if (done_ >= most_) return false;
  const auto ended_with = [&](Exit code) { return *status.exit_code == static_cast<int>(code); };
  const std::vector<std::string> there =
      elastic_ && !ranks_.gpus.empty() ? visible() : std::vector<std::string>();
  const bool lost = ended_with(Exit::kPeerLost) || ended_with(Exit::kNoProgress);
  const bool killed = ended_with(Exit::kHostMemory) && status.reason == "killed:SIGKILL" && !memory_;
  // A GPU that falls off the bus makes the next call of CUDA fail.
  const bool broken = ended_with(Exit::kInternal) && !missing(ranks_.gpus, there).empty();
  if (!lost && !killed && !broken) return false;
  memory_ = memory_ || killed;
  ++done_;
  const int before = ranks_.count;
  const std::string why = elastic_ ? change_ranks(status, there) : "";
  std::string ranks;
  if (ranks_.count != before || !why.empty())
    ranks = fmt::format("; with {} of {} ranks{}", ranks_.count, first_.count, why.empty() ? "" : ": " + why);
  log_note("RUN-42", fmt::format("restart {} of {}: code {} ({}) after step {}; {}{}", done_, most_,
                                 *status.exit_code, status.reason, status.step,
                                 status.checkpoint.empty() ? "there is no checkpoint yet"
                                                           : "the newest checkpoint is " + status.checkpoint,
                                 ranks));
  return true;
}

}  // namespace lm
