// Which executable computes: the decision from --gpus, --ranks, run.device and what the machine has. Pure.
#pragma once

#include <string>

#include "config/config.h"
#include "launcher/command_line.h"

namespace lm {

struct DeviceFacts {
  int gpus = 0;                // that the kernel's driver shows
  int visible = 0;             // of these, to a run
  std::string hidden_by = {};  // CUDA_VISIBLE_DEVICES's value, when it is set
  bool cuda_program = false;   // lmlaunch-cuda was built
};

// "no GPU is visible: CUDA_VISIBLE_DEVICES="3" hides the 2 that are there"
std::string all_hidden(const DeviceFacts& facts);

struct DeviceDecision {
  bool cuda = false;
  std::string note;  // why it is not what one might expect; "" when there is nothing to say
};

// Throws Error(2) for contradictions, Error(12) when GPUs are asked for by name or number and cannot be had.
DeviceDecision decide_device(const CommandLine& line, DeviceChoice configured, const DeviceFacts& facts);

}  // namespace lm
