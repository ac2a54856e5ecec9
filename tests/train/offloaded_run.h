// A training run of a tiny model whose state lives where a test wants it: a real rank, with every transfer
// that its plan asks for, on an engine of the test's choice. Shared by the tests of where state lives
// (offload_test.cpp) and of what a disk does wrong (offload_faults_test.cpp).
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/support/rank_state.h"
#include "tests/support/sim_disk.h"
#include "train/rank.h"

namespace lm::offloaded_run {

constexpr int64_t kLength = 24;       // tokens of a document, at most
constexpr double kMaxGradNorm = 0.4;  // of full runs it clips every step, of LoRA runs some

enum class Engine { kUring, kThreads, kSim };
// What families differ in, where state passes through: sizes of blocks, what attention does, and what else
// there is to a block (tests/support/family_shapes.h).
enum class Family {
  kLlama,    // plain
  kQwen2,    // biases
  kQwen3,    // q/k norms
  kMistral,  // sliding windows
  kGpt2,
  kGemma,
  kCohere,
  kGranite,
  kGemma4,
  kExperts,
  kManyExperts,  // of which a micro-batch meets few
  // Of which two and four ranks have equally many.
  kEightExperts,
  kBiasedExperts,   // with clamped GLUs
  kSigmoidExperts,  // with an expert that all tokens meet
  kExpertsBeside,   // an MLP, with norms of their own and of the sum
};

// A run of the matrix. The first twenty decide the numbers, the rest must not.
struct Variant {
  bool lora = false, tied = true;
  int64_t vocab = 300;  // more than 8192: an untied head is cut where weights or gradients are off the device
  Clip clip = Clip::kGlobal;
  int64_t micro_batches = 1;
  DType dtype = DType::kBF16;
  RuleId rule = Rules::id<AdamW>();
  Master master = Master::kSplit;
  DType gradient_dtype = DType::kF32;
  Family family = Family::kLlama;
  int64_t layers = 3, steps = 12;
  EncodingKind base = EncodingKind::kPlain;  // with LoRA: of the frozen matrices
  bool fp32_adapters = false;                // with LoRA: whatever dtype is
  int64_t r = 4;                             // of adapters
  bool dora = false;                         // with LoRA: with trained lengths of rows
  bool pissa = false;                        // with LoRA: with the frozen pairs that it begins with
  AdapterKind kind = AdapterKind::kLora;     // with LoRA: of the adapter
  bool adapted_experts = false;              // with LoRA: a mixture's experts have pairs, too
  int64_t encoder = 0;                       // of a prompt: the size of its encoder (P-tuning)
  bool groups = false;                       // parameter groups, which cut fused tensors
  bool stateless = false;                    // momentum = 0: sgd then has no state
  bool weighed = false;                      // by an objective that makes weights of the nll
  int64_t overflows_at = 3;                  // of an fp16 model: the step whose loss scale is too large

  bool recompute = false;
  RecomputeChoice level = Recompute::kBlock;                                        // where it recomputes
  bool keep_norms = false;                                                          // StepConfig's
  bool optimizer = false, gradients = false, weights = false, activations = false;  // off the device
  bool mixed = false;    // the earlier half of each pool stays on the device
  int64_t granules = 1;  // of a tile
  int64_t slots = 2;     // more where an operation needs more
  int64_t group = 1;
  int threads = 2;  // of compute; LibTorch's are those of the process's first run
  int optimizer_threads = 1;
  Engine engine = Engine::kSim;
  bool verify = true;
  bool slots_on_device = false;  // slots are memory of their own, as on a GPU
  bool on_host =
      false;  // with `slots_on_device`: state off the device is updated in host memory, as beside a GPU
  bool shared = false;  // with `on_host`: of what is in host memory every other tile, the rest by the device
  int host = 0;  // with `slots_on_device`: tiers in host memory: 0 of none, 1 of all, 2 of the earlier half

  bool in_backward = false;  // updates; then gradients have no tier, and all micro-batches are one group
  bool two_phases = false;   // the head's, though the weights are known beforehand
  bool defer_tied_gradient =
      false;  // with that, tied and not clipped by the global norm: of the table the last one

  int64_t stage = 1;                  // of several ranks
  int nodes = 1;                      // machines that they are planned to be on
  ZeroGroup among = ZeroGroup::kAll;  // whom shards are divided among
  bool parallel = false;              // each rank has some of the experts
  bool one_copy = false;              // of what is frozen and stays in memory, for the ranks of a machine

  const Kernels* kernels = nullptr;  // instead of the device's
  int64_t io_timeout = 60;

  AdapterSpec adapter() const {
    std::vector<std::string> targets = {"q_proj", "v_proj", "down_proj"};
    if (adapted_experts) targets = {"q_proj", "experts.gate_up_proj", "experts.down_proj"};
    if (kind == AdapterKind::kNorms) targets = {"input_layernorm", "q_norm", "norm"};
    const double alpha = 2.0 * static_cast<double>(r);
    const bool with_tokens = kind == AdapterKind::kPrefix || kind == AdapterKind::kPrompt;
    return {.r = r,
            .alpha = alpha,
            .dora = dora,
            .pissa = pissa,
            .dropout = adapted_experts ? 0 : 0.1,
            .targets = targets,
            .kind = kind,
            .virtual_tokens = with_tokens ? 3 : 0,
            .encoder = encoder};
  }
  std::string text() const;
  std::string numbers() const;  // what decides them
  DType trained_dtype() const { return fp32_adapters ? DType::kF32 : dtype; }
};

using State = std::map<std::string, std::vector<std::byte>>;  // every byte of it, by name

struct Outcome {
  std::vector<double> losses, norms;
  std::vector<bool> skipped;
  double evaluated = 0;
  State state;
  int64_t moved_bytes = 0;
};

DeviceType device();
// What else blocks may keep where their inputs are not offloaded, by turns.
RecomputeChoice drawn_level(int i);
// A draw from {none, disk, mixed} x {optimizer, gradients, weights, activations} x tile sizes x threads x
// engines x recompute x accumulation x groups x clip modes x tied/untied x full/LoRA x rules x masters x
// gradients in fp32/bf16 x biases, norms of heads, windows; the rules take turns with `i`.
Variant drawn_variant(std::mt19937& random, int i);
// Whether this machine lets us have a ring; a test that names io_uring skips without one.
bool ring_allowed();

class Training {
 public:
  // `engine` (may be empty) replaces the variant's; `store` (may be empty) this machine's memory and disks.
  // `group` (may be null): the ranks that share the variant's micro-batches, of which this is one;
  // `device_group` (null: as `group`): the same, for what lies on their GPUs.
  explicit Training(const Variant& run, EngineFactory engine = {}, StoreFactory store = {},
                    Group* group = nullptr, Group* device_group = nullptr);
  ~Training();

  // All steps, an evaluation after the fifth, and the state after the last; with `read_between` it is read
  // before every step, too.
  Outcome run(bool read_between = false);
  StepResult step(int64_t step, double lr = 3e-3) {
    start(step, lr);
    return train_step().finish();
  }
  void start(int64_t step, double lr = 3e-3);
  State state();
  // What a checkpoint has of it; `restore` resets the rank and writes it anew.
  struct Copy {
    State state;
    int64_t updates = 0;
  };
  Copy copy();
  void restore(const Copy& copy);
  // The state where it lives, and the other direction; `updates`: of the optimizer so far.
  LiveState live_state() { return rank_state(*rank_); }
  void restore_from(StateReader& from, int64_t updates);
  // The trained units, in the order in which a step's gradients are final.
  std::vector<int64_t> reduced_units() const;
  void flush() { rank_->step().flush(); }
  // Made without the rank.
  StateCatalogue catalogue() const;
  TrainStep& train_step() { return rank_->step(); }
  // Completes what is deferred and puts `value` in place of the final norm's first weight, wherever that
  // lives; gives what was there.
  float replace_norm_weight(float value);
  bool weights_in_shards(int64_t u) { return rank_->weights().in_shards(u); }
  int64_t head_segments() const { return plan_.placement.head_segments(); }
  const Rank& rank() const { return *rank_; }
  const Plan& plan() const { return plan_; }
  const ModelLayout& layout() const { return layout_; }
  const Gradients& gradients() { return rank_->gradients(); }

 private:
  std::unique_ptr<IoEngine> make_engine_of_run(const EngineSetup& setup);
  void load();
  void set_pools();
  void set_update_site();
  void set_arena(const Config& config);

  // This rank's micro-batches of a step.
  StepBatches batches(int64_t step) const;

  Variant run_;
  int rank_index_ = 0, ranks_ = 1;
  EngineFactory engine_;
  AdapterSpec adapter_;
  OptimizerConfig optimizer_;
  ModelSpec spec_;
  ModelLayout layout_;
  StreamView stream_;
  Plan plan_;
  std::unique_ptr<SimDisk> disk_;
  std::unique_ptr<MachineMemory> machine_memory_;
  std::unique_ptr<Rank> rank_;
};

// The run that keeps everything on the device, once per set of numbers.
const Outcome& reference(const Variant& run);
void expect_same(const Variant& run, const Outcome& got);

}  // namespace lm::offloaded_run
