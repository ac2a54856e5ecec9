// How near to its memory's speed do our kernels come on a GPU? Each on the shapes of an 8B layer, beside a
// copy within the device of as many bytes as it reads and writes, in bf16; the least time of some windows
// between two events. Memory holds a repeated pattern (gpu_pattern.h). The ceiling is the data sheet's
// bandwidth. Prints a table and one JSON line.
//
//   bench_gpu_kernels [--quick]      --quick: 64 tokens and narrow layers, to see that it works
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "base/error.h"
#include "gpu_pattern.h"
#include "kernels/kernels.h"
#include "plan/machine.h"

namespace {

using namespace lm;

struct Sizes {
  int64_t tokens = 8192, hidden = 4096, ffn = 14336, heads = 32, head_dim = 128, columns = 128256,
          rows = 2048;
};
constexpr Sizes kQuick = {64, 64, 96, 4, 16, 320, 32};

struct Case {
  const char* name;
  int64_t bytes;  // read and written
  std::function<void(StreamView)> run;
  int64_t elements = 0;  // of a matrix that is decoded
};

// Device memory that the cases share; every case may overwrite it.
struct Arrays {
  Arrays(const Sizes& s, StreamView stream)
      : tile(DType::kBF16, stream, 0.5f),
        ones(DType::kF32, stream, 0, 1),
        zeros(DType::kF32, stream, 0, 0, kMiB),
        a(make(tile, std::max(s.tokens * 2 * s.ffn, s.rows * s.columns) * 2)),
        b(make(tile, std::max(s.tokens * s.ffn, s.tokens * s.hidden) * 2)),
        c(make(tile, s.tokens * s.hidden * 2)),
        weight(make(tile, s.ffn * 2)),
        angles(make(ones, s.tokens * s.head_dim * 4)),
        sums(make(ones, s.tokens * 4 * 4)),
        partial(make(ones, (s.tokens / 64 + 1) * s.ffn * 4)),
        integers(make(zeros, s.tokens * 4)),
        state(make(zeros, 3 * s.hidden * s.ffn * 4)),
        norms(make(zeros, s.hidden * s.ffn / 4096 * 8 + 8)) {
    synchronize(stream);
  }
  static Memory make(const PatternTile& tile, int64_t bytes) {
    Memory memory(DeviceType::kCuda, bytes);
    tile.fill(memory.data(), bytes);
    return memory;
  }
  static float* f32(const Memory& memory) { return reinterpret_cast<float*>(memory.data()); }
  const int32_t* i32() const { return reinterpret_cast<const int32_t*>(integers.data()); }

  PatternTile tile, ones, zeros;
  Memory a, b, c, weight, angles, sums, partial, integers, state, norms;
};

// What a block does.
std::vector<Case> block_cases(const Sizes& n, const Arrays& m) {
  const Kernels& k = kernels(DeviceType::kCuda);
  const int64_t row = n.tokens * n.hidden * 2, ffn = n.tokens * n.ffn * 2;
  const DType t = DType::kBF16;
  const auto forward = [=, &k, &m](StreamView s) {
    k.rms_norm_forward({.x = m.a.data(),
                        .residual = m.b.data(),
                        .weight = m.weight.data(),
                        .sum = m.a.data(),
                        .out = m.c.data(),
                        .rstd = Arrays::f32(m.sums),
                        .rows = n.tokens,
                        .width = n.hidden,
                        .x_stride = n.hidden,
                        .out_stride = n.hidden,
                        .eps = 1e-5f,
                        .dtype = t},
                       s);
  };
  // Behind a block, with the gradient that passes it by; and without one, behind the last.
  const auto backward = [=, &k, &m](StreamView s, const void* residual) {
    k.rms_norm_backward({.dy = m.c.data(),
                         .x = m.b.data(),
                         .weight = m.weight.data(),
                         .rstd = Arrays::f32(m.sums),
                         .dresidual = residual,
                         .dx = m.c.data(),
                         .dweight = Arrays::f32(m.angles),
                         .partial = Arrays::f32(m.partial),
                         .rows = n.tokens,
                         .width = n.hidden,
                         .dy_stride = n.hidden,
                         .x_stride = n.hidden,
                         .dx_stride = n.hidden,
                         .dtype = t},
                        s);
  };
  const auto rope = [=, &k, &m](StreamView s) {
    k.rope({.x = m.c.data(),
            .cos = Arrays::f32(m.angles),
            .sin = Arrays::f32(m.angles),
            .position = m.i32(),
            .rows = n.tokens,
            .heads = n.heads,
            .head_dim = n.head_dim,
            .x_stride = n.hidden,
            .dtype = t},
           s);
  };
  const auto swiglu = [=, &k, &m](StreamView s) {
    k.gated_forward({.gate_up = m.a.data(), .out = m.b.data(), .rows = n.tokens, .ffn = n.ffn, .dtype = t},
                    s);
  };
  const auto swiglu_back = [=, &k, &m](StreamView s) {
    k.gated_backward({.gate_up = m.a.data(), .dh = m.b.data(), .rows = n.tokens, .ffn = n.ffn, .dtype = t},
                     s);
  };
  const auto dropout = [=, &k, &m](StreamView s) {
    k.dropout({.x = m.a.data(),
               .out = m.c.data(),
               .sample = m.i32(),
               .position = m.i32(),
               .rows = n.tokens,
               .width = n.hidden,
               .key = 5,
               .p = 0.05f,
               .dtype = t},
              s);
  };
  return {{"rms_norm forward + residual", 4 * row, forward},
          {"rms_norm backward", 4 * row, [=, &m](StreamView s) { backward(s, m.a.data()); }},
          {"rms_norm backward, the last", 3 * row, [=](StreamView s) { backward(s, nullptr); }},
          {"rope", 2 * row, rope},
          {"swiglu forward", 3 * ffn, swiglu},
          {"swiglu backward", 6 * ffn, swiglu_back},
          {"dropout", 2 * row, dropout}};
}

// The head, gradients and the update, the latter on one layer's down projection.
std::vector<Case> other_cases(const Sizes& n, const Arrays& m) {
  const Kernels& k = kernels(DeviceType::kCuda);
  const int64_t logits = n.rows * n.columns * 2, elements = n.hidden * n.ffn / 4096 * 4096;
  const DType t = DType::kBF16;
  float* const state = Arrays::f32(m.state);
  const auto statistics = [=, &k, &m](StreamView s) {
    k.softmax_statistics({.logits = m.a.data(),
                          .target = m.i32(),
                          .max = Arrays::f32(m.sums),
                          .sum = Arrays::f32(m.sums) + n.tokens,
                          .target_logit = Arrays::f32(m.angles),
                          .rows = n.rows,
                          .columns = n.columns,
                          .stride = n.columns,
                          .first_segment = true,
                          .dtype = t},
                         s);
  };
  const auto gradient = [=, &k, &m](StreamView s) {
    k.softmax_gradient({.logits = m.a.data(),
                        .target = m.i32(),
                        .max = Arrays::f32(m.sums),
                        .sum = Arrays::f32(m.sums) + n.tokens,
                        .rows = n.rows,
                        .columns = n.columns,
                        .stride = n.columns,
                        .dtype = t},
                       s);
  };
  const auto accumulate = [=, &k, &m](StreamView s) {
    k.accumulate(
        {.to = state, .from = m.a.data(), .elements = elements, .to_dtype = DType::kF32, .from_dtype = t}, s);
  };
  const auto norms = [=, &k, &m](StreamView s) {
    k.granule_norms({.x = state,
                     .sums = reinterpret_cast<double*>(m.norms.data()),
                     .granules = elements / 4096,
                     .dtype = DType::kF32},
                    s);
  };
  // Gradient, weight and master of 2 bytes, m and v of 4; weight, master, m and v are written, too.
  const auto adamw = [=, &k, &m](StreamView s) {
    k.update({.rule = AdamW{.one_minus_beta1 = 0.1f,
                            .beta2 = 0.999f,
                            .one_minus_beta2 = 0.001f,
                            .step_size = 1e-5f,
                            .eps = 1e-8f},
              .gradient = m.b.data(),
              .weight = m.a.data(),
              .master = state,
              .state = {state + elements, state + 2 * elements},
              .elements = elements,
              .gradient_dtype = t,
              .weight_dtype = t,
              .form = MasterForm::kSplit},
             s);
  };
  // A base of 4-bit codes with an fp32 scale for 64 of them, and what goes to host memory.
  const int64_t matrix = n.ffn * n.hidden;
  const auto decode = [=, &k, &m](StreamView s) {
    k.materialise({.kind = EncodingKind::kNf4,
                   .pieces = {m.b.data(), reinterpret_cast<const std::byte*>(state)},
                   .out = {m.a.data(), t, n.ffn, n.hidden, n.hidden}},
                  s);
  };
  const auto checksums = [=, &k, &m](StreamView s) {
    k.chunk_sums({m.state.data(), 4 * elements, reinterpret_cast<uint64_t*>(m.partial.data())}, s);
  };
  return {{"softmax statistics", logits, statistics},
          {"softmax gradient", 2 * logits, gradient},
          {"accumulate bf16 into fp32", 10 * elements, accumulate},
          {"granule norms fp32", 4 * elements, norms},
          {"AdamW bf16, split master", 26 * elements, adamw},
          {"nf4 to bf16", matrix * 2 + matrix / 2 + matrix / 16, decode, matrix},
          {"checksums", 4 * elements, checksums}};
}

double seconds_of(const std::function<void(StreamView)>& work, StreamView stream) {
  constexpr int kCalls = 10, kWindows = 5;
  double best = 1e9;
  for (int window = 0; window <= kWindows; ++window) {
    TimingEvent begin(stream.device), end(stream.device);
    begin.record(stream);
    for (int i = 0; i < kCalls; ++i) work(stream);
    end.record(stream);
    end.synchronize();
    if (window > 0) best = std::min(best, end.seconds_since(begin) / kCalls);
  }
  return best;
}

void run(bool quick) {
  std::string reason;
  if (cuda_device_count(&reason) == 0) {
    std::printf("gpu_kernels: no CUDA device: %s\n", reason.c_str());
    return;
  }
  const Gpu gpu = built_in_gpu(cuda_device(0).name);
  const Stream owned(DeviceType::kCuda);
  const StreamView stream = owned.view();
  const Sizes sizes = quick ? kQuick : Sizes{};
  const Arrays arrays(sizes, stream);
  std::printf("%s: %.0f GB/s by its data sheet (0: not known)\n", gpu.name.c_str(), gpu.bandwidth / 1e9);
  std::printf("%-28s %10s %10s %10s %9s %10s\n", "kernel", "us", "GB/s", "copy GB/s", "of a copy", "of peak");
  nlohmann::json rows = nlohmann::json::array();
  std::vector<Case> cases = block_cases(sizes, arrays);
  for (Case& c : other_cases(sizes, arrays)) cases.push_back(std::move(c));
  double least = 1e9;
  std::string slowest;
  for (const Case& c : cases) {
    const Memory from(DeviceType::kCuda, c.bytes / 2), to(DeviceType::kCuda, c.bytes / 2);
    const auto copy = [&](StreamView s) { copy_bytes(to.data(), from.data(), from.size(), s); };
    const double ours = seconds_of(c.run, stream), copied = seconds_of(copy, stream);
    const double gbps = static_cast<double>(c.bytes) / ours / 1e9,
                 copy_gbps = static_cast<double>(c.bytes) / copied / 1e9;
    std::printf("%-28s %10.1f %10.1f %10.1f %8.0f%% %9.0f%%\n", c.name, ours * 1e6, gbps, copy_gbps,
                100 * gbps / copy_gbps, gpu.bandwidth > 0 ? 100 * gbps * 1e9 / gpu.bandwidth : 0);
    nlohmann::json row = {{"kernel", c.name}, {"gbps", gbps}, {"copy_gbps", copy_gbps}};
    if (c.elements > 0) {
      const double each = static_cast<double>(c.bytes) / static_cast<double>(c.elements);
      row["bytes_per_element"] = each;
      std::printf("  %.2f bytes of each element, %.2f ms for 10^9 elements\n", each, each / gbps * 1e3);
    }
    rows.push_back(row);
    if (gbps / copy_gbps < least) least = gbps / copy_gbps, slowest = c.name;
  }
  std::printf("%s\n",
              nlohmann::json{{"benchmark", "gpu_kernels"}, {"gpu", gpu.name}, {"rows", rows}}.dump().c_str());
  std::printf("figure: slowest %s, %.0f %% of a copy\n", slowest.c_str(), 100 * least);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc > 1 && std::string(argv[1]) == "--quick");
    return 0;
  } catch (const lm::Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return static_cast<int>(error.code());
  }
}
