// Where every byte of a run lives and what a step costs, decided before anything is allocated. A pure
// function of config, spec, layout and machine: it prints as a table, is tested on any laptop, and refuses
// what cannot fit. The numerics half is recorded with the run and kept at resume; the placement half never
// changes a bit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/config.h"
#include "plan/activations.h"
#include "plan/machine.h"
#include "plan/schedule.h"
#include "spec/block_layout.h"

namespace lm {

enum class StateClass : uint8_t {
  kWeights,
  kFrozenWeights,
  kGradients,
  kMaster,
  kFirstMoment,
  kSecondMoment,
  kActivations,
};
inline constexpr int kStateClasses = 7;
const char* state_class_name(StateClass state);

enum class Home : uint8_t { kDevice, kHost, kNvme };

// Depends on config, spec and the machine's capacities alone.
struct NumericsPlan {
  DType dtype = DType::kBF16;
  DType gradient_dtype = DType::kF32;
  int64_t micro_batch = 1;    // sequences
  int64_t micro_batches = 1;  // per step
  int64_t row_chunk = 512;    // rows of logits at once
  bool recompute = false;
  int threads = 1;  // compute threads (CPU)
};

struct PlacementPlan {
  DeviceType device = DeviceType::kCpu;
  Home home[kStateClasses] = {};  // all on the compute device here
  int optimizer_threads = 1;
};

struct ClassBytes {
  std::string name;
  int64_t bytes = 0;
  std::string note;  // e.g. "fp32, 12 B per parameter"
};

struct PeakBytes {
  int64_t device = 0;  // GPU; 0 on the CPU
  int64_t host = 0;    // resident memory of the rank's process, libraries included
  int64_t disk = 0;
};

struct LinkTime {
  std::string name;  // "compute", "memory"
  double seconds = 0;
};

struct Choice {
  std::string key, value, reason;
};

struct Plan {
  NumericsPlan numerics;
  PlacementPlan placement;
  ArenaNeed arena;
  int64_t micro_tokens = 0;  // micro_batch x max_length
  std::vector<ClassBytes> classes;
  PeakBytes peak;
  std::vector<LinkTime> links;  // what a step spends on each resource
  double step_seconds = 0;
  std::string binding;               // the resource that decides
  double sol_seconds_per_token = 0;  // GEMM-bound time of one token: the speed of light
  std::vector<Choice> choices;       // every `auto`, resolved, with its reason
};

// `device` is where the run computes; one rank. Throws Error(12) with a table of need and have and the
// settings that would fit.
Plan make_plan(const Config& config, const ModelSpec& spec, const AdapterSpec* adapter,
               const ModelLayout& layout, const Machine& machine, DeviceType device);

// FLOP of a training step's necessary GEMMs per token, by the speed-of-light definition: 6 per trained block
// parameter (LoRA: 4 per frozen one, 6 per adapter's), 6 V H for the head, 6 L n_h d S for causal attention.
double necessary_flops(const ModelSpec& spec, const ModelLayout& layout, bool lora, int64_t sequence);

// The table for people, and the object for programs.
std::string print_plan(const Plan& plan);
std::string plan_json(const Plan& plan);

}  // namespace lm
