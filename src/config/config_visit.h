// One visitor over the configuration: key, field, tag, allowed range and a line of help, in the order in
// which they are printed. Parsing, printing, help and the comparison at resume all ride on it, so that a key
// cannot be half-supported. Pure; `Config` may be const.
//
// A visitor has `template <class T> void key(const char* table, const char* name, T& field, const KeyInfo&)`
// and `void table(const char* name, const char* help)`, which is called before the keys of that table.
#pragma once

#include <cstdint>

#include "base/range.h"
#include "config/config.h"
#include "config/config_names.h"

namespace lm {

// What a difference in the key means at resume: placement and reporting may change, the others refuse.
// --override lets a run go on with other numerics. A checkpoint's state has its shapes and types by the keys
// of kState, and the tokens that a run began with are made by those of kTokens: with others of these no run
// can go on, so --override is not proposed for them.
enum class KeyTag : uint8_t { kNumerics, kState, kTokens, kPlacement, kReporting };
constexpr bool changes_results(KeyTag tag) {
  return tag == KeyTag::kNumerics || tag == KeyTag::kState || tag == KeyTag::kTokens;
}

struct KeyInfo {
  KeyTag tag;
  const char* help;
  Range range = {};
  bool required = false;       // a string or list that must not be empty
  const char* rule = nullptr;  // of that optimizer's rule alone
  bool used = true;            // false: of a rule that is not chosen
};

// A bound that only keeps sums computable: said to whoever exceeds it, and to nobody else.
inline constexpr double kMostCounted = 1e15;
inline constexpr Range kCountFromOne = {.low = 1, .high = kMostCounted};
inline constexpr Range kCountFromZero = {.low = 0, .high = kMostCounted};
inline constexpr Range kThreads = {.low = 1, .high = 4096};

template <class RunT, class V>
void visit_run(RunT& run, V& v) {
  using enum KeyTag;
  v.table("run", "where the run writes and computes");
  v.key("run", "dir", run.dir, {kReporting, "the run's directory; \"\" = runs/<config's name>"});
  v.key("run", "seed", run.seed,
        {kNumerics, "of shuffling, initialisation, dropout and rounding", {.low = 0}});
  v.key("run", "device", run.device, {kNumerics, "auto: one GPU if present, else the CPU with a note"});
  v.key("run", "threads", run.threads,
        {kNumerics, "compute threads on the CPU; auto: the cores this process may use", kThreads});
  v.key("run", "deterministic", run.deterministic,
        {kNumerics, "deterministic attention and reductions on GPUs"});
  v.key("run", "time_limit", run.time_limit,
        {kReporting, "then the run saves and leaves with exit code 75; auto: when the Slurm job ends"});
}

template <class ModelT, class V>
void visit_model(ModelT& model, V& v) {
  using enum KeyTag;
  v.table("model", "what is trained");
  v.key("model", "path", model.path,
        {kNumerics,
         "a Hugging Face directory, a run's, or ORG/NAME[@REVISION] in the local hub cache (lmlaunch fetch); of "
         "lora an adapter, too",
         {},
         true});
  v.key("model", "dtype", model.dtype, {kState, "of weights and activations"});
  v.key("model", "init", model.init, {kState, "random: fresh weights of the config's shape, for benchmarks"});
  v.key("model", "quantize", model.quantize,
        {kNumerics, "frozen matrices of the blocks as codes of 4 or 8 bits; train.method = \"lora\" alone"});
  v.key("model", "double_quantize", model.double_quantize,
        {kNumerics, "scales of 4-bit codes as codes, too: 4.1 bits per weight instead of 4.5"});
}

template <class DataT, class V>
void visit_data(DataT& data, V& v) {
  using enum KeyTag;
  v.table("data", "what it is trained on");
  v.key(
      "data", "train", data.train,
      {kNumerics,
       "files or globs: JSONL, JSON, Parquet, CSV, text, also .gz and .zst; or ORG/NAME of a data set in the "
       "local hub cache",
       {},
       true});
  v.key("data", "weights", data.weights,
        {kNumerics,
         "of each entry of train: how often its examples occur in an epoch; []: once",
         {.low = 0, .high = 1e6, .low_open = true}});
  v.key("data", "eval", data.eval, {kReporting, "the same, for evaluation; empty: see eval_fraction"});
  v.key("data", "eval_fraction", data.eval_fraction,
        {kNumerics, "share of the training examples held out when eval is empty", kFraction});
  v.key("data", "format", data.format, {kTokens, "of the examples; auto: by their columns"});
  v.key("data", "columns", data.columns, {kTokens, "columns that have other names in the files"});
  v.key("data", "chat_template", data.chat_template,
        {kTokens, "a file with a chat template in Jinja; \"\": the model's own"});
  v.key("data", "bad_rows", data.bad_rows,
        {kTokens, "a row that cannot be used ends the run, or is counted, named and left out"});
  v.key("data", "answers", data.answers,
        {kTokens,
         "which of a conversation are trained; each: as an example that ends with it, as the model will see "
         "it"});
  v.key("data", "reasoning", data.reasoning,
        {kTokens, "what assistants thought before they answered: as the chat template has it, or taken out"});
  v.key("data", "max_length", data.max_length,
        {kNumerics, "tokens per sequence; activation memory grows with it", {.low = 2, .high = 16777216}});
  v.key("data", "too_long", data.too_long,
        {kNumerics, "what becomes of longer examples; auto: plain text is split, other rows are cut"});
  v.key("data", "packing", data.packing,
        {kNumerics, "fill sequences with several examples; attention stays inside each"});
  v.key("data", "loss_on", data.loss_on, {kTokens, "train on answers only, or on every token"});
  v.key("data", "cache_dir", data.cache_dir,
        {kPlacement, "of token caches; \"\" = lmlaunch/tokens in the user's cache directory"});
}

template <class TrainT, class V>
void visit_train(TrainT& train, V& v) {
  using enum KeyTag;
  v.table("train", "how it is trained");
  v.key("train", "method", train.method,
        {kState,
         "all weights, or low-rank adapters: see [lora]; qlora: adapters, and model.quantize = \"nf4\""});
  v.key("train", "epochs", train.epochs,
        {kNumerics,
         "passes over the data; exclusive with steps (neither: 1)",
         {.low = 0, .high = 1e6, .low_open = true}});
  v.key("train", "steps", train.steps, {kNumerics, "optimizer steps; exclusive with epochs", kCountFromOne});
  v.key("train", "global_batch", train.global_batch,
        {kNumerics, "sequences per optimizer step, over all ranks", {.low = 1, .high = 1e9}});
  v.key("train", "micro_batch", train.micro_batch,
        {kNumerics, "sequences at once on a rank; auto: the most that fits", {.low = 1, .high = 1e9}});
  v.key("train", "gradients", train.gradients,
        {kNumerics, "type of accumulated gradients; bf16 halves their bytes"});
  v.key("train", "recompute", train.recompute,
        {kPlacement, "block: keep block inputs only, at one more forward in backward"});
  v.key("train", "update", train.update,
        {kPlacement,
         "in_backward: each block right after its backward, gradients in memory for one block alone; "
         "auto: only where those of the whole model do not fit"});
  v.key("train", "max_grad_norm", train.max_grad_norm,
        {kNumerics, "clipping threshold; used unless optimizer.clip = \"none\"", kPositive});
  v.key("train", "eval_every", train.eval_every,
        {kReporting, "steps between evaluations; 0: before and after only", kCountFromZero});
  v.key("train", "early_stopping_patience", train.early_stopping_patience,
        {kReporting, "evaluations without a lower held-out loss after which the run ends; 0: it goes on",
         kCountFromZero});
  v.key("train", "early_stopping_threshold", train.early_stopping_threshold,
        {kReporting, "by more than so much a held-out loss counts as lower", {.low = 0, .high = 1e6}});
  v.key("train", "sample_prompts", train.sample_prompts,
        {kReporting, "answered at each evaluation, greedily; \"@FILE\": the lines of a file"});
  v.key("train", "sample_tokens", train.sample_tokens,
        {kReporting, "of such an answer, at most", {.low = 1, .high = 1e6}});
}

template <class OptimizerT, class V>
void visit_optimizer(OptimizerT& optimizer, V& v) {
  using enum KeyTag;
  v.table("optimizer", "how weights are updated");
  v.key("optimizer", "name", optimizer.name, {kState, rule_text(optimizer.name).help});
  v.key("optimizer", "lr", optimizer.lr, {kNumerics, "peak learning rate", {.low = 0, .high = 1e6}});
  Rules::each([&](auto rule) {
    using R = typename decltype(rule)::type;
    R::keys(optimizer.rule.template of<R>(),
            [&](const char* name, auto& field, const char* help, const Range& range) {
              v.key("optimizer", name, field,
                    {.tag = kNumerics,
                     .help = help,
                     .range = range,
                     .rule = R::kText.name,
                     .used = optimizer.name == Rules::id<R>()});
            });
  });
  v.key("optimizer", "weight_decay", optimizer.weight_decay,
        {kNumerics, "per step, times lr; not applied to norms and biases", {.low = 0, .high = 1e6}});
  v.key("optimizer", "clip", optimizer.clip,
        {kNumerics, "by the norm of all gradients, of each block's, or not at all"});
  v.key("optimizer", "schedule", optimizer.schedule, {kNumerics, "of the learning rate"});
  v.key("optimizer", "warmup", optimizer.warmup,
        {kNumerics, "steps if >= 1, else a fraction of all steps", {.low = 0, .high = 1e15}});
  v.key("optimizer", "min_lr_ratio", optimizer.min_lr_ratio,
        {kNumerics, "floor of the schedules that fall, as a share of lr", {.low = 0, .high = 1}});
  v.key("optimizer", "master", optimizer.master,
        {kState,
         "of bf16 weights: split and fp32 give the same bits, split costs 2 bytes per weight less; "
         "none: stochastic rounding"});
  v.key("optimizer", "threads", optimizer.threads,
        {kPlacement, "of the update on the CPU; auto: run.threads", kThreads});
}

template <class LoraT, class V>
void visit_lora(LoraT& lora, V& v) {
  using enum KeyTag;
  v.table("lora", "low-rank adapters; used with train.method = \"lora\"");
  v.key("lora", "r", lora.r, {kState, "rank", {.low = 1, .high = 65536}});
  v.key("lora", "alpha", lora.alpha,
        {kNumerics, "the adapter's output is scaled by alpha / r (rslora: alpha / sqrt(r))", kPositive});
  v.key("lora", "dropout", lora.dropout, {kNumerics, "on the adapter's input", kFraction});
  v.key("lora", "dtype", lora.dtype,
        {kState, "of adapters and their products: auto is model.dtype; fp32 beside a bf16 model as peft's"});
  v.key("lora", "targets", lora.targets,
        {kState, "\"all-linear\", or names such as q_proj, v_proj", {}, true});
  v.key("lora", "rslora", lora.rslora, {kNumerics, "scale by the square root of the rank"});
  v.key("lora", "start", lora.start,
        {kNumerics, "loftq: fresh adapters begin with what quantising the model lost, as far as r allows"});
  v.key("lora", "init", lora.init,
        {kNumerics, "a PEFT adapter or a run to continue, which decides what is not written; \"\" = fresh"});
}

template <class ZeroT, class V>
void visit_zero(ZeroT& zero, V& v) {
  v.table("zero", "what several ranks share out among them; never changes a result");
  v.key("zero", "stage", zero.stage,
        {KeyTag::kPlacement,
         "what each rank has a shard of: 0 nothing, 1 optimizer state, 2 and gradients, 3 and weights",
         {.low = 0, .high = 3}});
}

template <class OffloadT, class V>
void visit_offload(OffloadT& offload, V& v) {
  using enum KeyTag;
  v.table("offload", "where state lives that does not fit on the device; never changes a result");
  v.key("offload", "optimizer", offload.optimizer, {kPlacement, "home of master and moments"});
  v.key("offload", "gradients", offload.gradients, {kPlacement, "home of the transformer blocks' gradients"});
  v.key("offload", "weights", offload.weights,
        {kPlacement, "home of the transformer blocks' weights (LoRA: of the frozen base)"});
  v.key("offload", "activations", offload.activations,
        {kPlacement, "home of block inputs; needs train.recompute = \"block\""});
  v.key("offload", "paths", offload.paths,
        {kPlacement, "directories on fast disks for what is on nvme; striped by their speed"});
  v.key("offload", "device_memory", offload.device_memory, {kPlacement, "that a run may use of the GPU"});
  v.key("offload", "host_memory", offload.host_memory,
        {kPlacement, "that the rank's process may use of this machine"});
  v.key("offload", "disk_limit", offload.disk_limit, {kPlacement, "of each path; auto: what is free"});
  v.key("offload", "verify", offload.verify,
        {kPlacement,
         "compare every chunk that comes back from disk, or to a GPU from host memory, with its checksum"});
}

template <class IoT, class V>
void visit_io(IoT& io, V& v) {
  using enum KeyTag;
  v.table("io", "how disks are driven; the plan's choice is seldom worth changing");
  v.key("io", "engine", io.engine, {kPlacement, "auto: io_uring, or threads where it is refused"});
  v.key("io", "block", io.block, {kPlacement, "bytes of one request", {.low = 4096, .high = 1 << 30}});
  v.key("io", "depth", io.depth, {kPlacement, "requests in flight", {.low = 1, .high = 4096}});
  v.key("io", "tile", io.tile,
        {kPlacement, "bytes of optimizer state that move as one", {.low = 40960, .high = 1 << 30}});
  v.key("io", "timeout", io.timeout,
        {kPlacement, "seconds without any answer until a disk is given up", {.low = 1, .high = 1e6}});
}

template <class CheckpointT, class V>
void visit_checkpoint(CheckpointT& checkpoint, V& v) {
  using enum KeyTag;
  v.table("checkpoint", "what a run that was interrupted goes on from");
  v.key("checkpoint", "every", checkpoint.every,
        {kReporting, "between saves; 0: only when the run is stopped", kCountFromZero});
  v.key("checkpoint", "keep", checkpoint.keep,
        {kReporting, "how many of the newest are kept", {.low = 1, .high = 1e6}});
  v.key("checkpoint", "keep_best", checkpoint.keep_best,
        {kReporting, "also keep the one with the least held-out loss, saved when it is reached"});
  v.key("checkpoint", "resume", checkpoint.resume,
        {kReporting,
         "auto: go on from the newest that is whole; never; or a name such as step_00000100",
         {},
         true});
}

template <class LogT, class V>
void visit_log(LogT& log, V& v) {
  v.table("log", "what is printed");
  v.key("log", "every", log.every,
        {KeyTag::kReporting, "steps between lines of log.txt, and of stderr unless it is a terminal",
         kCountFromOne});
  v.key("log", "tensorboard", log.tensorboard,
        {KeyTag::kReporting, "also write the curves to <run>/tensorboard, as TensorBoard reads them"});
}

template <class ConfigT, class V>
void visit_config(ConfigT& config, V& v) {
  visit_run(config.run, v);
  visit_model(config.model, v);
  visit_data(config.data, v);
  visit_train(config.train, v);
  visit_optimizer(config.optimizer, v);
  visit_lora(config.lora, v);
  visit_zero(config.zero, v);
  visit_offload(config.offload, v);
  visit_io(config.io, v);
  visit_checkpoint(config.checkpoint, v);
  visit_log(config.log, v);
}

}  // namespace lm
