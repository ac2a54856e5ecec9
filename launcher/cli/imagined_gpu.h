// The GPU that `lmlaunch plan` imagines: a known card, or one given by memory and rates. Pure.
#pragma once

#include <optional>
#include <string>

#include "launcher/command_line.h"
#include "plan/gpu.h"

namespace lm {

// From --gpu, --gpu-memory, --gpu-flops and --gpu-bandwidth; nullopt: none is given. With only a size,
// nothing else of the Gpu is set. Throws Error(2).
std::optional<Gpu> imagined_gpu(const CommandLine& line);

// The figures that a plan for it assumes, with defaults for unknown rates: "RTX 4090: 22.4 GiB, 165 TFLOP/s
// of bf16, 1008 GB/s".
std::string assumptions(const Gpu& gpu);

}  // namespace lm
