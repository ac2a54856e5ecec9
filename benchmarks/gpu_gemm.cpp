// How near to the card's peak do its matrix products come on the shapes of 1B, 7B and 8B layers, and how near
// to its memory's speed those of adapters (gbps: what a product has to read and write)? Forward
// (x Wᵀ), the input's gradient (dy W) and the weight's (dyᵀ x), through the same function as the model's, in
// bf16 and fp32 (no TF32), at 2048 to 16384 rows; TFLOP/s and share of the data sheet's dense peak, and in
// bf16 how much faster the fastest of cuBLASLt's first few algorithms is than the first, which is the
// model's. The figures depend on the data's bits through power: matrices hold a repeated pattern of small
// numbers (gpu_pattern.h). Prints a table and one JSON line.
//
//   bench_gpu_gemm [--quick]      --quick: one small shape, to see that it works
#include <algorithm>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "base/error.h"
#include "gpu_pattern.h"
#include "kernels/library.h"
#include "kernels/runtime.h"
#include "plan/machine.h"

namespace {

using namespace lm;

struct Shape {
  const char* model;
  const char* layer;
  int64_t out, in;
};
constexpr Shape kShapes[] = {
    {"1b", "qkv", 3072, 2048},      {"1b", "o", 2048, 2048},        {"1b", "gate_up", 16384, 2048},
    {"1b", "down", 2048, 8192},     {"7b", "qkv", 12288, 4096},     {"7b", "o", 4096, 4096},
    {"7b", "gate_up", 22016, 4096}, {"7b", "down", 4096, 11008},    {"8b", "qkv", 6144, 4096},
    {"8b", "o", 4096, 4096},        {"8b", "gate_up", 28672, 4096}, {"8b", "down", 4096, 14336},
    {"8b", "A r16", 16, 4096},      {"8b", "B r16", 14336, 16},     {"8b", "A r64", 64, 4096},
    {"8b", "B r64", 14336, 64},
};
constexpr Shape kQuick = {"quick", "o", 96, 64};
constexpr int64_t kRows[] = {2048, 4096, 8192, 16384};
constexpr int kAlgorithms = 4;  // that are compared

// Seconds of one call: the least of windows of calls that together take some 20 ms.
double seconds_of(const std::function<void()>& work, StreamView stream) {
  const auto window = [&](int calls) {
    TimingEvent begin(stream.device), end(stream.device);
    begin.record(stream);
    for (int i = 0; i < calls; ++i) work();
    end.record(stream);
    end.synchronize();
    return end.seconds_since(begin) / calls;
  };
  const double first = (window(1), window(1));  // the first call chooses an algorithm
  const int calls = std::clamp(static_cast<int>(0.005 / std::max(first, 1e-6)), 1, 50);
  double best = first;
  for (int i = 0; i < (calls > 1 ? 3 : 2); ++i) best = std::min(best, window(calls));
  return best;
}

class Bench {
 public:
  Bench(DType dtype, double peak, StreamView stream)
      : dtype_(dtype), peak_(peak), stream_(stream), tile_(dtype, stream, 0.05f) {}

  nlohmann::json row(const Shape& shape, int64_t rows) const {
    const auto matrix = [&](Memory& memory, int64_t first, int64_t second) {
      memory = Memory(stream_.device, first * second * static_cast<int64_t>(dtype_size(dtype_)));
      tile_.fill(memory.data(), memory.size());
      return view_of(memory.data(), dtype_, first, second);
    };
    Memory memory[6];
    const View x = matrix(memory[0], rows, shape.in), w = matrix(memory[1], shape.out, shape.in),
               y = matrix(memory[2], rows, shape.out), dx = matrix(memory[3], rows, shape.in),
               dw = matrix(memory[4], shape.out, shape.in), dy = matrix(memory[5], rows, shape.out);
    const double flops =
        2.0 * static_cast<double>(rows) * static_cast<double>(shape.out) * static_cast<double>(shape.in);
    double best[3] = {};
    int choice[3] = {}, product = 0;
    const auto tflops = [&](const Gemm& g) {
      double first = 0, &fastest = best[product];
      for (int i = 0; i < (dtype_ == DType::kBF16 ? kAlgorithms : 1) && gemm_cuda(g, stream_, i); ++i) {
        const double reached = flops / seconds_of([&] { gemm_cuda(g, stream_, i); }, stream_) / 1e12;
        if (i == 0) first = reached;
        if (reached > fastest) fastest = reached, choice[product] = i;
      }
      ++product;
      return first;
    };
    const double forward = tflops({.a = x, .b = w, .out = y, .transpose_b = true}),
                 input = tflops({.a = dy, .b = w, .out = dx}),
                 weight = tflops({.a = dy, .b = x, .out = dw, .transpose_a = true});
    synchronize(stream_);
    const auto faster = [&](int which, double reached) { return 100 * (best[which] / reached - 1); };
    const auto share = [&](double reached) { return peak_ > 0 ? 100 * reached * 1e12 / peak_ : 0; };
    std::printf(
        "%-5s %-8s %-5s %6ld %6ld %6ld  %8.1f %3.0f%%  %8.1f %3.0f%%  %8.1f %3.0f%%  %+4.1f %+4.1f %+4.1f\n",
        shape.model, shape.layer, dtype_ == DType::kBF16 ? "bf16" : "fp32", rows, shape.out, shape.in,
        forward, share(forward), input, share(input), weight, share(weight), faster(0, forward),
        faster(1, input), faster(2, weight));
    const double size = static_cast<double>(dtype_size(dtype_));
    const double bytes = size * static_cast<double>(rows * (shape.in + shape.out) + shape.out * shape.in);
    const auto gbps = [&](double reached) { return bytes * reached * 1e3 / flops; };
    return {{"model", shape.model},
            {"layer", shape.layer},
            {"dtype", dtype_ == DType::kBF16 ? "bf16" : "fp32"},
            {"rows", rows},
            {"tflops", {forward, input, weight}},
            {"gbps", {gbps(forward), gbps(input), gbps(weight)}},
            {"best_tflops", best},
            {"best_algorithm", choice}};
  }

 private:
  DType dtype_;
  double peak_;
  StreamView stream_;
  PatternTile tile_;
};

void run(bool quick) {
  std::string reason;
  if (cuda_device_count(&reason) == 0) {
    std::printf("gpu_gemm: no CUDA device: %s\n", reason.c_str());
    return;
  }
  const StreamView stream = start_torch(DeviceType::kCuda, 1, false);
  const Gpu gpu = built_in_gpu(cuda_device(0).name);
  std::printf("%s: peak bf16 %.0f, fp32 %.0f TFLOP/s (data sheet; 0: not known)\n", gpu.name.c_str(),
              gpu.bf16_flops / 1e12, gpu.fp32_flops / 1e12);
  std::printf("%-5s %-8s %-5s %6s %6s %6s  %-14s %-14s %-14s  %s\n", "model", "layer", "", "rows", "out",
              "in", " forward TFLOP/s", " dx", " dW", "% more by the best algorithm");
  nlohmann::json rows = nlohmann::json::array();
  double best[2] = {0, 0};
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const double peak = dtype == DType::kBF16 ? gpu.bf16_flops : gpu.fp32_flops;
    const Bench bench(dtype, peak, stream);
    const auto add = [&](const Shape& shape, int64_t count) {
      rows.push_back(bench.row(shape, count));
      double& most = best[dtype == DType::kF32];
      for (const double reached : rows.back()["tflops"]) most = std::max(most, reached);
    };
    if (quick) {
      add(kQuick, 48);
    } else {
      for (const Shape& shape : kShapes) {
        for (const int64_t count : kRows) add(shape, count);
      }
    }
  }
  std::printf("%s\n",
              nlohmann::json{{"benchmark", "gpu_gemm"}, {"gpu", gpu.name}, {"rows", rows}}.dump().c_str());
  std::printf("figure: best bf16 %.0f, fp32 %.1f TFLOP/s\n", best[0], best[1]);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc > 1 && std::string(argv[1]) == "--quick");
    return 0;
  } catch (const lm::Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return static_cast<int>(error.code());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_gemm: %s\n", error.what());
    return 70;
  }
}
