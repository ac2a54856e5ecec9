// What a step costs: the FLOP and bytes of each of the schedule's operations, then seconds at a machine's
// rates; and the speed of light, the time of the GEMMs and attention that no implementation can avoid. Pure
// arithmetic on values; FLOP count a multiplication and an addition as two.
#pragma once

#include <array>
#include <cstdint>
#include <functional>

#include "optim/rules/rules.h"
#include "plan/dry_run.h"
#include "plan/machine.h"

namespace lm {

// `tokens` in documents of one length, all of them targets: the published definition's case.
StepWork uniform_work(double tokens, double length, double target_share = 1);

// FLOP that any exact implementation needs: 6 per trained block parameter and token (4 per frozen one, and 2
// before the first trained block), 6 V H per target (frozen: 4; where nothing before the head is trained 2
// less), 6 n_h d S per layer and token of causal attention in documents of S tokens (less in layers with a
// window; 2 n_h d S before the first trained block). Recomputation, embedding, norms and the update are not
// in it.
double necessary_flops(const ModelSpec& spec, const ModelLayout& layout, const StepWork& work);

// Rates of a GPU of which nothing is known.
inline constexpr double kAssumedGpuBF16 = 100e12, kAssumedGpuF32 = 20e12, kAssumedGpuBandwidth = 500e9;

struct ComputeRates {
  double peak_flops =
      0;  // what the speed of light is counted against: GPUs dense peak, CPU its quickest GEMM
  double gemm_flops = 0;       // what large GEMMs of the model's type reach
  double fp32_gemm_flops = 0;  // and those of fp32: of adapters that a narrower model may have
  double attention_flops = 0;
  double bandwidth = 0;         // of copies and sums
  double pass_bandwidth = 0;    // of passes that compute on what they read: norms, SwiGLU, softmax
  double decode_bandwidth = 0;  // of decoded weights
  // Fixed cost of each call: waking threads; for a GEMM also the library's checks of its arguments.
  double call_seconds = 0, gemm_call_seconds = 0;
  bool assumed = false;  // some rate is the documented default of cost_model.cpp
};
// `products`: of fp32 matrices, on a GPU.
ComputeRates compute_rates(const Machine& machine, DeviceType device, DType dtype,
                           Products products = Products::kF32);

// Links of one rank; `machine` is its share of the machine.
RankLinks rank_links(const Machine& machine, DeviceType device);

// Everything about the run that a step's cost depends on.
struct StepShape {
  ModelParts model;
  StepConfig step;
  double state_bytes = 10;  // of the optimizer, per parameter
  StepWork micro;           // of one micro-batch
  double step_tokens = 0;   // of all of them
  RuleId rule = {};         // products of its updates count, too
  double bf16_time = 1;     // of a FLOP in bf16, beside one in the model's type
  // FLOP/s of flash attention on the GPU; empty: attention has ComputeRates' one rate.
  std::function<double(const FlashCall&)> attention_rate = {};
};

// What each operation of a step's list costs: compute as in the dry run, updates by their state's bytes and
// their rule's products.
class StepCosts {
 public:
  explicit StepCosts(const StepShape& shape);
  // An update's is that of all tiles of its unit.
  Cost of(const Operation& operation) const;

 private:
  PassCosts pass_;
  std::vector<Unit> units_;
  std::vector<Cost> updates_;                           // of each unit
  double gradient_bytes_;                               // per parameter
  double reduce_scatter_bytes_ = 0, gather_bytes_ = 0;  // the same
  double embedding_rows_ = 0;  // bytes that adding the step's rows to the embedding's gradient moves
};
double cost_seconds(const Cost& cost, const ComputeRates& rates);

struct StepEstimate {
  double seconds = 0;
  double gemm_seconds = 0, attention_seconds = 0, memory_seconds = 0;  // add up to `seconds`; calls: memory
  std::array<double, kOperationKinds> by_kind = {};                    // add up to `seconds`
  Cost cost;
};
// One stream, one operation after the other: the sum over the step's list.
StepEstimate estimate_step(const StepCosts& costs, const StepConfig& step, const ComputeRates& rates);

}  // namespace lm
