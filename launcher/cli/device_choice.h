// Chooses the executable that computes from --gpus, --ranks, run.device and the machine. Pure.
#pragma once

#include <string>

#include "config/config.h"
#include "launcher/command_line.h"

namespace lm {

struct DeviceFacts {
  int gpus = 0;                // that the kernel driver shows
  int visible = 0;             // of these, visible to a run
  std::string hidden_by = {};  // CUDA_VISIBLE_DEVICES, if it is set
  bool cuda_program = false;   // lmlaunch-cuda was built
  std::string file = {};       // that describes the machine; "": this machine
};

// "no GPU is visible: CUDA_VISIBLE_DEVICES="3" hides the 2 that are there"
std::string all_hidden(const DeviceFacts& facts);

struct DeviceDecision {
  bool cuda = false;
  std::string note;  // explains an unexpected choice; "": none
};

// Throws Error(2) for contradictions, Error(12) if the requested GPUs do not exist.
DeviceDecision decide_device(const CommandLine& line, DeviceChoice configured, const DeviceFacts& facts);

}  // namespace lm
