// The spelling of every choice of the configuration: enum value <-> the word in the TOML file. Pure tables.
#pragma once

#include <array>
#include <optional>
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
  static constexpr EnumName<ModelDType> kAll[] = {{ModelDType::kBF16, "bf16"}, {ModelDType::kF32, "fp32"}};
};
template <>
struct EnumNames<ModelInit> {
  static constexpr EnumName<ModelInit> kAll[] = {{ModelInit::kPretrained, "pretrained"},
                                                 {ModelInit::kRandom, "random"}};
};
template <>
struct EnumNames<DataFormat> {
  static constexpr EnumName<DataFormat> kAll[] = {
      {DataFormat::kAuto, "auto"},     {DataFormat::kText, "text"},
      {DataFormat::kChat, "chat"},     {DataFormat::kShareGpt, "sharegpt"},
      {DataFormat::kAlpaca, "alpaca"}, {DataFormat::kPromptCompletion, "prompt-completion"},
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
struct EnumNames<Method> {
  static constexpr EnumName<Method> kAll[] = {{Method::kFull, "full"}, {Method::kLora, "lora"}};
};
template <>
struct EnumNames<GradientDType> {
  static constexpr EnumName<GradientDType> kAll[] = {{GradientDType::kF32, "fp32"},
                                                     {GradientDType::kBF16, "bf16"}};
};
template <>
struct EnumNames<Recompute> {
  static constexpr EnumName<Recompute> kAll[] = {
      {Recompute::kAuto, "auto"}, {Recompute::kNone, "none"}, {Recompute::kBlock, "block"}};
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
};
template <>
struct EnumNames<Master> {
  static constexpr EnumName<Master> kAll[] = {
      {Master::kSplit, "split"}, {Master::kF32, "fp32"}, {Master::kNone, "none"}};
};
template <>
struct EnumNames<OffloadHome> {
  static constexpr EnumName<OffloadHome> kAll[] = {{OffloadHome::kAuto, "auto"},
                                                   {OffloadHome::kNone, "none"},
                                                   {OffloadHome::kHost, "host"},
                                                   {OffloadHome::kNvme, "nvme"}};
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

template <class E>
constexpr std::optional<E> parse_name(std::string_view name) {
  for (const auto& entry : EnumNames<E>::kAll) {
    if (entry.name == name) return entry.value;
  }
  return std::nullopt;
}

}  // namespace lm
