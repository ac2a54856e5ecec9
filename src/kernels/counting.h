// The table of a rehearsal: calls count what the kernels of a device would do, and touch no memory. So a plan
// runs the model's own code to learn what a step costs.
#pragma once

#include <array>
#include <set>

#include "kernels/kernels.h"

namespace lm {

// Work, as sums; FLOP count a multiplication and an addition as two.
struct Cost {
  double gemm_flops = 0;
  double attention_flops = 0;
  double bytes = 0;            // of copies, sums and updates, and of a GEMM's operands where they cost time
  double pass_bytes = 0;       // of passes that compute on what they read
  double decoded_bytes = 0;    // of quantised weights, as decoded for a product
  double calls = 0;            // of kernels and of GEMMs
  double gemm_calls = 0;       // of these, of GEMMs
  double fp32_gemm_flops = 0;  // of gemm_flops, what is multiplied in fp32
  Cost& operator+=(const Cost& other);
  Cost& operator-=(const Cost& other);
  Cost& operator*=(double times);
};

// A product as a GEMM library tells it from others that it makes code for: sizes, strides, what is
// transposed, added and scaled. Types come from the model's and need not be told apart.
using GemmShape = std::array<int64_t, 11>;

struct Counts {
  Cost cost;
  std::set<GemmShape>* gemms = nullptr;  // every product's; null when not wanted
};

// While it lives, what is counted counts so many times: of work that is repeated, one part is carried out.
class CountedTimes {
 public:
  CountedTimes(Counts* counts, int64_t times);  // null: nothing counts
  ~CountedTimes();
  CountedTimes(const CountedTimes&) = delete;
  CountedTimes& operator=(const CountedTimes&) = delete;

 private:
  Counts* counts_;
  double times_;
  Cost before_;
};

// The device's table. Its functions expect a counting_stream, and memory that need not be there.
// Documents without starts are as many as there are, of one length.
const Kernels& counting_kernels(DeviceType device);
// What is called with this stream is added to `counts`, which must outlive it.
StreamView counting_stream(Counts& counts, DeviceType device, int threads);

}  // namespace lm
