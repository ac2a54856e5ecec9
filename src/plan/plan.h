// Where every byte of a run lives and what a step costs, decided before anything is allocated. A pure
// function of config, spec, layout and machine: it prints as a table, is tested on any laptop, and refuses
// what cannot fit. The numerics half is recorded with the run and kept at resume; the placement half never
// changes a bit.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "config/config.h"
#include "plan/activations.h"
#include "plan/machine.h"
#include "plan/predict.h"
#include "schedule/timeline.h"
#include "spec/block_layout.h"

namespace lm {

enum class StateClass : uint8_t {
  kWeights,
  kFrozenWeights,
  kGradients,
  kOptimizer,  // the streams that the rule names, and the master
  kActivations,
};
inline constexpr int kStateClasses = 5;
const char* state_class_name(StateClass state);

enum class Home : uint8_t { kDevice, kHost, kNvme };

// Depends on config, spec and the machine's capacities alone.
struct NumericsPlan {
  DType dtype = DType::kBF16;
  DType gradient_dtype = DType::kF32;
  int64_t micro_batch = 1;    // sequences
  int64_t micro_batches = 1;  // per step
  int64_t row_chunk = 512;    // rows of logits at once
  bool round_rows = false;    // a micro-batch's tensors have rounded_rows (base/batch.h) of its tokens
  bool recompute = false;
  int threads = 1;                 // compute threads (CPU)
  int64_t documents_at_once = 0;   // that attention is given on a GPU
  Master master = Master::kSplit;  // of bf16 weights; fp32 weights are their own
  RuleId rule = {};
  MasterForm form() const { return master_form(master, dtype); }
  StateStreams state() const { return {rule, form()}; }
};

// Slots and arrays off the device are multiples of this: whole checksum chunks (offload/store.h).
inline constexpr int64_t kSlotAlignment = 8192;

// Arrays of one pool (schedule/transfers.h says which). Those that are streamed live off the device and pass
// through slots; the others are near: in device memory (on the CPU, where both are one tier, in host memory).
struct PoolPlan {
  Home home = Home::kHost;     // the streamed arrays' farthest: kHost (of a GPU) or kNvme
  std::vector<int64_t> bytes;  // of each array; 0: nothing
  std::vector<char> streamed;  // 1: off the device
  int64_t kept_in_host = 0;  // of a GPU with home kNvme: arrays before this one that are streamed live there
  int64_t slots = 0;         // 0: nothing passes through any
  int64_t slot_bytes = 0;
  Home home_of(size_t array) const;  // of a streamed array
  int64_t streamed_bytes() const;
  int64_t streamed_bytes(Home at) const;
};

struct PlacementPlan {
  DeviceType device = DeviceType::kCpu;
  Home home[kStateClasses] = {};  // of what is not near; on a GPU at best kDevice, on the CPU kHost
  int optimizer_threads = 1;
  std::array<PoolPlan, kPools> pools;
  int64_t blocks = 0;                  // of the model
  std::vector<int64_t> first_tile;     // of each block, and behind the last: optimizer arrays are tiles
  std::vector<int64_t> first_granule;  // of each tile, in its block
  // Of a head that may be cut: the first tile of each segment, of what is left of the block, and the end.
  std::vector<int64_t> segment_tiles;
  int64_t tile_granules = 0;  // of 4096 elements each; a unit's last may be shorter
  // With a GPU: bytes of the embedding's weights in pinned host memory, where the GPU reads rows and writes
  // updates in place; 0: on the device.
  int64_t embedding_in_host = 0;
  int64_t granule_bytes = 0;  // optimizer state of one
  // With a GPU: state off it is updated by the CPU where it lies, in host memory or a slot there; else it
  // passes through the GPU. Then, per element, what an update brings from the GPU (gradient and weight) and
  // sends there (weight), and the host memory for that.
  bool update_on_host = false;
  int64_t update_brings = 0, update_sends = 0;
  int64_t update_staging = 0;
  // With a GPU: registered host memory for what a step's batches send to it, and for what the step's end
  // reads back.
  int64_t upload_bytes = 0, result_bytes = 0;
  int64_t library_device_bytes = 0;  // with a GPU: the most that LibTorch may take of it
  // That the CPU's GEMM library may keep code for (0: it keeps none), and whether these are all it could use.
  int64_t gemm_shapes = 0;
  bool every_gemm_shape = false;
  int64_t group = 1;            // micro-batches that pass a block before the next
  bool frozen_weights = false;  // LoRA: what the weight pool moves is the base
  IoEngineChoice engine = IoEngineChoice::kAuto;
  int64_t io_block = 1 << 20;
  int io_depth = 32;
  bool verify = true;

  PoolPlan& pool(Pool p) { return pools[static_cast<size_t>(p)]; }
  const PoolPlan& pool(Pool p) const { return pools[static_cast<size_t>(p)]; }
  // Into how many segments the head is cut: 0 unless one of them lives off the device.
  int64_t head_segments() const;
  // The step's list, but for what depends on the step.
  ScheduleShape schedule(const ModelSpec& spec, bool recompute, Clip clip) const;
  // The pools as the schedule's transfers see them: what passes through slots.
  TransferShape transfers(int64_t layers) const;
  // The same with what crosses which link.
  TimelineShape timeline(int64_t layers) const;
  // Per array of a pool: whether it passes through slots. Host memory that the CPU works in needs none.
  std::vector<char> moved(Pool which) const;
  // Whether the CPU carries out an operation beside a GPU.
  bool on_host(const Operation& operation) const;
  // Per block: into how many tiles its update is cut, 0 where all its state is near.
  std::vector<int64_t> update_tiles() const;
  bool on_disk() const;
};

struct ClassBytes {
  std::string name;
  int64_t bytes = 0;
  std::string note;  // e.g. "fp32, 12 B per parameter"
  Home home = Home::kHost;
};

// A kind of memory: what the plan puts there, and what there is.
struct Tier {
  Home home = Home::kHost;
  int64_t bytes = 0;
  int64_t capacity = 0;  // 0: not known, and then nothing is refused
  int64_t allowed = 0;   // the part of the capacity that the configuration lets a run plan for
  int64_t usable = 0;    // of that, no more than is free now
};
const char* home_name(Home home);

// Bytes that a run may take of a directory of offload.paths: what is free there, and no more than
// offload.disk_limit. 0: not known.
int64_t path_room(const OffloadConfig& offload, const Disk& disk);

struct PeakBytes {
  int64_t device = 0;  // GPU; 0 on the CPU
  int64_t host = 0;    // resident memory of the rank's process, libraries included
  int64_t disk = 0;
};

struct LinkTime {
  std::string name;  // "compute", "memory"
  double seconds = 0;
  double amount = 0;  // FLOP or bytes per step
  std::string unit;   // "FLOP", "B"
};

struct Choice {
  std::string key, value, reason;
};

// What the prediction of time knows of the data; memory is planned for data.max_length whatever it says.
struct DataShape {
  double mean_length = 0;   // tokens per sequence; 0: data.max_length
  double target_share = 1;  // of the tokens
};

struct Plan {
  NumericsPlan numerics;
  PlacementPlan placement;
  ArenaNeed arena;
  int64_t micro_tokens = 0;  // micro_batch x max_length
  int64_t micro_rows = 0;    // of such a micro-batch's tensors
  std::vector<ClassBytes> classes;
  std::vector<Tier> tiers;  // nearest first
  PeakBytes peak;
  bool fits = true;
  std::vector<LinkTime> links;  // what a step spends on each resource
  double step_seconds = 0;
  double step_tokens = 0;            // that the prediction is for
  Timeline timeline;                 // where something is streamed: its step, in time and bytes
  std::string binding;               // the resource that decides
  double sol_seconds_per_token = 0;  // GEMM-bound time of one token: the speed of light
  std::vector<Choice> choices;       // every `auto`, resolved, with its reason
  ScheduleShape schedule;            // of a full step
  Prediction prediction;
};

// `device` is where the run computes; one rank. Throws Error(12) with a table of need and have and the
// settings that would fit. `update_on_host` settles what the plan would choose (benchmarks compare both).
Plan make_plan(const Config& config, const ModelSpec& spec, const AdapterSpec* adapter,
               const ModelLayout& layout, const Machine& machine, DeviceType device,
               const DataShape& data = {}, std::optional<bool> update_on_host = {});

// The same without refusing: `fits` tells.
Plan draft_plan(const Config& config, const ModelSpec& spec, const AdapterSpec* adapter,
                const ModelLayout& layout, const Machine& machine, DeviceType device,
                const DataShape& data = {}, std::optional<bool> update_on_host = {});

// The table for people, and the object for programs.
std::string print_plan(const Plan& plan);
std::string plan_json(const Plan& plan);

}  // namespace lm
