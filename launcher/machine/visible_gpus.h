// Which of a machine's GPUs CUDA shows to a process and in which order, by CUDA's documented rules for
// CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER: the door has no CUDA to ask. Pure.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launcher/machine/survey.h"

namespace lm {

struct VisibleGpus {
  std::vector<GpuFacts> gpus;  // in CUDA's order: the first one computes
  // CUDA numbers by a rule of its own (FASTEST_FIRST), the cards differ, and it is numbers that choose: the
  // first one here has the highest peak that we know of.
  bool order_guessed = false;
};

// `cards` in PCI order. The list is a comma list of numbers (which count the cards in the order that
// `device_order` names), "GPU-..." (the beginning of one card's UUID) and "MIG-..." (taken as it is). It ends
// before its first invalid entry; an entry that comes twice hides everything, as do "" and "-1". Cards
// without a known UUID are believed to have the one that is asked for.
VisibleGpus visible_gpus(const std::vector<GpuFacts>& cards,
                         const std::optional<std::string>& visible_devices, const std::string& device_order);

}  // namespace lm
