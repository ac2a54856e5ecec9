// What the plan knows of a graphics card: by its name, else by what NVML says of it; and whether these
// executables hold code for it. Pure. Sizes in bytes, rates per second; 0: not known.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lm {

// As NVML and CUDA write it: 8.6, 12.0. 0.0: not known.
struct ComputeCapability {
  int major = 0, minor = 0;
  bool known() const { return major > 0; }
  std::string text() const { return std::to_string(major) + "." + std::to_string(minor); }
  bool operator==(const ComputeCapability&) const = default;
};

struct Gpu {
  std::string name;
  int64_t memory_bytes = 0;  // total
  double bf16_flops = 0;     // dense peak of 16-bit products; before 8.0 of fp16 alone
  double fp32_flops = 0;
  double bandwidth = 0;       // bytes/s
  int64_t free_bytes = 0;     // now, before our process has a context
  double link_bandwidth = 0;  // to host memory, bytes/s each way
  int processors = 0;         // streaming multiprocessors
  double peer_bandwidth = 0;  // to other GPUs of the machine, bytes/s each way
  ComputeCapability capability = {};
};

// What NVML says of a card beside its name; 0 where it does not.
struct GpuFigures {
  ComputeCapability capability = {};
  int cores = 0;                            // CUDA cores
  int clock_mhz = 0, memory_clock_mhz = 0;  // the largest
  int bus_bits = 0;                         // of the memory
};

// Dense peaks and sizes of known GPUs by (part of) their name, in any case; all zero but the name when
// unknown.
Gpu built_in_gpu(const std::string& name);

// Names under which built_in_gpu knows a card.
std::vector<std::string> built_in_gpu_names();

// The same, and for other names the peaks of the architecture with the card's own numbers of cores, clocks
// and bus.
Gpu gpu_of(const std::string& name, const GpuFigures& figures);

// Why these executables cannot compute on a card of this capability, with what would help; "" if they can, or
// nobody knows. `code`: the architectures that they hold, as CMake is told ("80-real,120": machine code
// of 8.0, and of 12.0 with PTX for what comes after it); "": no GPU code at all, which is another matter.
struct GpuObstacle {
  std::string what, next;
};
GpuObstacle gpu_obstacle(const ComputeCapability& capability, const std::string& code);
// The GPU code that this program has.
std::string gpu_code();

}  // namespace lm
