// A stand-in for <cuda_runtime.h>: .cu files compile as plain C++ and run on the host. The threads of a block
// are fibers (threads.cpp), a launch is work in a stream of the stand-in runtime (launch.cpp), and every load
// and store is seen (access.cpp). Only what this project uses is declared: anything else fails to compile.
//
// Compile a .cu with: -x c++ -include cuda_runtime.h -D__CUDACC__ -D__CUDA_ARCH__=900 (what nvcc predefines)
// -fsanitize=thread, and link without that.
#pragma once

#include <math.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
// A kernel's arguments have the addresses of the bytes; those that lie in memory itself are of the device.
namespace emulator {
void* inside(const void* p);
}
#define LM_ADDRESS_IN_MEMORY(p) emulator::inside(p)
// One copy of a block's shared memory (blocks run one after the other), in a section that is filled with
// garbage before each block.
#define __shared__ static __attribute__((section("emulator_shared")))

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// ---- Inside a kernel
namespace emulator::simt {

enum class Place : uint8_t { kThread, kBlock, kBlockSize, kGridSize };
// gnu::const: it never changes in a kernel, so that loops need not ask again.
[[gnu::const]] unsigned place(Place what, int axis);
// What threadIdx.x and its like are: read as an unsigned number.
template <Place what, int axis>
struct Axis {
  operator unsigned() const { return place(what, axis); }
};
template <Place what>
struct Axes {
  Axis<what, 0> x;
  Axis<what, 1> y;
  Axis<what, 2> z;
};

void sync_threads(const char* file, int line);
enum class Warp : uint8_t { kSync, kIndex, kXor, kUp, kDown, kBallot };
uint64_t warp_call(Warp what, uint32_t mask, uint64_t value, int parameter, int width, const char* file,
                   int line);
template <class T>
T shuffle(Warp what, uint32_t mask, T value, int parameter, int width, const char* file, int line) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = warp_call(what, mask, bits, parameter, width, file, line);
  memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace emulator::simt

inline constexpr emulator::simt::Axes<emulator::simt::Place::kThread> threadIdx{};
inline constexpr emulator::simt::Axes<emulator::simt::Place::kBlock> blockIdx{};
inline constexpr emulator::simt::Axes<emulator::simt::Place::kBlockSize> blockDim{};
inline constexpr emulator::simt::Axes<emulator::simt::Place::kGridSize> gridDim{};
inline constexpr int warpSize = 32;

#define EMULATOR_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()
inline void __syncthreads(EMULATOR_CALLER) {
  emulator::simt::sync_threads(file, line);
}
inline void __syncwarp(uint32_t mask = ~0u, EMULATOR_CALLER) {
  emulator::simt::warp_call(emulator::simt::Warp::kSync, mask, 0, 0, 32, file, line);
}
template <class T>
T __shfl_sync(uint32_t mask, T x, int lane, int width = 32, EMULATOR_CALLER) {
  return emulator::simt::shuffle(emulator::simt::Warp::kIndex, mask, x, lane, width, file, line);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T x, int lanes, int width = 32, EMULATOR_CALLER) {
  return emulator::simt::shuffle(emulator::simt::Warp::kXor, mask, x, lanes, width, file, line);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T x, int by, int width = 32, EMULATOR_CALLER) {
  return emulator::simt::shuffle(emulator::simt::Warp::kUp, mask, x, by, width, file, line);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T x, int by, int width = 32, EMULATOR_CALLER) {
  return emulator::simt::shuffle(emulator::simt::Warp::kDown, mask, x, by, width, file, line);
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate, EMULATOR_CALLER) {
  return static_cast<uint32_t>(
      emulator::simt::warp_call(emulator::simt::Warp::kBallot, mask, predicate != 0, 0, 32, file, line));
}
#undef EMULATOR_CALLER
inline int __popc(uint32_t x) {
  return __builtin_popcount(x);
}

using std::max;
using std::min;
inline float __fmaf_rn(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
inline double __fma_rn(double a, double b, double c) {
  return __builtin_fma(a, b, c);
}
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline double __dsqrt_rn(double a) {
  return __builtin_sqrt(a);
}
inline float __fsqrt_rn(float a) {
  return __builtin_sqrtf(a);
}
inline float __int_as_float(int bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// ---- What a launch needs (host); the runtime's own functions are the stand-in libcudart's.
enum cudaError_t : int { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
using cudaStream_t = struct CUstream_st*;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  void* attrs = nullptr;
  unsigned numAttrs = 0;
};

namespace emulator::simt {
// Checks every pointer among a kernel's arguments, and turns those to device memory into the places of its
// bytes.
void enter(const void* kernel, void* arguments, size_t bytes);
// Checks the configuration and puts the kernel into the stream.
cudaError_t enqueue(const void* kernel, const cudaLaunchConfig_t& config, std::function<void()> thread);
#define EMULATOR_UNSEEN __attribute__((no_sanitize("thread")))
template <class... P, size_t... i>
EMULATOR_UNSEEN void call(void (*kernel)(P...), const std::tuple<P...>& values, std::index_sequence<i...>) {
  kernel(std::get<i>(values)...);
}
}  // namespace emulator::simt

template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A&&... arguments) {
  std::tuple<P...> values(static_cast<A&&>(arguments)...);
  __builtin_clear_padding(&values);  // or a stale pointer in it would look like an argument
  emulator::simt::enter(reinterpret_cast<const void*>(kernel), &values, sizeof values);
  // Unseen: these are not the kernel's accesses.
  return emulator::simt::enqueue(reinterpret_cast<const void*>(kernel), *config,
                                 [kernel, values]() EMULATOR_UNSEEN {
                                   emulator::simt::call(kernel, values, std::index_sequence_for<P...>{});
                                 });
}
