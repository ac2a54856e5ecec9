// The spelling of every choice of the configuration: enum value <-> the value in the TOML file. Pure tables.
#pragma once

#include <array>
#include <charconv>
#include <optional>
#include <string>
#include <string_view>

#include "config/config.h"

namespace lm {

template <class E>
struct EnumName {
  E value;
  std::string_view name;
};

template <class E>
struct EnumNames;  // one specialisation per enum, each with an array `kAll`

template <>
struct EnumNames<DeviceChoice> {
  static constexpr EnumName<DeviceChoice> kAll[] = {
      {DeviceChoice::kAuto, "auto"}, {DeviceChoice::kCuda, "cuda"}, {DeviceChoice::kCpu, "cpu"}};
};
template <>
struct EnumNames<ModelDType> {
  static constexpr EnumName<ModelDType> kAll[] = {
      {ModelDType::kBF16, "bf16"}, {ModelDType::kF32, "fp32"}, {ModelDType::kF16, "fp16"}};
};
template <>
struct EnumNames<Products> {
  static constexpr EnumName<Products> kAll[] = {{Products::kF32, "fp32"}, {Products::kTF32, "tf32"}};
};
template <>
struct EnumNames<LoraDType> {
  static constexpr EnumName<LoraDType> kAll[] = {
      {LoraDType::kAuto, "auto"}, {LoraDType::kBF16, "bf16"}, {LoraDType::kF32, "fp32"}};
};
template <>
struct EnumNames<AdapterBias> {
  static constexpr EnumName<AdapterBias> kAll[] = {{AdapterBias::kNone, kAdapterBiasNames[0]},
                                                   {AdapterBias::kAll, kAdapterBiasNames[1]},
                                                   {AdapterBias::kLoraOnly, kAdapterBiasNames[2]}};
};
template <>
struct EnumNames<LoraStart> {
  static constexpr EnumName<LoraStart> kAll[] = {
      {LoraStart::kZero, "zero"}, {LoraStart::kLoftq, "loftq"}, {LoraStart::kPissa, "pissa"}};
};
template <>
struct EnumNames<ModelInit> {
  static constexpr EnumName<ModelInit> kAll[] = {{ModelInit::kPretrained, "pretrained"},
                                                 {ModelInit::kRandom, "random"}};
};
template <>
struct EnumNames<Quantize> {
  static constexpr EnumName<Quantize> kAll[] = {
      {Quantize::kNone, "none"}, {Quantize::kNf4, "nf4"}, {Quantize::kFp4, "fp4"}, {Quantize::kInt8, "int8"}};
};
template <>
struct EnumNames<DataFormat> {
  static constexpr EnumName<DataFormat> kAll[] = {
      {DataFormat::kAuto, "auto"},       {DataFormat::kText, "text"},
      {DataFormat::kChat, "chat"},       {DataFormat::kShareGpt, "sharegpt"},
      {DataFormat::kAlpaca, "alpaca"},   {DataFormat::kPromptCompletion, "prompt-completion"},
      {DataFormat::kChoices, "choices"}, {DataFormat::kClassify, "classify"},
      {DataFormat::kTokens, "tokens"},
  };
};
template <>
struct EnumNames<TooLong> {
  static constexpr EnumName<TooLong> kAll[] = {
      {TooLong::kAuto, "auto"}, {TooLong::kCut, "cut"}, {TooLong::kSplit, "split"}, {TooLong::kDrop, "drop"}};
};
template <>
struct EnumNames<LossOn> {
  static constexpr EnumName<LossOn> kAll[] = {{LossOn::kCompletion, "completion"}, {LossOn::kAll, "all"}};
};
template <>
struct EnumNames<BadRows> {
  static constexpr EnumName<BadRows> kAll[] = {{BadRows::kStop, "stop"}, {BadRows::kSkip, "skip"}};
};
template <>
struct EnumNames<Answers> {
  static constexpr EnumName<Answers> kAll[] = {
      {Answers::kAll, "all"}, {Answers::kLast, "last"}, {Answers::kEach, "each"}};
};
template <>
struct EnumNames<Reasoning> {
  static constexpr EnumName<Reasoning> kAll[] = {{Reasoning::kKeep, "keep"}, {Reasoning::kDrop, "drop"}};
};
template <>
struct EnumNames<Render> {
  static constexpr EnumName<Render> kAll[] = {
      {Render::kAuto, "auto"}, {Render::kPlain, "plain"}, {Render::kChat, "chat"}};
};
template <>
struct EnumNames<ObjectiveChoice> {
  static constexpr EnumName<ObjectiveChoice> kAll[] = {{ObjectiveChoice::kSft, "sft"},
                                                       {ObjectiveChoice::kClassify, "classify"},
                                                       {ObjectiveChoice::kReward, "reward"}};
};
template <>
struct EnumNames<LabelProblem> {
  static constexpr EnumName<LabelProblem> kAll[] = {{LabelProblem::kAuto, "auto"},
                                                    {LabelProblem::kSingleLabel, "single_label"},
                                                    {LabelProblem::kMultiLabel, "multi_label"},
                                                    {LabelProblem::kRegression, "regression"}};
};
template <>
struct EnumNames<Method> {
  static constexpr EnumName<Method> kAll[] = {{Method::kFull, "full"},     {Method::kLora, "lora"},
                                              {Method::kQlora, "qlora"},   {Method::kIa3, "ia3"},
                                              {Method::kNorms, "norms"},   {Method::kPrefix, "prefix"},
                                              {Method::kPrompt, "prompt"}, {Method::kPtuning, "ptuning"}};
};
template <>
struct EnumNames<PromptStart> {
  static constexpr EnumName<PromptStart> kAll[] = {{PromptStart::kNormal, "normal"},
                                                   {PromptStart::kZero, "zero"},
                                                   {PromptStart::kVocabulary, "vocabulary"}};
};
template <>
struct EnumNames<GradientDType> {
  static constexpr EnumName<GradientDType> kAll[] = {{GradientDType::kF32, "fp32"},
                                                     {GradientDType::kBF16, "bf16"}};
};
template <>
struct EnumNames<Recompute> {
  static constexpr EnumName<Recompute> kAll[] = {{Recompute::kAuto, "auto"},
                                                 {Recompute::kNone, "none"},
                                                 {Recompute::kAttention, "attention"},
                                                 {Recompute::kBlock, "block"}};
};
template <>
struct EnumNames<UpdateTime> {
  static constexpr EnumName<UpdateTime> kAll[] = {
      {UpdateTime::kAuto, "auto"}, {UpdateTime::kAfter, "after"}, {UpdateTime::kInBackward, "in_backward"}};
};
template <>
struct EnumNames<ZeroGroup> {
  static constexpr EnumName<ZeroGroup> kAll[] = {{ZeroGroup::kAll, "all"}, {ZeroGroup::kMachine, "machine"}};
};
template <>
struct EnumNames<ZeroExperts> {
  static constexpr EnumName<ZeroExperts> kAll[] = {{ZeroExperts::kReplicated, "replicated"},
                                                   {ZeroExperts::kParallel, "parallel"}};
};
template <>
struct EnumNames<Clip> {
  static constexpr EnumName<Clip> kAll[] = {
      {Clip::kGlobal, "global"}, {Clip::kBlock, "block"}, {Clip::kNone, "none"}};
};
template <>
struct EnumNames<RuleId> {
  static constexpr auto kAll = [] {
    std::array<EnumName<RuleId>, Rules::kSize> all;
    for (size_t i = 0; i < all.size(); ++i) all[i] = {static_cast<RuleId>(i), Rules::kTexts[i].name};
    return all;
  }();
  // Names of transformers, torchtune and TRL, bitsandbytes and torch. A "paged" optimizer differs only in
  // where its state may be placed, which offload.optimizer sets here.
  static constexpr EnumName<RuleId> kOtherNames[] = {
      {Rules::id<AdamW>(), "adamw_torch"},
      {Rules::id<AdamW>(), "adamw_torch_fused"},
      {Rules::id<AdamW>(), "adamw_hf"},
      {Rules::id<AdamW>(), "adamw_apex_fused"},
      {Rules::id<AdamW>(), "paged_adamw"},
      {Rules::id<AdamW>(), "paged_adamw_32bit"},
      {Rules::id<AdamW>(), "torch.optim.AdamW"},
      {Rules::id<AdamW>(), "bitsandbytes.optim.PagedAdamW"},
      {Rules::id<AdamW8bit>(), "adamw_bnb_8bit"},
      {Rules::id<AdamW8bit>(), "adamw_torch_8bit"},
      {Rules::id<AdamW8bit>(), "paged_adamw_8bit"},
      {Rules::id<AdamW8bit>(), "bitsandbytes.optim.AdamW8bit"},
      {Rules::id<AdamW8bit>(), "bitsandbytes.optim.PagedAdamW8bit"},
      {Rules::id<AdamW4bit>(), "adamw_torch_4bit"},
      {Rules::id<AdamW4bit>(), "torchao.optim.AdamW4bit"},
      {Rules::id<AdamWFp8>(), "adamw_torch_fp8"},
      {Rules::id<AdamWFp8>(), "torchao.optim.AdamWFp8"},
      {Rules::id<Adafactor>(), "transformers.Adafactor"},
      {Rules::id<Adafactor>(), "transformers.optimization.Adafactor"},
      {Rules::id<Lion>(), "lion_32bit"},
      {Rules::id<Lion>(), "paged_lion"},
      {Rules::id<Lion>(), "paged_lion_32bit"},
      {Rules::id<Lion>(), "bitsandbytes.optim.Lion"},
      {Rules::id<Lion8bit>(), "lion_bnb_8bit"},
      {Rules::id<Lion8bit>(), "paged_lion_8bit"},
      {Rules::id<Lion8bit>(), "bitsandbytes.optim.Lion8bit"},
      {Rules::id<Lion8bit>(), "bitsandbytes.optim.PagedLion8bit"},
      {Rules::id<Sgd>(), "torch.optim.SGD"},
  };
  // Words in names of what is refused, and why.
  static constexpr std::pair<const char*, const char*> kRefused[] = {
      {"galore",
       "GaLore's steps follow from singular vectors of whole gradients, and would change with shards and "
       "placement: \"adamw_4bit\" or \"adafactor\", with train.update = \"in_backward\", take as little "
       "memory"},
  };
};
template <>
struct EnumNames<Master> {
  static constexpr EnumName<Master> kAll[] = {
      {Master::kSplit, "split"}, {Master::kF32, "fp32"}, {Master::kNone, "none"}};
};
template <>
struct EnumNames<Rounding> {
  static constexpr EnumName<Rounding> kAll[] = {{Rounding::kNearest, "nearest"},
                                                {Rounding::kStochastic, "stochastic"}};
};
template <>
struct EnumNames<OffloadTier> {
  static constexpr EnumName<OffloadTier> kAll[] = {
      {OffloadTier::kAuto, "auto"},
#define LM_NEAREST_TIER(tier, ...) {OffloadTier::kNone, "none"},
#define LM_TIER(tier, ...) {OffloadTier::tier, tier_row(TierId::tier).name},
#include "base/tiers.inc"
  };
};
template <>
struct EnumNames<LogFormat> {
  static constexpr EnumName<LogFormat> kAll[] = {{LogFormat::kText, "text"}, {LogFormat::kJson, "json"}};
};
template <>
struct EnumNames<LogTarget> {
  static constexpr EnumName<LogTarget> kAll[] = {{LogTarget::kTensorboard, "tensorboard"},
                                                 {LogTarget::kWandb, "wandb"},
                                                 {LogTarget::kMlflow, "mlflow"},
                                                 {LogTarget::kTrackio, "trackio"}};
};
template <>
struct EnumNames<AnswerMetric> {
  static constexpr EnumName<AnswerMetric> kAll[] = {{AnswerMetric::kExactMatch, "exact_match"},
                                                    {AnswerMetric::kTokenF1, "token_f1"},
                                                    {AnswerMetric::kRougeL, "rouge_l"}};
};
template <>
struct EnumNames<IoEngineChoice> {
  static constexpr EnumName<IoEngineChoice> kAll[] = {{IoEngineChoice::kAuto, "auto"},
                                                      {IoEngineChoice::kUring, "uring"},
                                                      {IoEngineChoice::kThreads, "threads"}};
};
template <>
struct EnumNames<LrSchedule> {
  static constexpr EnumName<LrSchedule> kAll[] = {
      {LrSchedule::kConstant, "constant"},
      {LrSchedule::kConstantWithWarmup, "constant_with_warmup"},
      {LrSchedule::kLinear, "linear"},
      {LrSchedule::kCosine, "cosine"},
      {LrSchedule::kCosineWithMinLr, "cosine_with_min_lr"},
      {LrSchedule::kCosineWithRestarts, "cosine_with_restarts"},
      {LrSchedule::kCosineWarmupWithMinLr, "cosine_warmup_with_min_lr"},
      {LrSchedule::kPolynomial, "polynomial"},
      {LrSchedule::kInverseSqrt, "inverse_sqrt"},
      {LrSchedule::kWarmupStableDecay, "warmup_stable_decay"},
      {LrSchedule::kReduceLrOnPlateau, "reduce_lr_on_plateau"},
  };
};

template <class E>
constexpr std::string_view name_of(E value) {
  for (const auto& entry : EnumNames<E>::kAll) {
    if (entry.value == value) return entry.name;
  }
  return "?";
}

// Names of other projects for a choice, accepted as well.
template <class E>
constexpr std::optional<E> parse_name(std::string_view name) {
  const auto find = [&](const auto& entries) -> std::optional<E> {
    for (const auto& entry : entries) {
      if (entry.name == name) return entry.value;
    }
    return std::nullopt;
  };
  std::optional<E> found = find(EnumNames<E>::kAll);
  if constexpr (requires { EnumNames<E>::kOtherNames; }) {
    if (!found) found = find(EnumNames<E>::kOtherNames);
  }
  return found;
}

// "block", or "2" where every second block is recomputed.
inline std::string recompute_name(const RecomputeChoice& recompute) {
  return recompute.every > 1 ? std::to_string(recompute.every) : std::string(name_of(recompute.level));
}
inline std::optional<RecomputeChoice> parse_recompute(std::string_view name) {
  if (const std::optional<Recompute> level = parse_name<Recompute>(name)) return *level;
  int64_t every = 0;
  const auto parsed = std::from_chars(name.data(), name.data() + name.size(), every);
  if (parsed.ec != std::errc() || parsed.ptr != name.data() + name.size()) return std::nullopt;
  if (every < 1 || every > kMostRecomputeEvery) return std::nullopt;
  return RecomputeChoice(Recompute::kBlock, every);
}

}  // namespace lm
