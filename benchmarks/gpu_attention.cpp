// How fast is attention on the GPU, by length of the documents, size of the heads, and with a fixed order of
// sums or without? 16,384 tokens (or one document of 32,768) of 32 query heads over 8 key heads, through the
// kernels that a model's step calls; TFLOP/s of the visible keys, and what the plan takes them for
// (plan/flash_rate.h) in per cent of that. Least of some windows between two events. Memory holds a repeated
// pattern (gpu_pattern.h). Prints a table and one JSON line.
//
//   bench_gpu_attention [--quick]      --quick: a few short documents, to see that it works
#include <ATen/Context.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "gpu_pattern.h"
#include "kernels/library.h"
#include "kernels/runtime.h"
#include "plan/flash_rate.h"

namespace {

using namespace lm;

struct Shape {
  int64_t documents, length, heads = 32, kv_heads = 8;
  int64_t tokens() const { return documents * length; }
};
constexpr Shape kShapes[] = {{16, 1024}, {8, 2048}, {4, 4096}, {2, 8192}, {1, 32768}};
constexpr Shape kQuick[] = {{2, 32, 4, 2}};

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
  const double first = (window(1), window(1));  // the first call allocates
  const int calls = std::clamp(static_cast<int>(0.005 / std::max(first, 1e-6)), 1, 50);
  double best = first;
  for (int i = 0; i < (calls > 1 ? 3 : 2); ++i) best = std::min(best, window(calls));
  return best;
}

// q, k and v are slices of one array, as a model's fused projection leaves them; so are their gradients.
class Problem {
 public:
  Problem(const Shape& shape, int64_t head_dim, const PatternTile& tile, StreamView stream)
      : shape_(shape),
        head_dim_(head_dim),
        stream_(stream),
        tile_(tile),
        table_(library_kernels(stream.device)) {
    const int64_t q = shape.heads * head_dim, kv = shape.kv_heads * head_dim;
    std::byte* const in = array(q + 2 * kv);
    std::byte* const gradient = array(q + 2 * kv);
    const std::vector<int32_t> starts = places();
    auto* const start = reinterpret_cast<int32_t*>(bytes(std::ssize(starts) * 4));
    copy_bytes(start, starts.data(), std::ssize(starts) * 4, stream);
    synchronize(stream);
    run_ = {.tokens = shape.tokens(), .count = shape.documents, .longest = shape.length, .start = start};
    forward_ = {.q = in,
                .k = in + q * kBytes,
                .v = in + (q + kv) * kBytes,
                .out = array(q),
                .lse = reinterpret_cast<float*>(bytes(shape.tokens() * shape.heads * 4)),
                .documents = {.count = shape.documents, .runs = &run_, .run_count = 1},
                .tokens = shape.tokens(),
                .heads = shape.heads,
                .kv_heads = shape.kv_heads,
                .head_dim = head_dim,
                .q_stride = q + 2 * kv,
                .kv_stride = q + 2 * kv,
                .scale = 1 / std::sqrt(static_cast<float>(head_dim)),
                .dtype = DType::kBF16};
    backward_ = {.dout = array(q),
                 .q = forward_.q,
                 .k = forward_.k,
                 .v = forward_.v,
                 .out = forward_.out,
                 .lse = forward_.lse,
                 .dq = gradient,
                 .dk = gradient + q * kBytes,
                 .dv = gradient + (q + kv) * kBytes,
                 .documents = forward_.documents,
                 .tokens = shape.tokens(),
                 .heads = shape.heads,
                 .kv_heads = shape.kv_heads,
                 .head_dim = head_dim,
                 .q_stride = forward_.q_stride,
                 .kv_stride = forward_.kv_stride,
                 .dq_stride = forward_.q_stride,
                 .dkv_stride = forward_.kv_stride,
                 .scale = forward_.scale,
                 .dtype = DType::kBF16};
    forward_.scratch = bytes(table_.attention_forward_scratch(forward_, stream));
    backward_.scratch = bytes(table_.attention_backward_scratch(backward_, stream));
  }

  // {forward, backward} in FLOP/s of the visible keys, the diagonal counted half.
  std::array<double, 2> rates() const {
    const double keys = static_cast<double>(shape_.tokens()) * static_cast<double>(shape_.length) / 2;
    const double product = 2 * keys * static_cast<double>(shape_.heads * head_dim_);
    const double forward = seconds_of([&] { table_.attention_forward(forward_, stream_); }, stream_),
                 backward = seconds_of([&] { table_.attention_backward(backward_, stream_); }, stream_);
    return {2 * product / forward, 5 * product / backward};
  }

 private:
  static constexpr int64_t kBytes = 2;

  std::vector<int32_t> places() const {
    std::vector<int32_t> out;
    for (int64_t d = 0; d <= shape_.documents; ++d) out.push_back(static_cast<int32_t>(d * shape_.length));
    return out;
  }
  std::byte* bytes(int64_t count) {
    Memory& memory = memory_.emplace_back(stream_.device, std::max<int64_t>(count, 16));
    return memory.data();
  }
  std::byte* array(int64_t width) {
    std::byte* const out = bytes(shape_.tokens() * width * kBytes);
    tile_.fill(out, shape_.tokens() * width * kBytes);
    return out;
  }

  Shape shape_;
  int64_t head_dim_;
  StreamView stream_;
  const PatternTile& tile_;
  const Kernels& table_;
  std::vector<Memory> memory_;
  DocumentRun run_;
  AttentionForward forward_;
  AttentionBackward backward_;
};

nlohmann::json row(const Shape& shape, int64_t head_dim, bool deterministic, const Gpu& gpu,
                   const PatternTile& tile, StreamView stream) {
  at::globalContext().setDeterministicAlgorithms(deterministic, false);
  const Problem problem(shape, head_dim, tile, stream);
  const std::array<double, 2> measured = problem.rates();
  synchronize(stream);
  const auto rate = flash_rate(gpu, DType::kBF16, deterministic);
  std::array<double, 2> planned = {};
  for (const bool backward : {false, true}) {
    if (rate)
      planned[backward] = rate({.backward = backward,
                                .head_dim = head_dim,
                                .length = static_cast<double>(shape.length),
                                .pairs = shape.documents * shape.heads});
  }
  const auto of = [&](int pass) { return 100 * planned[pass] / measured[pass]; };
  std::printf("%3ld x %-6ld %5ld  %-8s  %8.1f %4.0f%%  %8.1f %4.0f%%\n", shape.documents, shape.length,
              head_dim, deterministic ? "ordered" : "any", measured[0] / 1e12, of(0), measured[1] / 1e12,
              of(1));
  return {{"documents", shape.documents},
          {"length", shape.length},
          {"head_dim", head_dim},
          {"pairs", shape.documents * shape.heads},
          {"deterministic", deterministic},
          {"tflops", {measured[0] / 1e12, measured[1] / 1e12}},
          {"planned", {planned[0] / 1e12, planned[1] / 1e12}}};
}

void run(bool quick) {
  std::string reason;
  if (cuda_device_count(&reason) == 0) {
    std::printf("gpu_attention: no CUDA device: %s\n", reason.c_str());
    return;
  }
  const StreamView stream = start_torch(DeviceType::kCuda, 1, true);
  const Gpu gpu = built_in_gpu(cuda_device(0).name);
  const PatternTile tile(DType::kBF16, stream, 0.5f);
  std::printf("%s\n%-12s %5s  %-8s  %-14s  %-14s\n", gpu.name.c_str(), "documents", "head", "sums",
              "forward TFLOP/s", "backward; planned in % of it");
  nlohmann::json rows = nlohmann::json::array();
  double best = 0, worst = 0;
  for (const Shape& shape : quick ? std::span<const Shape>(kQuick) : std::span<const Shape>(kShapes)) {
    for (const int64_t head_dim : {64, 128}) {
      for (const bool deterministic : {true, false}) {
        const auto& made = rows.emplace_back(row(shape, head_dim, deterministic, gpu, tile, stream));
        for (const int pass : {0, 1}) {
          const double measured = made["tflops"][pass], planned = made["planned"][pass];
          best = std::max(best, measured);
          worst = std::max(worst, std::abs(planned / measured - 1));
        }
      }
    }
  }
  std::printf(
      "%s\n",
      nlohmann::json{{"benchmark", "gpu_attention"}, {"gpu", gpu.name}, {"rows", rows}}.dump().c_str());
  std::printf("figure: best %.0f TFLOP/s, the plan at most %.0f %% off\n", best, 100 * worst);
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
    std::fprintf(stderr, "gpu_attention: %s\n", error.what());
    return 1;
  }
}
