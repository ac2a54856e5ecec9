// The machine as the plan's input, filled from the survey; disk_survey.h adds the disks. Rates are not
// measured here (0): the rank measures them, and the plan assumes those that are unknown.
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

// What `lmlaunch plan` imagines of a machine.
struct Imagined {
  std::optional<Gpu> gpu;  // its memory and, if not zero, its name and rates
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
Machine survey_machine(const std::vector<GpuFacts>& gpus);
// The same machine with what is imagined.
Machine with_imagined(Machine machine, const Imagined& imagined);

// The GPU that computes, `device` to CUDA, as the plan's input: NVML's figures for the card of the same UUID
// (the CLI's plan has them, too), or CUDA's own if NVML has none; `note` then says why.
struct ComputingGpu {
  GpuFacts facts;
  std::string note;
};
ComputingGpu computing_gpu(const GpuSurvey& survey, const GpuInfo& device);

// Throws Error(12) for a card that these executables have no code for, before anything is loaded.
void require_gpu_code(const Gpu& gpu);

}  // namespace lm
