// Our side of kernels.py: how near to the memory's speed do the model's kernels run? Each is timed on a
// training step's shapes beside a copy (memcpy) of as many bytes as it reads and writes, bf16; beside reading
// alone where it writes nothing. The quickest of interleaved rounds counts: most calls take well under a
// millisecond, and other work of the machine adds milliseconds. A table and a JSON line {kernel, gbps,
// copy_gbps, reads_only} each.
//
//   bench_kernels [threads = 1] [rounds = 50]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/parallel.h"
#include "kernels/cpu_features.h"

namespace {

using namespace lm;

// Shapes of SmolLM2-135M with 1024 tokens.
constexpr int64_t kTokens = 1024, kHidden = 576, kFfn = 1536, kHeads = 9, kHeadDim = 64, kColumns = 8192;

struct Case {
  const char* name;
  int64_t bytes;  // read and written
  std::function<void(StreamView)> run;
  bool reads_only = false;  // beside reading alone: a core copies more bytes in a second than it can read
};

// The sum, so that every byte has to come, asked for before the processor would by itself.
__attribute__((target_clones("avx512f", "avx2", "default"))) uint64_t read_all(const uint64_t* words,
                                                                               int64_t count) {
  constexpr int64_t kAhead = 16384 / 8, kLine = 8;
  uint64_t sum = 0;
  int64_t i = 0;
  for (; i + kLine <= count; i += kLine) {
    __builtin_prefetch(words + i + kAhead);
    for (int64_t j = 0; j < kLine; ++j) sum += words[i + j];
  }
  for (; i < count; ++i) sum += words[i];
  return sum;
}

double seconds(const std::function<void()>& work) {
  const double start = monotonic_seconds();
  work();
  return monotonic_seconds() - start;
}

// A block of memory of bf16 ones (0x3F80); as fp32 it is about 1 too.
struct Buffer {
  std::vector<uint16_t> data;
  explicit Buffer(int64_t n) : data(static_cast<size_t>(n + 32), 0x3F80) {}
  void* line() { return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(data.data()) + 63) / 64 * 64); }
  float* f32() { return static_cast<float*>(line()); }
};

struct Arrays {
  Buffer x{kTokens * kColumns}, y{kTokens * kColumns}, z{kTokens * 2 * kFfn}, weight{kColumns};
  Buffer rstd{2 * kTokens}, dweight{2 * kFfn}, partial{2 * kTokens / 64 * kFfn},
      angles{2 * kTokens * kHeadDim};
  Buffer gradients{2 * kTokens * kColumns}, sums{4 * kTokens};
  std::vector<int32_t> position = std::vector<int32_t>(kTokens), target = std::vector<int32_t>(kTokens, 7);
  std::vector<double> norms = std::vector<double>(kTokens * kColumns / 4096);
};

// What a block does.
std::vector<Case> block_cases(Arrays& a) {
  const Kernels& k = kernels(DeviceType::kCpu);
  const int64_t row = kTokens * kHidden * 2, ffn = kTokens * kFfn * 2;
  const DType t = DType::kBF16;
  return {
      {"rms_norm forward + residual", 4 * row,
       [&](StreamView s) {
         k.rms_norm_forward({.x = a.x.line(),
                             .residual = a.y.line(),
                             .weight = a.weight.line(),
                             .sum = a.x.line(),
                             .out = a.z.line(),
                             .rstd = a.rstd.f32(),
                             .rows = kTokens,
                             .width = kHidden,
                             .x_stride = kHidden,
                             .out_stride = kHidden,
                             .eps = 1e-5f,
                             .dtype = t},
                            s);
       }},
      {"rms_norm backward", 4 * row,
       [&](StreamView s) {
         k.rms_norm_backward({.dy = a.z.line(),
                              .x = a.y.line(),
                              .weight = a.weight.line(),
                              .rstd = a.rstd.f32(),
                              .dresidual = a.x.line(),
                              .dx = a.z.line(),
                              .dweight = a.dweight.f32(),
                              .partial = a.partial.f32(),
                              .rows = kTokens,
                              .width = kHidden,
                              .dy_stride = kHidden,
                              .x_stride = kHidden,
                              .dx_stride = kHidden,
                              .dtype = t},
                             s);
       }},
      {"rope", 2 * row,
       [&](StreamView s) {
         k.rope({.x = a.x.line(),
                 .cos = a.angles.f32(),
                 .sin = a.angles.f32(),
                 .position = a.position.data(),
                 .rows = kTokens,
                 .heads = kHeads,
                 .head_dim = kHeadDim,
                 .x_stride = kHidden,
                 .dtype = t},
                s);
       }},
      {"swiglu forward", 3 * ffn,
       [&](StreamView s) {
         k.gated_forward({.gate_up = a.z.line(), .out = a.x.line(), .rows = kTokens, .ffn = kFfn, .dtype = t},
                         s);
       }},
      {"swiglu backward", 6 * ffn,
       [&](StreamView s) {
         std::memset(a.x.line(), 0, 64);
         k.gated_backward({.gate_up = a.z.line(), .dh = a.x.line(), .rows = kTokens, .ffn = kFfn, .dtype = t},
                          s);
       }},
  };
}

// The head, gradients and LoRA.
std::vector<Case> other_cases(Arrays& a) {
  const Kernels& k = kernels(DeviceType::kCpu);
  const int64_t row = kTokens * kHidden * 2, logits = kTokens * kColumns * 2;
  const DType t = DType::kBF16;
  return {
      {"softmax statistics", logits,
       [&](StreamView s) {
         k.softmax_statistics({.logits = a.x.line(),
                               .target = a.target.data(),
                               .max = a.sums.f32(),
                               .sum = a.sums.f32() + kTokens,
                               .target_logit = a.rstd.f32(),
                               .rows = kTokens,
                               .columns = kColumns,
                               .stride = kColumns,
                               .first_segment = true,
                               .dtype = t},
                              s);
       }},
      {"softmax gradient", 2 * logits,
       [&](StreamView s) {
         k.softmax_gradient({.logits = a.x.line(),
                             .target = a.target.data(),
                             .max = a.sums.f32(),
                             .sum = a.sums.f32() + kTokens,
                             .rows = kTokens,
                             .columns = kColumns,
                             .stride = kColumns,
                             .dtype = t},
                            s);
       }},
      {"accumulate bf16 into fp32", 5 * logits,
       [&](StreamView s) {
         k.accumulate({.to = a.gradients.line(),
                       .from = a.y.line(),
                       .elements = kTokens * kColumns,
                       .to_dtype = DType::kF32,
                       .from_dtype = t},
                      s);
       }},
      {"granule norms fp32", 2 * logits,
       [&](StreamView s) {
         k.granule_norms({.x = a.gradients.line(),
                          .sums = a.norms.data(),
                          .granules = kTokens * kColumns / 4096,
                          .dtype = DType::kF32},
                         s);
       },
       true},
      {"dropout", 2 * row,
       [&](StreamView s) {
         k.dropout({.x = a.x.line(),
                    .out = a.y.line(),
                    .sample = a.target.data(),
                    .position = a.position.data(),
                    .rows = kTokens,
                    .width = kHidden,
                    .key = 5,
                    .p = 0.05f,
                    .dtype = t},
                   s);
       }},
  };
}

}  // namespace

int main(int count, char** words) {
  const int threads = count > 1 ? std::atoi(words[1]) : 1, rounds = count > 2 ? std::atoi(words[2]) : 50;
  const StreamView stream{DeviceType::kCpu, nullptr, threads};
  Arrays a;
  Buffer from(5 * kTokens * kColumns), to(5 * kTokens * kColumns);
  std::printf("kernels against memcpy of the same traffic: %d threads, %s, best of %d\n", threads,
              cpu_level_name(cpu_level()), rounds);
  std::printf("%-28s %10s %12s %12s %10s\n", "kernel", "us", "GB/s", "copy GB/s", "achieved");
  std::vector<Case> cases = block_cases(a);
  for (Case& c : other_cases(a)) cases.push_back(std::move(c));
  for (const Case& c : cases) {
    const auto copy = [&] {
      if (c.reads_only) {
        parallel_for(threads, c.bytes / 8, 4096, [&](int64_t begin, int64_t end) {
          volatile uint64_t kept = read_all(static_cast<const uint64_t*>(from.line()) + begin, end - begin);
          (void)kept;
        });
        return;
      }
      parallel_for(threads, c.bytes / 2, 4096, [&](int64_t begin, int64_t end) {
        std::memcpy(static_cast<char*>(to.line()) + begin, static_cast<char*>(from.line()) + begin,
                    static_cast<size_t>(end - begin));
      });
    };
    double ours = 1e9, copies = 1e9;
    for (int round = -2; round < rounds; ++round) {
      const double copied = seconds(copy), ran = seconds([&] { c.run(stream); });
      if (round < 0) continue;
      copies = std::min(copies, copied);
      ours = std::min(ours, ran);
    }
    const double gbps = static_cast<double>(c.bytes) / ours / 1e9;
    const double copy_gbps = static_cast<double>(c.bytes) / copies / 1e9;
    std::printf("%-28s %10.0f %12.2f %12.2f %9.0f%%\n", c.name, ours * 1e6, gbps, copy_gbps,
                gbps / copy_gbps * 100);
    std::printf("{\"kernel\": \"%s\", \"gbps\": %.3f, \"copy_gbps\": %.3f, \"reads_only\": %s}\n", c.name,
                gbps, copy_gbps, c.reads_only ? "true" : "false");
  }
}
