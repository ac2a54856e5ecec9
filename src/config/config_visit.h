// One visitor over the configuration: key, field, tag, allowed range and a line of help, in printing order.
// Parsing, printing, help and the comparison at resume all use it, so that no key can be half-supported.
// Pure; `Config` may be const.
//
// A visitor has `template <class T> void key(const char* table, const char* name, T& field, const KeyInfo&)`
// and `void table(const char* name, const char* help)`, which is called before the keys of that table.
#pragma once

#include "config/config.h"
#include "config/config_names.h"
#include "config/config_visit_adapters.h"

namespace lm {

template <class RunT, class V>
void visit_run(RunT& run, V& v) {
  using enum KeyTag;
  v.table("run", "the run's directory, device and seed");
  v.key("run", "dir", run.dir,
        {kReporting, "the run's output directory; \"\": runs/<the configuration's name>"});
  v.key("run", "seed", run.seed,
        {kNumerics, "random seed of shuffling, initialization, dropout and stochastic rounding", {.low = 0}});
  v.key("run", "device", run.device, {kNumerics, "auto: one GPU if present, else the CPU with a note"});
  v.key("run", "threads", run.threads,
        {kNumerics, "CPU compute threads; auto: all cores that this process may use", kThreads});
  v.key("run", "deterministic", run.deterministic,
        {kNumerics, "deterministic attention and reductions on GPUs"});
  v.key(
      "run", "time_limit", run.time_limit,
      {kReporting,
       "after this time the run saves a checkpoint and exits with code 75; auto: the end of the Slurm job"});
}

template <class ModelT, class V>
void visit_model(ModelT& model, V& v) {
  using enum KeyTag;
  v.table("model", "the model to train");
  v.key("model", "path", model.path,
        {kNumerics,
         "a Hugging Face directory, a run's directory, or ORG/NAME[@REVISION] in the local hub cache "
         "(lmlaunch fetch); with lora also an "
         "adapter",
         {},
         true});
  v.key("model", "dtype", model.dtype,
        {kState, "dtype of weights and activations; fp16 has a dynamic loss scale, train.loss_scale"});
  v.key(
      "model", "products", model.products,
      {kNumerics,
       "products of fp32 matrices on GPUs; tf32: both factors rounded to 10 bits of mantissa, several times "
       "as fast, from compute capability 8.0 on"});
  v.key("model", "init", model.init,
        {kState, "random: random weights of the shape in config.json, for benchmarks"});
  v.key("model", "quantize", model.quantize,
        {kNumerics,
         "quantize the blocks' frozen linear layers to 4 or 8 bits; only with train.method = \"lora\""});
  v.key("model", "double_quantize", model.double_quantize,
        {kNumerics, "also quantize the scales of 4-bit weights: 4.1 bits per weight instead of 4.5"});
  v.key("model", "add_tokens", model.add_tokens,
        {kState,
         "texts that become tokens of the tokenizer if it does not have them; the embedding and the head get "
         "rows for them"});
  v.key("model", "new_rows", model.new_rows,
        {kNumerics,
         "initial rows of these tokens: mean, of all tokens' rows, or the text of a token whose row is "
         "copied"});
}

template <class DataT, class V>
void visit_data(DataT& data, V& v) {
  using enum KeyTag;
  v.table("data", "the training and evaluation data");
  v.key(
      "data", "train", data.train,
      {kNumerics,
       "files or globs: JSONL, JSON, Parquet, CSV, text, also .gz and .zst; or ORG/NAME of a data set in the "
       "local hub cache",
       {},
       true});
  v.key("data", "weights", data.weights,
        {kNumerics,
         "for each entry of train, how often its examples occur in an epoch; []: once",
         {.low = 0, .high = 1e6, .low_open = true}});
  v.key("data", "eval", data.eval,
        {kReporting,
         "evaluation files, written as in train, or several named sets: {code = [\"code.jsonl\"], chat = "
         "[\"chat.jsonl\"]}, of which the first decides keep_best and early stopping; empty: see "
         "eval_fraction"});
  v.key("data", "eval_fraction", data.eval_fraction,
        {kNumerics, "share of the training examples held out when eval is empty", kFraction});
  v.key("data", "format", data.format,
        {kTokens,
         "format of the examples; auto: detected from their columns; choices: a context and endings, of "
         "which the right one is trained and an evaluation gives the accuracy; classify: a text and its "
         "label"});
  v.key("data", "columns", data.columns,
        {kTokens, "our column name = the name in the files, where they differ"});
  v.key("data", "chat_template", data.chat_template,
        {kTokens, "a file with a chat template in Jinja; \"\": the model's own"});
  v.key(
      "data", "render", data.render,
      {kTokens,
       "rows of plain prompt and completion on a model with a chat template; chat: a user's message and "
       "its answer, written by the template; plain: as they are, and generate prompts likewise; auto: plain, "
       "with a note"});
  v.key("data", "bad_rows", data.bad_rows,
        {kTokens, "stop: an invalid row ends the run; skip: it is reported and left out"});
  v.key("data", "max_rows", data.max_rows,
        {kTokens, "train on the first rows only: so many of all files in train, in their order; 0: all",
         kCountFromZero});
  v.key("data", "answers", data.answers,
        {kTokens,
         "which assistant messages are trained; each: one example per answer, which ends with that answer"});
  v.key("data", "reasoning", data.reasoning,
        {kTokens, "reasoning before an answer: rendered by the chat template, or removed"});
  v.key("data", "max_length", data.max_length,
        {kNumerics,
         "maximum sequence length in tokens; activation memory grows with it",
         {.low = 2, .high = 16777216}});
  v.key("data", "too_long", data.too_long,
        {kNumerics, "what happens to longer examples; auto: plain text is split, other rows are truncated"});
  v.key("data", "shuffle", data.shuffle,
        {kNumerics, "a new order of the examples in each epoch; false: the order of the files"});
  v.key("data", "streaming", data.streaming,
        {kTokens,
         "read, tokenize and pack rows while the run trains, for data whose tokens do not fit on a disk. It "
         "needs train.steps, and shuffles within data.shuffle_window; the token cache shuffles all "
         "examples"});
  v.key("data", "shuffle_window", data.shuffle_window,
        {kNumerics,
         "with data.streaming: documents that are held in memory and shuffled at a time; 5 bytes a token on "
         "each rank",
         {.low = 1, .high = 1e9}});
  v.key("data", "packing", data.packing,
        {kNumerics, "pack several examples into one sequence; attention does not cross examples"});
  v.key("data", "loss_on", data.loss_on, {kTokens, "train on the answers only, or on every token"});
  v.key("data", "cache_dir", data.cache_dir,
        {kPlacement, "directory of tokenized data; \"\": lmlaunch/tokens in the user's cache directory"});
}

template <class TrainT, class V>
void visit_objective(TrainT& train, V& v) {
  using enum KeyTag;
  v.key("train", "objective", train.objective,
        {kState,
         "the loss. sft: of tokens; classify: of a text's label; reward: of pairs of chosen and rejected "
         "answers. The last two train a head of scores in place of the vocabulary head"});
  v.key("train", "labels", train.labels,
        {kState,
         "with classify: the labels' names in the order of the head's rows; one: regression; []: those of "
         "the model's id2label"});
  v.key("train", "problem", train.problem,
        {kState,
         "with classify: whether a text has one of the labels, any of them, or a number for each; auto: a "
         "number with one label, else one of them"});
}

template <class TrainT, class V>
void visit_train(TrainT& train, V& v) {
  using enum KeyTag;
  v.table("train", "training method, length and batch size");
  v.key("train", "method", train.method,
        {kState,
         "full: all weights; lora: low-rank adapters, see [lora]; qlora: lora with model.quantize = \"nf4\"; "
         "ia3: factors of layers' inputs and outputs; norms: the norms alone, as an adapter (LN tuning); "
         "prefix: keys and values of virtual tokens in every layer; prompt: embeddings of virtual tokens; "
         "ptuning: such embeddings as an MLP makes them, which is trained with them (P-tuning)"});
  visit_objective(train, v);
  v.key("train", "only", train.only,
        {kState,
         "full fine-tuning of the tensors with these names alone; the others are frozen: whole segments of a "
         "name between points, such as \"model.layers\", or \"regex:...\"; []: all are trained"});
  v.key("train", "epochs", train.epochs,
        {kNumerics,
         "passes over the data; set this or steps (neither: 1 epoch)",
         {.low = 0, .high = 1e6, .low_open = true}});
  v.key("train", "steps", train.steps, {kNumerics, "optimizer steps; set this or epochs", kCountFromOne});
  v.key("train", "global_batch", train.global_batch,
        {kNumerics, "sequences per optimizer step, summed over all ranks", {.low = 1, .high = 1e9}});
  v.key("train", "micro_batch", train.micro_batch,
        {kNumerics,
         "sequences per forward pass on one rank; auto: the largest that fits",
         {.low = 1, .high = 1e9}});
  v.key("train", "gradients", train.gradients,
        {kNumerics, "dtype of accumulated gradients; bf16 halves their memory"});
  v.key("train", "recompute", train.recompute,
        {kPlacement,
         "activation checkpointing: what blocks keep of their forward pass; none: all that backward needs; "
         "attention: what attention has saved and the residual stream, and backward computes the MLPs again; "
         "block: only block inputs, and backward runs forward again; N: every Nth block (N, 2N, ...) as with "
         "block, the others as with none; auto: the level with the shortest estimated step that fits",
         {.low = 1, .high = kMostRecomputeEvery}});
  v.key("train", "update", train.update,
        {kPlacement,
         "in_backward: update each block right after its backward, so that only one block's gradients are in "
         "memory; auto: only if the whole model's gradients do not fit"});
  v.key(
      "train", "loss_scale", train.loss_scale,
      {kNumerics,
       "model.dtype = \"fp16\": the loss's factor at the start, which keeps small gradients in fp16's range",
       {.low = 1, .high = 1e30}});
  v.key("train", "loss_scale_growth", train.loss_scale_growth,
        {kNumerics,
         "what the loss scale is multiplied by after loss_scale_interval steps without overflow",
         {.low = 1, .high = 1e6}});
  v.key("train", "loss_scale_backoff", train.loss_scale_backoff,
        {kNumerics,
         "what it is multiplied by after a step whose gradients overflowed; the step is skipped",
         {.low = 0, .high = 1, .low_open = true, .high_open = true}});
  v.key("train", "loss_scale_interval", train.loss_scale_interval,
        {kNumerics, "steps in a row without overflow after which the loss scale grows", kCountFromOne});
  v.key(
      "train", "router_aux_loss", train.router_aux_loss,
      {kNumerics,
       "mixtures of experts: coefficient of the loss that balances their load, over all tokens of a step; 0: "
       "none; auto: the model's router_aux_loss_coef if its config.json has output_router_logits",
       {.low = 0, .high = 1e6}});
  v.key("train", "max_grad_norm", train.max_grad_norm,
        {kNumerics, "gradient clipping threshold; not used with optimizer.clip = \"none\"", kPositive});
  v.key("train", "eval_every", train.eval_every,
        {kReporting, "steps between evaluations; 0: only before and after training", kCountFromZero});
  v.key("train", "early_stopping_patience", train.early_stopping_patience,
        {kReporting, "early stopping: end after this many evaluations without a lower eval loss; 0: off",
         kCountFromZero});
  v.key("train", "early_stopping_threshold", train.early_stopping_threshold,
        {kReporting,
         "minimum decrease of the eval loss that counts as an improvement",
         {.low = 0, .high = 1e6}});
  v.key("train", "sample_prompts", train.sample_prompts,
        {kReporting,
         "prompts answered at each evaluation, greedily; \"@FILE\": one prompt per line of a file"});
  v.key("train", "sample_tokens", train.sample_tokens,
        {kReporting, "maximum new tokens per answer to a sample prompt", {.low = 1, .high = 1e6}});
}

template <class GenerateT, class V>
void visit_eval_generate(GenerateT& generate, V& v) {
  using enum KeyTag;
  constexpr const char* kTable = "eval.generate";
  v.table(kTable, "answers that are generated at each evaluation and scored against references");
  v.key(kTable, "data", generate.data,
        {kReporting,
         "JSON lines with a prompt and its completion, or messages whose last answer is the reference; the "
         "columns as data.columns names them; []: no answers"});
  v.key(kTable, "max_tokens", generate.max_tokens,
        {kReporting, "maximum new tokens per answer, decoded greedily", {.low = 1, .high = 1e6}});
  v.key(kTable, "metrics", generate.metrics,
        {kReporting,
         "means over the answers: equal but for blanks around, SQuAD's token F1, ROUGE-L's F-measure"});
  v.key(kTable, "command", generate.command,
        {kReporting,
         "a program and its arguments, run without a shell, that reads JSON lines of prompt, answer and "
         "reference, and prints a number or a JSON object of numbers; []: none"});
  v.key(kTable, "command_seconds", generate.command_seconds,
        {kReporting,
         "time after which this program is killed",
         {.low = 1, .high = 3000}});  // other ranks wait an hour at most (comm/liveness.h)
}

template <class OptimizerT, class V>
void visit_optimizer(OptimizerT& optimizer, V& v) {
  using enum KeyTag;
  v.table("optimizer", "optimizer, learning rate and clipping");
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
        {kNumerics,
         "weight decay, multiplied by lr at each step; not applied to norms and biases",
         {.low = 0, .high = 1e6}});
  v.key(
      "optimizer", "groups", optimizer.groups,
      {kNumerics,
       "parameter groups: tensors whose names match have another learning rate or weight decay; the first "
       "match counts. match: whole segments of a name between points, or \"regex:...\"; lr_scale: times lr; "
       "weight_decay: of norms and biases too"});
  v.key("optimizer", "clip", optimizer.clip,
        {kNumerics, "gradient clipping: by the global norm, by each block's norm, or none"});
  v.key("optimizer", "schedule", optimizer.schedule, {kNumerics, "learning rate schedule"});
  v.key("optimizer", "warmup", optimizer.warmup,
        {kNumerics, "warmup steps if >= 1, else a fraction of all steps", {.low = 0, .high = 1e15}});
  v.key("optimizer", "min_lr_ratio", optimizer.min_lr_ratio,
        {kNumerics, "final learning rate of a decaying schedule, as a share of lr", {.low = 0, .high = 1}});
  v.key(
      "optimizer", "master", optimizer.master,
      {kState,
       "master weights of bf16 weights: split and fp32 give the same bits, and split takes 2 bytes per "
       "weight less; none: stochastic rounding; adamw_bf16 and adamw_anyprecision always have none; those of "
       "fp16 weights are fp32 or none"});
  v.key("optimizer", "threads", optimizer.threads,
        {kPlacement, "CPU threads of the optimizer update; auto: run.threads", kThreads});
}

template <class ZeroT, class V>
void visit_zero(ZeroT& zero, V& v) {
  v.table("zero", "sharding across ranks; never changes a result");
  v.key("zero", "stage", zero.stage,
        {KeyTag::kPlacement,
         "0: no sharding; 1: shard optimizer state; 2: also gradients; 3: also weights",
         {.low = 0, .high = 3}});
  v.key(
      "zero", "group", zero.group,
      {KeyTag::kPlacement,
       "ranks that shards are divided among; machine: each machine has all of them, so that no weights cross "
       "the network, and a rank has as many times the state as there are machines"});
  v.key("zero", "experts", zero.experts,
        {KeyTag::kPlacement,
         "parallel: each rank keeps an equal part of every mixture's experts, and tokens pass between ranks; "
         "of a frozen base; with lora.experts sums of several micro-batches have another order"});
}

template <class OffloadT, class V>
void visit_offload(OffloadT& offload, V& v) {
  using enum KeyTag;
  v.table("offload", "offloading to host memory and disks; never changes a result");
  v.key("offload", "optimizer", offload.optimizer,
        {kPlacement, "where master weights and optimizer state are kept"});
  v.key("offload", "gradients", offload.gradients,
        {kPlacement, "where the transformer blocks' gradients are kept"});
  v.key("offload", "weights", offload.weights,
        {kPlacement, "where the transformer blocks' weights are kept (LoRA: the frozen base)"});
  v.key("offload", "activations", offload.activations,
        {kPlacement,
         "where saved activations are kept: block inputs, and what train.recompute keeps of blocks"});
  v.key("offload", "paths", offload.paths,
        {kPlacement, "directories on fast disks for offloaded state; striped by their speed"});
  v.key("offload", "device_memory", offload.device_memory, {kPlacement, "GPU memory that a run may use"});
  v.key("offload", "host_memory", offload.host_memory, {kPlacement, "host memory that a rank may use"});
  v.key("offload", "disk_limit", offload.disk_limit,
        {kPlacement, "disk space that a run may use in each path; auto: what is free"});
  v.key(
      "offload", "verify", offload.verify,
      {kPlacement, "check the checksum of every chunk read from disk, or copied to a GPU from host memory"});
}

template <class IoT, class V>
void visit_io(IoT& io, V& v) {
  using enum KeyTag;
  v.table("io", "disk I/O; the defaults seldom need a change");
  v.key("io", "engine", io.engine, {kPlacement, "auto: io_uring, or threads if the kernel refuses it"});
  v.key("io", "block", io.block, {kPlacement, "bytes per request", {.low = 4096, .high = 1 << 30}});
  v.key("io", "depth", io.depth, {kPlacement, "requests in flight", {.low = 1, .high = 4096}});
  v.key("io", "tile", io.tile,
        {kPlacement,
         "bytes of optimizer state that are read and written together",
         {.low = 40960, .high = 1 << 30}});
  v.key("io", "timeout", io.timeout,
        {kPlacement,
         "seconds without a completed request after which a disk counts as failed",
         {.low = 1, .high = 1e6}});
}

template <class CheckpointT, class V>
void visit_checkpoint(CheckpointT& checkpoint, V& v) {
  using enum KeyTag;
  v.table("checkpoint", "checkpoints and resume");
  v.key("checkpoint", "every", checkpoint.every,
        {kReporting, "steps or time between checkpoints; 0: only when the run is stopped", kCountFromZero});
  v.key("checkpoint", "keep", checkpoint.keep,
        {kReporting, "how many of the newest checkpoints are kept", {.low = 1, .high = 1e6}});
  v.key("checkpoint", "keep_best", checkpoint.keep_best,
        {kReporting,
         "also keep the checkpoint with the lowest eval loss; it is saved when that loss is reached"});
  v.key("checkpoint", "resume", checkpoint.resume,
        {kReporting,
         "auto: resume from the newest valid checkpoint; never; or a name such as step_00000100",
         {},
         true});
  v.key("checkpoint", "mirror", checkpoint.mirror,
        {kReporting,
         "a directory on another disk, into which checkpoints are copied beside training and verified, under "
         "the "
         "run's name; a start that lacks them resumes from there; \"\": none"});
  v.key("checkpoint", "on_commit", checkpoint.on_commit,
        {kReporting,
         "a command after each committed checkpoint, such as a copy to object storage: a list of arguments "
         "without a shell, in which {} is the checkpoint's directory; []: none"});
  v.key("checkpoint", "on_commit_limit", checkpoint.on_commit_limit,
        {kReporting, "after this time the command of on_commit is killed"});
}

template <class LogT, class V>
void visit_log(LogT& log, V& v) {
  v.table("log", "logging");
  v.key("log", "every", log.every,
        {KeyTag::kReporting, "steps between lines in log.txt, and on stderr unless it is a terminal",
         kCountFromOne});
  v.key("log", "format", log.format,
        {KeyTag::kReporting,
         "json: stderr gets a JSON object in place of each line, with time, rank, host, level and message; "
         "log.txt is always text"});
  v.key("log", "prometheus", log.prometheus,
        {KeyTag::kReporting,
         "an address such as 127.0.0.1:9400 at which Prometheus scrapes the run, or the path of a file for "
         "node_exporter's textfile collector; \"\": neither"});
  v.key("log", "to", log.to,
        {KeyTag::kReporting,
         "also send the curves to these: TensorBoard event files in <run>/tensorboard, or a tracker's Python "
         "library"});
  v.key("log", "webhook", log.webhook,
        {KeyTag::kReporting,
         "an http or https address that gets a POST at the start, the end or the failure of a run"});
}

template <class ConfigT, class V>
void visit_config(ConfigT& config, V& v) {
  visit_run(config.run, v);
  visit_model(config.model, v);
  visit_data(config.data, v);
  visit_train(config.train, v);
  visit_eval_generate(config.eval.generate, v);
  visit_optimizer(config.optimizer, v);
  visit_lora(config.lora, v);
  visit_prompt(config.prompt, v);
  visit_zero(config.zero, v);
  visit_offload(config.offload, v);
  visit_io(config.io, v);
  visit_checkpoint(config.checkpoint, v);
  visit_log(config.log, v);
}

}  // namespace lm
