// Which of a machine's GPUs CUDA shows to a process and in which order, by CUDA's documented rules for
// CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER: the CLI does not link CUDA. Pure.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launcher/machine/survey.h"

namespace lm {

struct VisibleGpus {
  std::vector<GpuFacts> gpus;  // in CUDA's order: the first one computes
  // CUDA numbers by its own rule (FASTEST_FIRST), the cards differ, and numbers choose: then the first one
  // here is the one with the highest peak that we know of.
  bool order_guessed = false;
};

// `cards` in PCI order. The list is a comma list of numbers (indices in the order that `device_order` names),
// "GPU-..." (a prefix of one card's UUID) and "MIG-..." (taken as it is). It ends before its first invalid
// entry; a repeated entry hides everything, as do "" and "-1". Cards without a known UUID are assumed to have
// the requested one.
VisibleGpus visible_gpus(const std::vector<GpuFacts>& cards,
                         const std::optional<std::string>& visible_devices, const std::string& device_order);

}  // namespace lm
