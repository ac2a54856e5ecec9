// The configuration of a run as plain values: one struct per TOML table, every field with its default, unit
// and cost. `load_config` (config_toml.h) fills and checks it once; afterwards it is valid and is passed as
// `const Config&`. Each field's tag for resume (numerics, placement, reporting) stands in config_visit.h.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/choices.h"
#include "base/tier.h"
#include "optim/rules/rules.h"

namespace lm {

enum class DeviceChoice : uint8_t { kAuto, kCuda, kCpu };
enum class ModelDType : uint8_t { kBF16, kF32, kF16 };
enum class Products : uint8_t { kF32, kTF32 };
enum class LoraDType : uint8_t { kAuto, kBF16, kF32 };
enum class LoraStart : uint8_t { kZero, kLoftq, kPissa };
enum class ModelInit : uint8_t { kPretrained, kRandom };
enum class Quantize : uint8_t { kNone, kNf4, kFp4, kInt8 };
enum class DataFormat : uint8_t {
  kAuto,
  kText,
  kChat,
  kShareGpt,
  kPromptCompletion,
  kAlpaca,
  kChoices,
  kClassify,
  kTokens
};
enum class TooLong : uint8_t { kAuto, kCut, kSplit, kDrop };
enum class LossOn : uint8_t { kCompletion, kAll };
enum class BadRows : uint8_t { kStop, kSkip };
enum class Answers : uint8_t { kAll, kLast, kEach };
// How plain prompts and completions are written for a model with a chat template; auto: plain, with a note.
enum class Render : uint8_t { kAuto, kPlain, kChat };
enum class Reasoning : uint8_t { kKeep, kDrop };
// What is trained for: the nll of tokens; or the loss of a head of scores in place of the vocabulary head.
enum class ObjectiveChoice : uint8_t { kSft, kClassify, kReward };
// load_config makes kQlora kLora with model.quantize.
enum class Method : uint8_t { kFull, kLora, kQlora, kIa3, kNorms, kPrefix, kPrompt, kPtuning };
// Initial values of virtual tokens, of which each method has its own.
enum class PromptStart : uint8_t { kNormal, kZero, kVocabulary };
enum class GradientDType : uint8_t { kF32, kBF16 };
enum class Recompute : uint8_t { kAuto, kNone, kAttention, kBlock };
enum class UpdateTime : uint8_t { kAuto, kAfter, kInBackward };
enum class ZeroGroup : uint8_t { kAll, kMachine };
enum class ZeroExperts : uint8_t { kReplicated, kParallel };
enum class Clip : uint8_t { kGlobal, kBlock, kNone };
enum class LrSchedule : uint8_t {
  kConstant,
  kConstantWithWarmup,
  kLinear,
  kCosine,
  kCosineWithMinLr,
  kCosineWithRestarts,
  kCosineWarmupWithMinLr,
  kPolynomial,
  kInverseSqrt,
  kWarmupStableDecay,
  kReduceLrOnPlateau,
};

enum class IoEngineChoice : uint8_t { kAuto, kUring, kThreads };
enum class LogFormat : uint8_t { kText, kJson };
enum class LogTarget : uint8_t { kTensorboard, kWandb, kMlflow, kTrackio };
enum class AnswerMetric : uint8_t { kExactMatch, kTokenF1, kRougeL };  // data/answer_scores.h

// "64MiB".
struct ByteSize {
  int64_t bytes = 0;
  bool operator==(const ByteSize&) const = default;
};
// "24GiB", or "90%" of what the machine has.
struct Budget {
  int64_t bytes = 0;  // used when share is 0
  double share = 0;   // of 1
  bool operator==(const Budget&) const = default;
};

inline constexpr int64_t kMostRecomputeEvery = 4096;
// Activation checkpointing: the level of the blocks whose number `every` divides; the other blocks keep
// everything. kNone keeps all that backward needs; kAttention keeps what attention has saved and the residual
// stream, and computes the MLPs once more; kBlock keeps a block's input alone. No level changes a bit.
struct RecomputeChoice {
  Recompute level = Recompute::kAuto;
  int64_t every = 1;

  // A level alone is that of every block.
  // NOLINTNEXTLINE(google-explicit-constructor)
  constexpr RecomputeChoice(Recompute of_all = Recompute::kAuto, int64_t every_block = 1)
      : level(of_all), every(every_block) {}
  auto operator<=>(const RecomputeChoice&) const = default;
  // Blocks are counted from 1, the first transformer block.
  constexpr Recompute of(int64_t block) const { return block % every == 0 ? level : Recompute::kNone; }
  // Every block keeps its input alone.
  constexpr bool whole() const { return level == Recompute::kBlock && every == 1; }
  constexpr bool chosen_by_plan() const { return level == Recompute::kAuto; }
};

// "90s", "30min", "8h".
struct Duration {
  int64_t seconds = 0;
};
// An interval in steps, 200, or in time, "30min": one of the two; neither: never.
struct Interval {
  int64_t steps = 0;
  int64_t seconds = 0;
  bool operator==(const Interval&) const = default;
};

struct RunConfig {
  std::string dir;                            // "" = runs/<config's name>
  int64_t seed = 42;                          // of shuffling, initialization, dropout and rounding
  DeviceChoice device = DeviceChoice::kAuto;  // auto: one GPU if present, else the CPU with a note
  std::optional<int64_t> threads;      // compute threads on the CPU; auto: the cores this process may use
  bool deterministic = true;           // deterministic attention and reductions on GPUs
  std::optional<Duration> time_limit;  // then save and exit with 75; auto: when the Slurm job ends
};

struct ModelConfig {
  std::string path;                      // a Hugging Face directory, or ORG/NAME in the local hub cache
  ModelDType dtype = ModelDType::kBF16;  // of weights and activations
  // Of fp32 matrices, on GPUs from compute capability 8.0 on: tf32 rounds both factors to 10 bits of mantissa
  // (1e-3 relative), and sums in fp32, at 4 to 8 times the rate of fp32 on data centre cards.
  Products products = Products::kF32;
  ModelInit init = ModelInit::kPretrained;  // random: random weights of the config's shape, for benchmarks
  // Quantizes the frozen matrices of the transformer blocks to 4 or 8 bits; training then needs an adapter.
  // nf4: 4.1 bits per weight.
  Quantize quantize = Quantize::kNone;
  bool double_quantize =
      true;  // quantizes scales of 4-bit codes to 8 bits: 4.1 bits per weight instead of 4.5
  // Texts that become tokens, where the tokenizer has no such token: rows of the embedding and the head
  // without a token are taken first, then the matrices get more. Every method; beside adapters they must be
  // trained (lora.tokens or lora.also).
  std::vector<std::string> add_tokens;
  // What their rows begin with: "mean", of the rows of the tokenizer's tokens, or the text of a token whose
  // row is copied.
  std::string new_rows = "mean";
};

inline bool quantizes_to_four_bits(const ModelConfig& model) {
  return model.quantize == Quantize::kNf4 || model.quantize == Quantize::kFp4;
}

// Our column name -> the files' name for it.
using ColumnNames = std::map<std::string, std::string>;

// One set without a name, or named sets in the order of the file: the first one's loss decides keep_best,
// early stopping and a schedule that follows the loss.
struct EvalSet {
  std::string name = {};
  std::vector<std::string> files = {};
};
struct EvalSets {
  std::vector<EvalSet> all = {};
  bool empty() const { return all.empty(); }
};

// Unfinished sequences that data.packing considers. They are 97 % full for uniformly distributed
// lengths, 99.6 % for short ones, at under 1 us per piece; 64 gives 95 %.
inline constexpr int64_t kOpenSequences = 256;

struct DataConfig {
  std::vector<std::string> train;  // files or globs: JSONL, JSON, Parquet, CSV, text; or ORG/NAME in a cache
  std::vector<double> weights;     // for each entry of `train`: how often its examples occur in an epoch
  EvalSets eval;                   // files as in `train`; empty: see eval_fraction
  double eval_fraction = 0.0;      // share of the training examples held out when `eval` is empty
  DataFormat format = DataFormat::kAuto;   // detected from the columns unless named
  ColumnNames columns;                     // {prompt = "question"}: columns that have other names
  std::string chat_template;               // a file of Jinja; "" = the model's own
  Render render = Render::kAuto;           // how plain prompts and completions are written
  BadRows bad_rows = BadRows::kStop;       // an invalid row ends the run, or is counted and left out
  int64_t max_rows = 0;                    // of `train`, in the order of the files; 0: all
  Answers answers = Answers::kAll;         // answers that are trained; each: one example per answer
  Reasoning reasoning = Reasoning::kKeep;  // reasoning of assistants: by the template, or removed
  int64_t max_length = 2048;               // tokens per sequence; activation memory grows with it
  TooLong too_long = TooLong::kAuto;       // longer examples; auto: plain text is split, others are cut
  bool shuffle = true;                     // a new order in each epoch; false: the order of the files
  bool streaming = false;                  // rows are read as the run goes, in place of a cache of all tokens
  int64_t shuffle_window = 10000;          // with streaming: documents that are held and shuffled at a time
  bool packing = false;                  // pack several examples into a sequence; attention stays inside each
  LossOn loss_on = LossOn::kCompletion;  // train on answers only, or on every token
  std::string cache_dir;                 // of cached tokens; "" = ~/.cache/lmlaunch/tokens
};

struct TrainConfig {
  Method method = Method::kFull;
  ObjectiveChoice objective = ObjectiveChoice::kSft;
  std::vector<std::string> labels;  // of classify: the classes' names, in the order of the head's rows
  LabelProblem problem = LabelProblem::kAuto;
  // Names of the tensors that a full run trains (base/name_pattern.h); the others are frozen. Empty: all.
  std::vector<std::string> only;
  std::optional<double> epochs;        // passes over the data; exclusive with steps (neither: 1 epoch)
  std::optional<int64_t> steps;        // optimizer steps
  int64_t global_batch = 8;            // sequences per optimizer step, over all ranks
  std::optional<int64_t> micro_batch;  // sequences per forward pass on a rank; auto: the largest that fits
  GradientDType gradients = GradientDType::kF32;  // of accumulated gradients; bf16 halves their memory
  RecomputeChoice recompute;                      // what blocks keep of their forward for their backward
  // in_backward: a block's gradient exists only between its backward and its update, in one slot that the
  // blocks share; with optimizer.clip = "global" a first backward measures the norm. A tied embedding's
  // gradient lies beside that slot, or, if it does not fit there and the norm is not global, is computed
  // last, in that slot.
  UpdateTime update = UpdateTime::kAuto;
  // Of model.dtype = "fp16", as torch.amp.GradScaler has them (train/loss_scale.h).
  double loss_scale = 65536;
  double loss_scale_growth = 2;
  double loss_scale_backoff = 0.5;
  int64_t loss_scale_interval = 2000;
  // Coefficient of the loss that balances the load of experts, over all of a step's tokens; 0: none; auto:
  // the model's router_aux_loss_coef if its config.json has output_router_logits, as transformers has it.
  std::optional<double> router_aux_loss;
  double max_grad_norm = 1.0;  // clipping threshold; used unless optimizer.clip = "none"
  int64_t eval_every = 0;      // steps between evaluations; 0: before and after only
  // Early stopping: the run ends after this many evaluations without a lower eval loss; 0: never.
  int64_t early_stopping_patience = 0;
  double early_stopping_threshold = 0.0;    // minimum decrease of the eval loss that counts as an improvement
  std::vector<std::string> sample_prompts;  // answered at each evaluation; "@FILE": one prompt per line
  int64_t sample_tokens = 64;               // maximum new tokens of an answer
};

// Answers that are generated greedily at each evaluation, and scored against references.
struct EvalGenerateConfig {
  std::vector<std::string>
      data;                  // files of JSON lines with prompts and references; empty: none are generated
  int64_t max_tokens = 128;  // of an answer
  std::vector<AnswerMetric> metrics = {AnswerMetric::kExactMatch, AnswerMetric::kTokenF1,
                                       AnswerMetric::kRougeL};
  std::vector<std::string> command;  // a program and its arguments, which scores answers too; empty: none
  int64_t command_seconds = 60;      // after which the program is killed
};

struct EvalConfig {
  EvalGenerateConfig generate;
};

// Other settings for tensors with such names.
struct OptimizerGroup {
  std::string match;                        // base/name_pattern.h
  double lr_scale = 1;                      // of the learning rate
  std::optional<double> weight_decay = {};  // of all tensors, norms and biases too; left out: as without
};

// Out of line: where GCC 12 inlines the lists in the defaults of all rules it takes them for dangling.
RuleSettings rule_defaults();

struct OptimizerConfig {
  RuleId name = Rules::id<AdamW>();
  std::string written;  // the name that was written, if it is another project's; set by load_config
  double lr = 5e-5;     // peak learning rate
  RuleSettings rule = rule_defaults();  // the keys of every rule; those of `name` are used
  double weight_decay = 0.0;            // not applied to norms and biases
  std::vector<OptimizerGroup> groups;   // a tensor is in the first that matches one of its names
  Clip clip = Clip::kGlobal;            // by the global norm, by each block's norm, or none
  LrSchedule schedule = LrSchedule::kLinear;
  double warmup = 0.0;        // steps if >= 1, else a fraction of all steps
  double min_lr_ratio = 0.0;  // final lr of a decaying schedule, as a share of lr
  // Of bf16 and fp16 weights (MasterForm in optim/rules/rule.h); fp16 has no split. none: stochastic rounding
  Master master = Master::kSplit;
  std::optional<int64_t> threads;  // of the update on the CPU; auto: run.threads
};

// Values of modules, by the end of their paths or "regex:...", in the order of the file: the first that
// matches a module decides.
template <class T>
struct ModuleValues {
  std::vector<std::pair<std::string, T>> all = {};
  bool empty() const { return all.empty(); }
};

// A token of the tokenizer, by its text or by its number.
struct TokenName {
  std::string text;
  int64_t id = -1;  // of one that is named by its number; else -1
  bool operator==(const TokenName&) const = default;
};

struct LoraConfig {
  int64_t r = 8;
  double alpha = 16.0;   // the adapter's output is scaled by alpha / r (rslora: alpha / sqrt(r))
  double dropout = 0.0;  // on the adapter's input
  // Type of the adapters and of their products. auto: model.dtype; bf16 adapters have master weights. fp32
  // over a bf16 model takes no more memory than bf16 with master weights, some percent of a step, and fp32
  // copies of the activations that an adapter reads, while it reads them.
  LoraDType dtype = LoraDType::kAuto;
  // Modules by the end of their paths (q_proj, layers.3.mlp.up_proj) or "regex:...", or "all-linear".
  std::vector<std::string> targets = {"all-linear"};
  std::vector<std::string> exclude;  // of these, by the same rules
  std::vector<int64_t> layers;       // in which targets without a whole path have adapters; empty: all
  // Of a mixture also each expert's matrices have pairs of rank r, gate and up together: E times the adapter
  // of an MLP. Routers stay as they are.
  bool experts = false;
  ModuleValues<int64_t> ranks;  // in place of r, by module
  ModuleValues<double> alphas;  // in place of alpha, by module
  bool rslora = false;
  // Modules of the model that are trained whole beside the adapters: embed_tokens (the token embedding),
  // lm_head, norms, or ends of such modules' paths. In model.dtype, with master weights as in full
  // fine-tuning: an embedding of [V, H] in bf16 takes 16 V H bytes with AdamW.
  std::vector<std::string> also;
  // Tokens whose rows of the embedding (and of a tied head) are trained beside the adapters, such as markers
  // of a chat that the base has not learnt: some rows' state in place of the embedding's.
  std::vector<TokenName> tokens;
  // DoRA: the length of each row of W + s B A is trained, too. Takes one number per row, a pass over the
  // frozen weights and the outputs of adapted layers as saved activations.
  bool dora = false;
  // Which biases of the model are trained beside the adapters: copies, which are used in the biases' place
  // and saved with the adapters. The base stays as it is. all: of every layer and norm that has one;
  // lora_only: of the layers that have adapters.
  AdapterBias bias = AdapterBias::kNone;
  // LoRA+: the learning rate of B (and of DoRA's magnitudes and biases) is this times that of A.
  double b_lr_ratio = 1.0;
  // Initialization of new adapters. zero: they change nothing at first. loftq: on a quantized model, the
  // rank-r approximation of the quantization error (weights/loftq.h); valid with the quantized model alone.
  // pissa: the rank-r approximation of each adapted matrix, of which a frozen copy is subtracted
  // (weights/principal_pairs.h), so that they change nothing at first either. Doubles the adapters' products
  // and, in model.dtype, their weights, but neither gradients nor optimizer state; costs ten products with
  // every adapted matrix whenever the run is opened.
  LoraStart start = LoraStart::kZero;
  std::string init;  // a PEFT adapter or run to train further; its settings apply unless written; "" = new
  std::vector<std::string> written;  // keys of this table that were given a value; set by load_config
};

// Virtual tokens before each document (prefix, prompt and P-tuning).
struct PromptConfig {
  int64_t length = 20;  // of data.max_length so many are theirs, in each document
  // normal: N(0, 1), peft's default of both methods. zero: a prefix of zeros, which attention gives weight
  // all the same. vocabulary: a prompt of embeddings of tokens drawn from the vocabulary.
  PromptStart start = PromptStart::kNormal;
  // P-tuning: inner size of the MLP that makes the embeddings; auto: the model's hidden size, as peft. Its
  // weights, 2 hidden H + hidden² of them, have gradients and optimizer state, and stay in checkpoints.
  std::optional<int64_t> hidden;
  bool length_written = false;  // set by load_config
};

// Where state is placed. "auto" keeps everything on the device while it fits, and then moves one class after
// another to the next tier, as much as needed; a named tier takes all of its class. Never changes a result.
struct OffloadConfig {
  OffloadTier optimizer = OffloadTier::kAuto;    // master weights and optimizer state
  OffloadTier gradients = OffloadTier::kAuto;    // of transformer blocks
  OffloadTier weights = OffloadTier::kAuto;      // of transformer blocks (LoRA: the frozen base)
  OffloadTier activations = OffloadTier::kAuto;  // what blocks keep for their backward
  std::vector<std::string> paths;                // directories on fast disks; state is striped over them
  Budget device_memory = {0, 0.9};               // of the GPU
  Budget host_memory = {0, 0.9};                 // of this machine, for the rank's whole process
  std::optional<Budget> disk_limit;              // of each path; auto: the free space
  // Checks the checksum of every chunk read from disk, or copied to a GPU from host memory; takes ~2 % of a
  // step.
  bool verify = true;
  bool operator==(const OffloadConfig&) const = default;
};

struct IoConfig {
  IoEngineChoice engine = IoEngineChoice::kAuto;  // auto: io_uring, or threads if the kernel refuses it
  std::optional<ByteSize> block;                  // bytes per request; auto: 1 MiB
  std::optional<int64_t> depth;                   // requests in flight; auto: 32
  std::optional<ByteSize> tile;                   // bytes of optimizer state per transfer
  int64_t timeout = 60;  // seconds without a completed request after which a disk counts as failed
};

struct ZeroConfig {
  int64_t stage = 1;  // what is sharded: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights
  // Among whom. machine: every machine has all shards, each on one of its ranks; weights then never cross the
  // network, and gradients cross it as often as without.
  ZeroGroup group = ZeroGroup::kAll;
  // Who has a mixture's experts. parallel: each rank an equal part of every layer's, and tokens go to the
  // ranks that have those of their choice and back, in the forward and the backward pass.
  ZeroExperts experts = ZeroExperts::kReplicated;
};

struct CheckpointConfig {
  Interval every = {0, 30 * 60};  // between saves; a stopped run saves, too
  int64_t keep = 2;               // number of newest checkpoints
  bool keep_best = false;         // also the one with the lowest eval loss, saved when it is reached
  std::string resume = "auto";    // the newest valid one; "never"; or a name such as step_00000100
  std::string mirror = "";        // a directory, in which <run's name>/checkpoints gets copies; "": none
  // Started after each commit (launcher/cli/commit_hook.h): arguments without a shell, in which "{}" is the
  // checkpoint's directory; killed after the limit.
  std::vector<std::string> on_commit = {};
  Duration on_commit_limit = {3600};
};

struct LogConfig {
  int64_t every = 1;  // steps between lines of log.txt, and of stderr unless it is a terminal
  LogFormat format = LogFormat::kText;  // of stderr; log.txt is always text
  // Further targets of the curves: TensorBoard's files in <run>/tensorboard, or a tracker's Python library,
  // which a process of its own feeds (launcher/cli/follower.h).
  std::vector<LogTarget> to = {};
  std::string prometheus = "";  // an address to listen at (config/listen_address.h), or a file's path
  std::string webhook = "";     // POST of start, end and failure; often a secret: never shown
};

struct Config {
  RunConfig run;
  ModelConfig model;
  DataConfig data;
  TrainConfig train;
  EvalConfig eval;
  OptimizerConfig optimizer;
  LoraConfig lora;
  PromptConfig prompt;
  ZeroConfig zero;
  OffloadConfig offload;
  IoConfig io;
  CheckpointConfig checkpoint;
  LogConfig log;
};

// Whether a head of scores is trained.
inline bool trains_scores(const Config& config) {
  return config.train.objective != ObjectiveChoice::kSft;
}
// Of weights and activations.
constexpr DType storage_type(ModelDType type) {
  switch (type) {
    case ModelDType::kBF16:
      return DType::kBF16;
    case ModelDType::kF32:
      return DType::kF32;
    case ModelDType::kF16:
      return DType::kF16;
  }
  return DType::kF32;
}
constexpr ModelDType model_type(DType type) {
  if (type == DType::kF16) return ModelDType::kF16;
  return type == DType::kBF16 ? ModelDType::kBF16 : ModelDType::kF32;
}
// Whether losses are scaled: gradients of activations would be below fp16's smallest numbers.
inline bool scales_loss(const Config& config) {
  return config.model.dtype == ModelDType::kF16;
}
// Type of the adapters; "auto" is the model's type, and stays for an fp16 model.
inline LoraDType adapter_type(const Config& config) {
  if (config.lora.dtype != LoraDType::kAuto) return config.lora.dtype;
  if (config.model.dtype == ModelDType::kF16) return LoraDType::kAuto;
  return config.model.dtype == ModelDType::kF32 ? LoraDType::kF32 : LoraDType::kBF16;
}
// Whether the model is frozen, and an adapter of any kind trained.
inline bool trains_adapter(const Config& config) {
  return config.train.method != Method::kFull;
}
// Whether every document begins with virtual tokens.
constexpr bool has_virtual_tokens(Method method) {
  return method == Method::kPrefix || method == Method::kPrompt || method == Method::kPtuning;
}
// Of a run whose adapter is new, or recorded.
inline int64_t virtual_tokens(const Config& config) {
  return has_virtual_tokens(config.train.method) ? config.prompt.length : 0;
}
// Whether adapters are fp32.
inline bool has_fp32_adapters(const Config& config) {
  return trains_adapter(config) && config.lora.dtype == LoraDType::kF32;
}
// Whether the trained weights are fp32, and so need no master weights.
inline bool trains_fp32(const Config& config) {
  return config.model.dtype == ModelDType::kF32 || has_fp32_adapters(config);
}

}  // namespace lm
