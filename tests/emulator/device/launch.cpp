// Launches of the project's own kernels: arguments and configuration are checked, then the grid is work in a
// stream.
#include <sys/mman.h>

#include <cstdio>
#include <mutex>
#include <string>

#include "../emulator.h"
#include "grid.h"
#include "names.h"

namespace emulator::simt {
void enter(const void* kernel, void* arguments, size_t bytes) {
  // Pointers are aligned words; no size or count is as large as an address.
  constexpr uint64_t kFirst = uint64_t{1} << 40, kLast = uint64_t{1} << 47;
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    uint64_t word = 0;
    memcpy(&word, static_cast<const char*>(arguments) + i, 8);
    if (word < kFirst || word >= kLast) continue;
    void* const p = reinterpret_cast<void*>(word);
    if (device_can_use(p)) {
      void* const bytes_of_it = inside(p);
      memcpy(static_cast<char*>(arguments) + i, &bytes_of_it, 8);
    } else if (msync(reinterpret_cast<void*>(word & ~uint64_t{4095}), 1, MS_ASYNC) == 0) {
      char text[80];
      snprintf(text, sizeof text, "argument bytes %zu hold pointer %#zx, which the device cannot use: ", i,
               static_cast<size_t>(word));
      fault(text + kernel_name(kernel));
    }
  }
}

cudaError_t enqueue(const void* kernel, const cudaLaunchConfig_t& c, std::function<void()> thread) {
  const dim3 g = c.gridDim, b = c.blockDim;
  const bool grid = g.x > 0 && g.x <= 2147483647u && g.y > 0 && g.y <= 65535 && g.z > 0 && g.z <= 65535;
  const uint64_t threads = uint64_t{b.x} * b.y * b.z;
  if (!grid || threads == 0 || threads > 1024 || b.z > 64) return cudaErrorInvalidConfiguration;
  const std::string name = kernel_name(kernel);
  emulator::enqueue(c.stream, Kind::kKernel, name, [=] {
    static std::mutex one;  // fibers and pages are one set
    const std::lock_guard lock(one);
    const Accesses accesses;
    run_grid(name.c_str(), g, b, thread);
  });
  return cudaSuccess;
}

}  // namespace emulator::simt
