// XXH3-64 of chunks of 8 KiB that lie on the GPU: a warp per chunk, eight bytes per thread and load. Of a
// chunk's 128 stripes of eight numbers the hash adds 16 to its eight accumulators, scrambles these, and goes
// on; within 16 the order of sums does not matter. A warp takes four stripes at once: thread t has number t %
// 8 of stripes t / 8, t / 8 + 4, ... Constants and steps: the specification of XXH3 (xxHash 0.8).
#include "base/checksum.h"
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"

namespace lm::gpu {
namespace {

constexpr int kChunkWords = static_cast<int>(kChecksumChunk / 8);
constexpr int kRounds = 8, kStripes = 16,
              kLoads = kStripes / 4;  // per chunk, per round, per thread and round
static_assert(kRounds * kStripes * 8 == kChunkWords);

constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D,
                   kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F,
                   kPrime64_3 = 0x165667B19E3779F9, kPrime64_4 = 0x85EBCA77C2B2AE63,
                   kPrime64_5 = 0x27D4EB2F165667C5, kAvalanche = 0x165667919E3779F9;

// The secret that the hash has without a seed, as little-endian words.
__device__ __constant__ const uint64_t kSecret[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb,
    0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088,
    0x4ef90da297486471, 0xd8acdea946ef1938, 0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a,
    0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};

// Eight bytes of the secret from byte `at` on.
__device__ __forceinline__ uint64_t secret_at(int at) {
  const uint64_t low = kSecret[at / 8];
  const int shift = at % 8 * 8;
  return shift == 0 ? low : low >> shift | kSecret[at / 8 + 1] << (64 - shift);
}

__device__ __forceinline__ uint64_t first_accumulator(int number) {
  switch (number) {
    case 0:
      return kPrime32_3;
    case 1:
      return kPrime64_1;
    case 2:
      return kPrime64_2;
    case 3:
      return kPrime64_3;
    case 4:
      return kPrime64_4;
    case 5:
      return kPrime32_2;
    case 6:
      return kPrime64_5;
    default:
      return kPrime32_1;
  }
}

// Word `index` of the chunk at `bytes`, of which `left` bytes count.
template <bool kWhole>
__device__ __forceinline__ uint64_t word_at(const std::byte* bytes, int index, int64_t left) {
  if constexpr (kWhole) return reinterpret_cast<const uint64_t*>(bytes)[index];
  uint64_t word = 0;
  for (int i = 0; i < 8; ++i) {
    if (index * 8 + i < left) word |= static_cast<uint64_t>(bytes[index * 8 + i]) << (8 * i);
  }
  return word;
}

template <bool kWhole>
__device__ __forceinline__ uint64_t sum_of(const std::byte* bytes, int64_t left) {
  const int lane = static_cast<int>(threadIdx.x % 32), number = lane % 8, stripe = lane / 8;
  uint64_t key[kLoads];
  for (int k = 0; k < kLoads; ++k) key[k] = kSecret[stripe + 4 * k + number];
  const uint64_t scramble = kSecret[kStripes + number];
  uint64_t accumulator = first_accumulator(number);
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    // The chunk's last stripe has a place of its own in the secret.
    if (round == kRounds - 1 && stripe == 3) key[kLoads - 1] = secret_at(121 + 8 * number);
    uint64_t plain = 0, product = 0;
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const uint64_t word = word_at<kWhole>(bytes, (round * kLoads + k) * 32 + lane, left);
      const uint64_t mixed = word ^ key[k];
      plain += word;
      product += (mixed & 0xFFFFFFFFu) * (mixed >> 32);
    }
    // A number is added to its neighbour's accumulator, its product to its own.
    uint64_t sum = product + __shfl_xor_sync(0xFFFFFFFFu, plain, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 8);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 16);
    accumulator += sum;
    if (round < kRounds - 1) accumulator = (accumulator ^ accumulator >> 47 ^ scramble) * kPrime32_1;
  }
  // Pairs of accumulators are multiplied to 128 bits, and folded.
  const uint64_t mine = accumulator ^ secret_at(11 + 8 * number);
  const uint64_t other = __shfl_xor_sync(0xFFFFFFFFu, mine, 1);
  uint64_t sum = mine * other ^ __umul64hi(mine, other);
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 4);
  sum += static_cast<uint64_t>(kChecksumChunk) * kPrime64_1;
  sum = (sum ^ sum >> 37) * kAvalanche;
  return sum ^ sum >> 32;
}

__global__ void checksums(ChunkSums a) {
  const int64_t chunk = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const int64_t left = a.size - chunk * kChecksumChunk;
  if (left <= 0) return;  // whole warps
  const std::byte* bytes = a.bytes + chunk * kChecksumChunk;
  const uint64_t sum = left >= kChecksumChunk ? sum_of<true>(bytes, left) : sum_of<false>(bytes, left);
  if (threadIdx.x % 32 == 0) a.sums[chunk] = sum;
}

}  // namespace

void chunk_sums(const ChunkSums& a, StreamView stream) {
  launch(checksums, blocks_of(a.size, kChecksumChunk * (kThreads / 32)), kThreads, stream, a);
}

}  // namespace lm::gpu
