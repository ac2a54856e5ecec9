// Our side of adamw.py: how much of the memory's speed does AdamW reach? Its ceiling is a loop that reads and
// writes the same arrays and computes next to nothing. Both run in turn, on 1 and 2 threads; medians of the
// rounds, as a table and a JSON line {form, threads, gbps, ceiling_gbps, achieved} each. And adamw_8bit
// beside adamw, of a bf16 weight with a split master: {rule, threads, ms, plain_ms, speedup}.
//
//   bench_adamw [million elements = 16] [rounds = 9]
//   bench_adamw serve THREADS [million elements = 16]    prints "ready", then per line of input one fp32 pass
//                                                        and its JSON line {ms}
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "base/arena.h"
#include "base/clock.h"
#include "base/parallel.h"
#include "kernels/cpu_features.h"

namespace {

using namespace lm;

#if defined(__x86_64__)
#define FOR_EVERY_LEVEL __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define FOR_EVERY_LEVEL
#endif

// 4 arrays read, 3 of them written back.
FOR_EVERY_LEVEL void twin_fp32(int64_t n, const float* g, float* m, float* v, float* p) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    m[i] += g[i];
    v[i] += g[i];
    p[i] += g[i];
  }
}
// 5 arrays read, 4 of them written back.
FOR_EVERY_LEVEL void twin_split(int64_t n, const uint16_t* g, float* m, float* v, uint16_t* w,
                                uint16_t* low) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const float x = static_cast<float>(static_cast<int16_t>(g[i]));
    m[i] += x;
    v[i] += x;
    w[i] = static_cast<uint16_t>(w[i] ^ g[i]);
    low[i] = static_cast<uint16_t>(low[i] + g[i]);
  }
}

// In huge pages, as the program's arenas are.
template <class T>
class Array {
 public:
  Array(size_t n, T value) : memory_(DeviceType::kCpu, static_cast<int64_t>(n * sizeof(T))), size_(n) {
    fill(value);
  }
  T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  size_t size() const { return size_; }
  T& operator[](size_t i) const { return data()[i]; }
  void fill(T value) const { std::fill_n(data(), size_, value); }

 private:
  Memory memory_;
  size_t size_;
};

struct Arrays {
  Array<float> g32, m, v, p;
  Array<uint16_t> g16, w, low;
  explicit Arrays(size_t n)
      : g32(n, 0.01f), m(n, 0.01f), v(n, 0.01f), p(n, 1.f), g16(n, 0x3C00), w(n, 0x3F80), low(n, 0) {}
};

RuleUpdate arguments(Arrays& a, bool split) {
  return {.rule = AdamW{.one_minus_beta1 = 0.1f,
                        .beta2 = 0.999f,
                        .one_minus_beta2 = 0.001f,
                        .step_size = 1e-5f,
                        .eps = 1e-8f,
                        .decay = 0.99999f},
          .gradient = split ? static_cast<const void*>(a.g16.data()) : a.g32.data(),
          .weight = split ? static_cast<void*>(a.w.data()) : a.p.data(),
          .master = split ? a.low.data() : nullptr,
          .state = {a.m.data(), a.v.data()},
          .elements = static_cast<int64_t>(a.m.size()),
          .gradient_dtype = split ? DType::kBF16 : DType::kF32,
          .weight_dtype = split ? DType::kBF16 : DType::kF32,
          .form = split ? MasterForm::kSplit : MasterForm::kWeight};
}

// The same weights with coded state.
RuleUpdate coded_arguments(Arrays& a, std::vector<Array<uint8_t>>& codes, std::vector<Array<float>>& scales) {
  RuleUpdate out = arguments(a, true);
  out.rule = AdamW8bit{out.rule.as<AdamW>()};
  for (size_t s = 0; s < codes.size(); ++s) {
    out.codes[s] = codes[s].data();
    out.state[s] = scales[s].data();
  }
  return out;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

template <class Work>
double seconds(const Work& work) {
  const double start = monotonic_seconds();
  work();
  return monotonic_seconds() - start;
}

void serve(int64_t n, int threads) {
  Arrays a(static_cast<size_t>(n));
  const RuleUpdate args = arguments(a, false);
  const StreamView stream{DeviceType::kCpu, nullptr, threads};
  std::printf("ready\n");
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    const double s = seconds([&] { kernels(DeviceType::kCpu).update(args, stream); });
    std::printf("{\"ms\": %.6f}\n", s * 1e3);
    std::fflush(stdout);
  }
}

void compare_coded(Arrays& a, int64_t n, int rounds) {
  const auto elements = static_cast<size_t>(n);
  std::vector<Array<uint8_t>> codes;
  std::vector<Array<float>> scales;
  for (int s = 0; s < 2; ++s) {
    codes.emplace_back(elements, static_cast<uint8_t>(200));
    scales.emplace_back(elements / kCodeBlock, 0.01F);
  }
  // Gradients of a model's kind, so that codes differ.
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 0.01F);
  for (int64_t i = 0; i < n; ++i) {
    const float x = normal(random);
    uint32_t bits = 0;
    std::memcpy(&bits, &x, 4);
    a.g16[static_cast<size_t>(i)] = static_cast<uint16_t>(bits >> 16);
  }
  const RuleUpdate plain = arguments(a, true), coded = coded_arguments(a, codes, scales);
  for (const int threads : {1, 2}) {
    const StreamView stream{DeviceType::kCpu, nullptr, threads};
    std::vector<double> of_plain, of_coded, ratios;
    for (int round = 0; round <= rounds; ++round) {
      const double p = seconds([&] { kernels(DeviceType::kCpu).update(plain, stream); });
      const double c = seconds([&] { kernels(DeviceType::kCpu).update(coded, stream); });
      if (round == 0) continue;
      of_plain.push_back(p), of_coded.push_back(c), ratios.push_back(p / c);
    }
    const double speedup = median(ratios);
    std::printf("adamw_8bit, %d threads: %.2f ms, adamw %.2f ms, %.2fx\n", threads, median(of_coded) * 1e3,
                median(of_plain) * 1e3, speedup);
    std::printf(
        "{\"rule\": \"adamw_8bit\", \"threads\": %d, \"ms\": %.3f, \"plain_ms\": %.3f, \"speedup\": %.4f}\n",
        threads, median(of_coded) * 1e3, median(of_plain) * 1e3, speedup);
  }
}

}  // namespace

int main(int count, char** words) {
  if (count > 2 && std::string(words[1]) == "serve") {
    serve((count > 3 ? std::atoll(words[3]) : 16) << 20, std::atoi(words[2]));
    return 0;
  }
  const int64_t n = (count > 1 ? std::atoll(words[1]) : 16) << 20;
  const int rounds = count > 2 ? std::atoi(words[2]) : 9;
  Arrays a(static_cast<size_t>(n));
  std::printf("AdamW against a loop with the same memory traffic: %lld Mi elements, %s, medians of %d\n",
              static_cast<long long>(n >> 20), cpu_level_name(cpu_level()), rounds);
  std::printf("%-28s %8s %14s %14s %10s\n", "form", "threads", "AdamW GB/s", "ceiling GB/s", "achieved");
  for (bool split : {false, true}) {
    const double bytes = static_cast<double>(n) * (split ? 2 + 2 * 8 + 2 * 4 : 4 + 2 * 12);
    for (int threads : {1, 2}) {
      const StreamView stream{DeviceType::kCpu, nullptr, threads};
      const auto twin = [&] {
        parallel_for(threads, n, 1, [&](int64_t begin, int64_t end) {
          if (split) {
            twin_split(end - begin, &a.g16[static_cast<size_t>(begin)], &a.m[static_cast<size_t>(begin)],
                       &a.v[static_cast<size_t>(begin)], &a.w[static_cast<size_t>(begin)],
                       &a.low[static_cast<size_t>(begin)]);
          } else {
            twin_fp32(end - begin, &a.g32[static_cast<size_t>(begin)], &a.m[static_cast<size_t>(begin)],
                      &a.v[static_cast<size_t>(begin)], &a.p[static_cast<size_t>(begin)]);
          }
        });
      };
      const RuleUpdate args = arguments(a, split);
      const auto ours = [&] { kernels(DeviceType::kCpu).update(args, stream); };
      std::vector<double> twin_seconds, our_seconds, ratios;
      for (int round = 0; round <= rounds; ++round) {
        const double t = seconds(twin), o = seconds(ours);
        if (round == 0) continue;  // page faults and thread start
        twin_seconds.push_back(t);
        our_seconds.push_back(o);
        ratios.push_back(t / o);
      }
      // The twin leaves large values behind; they must not become infinite in the next form.
      a.m.fill(0.01f);
      a.v.fill(0.01f);
      const double achieved = median(ratios);  // of neighbours: what else the machine does hits both
      const char* name = split ? "bf16 gradient, split master" : "fp32 gradient, fp32 weight";
      std::printf("%-28s %8d %14.2f %14.2f %9.1f%%\n", name, threads, bytes / median(our_seconds) / 1e9,
                  bytes / median(twin_seconds) / 1e9, achieved * 100);
      std::printf(
          "{\"form\": \"%s\", \"threads\": %d, \"gbps\": %.3f, \"ceiling_gbps\": %.3f, \"achieved\": %.4f}\n",
          name, threads, bytes / median(our_seconds) / 1e9, bytes / median(twin_seconds) / 1e9, achieved);
    }
  }
  compare_coded(a, n, rounds);
}
