// The GPU that `lmlaunch plan` imagines: a card by its name, or one of some memory and rates. Pure.
#pragma once

#include <optional>
#include <string>

#include "launcher/command_line.h"
#include "plan/gpu.h"

namespace lm {

// Of --gpu, --gpu-memory, --gpu-flops and --gpu-bandwidth; nullopt: none is given. Of a size alone, a Gpu
// that has nothing else. Throws Error(2).
std::optional<Gpu> imagined_gpu(const CommandLine& line);

// What a plan for it assumes, rates that nobody knows among them: "RTX 4090: 22.4 GiB, 165 TFLOP/s of bf16,
// 1008 GB/s".
std::string assumptions(const Gpu& gpu);

}  // namespace lm
