// A rule whose state is in codes, on the GPU: a thread has an element, a block of threads the 256 that share
// a scale. Compiled with -fmad=false: the CPU's bits.
#include "kernels/code_formula.h"
#include "kernels/cuda_launchers.h"
#include "kernels/update_weights.cuh"

namespace lm::gpu {
namespace {

static_assert(kThreads == kCodeBlock);

static __device__ const auto kSigned = make_table<CodeMap::kSigned8>();
static __device__ const auto kUnsigned = make_table<CodeMap::kUnsigned8>();
static __device__ const auto kSigned4 = make_table<CodeMap::kSigned4>();
static __device__ const auto kUnsigned4 = make_table<CodeMap::kUnsigned4>();
static __device__ const auto kFloat = make_table<CodeMap::kFloat8>();
template <CodeMap map>
__device__ __forceinline__ const auto& table() {
  if constexpr (map == CodeMap::kSigned8) {
    return kSigned;
  } else if constexpr (map == CodeMap::kUnsigned8) {
    return kUnsigned;
  } else if constexpr (map == CodeMap::kSigned4) {
    return kSigned4;
  } else if constexpr (map == CodeMap::kUnsigned4) {
    return kUnsigned4;
  } else {
    return kFloat;
  }
}

// Device code can ask neither the rule's array nor functions of the host.
template <class R, int s>
constexpr CodeMap kCodeMap = R::kCodes[s];
template <CodeMap map>
constexpr int kCodeBits = code_bits(map);
template <CodeMap map>
constexpr int64_t kScaled = code_block(map);  // elements

// The largest of the threads whose elements share a scale. Every thread of the block must call.
template <CodeMap map>
__device__ __forceinline__ float largest_of_block(float x) {
  if constexpr (kScaled<map> == kCodeBlock) return block_max(x);
  constexpr int kWarps = kScaled<map> / 32;
  __shared__ float warps[kThreads / 32];
  x = warp_max(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  const int first = threadIdx.x / 32 / kWarps * kWarps;
  float largest = warps[first];
  for (int w = 1; w < kWarps; ++w) largest = largest < warps[first + w] ? warps[first + w] : largest;
  return largest;
}

// One state after another, s to the last: its value from its code, and back.
template <class R, int s>
__device__ __forceinline__ void read_states(const RuleUpdate& a, int64_t i, float* state) {
  if constexpr (s < kStateCount<R>) {
    constexpr CodeMap map = kCodeMap<R, s>;
    const uint8_t code =
        kCodeBits<map> == 4 ? (a.codes[s][i / 2] >> (i % 2 == 0 ? 4 : 0)) & 15 : a.codes[s][i];
    state[s] = table<map>().value[code] * static_cast<const float*>(a.state[s])[i / kScaled<map>];
    read_states<R, s + 1>(a, i, state);
  }
}
template <class R, int s>
__device__ __forceinline__ void write_states(const RuleUpdate& a, int64_t i, const float* state) {
  if constexpr (s < kStateCount<R>) {
    constexpr CodeMap map = kCodeMap<R, s>;
    const float x = coded_state(state[s]), largest = largest_of_block<map>(magnitude(x));
    const auto code = nearest_code<map>(table<map>(), over_scale<map>(x, code_factor<map>(largest)));
    if constexpr (kCodeBits<map> == 4) {
      const auto next = __shfl_xor_sync(0xFFFFFFFFu, code, 1);
      if (i % 2 == 0) a.codes[s][i / 2] = static_cast<uint8_t>(code << 4 | next);
    } else {
      a.codes[s][i] = static_cast<uint8_t>(code);
    }
    if (i % kScaled<map> == 0) static_cast<float*>(a.state[s])[i / kScaled<map>] = code_scale<map>(largest);
    write_states<R, s + 1>(a, i, state);
  }
}

template <class R, class G, MasterForm form>
__global__ void update_blocks(RuleUpdate a, R rule) {
  if (skipped(a)) return;
  const float scale = gradient_scale(a);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kCodeBlock;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kCodeBlock; first < a.elements; first += step) {
    const int64_t i = first + threadIdx.x;
    float state[kStateCount<R>];
    read_states<R, 0>(a, i, state);
    Pack<float, 1> p = load_weights<form, 1>(a, i);
    R::update(rule, to_float(static_cast<const G*>(a.gradient)[i]) * scale, state, p.at[0]);
    p.at[0] = one_nan(p.at[0]);
    store_weights<form, 1>(a, i, p);
    write_states<R, 0>(a, i, state);  // its maximum waits for all threads to have read the scale
  }
}

}  // namespace

void update_coded(const RuleUpdate& a, StreamView stream) {
  LM_CHECK(a.elements % kCodeBlock == 0, "update: coded elements are no multiple of 256");
  Rules::with(a.rule.id, [&](auto type) {
    using R = typename decltype(type)::type;
    if constexpr (kIsCoded<R>) {
      with_gradient_dtype(a.gradient_dtype, [&](auto gradient) {
        with_form<R>(a.form, [&](auto form) {
          launch(update_blocks<R, decltype(gradient), decltype(form)::value>, stride_blocks(a.elements),
                 kThreads, stream, a, a.rule.as<R>());
        });
      });
    } else {
      LM_CHECK(false, "update: codes of a rule that has none");
    }
  });
}

}  // namespace lm::gpu
