// The project's own kernels: compiled as C++ (emu/cuda_runtime.h in place of the real one), their threads are
// fibers of the stream's thread. With TWIN_RACES every load and store of theirs goes through the order
// checker: the .cu files are then compiled with -fsanitize=thread and linked without it, so that the calls it
// inserts end here.
#include <sys/mman.h>

#include <cstdio>
#include <mutex>
#include <string>

#include "../twin.h"
#include "cuda_runtime.h"

namespace emu {

std::string short_name(const std::string& pretty) {
  // "... kernel = void (*)(lm::gpu::...)" says nothing; the launcher's arguments do
  const size_t with = pretty.find("[with P");
  return with == std::string::npos ? pretty : "kernel " + pretty.substr(with + 6, 100);
}

void enter(const char* kernel, void* arguments, size_t bytes) {
  // Pointers are aligned words; no size or count is as large as an address.
  constexpr uint64_t kFirst = uint64_t{1} << 40, kLast = uint64_t{1} << 47;
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    uint64_t word = 0;
    memcpy(&word, static_cast<const char*>(arguments) + i, 8);
    if (word < kFirst || word >= kLast) continue;
    void* const p = reinterpret_cast<void*>(word);
    if (twin::device_can_use(p)) {
      void* const place = twin::inside(p);
      memcpy(static_cast<char*>(arguments) + i, &place, 8);
    } else if (msync(reinterpret_cast<void*>(word & ~uint64_t{4095}), 1, MS_ASYNC) == 0) {
      char text[80];
      snprintf(text, sizeof text, "argument bytes %zu hold pointer %#zx, which the device cannot use: ", i,
               static_cast<size_t>(word));
      twin::fault(text + short_name(kernel));
    }
  }
}

cudaError_t enqueue(const char* kernel, const cudaLaunchConfig_t& c, std::function<void()> thread) {
  const dim3 g = c.gridDim, b = c.blockDim;
  const bool grid = g.x > 0 && g.y > 0 && g.y <= 65535 && g.z <= 65535;
  if (!grid || b.x * b.y * b.z == 0 || b.x * b.y * b.z > 1024) return cudaErrorInvalidConfiguration;
  const std::string name = short_name(kernel);
  twin::enqueue(c.stream, twin::Kind::kKernel, name, [=] {
    static std::mutex one;  // the fibers are one set
    const std::lock_guard lock(one);
    run_grid(name.c_str(), g, b, thread);
  });
  return cudaSuccess;
}

}  // namespace emu

extern "C" {
#define TOUCH(n)                            \
  void __tsan_read##n(void* p) {            \
    twin::touched(p, n, false);             \
  }                                         \
  void __tsan_write##n(void* p) {           \
    twin::touched(p, n, true);              \
  }                                         \
  void __tsan_unaligned_read##n(void* p) {  \
    twin::touched(p, n, false);             \
  }                                         \
  void __tsan_unaligned_write##n(void* p) { \
    twin::touched(p, n, true);              \
  }
TOUCH(1) TOUCH(2) TOUCH(4) TOUCH(8) TOUCH(16) void __tsan_read_range(void* p, size_t n) {
  twin::touched(p, static_cast<int64_t>(n), false);
}
void __tsan_write_range(void* p, size_t n) {
  twin::touched(p, static_cast<int64_t>(n), true);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
}
