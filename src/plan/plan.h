// Where every byte of a run lives and what a step costs, decided before anything is allocated. A pure
// function of config, spec, layout and machine: it prints as a table, is tested on any laptop, and refuses
// what cannot fit. It is made in four steps, each a value made from the ones before:
//
//   choose_numerics   NumericsPlan    what decides the result's bits; recorded, and kept at resume
//   place             PlacementPlan   tiers, slots and tiles; never changes a bit
//   size_plan         PlanSizes       bytes of each class and tier, and whether they fit
//   estimate          PlanCost        what a step takes; steers no numerics
//
// choose_placement sizes candidates of placements, and choose_recompute_level compares their costs.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "config/config.h"
#include "plan/cost_model.h"
#include "plan/dry_run.h"
#include "plan/machine.h"
#include "plan/numerics.h"
#include "plan/placement_plan.h"
#include "spec/block_layout.h"

namespace lm {

struct ClassBytes {
  std::string name;
  int64_t bytes = 0;
  std::string note;  // e.g. "fp32, 12 B per parameter"
  TierId tier_id = TierId::kHost;
};

// A kind of memory: what the plan puts there, and what there is.
struct Tier {
  TierId tier_id = TierId::kHost;
  int64_t bytes = 0;
  int64_t capacity = 0;  // 0: not known, and then nothing is refused
  int64_t allowed = 0;   // the part of the capacity that the configuration lets a run plan for
  int64_t usable = 0;    // of that, no more than is free now
};

// Bytes that a run may take of a directory of offload.paths: what is free there, and no more than
// offload.disk_limit. 0: not known.
int64_t path_room(const OffloadConfig& offload, const Disk& disk);

struct PeakBytes {
  int64_t device = 0;  // GPU; 0 on the CPU
  int64_t host = 0;    // resident memory of the rank's process, libraries included
  int64_t disk = 0;
  int64_t& of(Medium medium) {
    return medium == Medium::kDevice ? device : medium == Medium::kMemory ? host : disk;
  }
};

struct LinkTime {
  std::string name;  // "compute", "memory"
  double seconds = 0;
  double amount = 0;  // FLOP or bytes per step
  std::string unit;   // "FLOP", "B"
};

// What a rank says to the others in a step: bytes that it sends, on average of all ranks, and the time that
// takes. Compute waits for every call.
struct RankTraffic {
  double gradient_bytes = 0, weight_bytes = 0;
  double vote_bytes = 0;    // losses, norms, whether to stop
  double expert_bytes = 0;  // rows of tokens to other ranks' experts and back, with zero.experts = "parallel"
  double between_share = 0;  // of all of it: to ranks of other machines
  int64_t calls = 0;
  double seconds = 0;
  double inside_seconds = 0, between_seconds = 0;  // that links of either kind are at work

  double bytes() const { return gradient_bytes + weight_bytes + vote_bytes + expert_bytes; }
};

// What a plan knows of the data. Lengths, share and number are the estimate's: memory is planned for
// data.max_length and train.global_batch whatever they say.
struct DataShape {
  double mean_length = 0;      // tokens per sequence; 0: data.max_length
  double document_length = 0;  // of the document that a token is in, on average; 0: its sequence's
  double target_share = 1;     // of the tokens
  bool weighted = false;       // targets have weights in the loss
  int64_t sequences = 0;       // of an epoch, which no step goes beyond; 0: not known
};

// Tokens that a prompt of train.sample_prompts or eval.generate.data and its answer may have together, where
// data.max_length allows it.
inline constexpr int64_t kSamplePositions = 1024;
// Answers to eval.generate.data that are generated together.
inline constexpr int64_t kScoredTexts = 8;

// Numerics and a placement, of which nothing is sized yet: what functions that place may know.
struct PlacedPlan {
  NumericsPlan numerics;
  PlacementPlan placement;
  std::vector<Choice> choices;  // every `auto` so far, resolved, with its reason

  RecomputeChoice recompute() const { return placement.recompute.value_or(numerics.recompute); }
  // What a run records: it resumes with the same level of recomputation.
  NumericsPlan recorded_numerics() const {
    NumericsPlan out = numerics;
    out.recompute = recompute();
    return out;
  }
};

// What numerics and placement need (sizes.h: size_plan).
struct PlanSizes {
  ArenaNeed arena;
  int64_t micro_tokens = 0;     // micro_batch x max_length; of generation, those of a prompt taken at once
  int64_t cache_positions = 0;  // tokens of a text that is generated; 0: none is
  int64_t cache_texts = 1;      // that are generated together
  std::vector<ClassBytes> classes;
  std::vector<Tier> tiers;  // nearest first
  PeakBytes peak;
  bool fits = true;
  StepConfig step;  // what a rank runs and a dry run counts
  // With a GPU: registered host memory for what a step's batches send to it, and for what the step's end
  // reads back.
  int64_t upload_bytes = 0, result_bytes = 0;
  int64_t library_device_bytes = 0;  // with a GPU: the most that LibTorch may take of it
  int64_t gemm_shapes = 0;           // that the CPU's library may cache code for; 0: it caches none
  int64_t swap_spare = 0;  // bytes of every path's swap file for writes that their own place refuses
};

struct SizedPlan : PlacedPlan, PlanSizes {};

// What a step of a sized plan takes (estimate.h: estimate).
struct PlanCost {
  std::vector<LinkTime> links;  // what a step spends on each resource
  double step_seconds = 0;
  double step_tokens = 0;      // that the estimate is for
  double sequence_tokens = 0;  // likewise, where the data say how many a sequence has; 0: data.max_length
  RankTraffic traffic;
  Timeline timeline;                  // where something is off the device: its step, in time and bytes
  std::string binding;                // the resource that decides
  double peak_seconds_per_token = 0;  // GEMM-bound time of one token: the speed of light
  StepEstimate estimate;
  double norm_seconds = 0;  // of it, of a first backward for the norm alone
};

struct Plan : SizedPlan, PlanCost {
  World world;
};

// What the plan's numerics and placement make of a step.
StepConfig step_config(const ModelSpec& spec, const ModelLayout& layout, const PlacedPlan& plan,
                       int64_t micro_tokens, Clip clip);

// What a plan is for. Training needs everything; evaluation and generation need weights and an arena of their
// own; export reads weights tensor by tensor.
enum class PlanPurpose : uint8_t { kTrain, kEvaluate, kGenerate, kExport };

// Of many plans, those whose step is estimated: a walk through its list costs more than placing it.
enum class Estimated : uint8_t { kNothing, kWhatFits, kAll };

// What a plan is made from beside the machine; borrowed for the call.
struct PlanInputs {
  const Config& config;
  const ModelSpec& spec;
  const AdapterSpec* adapter;  // null: full fine-tuning
  const ModelLayout& layout;
  DeviceType device;  // where the run computes
  DataShape data = {};
  std::optional<bool> update_on_host = {};  // settles what the plan would choose (benchmarks compare both)
  const NumericsPlan* recorded = nullptr;   // what the run has recorded, which is kept
};

// Throws Error(12) where there are more ranks than sequences in a step.
void refuse_idle_ranks(const World& world, const Config& config);
// Throws Error(10) where zero.group = "machine" and machines are no groups of neighbouring ranks.
void refuse_scattered_ranks(const World& world, const Config& config);

// Throws Error(12) with a table of need and have and the settings that would fit.
Plan make_plan(const PlanInputs& inputs, const Machine& machine, const World& world = {},
               PlanPurpose purpose = PlanPurpose::kTrain);

// The same without refusing: `fits` tells.
Plan draft_plan(const PlanInputs& inputs, const Machine& machine, const World& world = {},
                PlanPurpose purpose = PlanPurpose::kTrain);

// What a step takes, once more for data that are known by now.
void estimate_again(const PlanInputs& inputs, const Machine& machine, Plan& plan);

// Settings that take less of a tier's memory than the plan for these inputs, those that save most first; ""
// where none does.
std::string less_memory(const PlanInputs& inputs, const Machine& machine, const World& world, TierId tier_id);

// The table for people, and the object for programs.
std::string print_plan(const Plan& plan);
// "step: 59 tokens a sequence on average, 0.41 s and 287 tokens/s planned".
std::string step_line(const Plan& plan);
std::string plan_json(const Plan& plan);

}  // namespace lm
