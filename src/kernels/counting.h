// The kernel table of a dry run: calls count the work of a device's kernels, and touch no memory. A plan runs
// the model's own code with it to get the cost of a step.
#pragma once

#include <array>
#include <functional>
#include <set>

#include "kernels/kernels.h"

namespace lm {

// Work, as sums; FLOP count a multiplication and an addition as two.
struct Cost {
  double gemm_flops = 0;
  double attention_flops = 0;
  double bytes = 0;              // of copies, sums and updates, and of a GEMM's operands if they cost time
  double pass_bytes = 0;         // of passes that compute on what they read
  double decoded_bytes = 0;      // of quantized weights, dequantized for a product
  double calls = 0;              // of kernels and of GEMMs
  double gemm_calls = 0;         // of these, of GEMMs
  double fp32_gemm_flops = 0;    // of gemm_flops, the part in fp32
  double timed_flops = 0;        // of attention_flops, the part whose time Counts::attention_rate told, ...
  double attention_seconds = 0;  // ... which is this
  Cost& operator+=(const Cost& other);
  Cost& operator-=(const Cost& other);
  Cost& operator*=(double times);
};

// The key by which a GEMM library caches generated code: sizes, strides, transposition, addend and scale.
// Types follow from the model and need not be distinguished.
using GemmShape = std::array<int64_t, 11>;

// A call of flash attention on a GPU, as far as its rate depends on it.
struct FlashCall {
  bool backward = false;
  int64_t head_dim = 0;
  double length = 0;  // of its documents: twice the keys that a token sees on average
  int64_t pairs = 0;  // of document and query head
};

struct Counts {
  Cost cost;
  std::set<GemmShape>* gemms = nullptr;  // of every product; null if not needed
  // FLOP/s of such a call; 0: not known. Null: attention has the one rate of the whole step.
  const std::function<double(const FlashCall&)>* attention_rate = nullptr;
};

// Scope that multiplies counts: one repetition of repeated work is executed.
class CountedTimes {
 public:
  CountedTimes(Counts* counts, int64_t times);  // null: no counting
  ~CountedTimes();
  CountedTimes(const CountedTimes&) = delete;
  CountedTimes& operator=(const CountedTimes&) = delete;

 private:
  Counts* counts_;
  double times_;
  Cost before_;
};

// The device's table. Its functions expect a counting_stream, and never access memory. Documents without
// starts count as documents of equal length.
const Kernels& counting_kernels(DeviceType device);
// Calls with this stream are added to `counts`, which must outlive it.
StreamView counting_stream(Counts& counts, DeviceType device, int threads);

}  // namespace lm
