// A stand-in for <cuda_runtime.h>: .cu files compile as plain C++ and run on the host. The threads of a block
// are fibers (cuda_threads.cpp), streams are queues (cuda_streams.cpp), device memory is the heap, so that
// sanitizers see kernels. Only what this project uses is declared: anything else fails to compile.
//
// Compile a .cu with: -x c++ -include cuda_runtime.h -D__CUDACC__ -D__CUDA_ARCH__=900 (what nvcc predefines).
#pragma once

#include <math.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
// One copy of a block's shared memory (blocks run one after the other), in a section that is filled with
// garbage before each block.
#define __shared__ static __attribute__((section("emu_shared")))

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// ---- Inside a kernel
namespace emu {
uint3 thread_index();
uint3 block_index();
uint3 block_size();
uint3 grid_size();
// What threadIdx.x and its like are: read as an unsigned number.
template <uint3 (*get)(), unsigned uint3::*axis>
struct Axis {
  operator unsigned() const { return get().*axis; }
};
template <uint3 (*get)()>
struct Axes {
  Axis<get, &uint3::x> x;
  Axis<get, &uint3::y> y;
  Axis<get, &uint3::z> z;
};
void sync_threads(const char* file, int line);
enum class Warp { kSync, kIndex, kXor, kUp, kDown, kBallot };
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
}  // namespace emu

inline constexpr emu::Axes<emu::thread_index> threadIdx{};
inline constexpr emu::Axes<emu::block_index> blockIdx{};
inline constexpr emu::Axes<emu::block_size> blockDim{};
inline constexpr emu::Axes<emu::grid_size> gridDim{};
inline constexpr int warpSize = 32;

#define EMU_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()
inline void __syncthreads(EMU_PLACE) {
  emu::sync_threads(file, line);
}
inline void __syncwarp(uint32_t mask = ~0u, EMU_PLACE) {
  emu::warp_call(emu::Warp::kSync, mask, 0, 0, 32, file, line);
}
template <class T>
T __shfl_sync(uint32_t mask, T x, int lane, int width = 32, EMU_PLACE) {
  return emu::shuffle(emu::Warp::kIndex, mask, x, lane, width, file, line);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T x, int lanes, int width = 32, EMU_PLACE) {
  return emu::shuffle(emu::Warp::kXor, mask, x, lanes, width, file, line);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T x, int by, int width = 32, EMU_PLACE) {
  return emu::shuffle(emu::Warp::kUp, mask, x, by, width, file, line);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T x, int by, int width = 32, EMU_PLACE) {
  return emu::shuffle(emu::Warp::kDown, mask, x, by, width, file, line);
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate, EMU_PLACE) {
  return static_cast<uint32_t>(emu::warp_call(emu::Warp::kBallot, mask, predicate != 0, 0, 32, file, line));
}
#undef EMU_PLACE

using std::max;
using std::min;
inline float __fmaf_rn(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
inline double __fma_rn(double a, double b, double c) {
  return __builtin_fma(a, b, c);
}
inline float __fsqrt_rn(float a) {
  return __builtin_sqrtf(a);
}
inline float __int_as_float(int bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
template <class T>
T __ldg(const T* from) {
  return *from;
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

// ---- How kernels and streams are run: set by a test, or by the environment
namespace emu {
// The order of the blocks of a grid and of the threads of a block between two barriers (EMU_ORDER).
enum class Order { kForward, kReverse, kRandom };
// When enqueued work runs (EMU_STREAMS): at once; not before somebody must wait for it; at random.
enum class Streams { kEager, kLazy, kRandom };
struct Settings {
  Order order = Order::kForward;
  Streams streams = Streams::kEager;
  uint32_t seed = 1;
  // Pageable memory: staged, and waited for, as drivers do; or not, as CUDA 12.2 and later allow
  // (EMU_PAGEABLE=async).
  bool pageable_async = false;
  int garbage = 0xFF;  // what fresh device and shared memory holds: 0xFF bytes are NaN and -1
};
Settings& settings();
struct Counts {
  int64_t launches = 0, blocks = 0, threads = 0, barriers = 0, warp_calls = 0;
};
Counts& counts();

// Checks every pointer among a kernel's arguments, and turns those to device memory into the places of its
// bytes.
void enter(const char* kernel, void* arguments, size_t bytes);
// Checks the configuration and puts the kernel into the stream.
cudaError_t enqueue(const char* kernel, const cudaLaunchConfig_t& config, std::function<void()> thread);
// Runs every thread of the grid, then returns; throws std::runtime_error where a kernel breaks the rules.
void run_grid(const char* kernel, dim3 grid, dim3 block, const std::function<void()>& thread);
// Runs what is in the stream, and what that waits for.
void drain(cudaStream_t stream);
}  // namespace emu

template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A&&... arguments) {
  std::tuple<P...> values(static_cast<A&&>(arguments)...);
#if defined(__GNUC__) && !defined(__clang__)
  __builtin_clear_padding(&values);  // or a stale pointer in it would look like an argument
#endif
  emu::enter(__PRETTY_FUNCTION__, &values, sizeof values);
  return emu::enqueue(__PRETTY_FUNCTION__, *config, [kernel, values] { std::apply(kernel, values); });
}
