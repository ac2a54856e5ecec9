// The machine as the plan sees it, filled from what the survey finds; disks are disk_survey.h's. Rates are
// not measured here (0): the rank measures them, the plan replaces what is unknown.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/cuda.h"
#include "launcher/environment.h"
#include "launcher/machine/survey.h"
#include "launcher/machine/visible_gpus.h"
#include "plan/machine.h"

namespace lm {

// What `lmlaunch plan` imagines instead of what is there.
struct Imagined {
  std::optional<Gpu> gpu;  // its memory and, where they are not zero, its name and rates
  std::optional<int64_t> host_bytes;
};

// This machine's GPUs, and those that a run may use.
struct SurveyedGpus {
  CudaVariables cuda;
  GpuSurvey survey;
  VisibleGpus visible;
};
SurveyedGpus survey_visible_gpus();

// `gpus`: those that a run may use, the one that computes first.
Machine survey_machine(const std::vector<GpuFacts>& gpus, const Imagined& imagined = {});

// The GPU that computes, `device` to CUDA, as the plan wants it: NVML's figures for the card of the same UUID
// (the door's plan has them, too), CUDA's own where NVML has none. `note` then says why.
struct ComputingGpu {
  GpuFacts facts;
  std::string note;
};
ComputingGpu computing_gpu(const GpuSurvey& survey, const GpuInfo& device);

// Throws Error(12) for a card that these executables cannot compute on, before anything is loaded.
void require_gpu_code(const Gpu& gpu);

}  // namespace lm
