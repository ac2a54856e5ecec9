// What the GPU launchers share: element types, packs of 16 bytes, launching, and sums over the threads of a
// warp or block in a fixed order (no atomics anywhere: the same input gives the same bits). For .cu files
// alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "base/check_cuda.h"
#include "base/host_device.h"
#include "kernels/kernels.h"

// An address that a kernel has read from memory and follows. The GPU emulator (tests/emulator) has its own.
#ifndef LM_ADDRESS_IN_MEMORY
#define LM_ADDRESS_IN_MEMORY(p) (p)
#endif

namespace lm::gpu {

inline constexpr int kThreads = 256;

// Calls body(T{}) for the element type T of `type`.
template <class Body>
void with_dtype(DType type, const Body& body) {
  const bool fp16 = type == DType::kF16;
  LM_CHECK(type == DType::kF32 || type == DType::kBF16 || fp16,
           std::string("no GPU kernel for ") + dtype_name(type));
  if (type == DType::kF32) return body(float{});
  fp16 ? body(Fp16{}) : body(Bf16{});
}
// The same for the types that gradients are summed in.
template <class Body>
void with_gradient_dtype(DType type, const Body& body) {
  LM_CHECK(type == DType::kF32 || type == DType::kBF16, std::string("no update with ") + dtype_name(type));
  type == DType::kF32 ? body(float{}) : body(Bf16{});
}

// kernel<<<grid, block>>>(arguments...) in the stream, spelt as a call so that any C++ compiler reads it; an
// empty grid is no work.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int block, StreamView stream,
            const Arguments&... arguments) {
  if (grid.x == 0 || grid.y == 0) return;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(block));
  config.stream = static_cast<cudaStream_t>(stream.handle);
  LM_CUDA(cudaLaunchKernelEx(&config, kernel, arguments...));
}
inline unsigned blocks_of(int64_t n, int64_t each) {
  return static_cast<unsigned>((n + each - 1) / each);
}
// Blocks of a grid-stride loop: enough to fill any GPU several times.
inline unsigned stride_blocks(int64_t n) {
  const int64_t blocks = (n + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < 16384 ? blocks : 16384);
}

// n neighbouring elements as one memory access.
template <class T, int n>
struct alignas(sizeof(T) * n) Pack {
  T at[n];
};
template <int n, class T>
__device__ __forceinline__ Pack<T, n> load_pack(const T* from) {
  return *reinterpret_cast<const Pack<T, n>*>(from);
}
template <int n, class T>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, n>& pack) {
  *reinterpret_cast<Pack<T, n>*>(to) = pack;
}
// n neighbours on their way: as words where they fill some, since nvcc takes a bf16 out of its word as soon
// as it can, which waits for the load.
template <class T, int n>
using Loaded = std::conditional_t<n * sizeof(T) % 4 == 0, Pack<uint32_t, n* static_cast<int>(sizeof(T)) / 4>,
                                  Pack<T, n>>;
template <int n, class T>
__device__ __forceinline__ Loaded<T, n> load(const T* from) {
  return *reinterpret_cast<const Loaded<T, n>*>(from);
}
// to_float of each. The upper of two bf16 is a number already, but for a mask.
template <class T, int n>
__device__ __forceinline__ void unpack(const Loaded<T, n>& from, float (&x)[n]) {
  for (int i = 0; i < n; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      x[i] = float_of(from.at[i]);
    } else if constexpr (n % 2 == 0) {
      const uint32_t pair = from.at[i / 2];
      if constexpr (std::is_same_v<T, Fp16>) {
        x[i] = to_float(Fp16{static_cast<uint16_t>(i % 2 == 0 ? pair : pair >> 16)});
        continue;
      }
      x[i] = float_of(i % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u);
    } else {
      x[i] = to_float(from.at[i]);
    }
  }
}
// Stores n neighbours, each as round_to<T> leaves it. nvcc has an instruction that rounds two to bf16, with
// the same bits but for a NaN, 0x7FFF, of which the mask makes 0x7FC0: five instructions for two numbers
// instead of thirteen. (GPUs before 8.0 have none, and the GPU emulator's compiler reads the other half.)
template <class T, int n>
__device__ __forceinline__ void store_rounded(T* to, const float (&x)[n]) {
#if defined(__NVCC__) && (!defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800)
  if constexpr (std::is_same_v<T, Bf16> && n % 2 == 0) {
    Pack<uint32_t, n / 2> pairs;  // the first of two is the low half
    LM_UNROLL
    for (int i = 0; i < n; i += 2) {
      uint32_t pair;
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x[i + 1]), "f"(x[i]));
      if (x[i] != x[i]) pair &= 0xFFFFFFC0u;
      if (x[i + 1] != x[i + 1]) pair &= 0xFFC0FFFFu;
      pairs.at[i / 2] = pair;
    }
    *reinterpret_cast<Pack<uint32_t, n / 2>*>(to) = pairs;
    return;
  } else
#endif
  {
    Pack<T, n> r;
    for (int i = 0; i < n; ++i) r.at[i] = round_to<T>(x[i]);
    store_pack<n>(to, r);
  }
}
// Elements of T in 16 bytes.
template <class T>
inline constexpr int kPack = 16 / static_cast<int>(sizeof(T));
// Whether every pointer (null is fine) lies at a multiple of `bytes`.
template <class... Pointers>
bool aligned(size_t bytes, Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % bytes == 0) && ...);
}

// The sum (maximum) over the 32 threads of a warp; every thread gets it.
__device__ __forceinline__ float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, x, step);
    x = x < other ? other : x;
  }
  return x;
}
// The same over kThreads threads of a block. Every thread of the block must call.
static __device__ __forceinline__ float block_sum(float x) {
  __shared__ float warps[kThreads / 32];
  x = warp_sum(x);
  __syncthreads();  // the previous call's readers are done
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
  for (int w = 0; w < kThreads / 32; ++w) sum += warps[w];
  return sum;
}
// The sum over the kLanes threads that share a vector: a warp, or for vectors above kWarpWidth the block.
inline constexpr int64_t kWarpWidth = 1024;
template <int kLanes>
__device__ __forceinline__ float vector_sum(float x) {
  if constexpr (kLanes == 32) return warp_sum(x);
  return block_sum(x);
}
static __device__ __forceinline__ float block_max(float x) {
  __shared__ float warps[kThreads / 32];
  x = warp_max(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  float largest = warps[0];
  for (int w = 1; w < kThreads / 32; ++w) largest = largest < warps[w] ? warps[w] : largest;
  return largest;
}

// sums[j] = sum of partial[b, j] over b in order.
static __global__ void sum_partials(const float* partial, int64_t blocks, int64_t width, float* sums) {
  const int64_t j = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (j >= width) return;
  float sum = blocks > 0 ? partial[j] : 0.f;
#pragma unroll 16  // loads at a time: the additions wait for each other
  for (int64_t b = 1; b < blocks; ++b) sum += partial[b * width + j];
  sums[j] = sum;
}

}  // namespace lm::gpu
