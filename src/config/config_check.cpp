#include "config/config_check.h"

#include <fmt/format.h>
#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
#include <map>
#include <string_view>

#include "base/name_pattern.h"
#include "config/config_text.h"
#include "config/listen_address.h"
#include "config/prompt_rules.h"
#include "config/streaming_rules.h"

namespace lm {
namespace {

// The name becomes part of keys of metrics.jsonl and of tags, and a bare key of TOML. The unnamed set is not
// checked.
bool names_a_set(const std::string& name) {
  const auto allowed = [](unsigned char c) { return std::isalnum(c) != 0 || c == '_' || c == '-'; };
  return name.size() <= 64 && std::ranges::all_of(name, allowed);
}

using KeyTest = std::function<bool(const std::string&)>;

class Checks {
 public:
  Checks(const Config& config, const KeyTest& given, const KeyTest& usable)
      : config_(config), given_(given), usable_(usable) {}

  std::vector<Conflict> run() {
    length_of_run();
    batch();
    evaluation();
    generation();
    data();
    streaming();
    schedule();
    groups();
    scores();
    freezing();
    adapter();
    without_pairs();
    prompt();
    adapter_start();
    quantization();
    new_tokens();
    types();
    offload();
    checkpoint();
    log();
    return std::move(out_);
  }

 private:
  void take(const std::vector<KeyRule>& rules) {
    for (const KeyRule& rule : rules) require(rule.holds, rule.key, rule.other, rule.text);
  }
  // Reports `key`, unless it or `other` could not be read.
  void require(bool holds, const std::string& key, const std::string& other, const std::string& text) {
    if (!holds && usable_(key) && usable_(other)) out_.push_back({key, text});
  }

  void length_of_run() {
    const TrainConfig& train = config_.train;
    if (train.epochs && train.steps) {
      require(false, "train.steps", "train.epochs",
              "train.steps = " + value_text(train.steps) + " and train.epochs = " + value_text(train.epochs) +
                  " exclude each other: leave one out or set it to \"auto\"");
    }
    if (train.steps && config_.optimizer.warmup >= 1) {
      require(config_.optimizer.warmup <= static_cast<double>(*train.steps), "optimizer.warmup",
              "train.steps",
              "optimizer.warmup = " + value_text(static_cast<int64_t>(config_.optimizer.warmup)) +
                  " steps is more than train.steps = " + value_text(train.steps));
    }
    const double warmup = config_.optimizer.warmup;
    require(warmup < 1 || warmup == std::floor(warmup), "optimizer.warmup", "optimizer.warmup",
            "optimizer.warmup = " + value_text(warmup) +
                " is neither a fraction of all steps (less than 1) nor a whole number of steps");
  }

  // Tokens of a micro-batch are counted in 32 bits, those of a step in 64.
  void batch() {
    const TrainConfig& train = config_.train;
    const int64_t length = config_.data.max_length;
    const auto tokens = [&](const char* key, int64_t sequences, int64_t most) {
      require(sequences <= most / length, key, "data.max_length",
              fmt::format("{} = {} x data.max_length = {}: {} tokens, expected at most {}", key, sequences,
                          length, sequences * length, most));
    };
    tokens("train.global_batch", train.global_batch, int64_t{1} << 34);
    if (!train.micro_batch) return;
    tokens("train.micro_batch", *train.micro_batch, std::numeric_limits<int32_t>::max());
    const int64_t rest = train.global_batch % *train.micro_batch;
    const std::string sizes = "train.global_batch = " + value_text(train.global_batch) +
                              " is not divisible by train.micro_batch = " + value_text(train.micro_batch);
    require(rest == 0, "train.micro_batch", "train.global_batch",
            fmt::format("{}: {} = {} x {} + {}", sizes, train.global_batch,
                        train.global_batch / *train.micro_batch, *train.micro_batch, rest));
  }

  void evaluation() {
    const DataConfig& data = config_.data;
    require(data.eval.empty() || data.eval_fraction == 0, "data.eval_fraction", "data.eval",
            "data.eval names files, and data.eval_fraction = " + value_text(data.eval_fraction) +
                " holds out training examples: leave one out");
    for (const EvalSet& set : data.eval.all)
      require(names_a_set(set.name), "data.eval", "data.eval",
              "data.eval: " + quote(set.name) +
                  " is no valid set name: use at most 64 letters, digits, \"_\" and \"-\", as for metrics");
    const bool has_eval = !data.eval.empty() || data.eval_fraction > 0;
    if (usable_("data.eval_fraction")) {
      const bool samples = !config_.train.sample_prompts.empty();
      require(config_.train.eval_every == 0 || has_eval || samples, "train.eval_every", "data.eval",
              "train.eval_every = " + value_text(config_.train.eval_every) +
                  " needs something to evaluate: set data.eval or data.eval_fraction");
    }
    const int64_t patience = config_.train.early_stopping_patience;
    if (patience > 0 && usable_("data.eval_fraction")) {
      require(has_eval && config_.train.eval_every > 0, "train.early_stopping_patience", "train.eval_every",
              "train.early_stopping_patience = " + value_text(patience) +
                  " follows the eval loss: set train.eval_every (now " +
                  value_text(config_.train.eval_every) + ") and data.eval or data.eval_fraction");
    }
    if (config_.optimizer.schedule == LrSchedule::kReduceLrOnPlateau && usable_("data.eval_fraction")) {
      require(has_eval && config_.train.eval_every > 0, "optimizer.schedule", "train.eval_every",
              "optimizer.schedule = \"reduce_lr_on_plateau\" follows the eval loss: set "
              "train.eval_every (now " +
                  value_text(config_.train.eval_every) + ") and data.eval or data.eval_fraction");
    }
  }

  void generation() {
    const EvalGenerateConfig& generate = config_.eval.generate;
    const bool has_eval = !config_.data.eval.empty() || config_.data.eval_fraction > 0;
    if (generate.data.empty()) {
      require(generate.command.empty(), "eval.generate.command", "eval.generate.data",
              "eval.generate.command scores the answers to eval.generate.data, which names no file");
      return;
    }
    if (usable_("data.eval_fraction"))
      require(has_eval, "eval.generate.data", "data.eval",
              "eval.generate.data is scored beside the eval loss: set data.eval or data.eval_fraction");
    require(!generate.metrics.empty() || !generate.command.empty(), "eval.generate.metrics",
            "eval.generate.command",
            "eval.generate.metrics = [] scores no answer to eval.generate.data: name a metric, or set "
            "eval.generate.command");
  }

  void data() {
    const DataConfig& data = config_.data;
    require(data.weights.empty() || data.weights.size() == data.train.size(), "data.weights", "data.train",
            fmt::format("data.weights has {} numbers and data.train {} entries: give one weight for each",
                        data.weights.size(), data.train.size()));
    require(data.answers == Answers::kAll || data.loss_on == LossOn::kCompletion, "data.answers",
            "data.loss_on",
            "data.answers = " + value_text(data.answers) +
                " selects answers, and data.loss_on = \"all\" trains every token: leave one out");
    // As src/data/prepare/formats.py reads them.
    static constexpr std::string_view kColumns[] = {
        "messages", "conversations", "prompt", "completion", "instruction", "input",  "output",
        "system",   "history",       "text",   "tools",      "input_ids",   "labels", "attention_mask",
        "context",  "endings",       "label",  "chosen",     "rejected"};
    std::string known;
    for (const std::string_view column : kColumns) known += (known.empty() ? "" : ", ") + std::string(column);
    std::map<std::string, std::string> used;
    for (const auto& [ours, theirs] : data.columns) {
      require(std::ranges::find(kColumns, ours) != std::end(kColumns), "data.columns", "data.columns",
              "data.columns names `" + ours + "`, which is none of: " + known +
                  " (left our name of the column, right the files' name)");
      const auto [before, fresh] = used.emplace(theirs, ours);
      require(fresh, "data.columns", "data.columns",
              "data.columns takes " + value_text(theirs) + " for both `" + before->second + "` and `" + ours +
                  "`");
    }
  }

  void streaming() { take(streaming_rules(config_, given_("data.shuffle_window"))); }

  void schedule() {
    const OptimizerConfig& optimizer = config_.optimizer;
    require(optimizer.schedule != LrSchedule::kConstant || optimizer.warmup == 0, "optimizer.warmup",
            "optimizer.schedule",
            "optimizer.schedule = \"constant\" has no warm-up, and optimizer.warmup = " +
                value_text(optimizer.warmup) + ": \"constant_with_warmup\" has one");
    const bool falls =
        optimizer.schedule != LrSchedule::kConstant && optimizer.schedule != LrSchedule::kConstantWithWarmup;
    require(falls || optimizer.min_lr_ratio == 0, "optimizer.min_lr_ratio", "optimizer.schedule",
            "optimizer.min_lr_ratio = " + value_text(optimizer.min_lr_ratio) +
                " is the final value of a decaying schedule, and optimizer.schedule = " +
                value_text(optimizer.schedule) + " does not decay: leave one of them out");
  }

  void groups() {
    for (const OptimizerGroup& group : config_.optimizer.groups) {
      const std::string mistake = NamePattern::mistake(group.match);
      require(
          mistake.empty(), "optimizer.groups", "optimizer.groups",
          "optimizer.groups: match = " + value_text(group.match) + " is no regular expression: " + mistake);
    }
  }

  void scores() {
    const TrainConfig& train = config_.train;
    const bool classify = train.objective == ObjectiveChoice::kClassify;
    const std::string objective = "train.objective = " + value_text(train.objective);
    require(classify || train.labels.empty(), "train.labels", "train.objective",
            "train.labels names the labels of train.objective = \"classify\", and " + objective +
                " has none: leave one of them out");
    require(classify || train.problem == LabelProblem::kAuto, "train.problem", "train.objective",
            "train.problem is a matter of train.objective = \"classify\", and this is " + objective +
                ": leave one of them out");
    std::vector<std::string> names = train.labels;
    std::ranges::sort(names);
    require(std::ranges::adjacent_find(names) == names.end(), "train.labels", "train.labels",
            "train.labels has a name twice");
    require(train.labels.size() != 1 || train.problem != LabelProblem::kSingleLabel, "train.labels",
            "train.problem",
            "train.problem = \"single_label\" chooses one of several labels: name at least two");
    const DataConfig& data = config_.data;
    require(data.format != DataFormat::kClassify || classify, "data.format", "train.objective",
            "data.format = \"classify\" has labels, and " + objective +
                " trains on none: set train.objective = \"classify\"");
    if (!trains_scores(config_)) return;
    require(data.format == DataFormat::kAuto || data.format == DataFormat::kClassify, "data.format",
            "train.objective",
            "data.format = " + value_text(data.format) + " and " + objective +
                ", which has rows of its own: leave data.format out");
    require(data.too_long != TooLong::kSplit, "data.too_long", "train.objective",
            "data.too_long = \"split\" makes several texts of one, and " + objective +
                " scores a text as a whole: set \"cut\" or \"drop\"");
    require(classify || data.too_long != TooLong::kCut, "data.too_long", "train.objective",
            "data.too_long = \"cut\" would score answers without their ends, and " + objective +
                " drops such pairs: leave data.too_long out");
    const std::string answers =
        " asks for answers, and " + objective + " trains a model that gives scores: leave one of them out";
    require(train.sample_prompts.empty(), "train.sample_prompts", "train.objective",
            "train.sample_prompts" + answers);
    require(config_.eval.generate.data.empty(), "eval.generate.data", "train.objective",
            "eval.generate.data" + answers);
  }

  void freezing() {
    const std::vector<std::string>& only = config_.train.only;
    for (const std::string& name : only) {
      const std::string mistake = NamePattern::mistake(name);
      require(mistake.empty(), "train.only", "train.only",
              "train.only: " + value_text(name) + " is no regular expression: " + mistake);
    }
    require(
        only.empty() || config_.train.method == Method::kFull, "train.only", "train.method",
        "train.only chooses tensors of full fine-tuning, and train.method = \"lora\" and \"qlora\" freeze "
        "the whole model: set train.method = \"full\", or choose by lora.targets");
  }

  void patterns(const char* key, const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      const std::string mistake = NamePattern::mistake(name);
      require(mistake.empty(), key, key,
              std::string(key) + ": " + value_text(name) + " is no regular expression: " + mistake);
    }
  }
  template <class T>
  void patterns(const char* key, const ModuleValues<T>& values) {
    std::vector<std::string> names;
    for (const auto& [name, value] : values.all) names.push_back(name);
    patterns(key, names);
  }

  void adapter() {
    patterns("lora.targets", config_.lora.targets);
    patterns("lora.exclude", config_.lora.exclude);
    patterns("lora.ranks", config_.lora.ranks);
    patterns("lora.alphas", config_.lora.alphas);
    require(
        config_.lora.init.empty() || trains_adapter(config_), "lora.init", "train.method",
        "lora.init = " + value_text(config_.lora.init) +
            " trains an adapter further, and train.method = \"full\" has none: set train.method = \"lora\"");
  }

  // Keys of [lora] that adapters without pairs of low rank do not have. A recorded configuration has every
  // key: the values count.
  void without_pairs() {
    const Method method = config_.train.method;
    const bool with_prompt = has_virtual_tokens(method);
    if (method != Method::kIa3 && method != Method::kNorms && !with_prompt) return;
    const LoraConfig& lora = config_.lora;
    const LoraConfig fresh;
    const auto refuse = [&](const char* key, bool changed) {
      require(!changed, key, "train.method",
              std::string(key) + " is LoRA's, and train.method = " + value_text(method) + " has only " +
                  (with_prompt ? "" : "lora.targets, ") + "lora.dtype" +
                  (method == Method::kPtuning ? "" : " and lora.init") + ": leave it out");
    };
    refuse("lora.targets", with_prompt && lora.targets != fresh.targets);
    refuse("lora.r", lora.r != fresh.r);
    refuse("lora.alpha", lora.alpha != fresh.alpha);
    refuse("lora.dropout", lora.dropout != fresh.dropout);
    refuse("lora.exclude", !lora.exclude.empty());
    refuse("lora.layers", !lora.layers.empty());
    refuse("lora.experts", lora.experts);
    refuse("lora.ranks", !lora.ranks.all.empty());
    refuse("lora.alphas", !lora.alphas.all.empty());
    refuse("lora.rslora", lora.rslora);
    refuse("lora.also", !lora.also.empty());
    refuse("lora.tokens", !lora.tokens.empty());
    refuse("lora.dora", lora.dora);
    refuse("lora.bias", lora.bias != fresh.bias);
    refuse("lora.b_lr_ratio", lora.b_lr_ratio != fresh.b_lr_ratio);
    refuse("lora.start", lora.start != fresh.start);
  }

  void prompt() { take(prompt_rules(config_)); }

  void adapter_start() {
    const bool from_loss = config_.lora.start == LoraStart::kLoftq;
    require(
        !from_loss || config_.model.quantize != Quantize::kNone, "lora.start", "model.quantize",
        "lora.start = \"loftq\" needs the quantization error, and model.quantize = \"none\" has none: set "
        "train.method = \"qlora\", or leave lora.start out");
    if (config_.lora.start != LoraStart::kPissa) return;
    const std::string pissa = "lora.start = \"pissa\"";
    require(trains_adapter(config_), "lora.start", "train.method",
            pissa + " begins adapters, and train.method = \"full\" has none: set train.method = \"lora\"");
    require(!config_.lora.dora, "lora.start", "lora.dora",
            pissa +
                " and lora.dora = true: the lengths of DoRA's rows are not those of two pairs: leave one "
                "of them out");
  }

  void quantization() {
    const ModelConfig& model = config_.model;
    require(model.quantize == Quantize::kNone || trains_adapter(config_), "model.quantize", "train.method",
            "model.quantize = " + value_text(model.quantize) +
                " freezes the model, and train.method = \"full\" trains it: set train.method = \"qlora\"");
  }

  void new_tokens() {
    const ModelConfig& model = config_.model;
    const std::string key = "model.add_tokens";
    for (auto one = model.add_tokens.begin(); one != model.add_tokens.end(); ++one) {
      require(std::find(model.add_tokens.begin(), one, *one) == one, key, key,
              key + " names " + value_text(*one) + " twice: name it once");
    }
    const Method method = config_.train.method;
    const bool pairs = method == Method::kLora || method == Method::kQlora;
    require(model.add_tokens.empty() || method == Method::kFull || pairs, key, "train.method",
            key + " needs rows that are trained, and train.method = " + value_text(method) +
                " trains none: set train.method = \"lora\" and lora.tokens");
    require(model.new_rows == ModelConfig().new_rows || !model.add_tokens.empty(), "model.new_rows", key,
            "model.new_rows is for tokens of " + key + ", which is empty: leave it out");
  }

  void types() {
    const bool model = config_.model.dtype == ModelDType::kF32;
    require(
        !model || config_.train.method == Method::kFull || config_.lora.dtype != LoraDType::kBF16,
        "lora.dtype", "model.dtype",
        "lora.dtype = \"bf16\" and model.dtype = \"fp32\": adapters must not be less precise than the model "
        "(leave lora.dtype out)");
    const OptimizerConfig& optimizer = config_.optimizer;
    const bool no_master = has_no_master(optimizer.name);
    const std::string name = "optimizer.name = " + value_text(optimizer.name);
    require(!no_master || trains_fp32(config_) || optimizer.master == Master::kNone, "optimizer.master",
            "optimizer.name",
            "optimizer.master = " + value_text(optimizer.master) + " and " + name +
                ", which has no master weights: leave optimizer.master out");
    if (scales_loss(config_)) fp16();
    const TrainConfig &train = config_.train, unset;  // a recorded configuration has every key
    no_loss_scale("train.loss_scale", train.loss_scale == unset.loss_scale);
    no_loss_scale("train.loss_scale_growth", train.loss_scale_growth == unset.loss_scale_growth);
    no_loss_scale("train.loss_scale_backoff", train.loss_scale_backoff == unset.loss_scale_backoff);
    no_loss_scale("train.loss_scale_interval", train.loss_scale_interval == unset.loss_scale_interval);
    if (!trains_fp32(config_)) return;
    const std::string key = model ? "model.dtype" : "lora.dtype", fp32 = key + " = \"fp32\": ";
    require(!no_master, "optimizer.name", key,
            name + " trains bf16 weights, and " + fp32 + "leave that out, or set optimizer.name = \"adamw\"");
    require(!given_("optimizer.master") || config_.optimizer.master == Master::kF32, "optimizer.master", key,
            "optimizer.master = " + value_text(config_.optimizer.master) + " is for bf16 weights, and " +
                fp32 + "fp32 weights need no master weights (leave the key out)");
    require(config_.train.gradients == GradientDType::kF32, "train.gradients", key,
            "train.gradients = \"bf16\" and " + fp32 + "gradients of fp32 weights are accumulated in fp32");
  }

  void no_loss_scale(const char* key, bool is_default) {
    require(is_default || scales_loss(config_), key, "model.dtype",
            std::string(key) + " is for model.dtype = \"fp16\", and model.dtype = " +
                value_text(config_.model.dtype) + " needs no loss scale: leave the key out");
  }

  // What an fp16 model cannot have.
  void fp16() {
    const OptimizerConfig& optimizer = config_.optimizer;
    const std::string key = "model.dtype", fp16 = "model.dtype = \"fp16\": ";
    require(!has_no_master(optimizer.name), "optimizer.name", key,
            "optimizer.name = " + value_text(optimizer.name) + " trains bf16 weights, and " + fp16 +
                "set optimizer.name = \"adamw\"");
    require(
        !given_("optimizer.master") || optimizer.master != Master::kSplit, "optimizer.master", key,
        "optimizer.master = \"split\" and " + fp16 +
            "an fp16 weight is not the upper half of an fp32 number, so 16 more bits cannot hold its master: "
            "set optimizer.master = \"fp32\" (2 bytes more per parameter)");
    require(config_.train.gradients == GradientDType::kF32, "train.gradients", key,
            "train.gradients = \"bf16\" and " + fp16 +
                "gradients of fp16 weights are accumulated in fp32 (leave the key out)");
    require(config_.train.method == Method::kFull || config_.lora.dtype != LoraDType::kBF16, "lora.dtype",
            key,
            "lora.dtype = \"bf16\" and " + fp16 + "adapters are fp16 or fp32 then (leave lora.dtype out)");
    require(optimizer.clip == Clip::kGlobal, "optimizer.clip", key,
            "optimizer.clip = " + value_text(optimizer.clip) + " and " + fp16 +
                "layers would be updated before the step's gradients are checked for overflow: set "
                "optimizer.clip = \"global\" or \"none\"");
  }

  void checkpoint() {
    const CheckpointConfig& checkpoint = config_.checkpoint;
    const std::string& resume = checkpoint.resume;
    require(resume == "auto" || resume == "never" || checkpoint_step(resume), "checkpoint.resume",
            "checkpoint.resume",
            "checkpoint.resume = " + value_text(resume) +
                " is neither \"auto\" nor \"never\" nor the name of a checkpoint such as \"step_00000100\"");
    const bool evaluates = config_.train.eval_every > 0;
    require(
        !checkpoint.keep_best || evaluates, "checkpoint.keep_best", "train.eval_every",
        "checkpoint.keep_best keeps the checkpoint with the lowest eval loss: set train.eval_every (now " +
            value_text(config_.train.eval_every) + ")");
    const std::vector<std::string>& command = checkpoint.on_commit;
    require(command.empty() || command.front().find("{}") == std::string::npos, "checkpoint.on_commit",
            "checkpoint.on_commit",
            "checkpoint.on_commit = " + value_text(command) +
                " names no program: the first entry is the program, the others are its arguments");
    require(checkpoint.on_commit_limit.seconds > 0, "checkpoint.on_commit_limit",
            "checkpoint.on_commit_limit", "checkpoint.on_commit_limit is 0: give a time such as \"30min\"");
  }

  void log() {
    const std::string& url = config_.log.webhook;
    const size_t host = url.starts_with("https://") ? 8 : url.starts_with("http://") ? 7 : 0;
    require(url.empty() || (host > 0 && url.size() > host && url.find(' ') == std::string::npos),
            "log.webhook", "log.webhook",
            "log.webhook is not an address: it begins with https:// or http://, and has no spaces");
    const std::string& prometheus = config_.log.prometheus;
    require(!means_address(prometheus) || listen_address(prometheus), "log.prometheus", "log.prometheus",
            "log.prometheus = " + value_text(prometheus) +
                " is neither a numeric address and a port, such as \"127.0.0.1:9400\" or \"[::1]:9400\", nor "
                "the path of a file");
  }

  void offload() {
    const OffloadConfig& offload = config_.offload;
    const std::pair<const char*, OffloadTier> tiers[] = {{"offload.optimizer", offload.optimizer},
                                                         {"offload.gradients", offload.gradients},
                                                         {"offload.weights", offload.weights},
                                                         {"offload.activations", offload.activations}};
    for (const auto& [key, tier_id] : tiers) {
      require(!names_disk(tier_id) || !offload.paths.empty(), key, "offload.paths",
              std::string(key) + " = " + value_text(tier_id) +
                  " needs offload.paths: a directory on a fast disk");
    }
    if (const auto& block = config_.io.block) {
      require(block->bytes % 4096 == 0, "io.block", "io.block",
              "io.block = " + value_text(block) + " is not a multiple of 4KiB, which direct I/O requires");
    }
    require(!names_tier(offload.gradients) || config_.train.update != UpdateTime::kInBackward,
            "offload.gradients", "train.update",
            "offload.gradients = " + value_text(offload.gradients) +
                " offloads the gradients, and train.update = \"in_backward\" has at most one block's: "
                "leave one of them out");
  }

  const Config& config_;
  const KeyTest& given_;
  const KeyTest& usable_;
  std::vector<Conflict> out_;
};

}  // namespace

RuleSettings rule_defaults() {
  return {};
}

std::vector<Conflict> find_conflicts(const Config& config, const KeyTest& given, const KeyTest& usable) {
  return Checks(config, given, usable).run();
}

}  // namespace lm
