#include "launcher/cli/device_choice.h"

#include <fmt/format.h>

#include "base/error.h"

namespace lm {
namespace {

constexpr int64_t kMostRanks = 256;  // processes of one machine

// Why a GPU cannot be used here; "" if it can.
std::string obstacle(const DeviceFacts& facts) {
  if (facts.gpus == 0 && !facts.file.empty()) return "the machine of " + facts.file + " has no GPU";
  if (facts.gpus == 0) return "there is no GPU (no /dev/nvidia0)";
  if (facts.visible == 0) return all_hidden(facts);
  return facts.cuda_program ? "" : "lmlaunch-cuda is not built";
}

}  // namespace

std::string all_hidden(const DeviceFacts& facts) {
  return "no GPU is visible: CUDA_VISIBLE_DEVICES=\"" + facts.hidden_by + "\" hides the " +
         (facts.gpus == 1 ? "one that is" : fmt::format("{} that are", facts.gpus)) + " there";
}

DeviceDecision decide_device(const CommandLine& line, DeviceChoice configured, const DeviceFacts& facts) {
  const auto gpus = line.integer("--gpus"), ranks = line.integer("--ranks");
  const bool plans = line.command == "plan";
  if (gpus && *gpus > 1 && !plans && line.command != "train")
    throw usage_error(fmt::format("--gpus {}: {} computes on one GPU", *gpus, line.command), "use --gpus 1");
  if (ranks && *ranks > kMostRanks && !plans)
    throw usage_error(fmt::format("--ranks {}: more than {}", *ranks, kMostRanks), "use fewer");
  if (ranks && *ranks == 0) throw usage_error("--ranks 0: at least one process trains", "use --ranks 1");
  const bool wants_cpu = ranks.has_value() || (gpus && *gpus == 0), wants_gpu = gpus && *gpus > 0;
  if (wants_cpu && configured == DeviceChoice::kCuda) {
    throw usage_error("the command line asks for the CPU, and run.device = \"cuda\" for a GPU",
                      "change one of them");
  }
  if (wants_gpu && configured == DeviceChoice::kCpu) {
    throw usage_error(fmt::format("--gpus {} asks for a GPU, and run.device = \"cpu\" for the CPU", *gpus),
                      "change one of them");
  }
  if (wants_cpu || configured == DeviceChoice::kCpu) return {};
  std::string missing = obstacle(facts);
  if (missing.empty() && !plans && gpus.value_or(1) > facts.visible)
    missing = facts.visible == 1 ? "one is visible here" : fmt::format("{} are visible here", facts.visible);
  if (missing.empty()) return {.cuda = true, .note = ""};
  if (wants_gpu || configured == DeviceChoice::kCuda) {
    throw Error(
        Exit::kDoesNotFit,
        {.area = "DEV-34",
         .what = (gpus.value_or(1) > 1 ? fmt::format("{} GPUs are asked for, and ", *gpus)
                                       : "a GPU is asked for, and ") +
                 missing,
         .place = wants_gpu ? fmt::format("--gpus {}", *gpus) : "run.device = \"cuda\"",
         .next = line.command == "plan" ? "--gpu NAME or --gpu-memory SIZE plans for a GPU that is not here"
                                        : "`lmlaunch doctor` has details; --gpus 0 uses the CPU"});
  }
  return {.cuda = false, .note = missing + ": using the CPU; pass --gpus 0 to silence this"};
}

}  // namespace lm
