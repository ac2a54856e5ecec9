#include "launcher/cli/imagined_gpu.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/bytes.h"
#include "base/error.h"
#include "config/nearest.h"
#include "plan/cost_model.h"

namespace lm {
namespace {

// "RTX-4090" needs no quotes in a shell.
Gpu named(const std::string& asked) {
  Gpu gpu = built_in_gpu(asked);
  if (gpu.memory_bytes > 0) return gpu;
  std::string spaced = asked;
  std::ranges::replace(spaced, '-', ' ');
  gpu = built_in_gpu(spaced);
  if (gpu.memory_bytes > 0) return gpu;
  const auto hit = nearest(spaced, built_in_gpu_names());
  throw usage_error(fmt::format("--gpu {}: no card of this name is known{}", asked,
                                hit ? fmt::format("; did you mean {}?", *hit) : ""),
                    "name another, or describe it with --gpu-memory, --gpu-flops and --gpu-bandwidth");
}

}  // namespace

std::optional<Gpu> imagined_gpu(const CommandLine& line) {
  const auto memory = line.bytes("--gpu-memory"), bandwidth = line.bytes("--gpu-bandwidth");
  const auto tflops = line.number("--gpu-flops");
  const auto name = line.value("--gpu");
  if (!name && !memory && !tflops && !bandwidth) return std::nullopt;
  Gpu gpu = name ? named(*name) : Gpu{};
  if (memory) gpu.memory_bytes = *memory;
  if (gpu.memory_bytes == 0)
    throw usage_error("--gpu-flops and --gpu-bandwidth describe a card of unknown memory",
                      "give --gpu-memory SIZE, or --gpu NAME");
  if (tflops && *tflops <= 0)
    throw usage_error("--gpu-flops: not above 0", "give TFLOP/s of dense bf16 products");
  if (tflops) gpu.bf16_flops = *tflops * 1e12;
  if (bandwidth) gpu.bandwidth = static_cast<double>(*bandwidth);
  if (!name && (tflops || bandwidth)) gpu.name = "a GPU that is described";
  return gpu;
}

std::string assumptions(const Gpu& gpu) {
  const auto rate = [](double known, double assumed, double unit, const char* text) {
    return fmt::format("{:.4g} {}{}", (known > 0 ? known : assumed) / unit, text,
                       known > 0 ? "" : " (assumed)");
  };
  const bool fp16 = gpu.capability.known() && gpu.capability.major < 8;  // it has no bf16
  return fmt::format(
      "{}: {}, {}, {}", gpu.name.empty() ? "a GPU" : gpu.name, format_bytes(gpu.memory_bytes),
      rate(gpu.bf16_flops, kAssumedGpuBF16, 1e12, fp16 ? "TFLOP/s of fp16" : "TFLOP/s of bf16"),
      rate(gpu.bandwidth, kAssumedGpuBandwidth, 1e9, "GB/s"));
}

}  // namespace lm
