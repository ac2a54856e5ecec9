#include "export/llama_cpp.h"

#include <algorithm>

#include "base/error.h"

namespace lm {
namespace {

using Has = LlamaCpp::Has;
using Norms = LlamaCpp::Norms;
using Turns = LlamaCpp::Turns;
using Windows = LlamaCpp::Windows;

constexpr LlamaCpp kLlama = {.model_type = "llama",
                             .name = "llama",
                             .qkv_bias = Has::kMay,
                             .out_bias = Has::kMay,
                             .mlp_bias = Has::kMay,
                             .neighbours = true,
                             .rope_factors = true};

constexpr LlamaCpp kMistral = {
    .model_type = "mistral", .name = "llama", .neighbours = true, .rope_factors = true};

constexpr LlamaCpp kMinistral3 = {.model_type = "ministral3",
                                  .name = "mistral3",
                                  .neighbours = true,
                                  .rope_factors = true,
                                  .position_scale = true};

constexpr LlamaCpp kQwen2 = {.model_type = "qwen2", .name = "qwen2", .qkv_bias = Has::kMust};
constexpr LlamaCpp kQwen3 = {.model_type = "qwen3", .name = "qwen3", .head_norm = Has::kMust};

constexpr LlamaCpp kQwen3Moe = {.model_type = "qwen3_moe",
                                .name = "qwen3moe",
                                .experts = true,
                                .renormalised = true,
                                .head_norm = Has::kMust};

constexpr LlamaCpp kMixtral = {.model_type = "mixtral",
                               .name = "llama",
                               .experts = true,
                               .renormalised = true,
                               .neighbours = true,
                               .rope_factors = true};

constexpr LlamaCpp kOlmoe = {.model_type = "olmoe",
                             .name = "olmoe",
                             .heads_of_hidden = true,
                             .heads_alike = true,
                             .experts = true,
                             .head_norm = Has::kMust,
                             .joint_norm = true};

constexpr LlamaCpp kSmolLm3 = {.model_type = "smollm3",
                               .name = "smollm3",
                               .neighbours = true,
                               .turns = Turns::kButEach,
                               .unturned_each = 4};

constexpr LlamaCpp kArcee = {.model_type = "arcee",
                             .name = "arcee",
                             .gated = false,
                             .activation = Activation::kRelu2,
                             .neighbours = true,
                             .rope_factors = true};

constexpr LlamaCpp kPhi3 = {.model_type = "phi3",
                            .name = "phi3",
                            .joined_qkv = true,
                            .joined_gate_up = true,
                            .heads_of_hidden = true,
                            .partial = true,
                            .longrope = true};

constexpr LlamaCpp granite(const char* model_type) {
  return {.model_type = model_type,
          .name = "granite",
          .qkv_bias = Has::kMay,
          .out_bias = Has::kMay,
          .mlp_bias = Has::kMay,
          .residual_scale = true,
          .neighbours = true,
          .turns = Turns::kAllOrNone,
          .rope_factors = true,
          .scale = LlamaCpp::Scale::kGiven,
          .embedding = LlamaCpp::Embedding::kGiven,
          .logits = LlamaCpp::Logits::kDivided};
}

constexpr LlamaCpp olmo(const char* model_type) {
  return {.model_type = model_type,
          .name = "olmo2",
          .needs_head = true,
          .heads_of_hidden = true,
          .norms = Norms::kAfter,
          .head_norm = Has::kMust,
          .joint_norm = true,
          .plain_in_windows = true,
          .windows = Windows::kEach,
          .full_each = 4};
}

constexpr LlamaCpp kGemma = {.model_type = "gemma",
                             .name = "gemma",
                             .tied_only = true,
                             .activation = Activation::kGeluTanh,
                             .embedding = LlamaCpp::Embedding::kRoot};

constexpr LlamaCpp kGemma2 = {.model_type = "gemma2",
                              .name = "gemma2",
                              .tied_only = true,
                              .norms = Norms::kAround,
                              .activation = Activation::kGeluTanh,
                              .windows = Windows::kEach,
                              .full_each = 2,
                              .always_slides = true,
                              .scale = LlamaCpp::Scale::kGemma,
                              .largest_layers = 46,
                              .score_cap = Has::kMust,
                              .logit_cap = Has::kMust,
                              .embedding = LlamaCpp::Embedding::kRoot};

constexpr LlamaCpp kGemma3 = {.model_type = "gemma3_text",
                              .name = "gemma3",
                              .norms = Norms::kAround,
                              .activation = Activation::kGeluTanh,
                              .head_norm = Has::kMust,
                              .plain_in_windows = true,
                              .own_base_in_windows = true,
                              .windows = Windows::kEach,
                              .full_each = 6,
                              .scale = LlamaCpp::Scale::kGemma,
                              .largest_layers = 62,
                              .logit_cap = Has::kMay,
                              .embedding = LlamaCpp::Embedding::kRoot};

constexpr LlamaCpp gemma4(const char* model_type) {
  return {.model_type = model_type,
          .name = "gemma4",
          .norms = Norms::kAround,
          .activation = Activation::kGeluTanh,
          .head_norm = Has::kMust,
          .gemma4 = true,
          .plain_in_windows = true,
          .own_base_in_windows = true,
          .windows = Windows::kList,
          .always_slides = true,
          .scale = LlamaCpp::Scale::kOne,
          .logit_cap = Has::kMay,
          .embedding = LlamaCpp::Embedding::kRoot,
          .tokenizer = "gemma4"};
}

constexpr LlamaCpp kGlm = {.model_type = "glm",
                           .name = "chatglm",
                           .joined_gate_up = true,
                           .heads_of_hidden = true,
                           .qkv_bias = Has::kMay,
                           .neighbours = true,
                           .partial = true};

constexpr LlamaCpp kGlm4 = {.model_type = "glm4",
                            .name = "glm4",
                            .joined_gate_up = true,
                            .heads_of_hidden = true,
                            .qkv_bias = Has::kMay,
                            .norms = Norms::kAround,
                            .neighbours = true,
                            .partial = true};

constexpr LlamaCpp kGpt2 = {.model_type = "gpt2",
                            .name = "gpt2",
                            .joined_qkv = true,
                            .heads_of_hidden = true,
                            .qkv_bias = Has::kMust,
                            .out_bias = Has::kMust,
                            .mlp_bias = Has::kMust,
                            .layer_norm = true,
                            .norm_bias = true,
                            .gated = false,
                            .activation = Activation::kGeluTanh,
                            .learned_positions = true,
                            .turns = Turns::kNone};

constexpr LlamaCpp kStarCoder2 = {.model_type = "starcoder2",
                                  .name = "starcoder2",
                                  .heads_of_hidden = true,
                                  .qkv_bias = Has::kMust,
                                  .out_bias = Has::kMust,
                                  .mlp_bias = Has::kMust,
                                  .layer_norm = true,
                                  .norm_bias = true,
                                  .gated = false,
                                  .activation = Activation::kGeluTanh};

constexpr LlamaCpp kNemotron = {.model_type = "nemotron",
                                .name = "nemotron",
                                .needs_head = true,
                                .heads_of_hidden = true,
                                .qkv_bias = Has::kMay,
                                .out_bias = Has::kMay,
                                .mlp_bias = Has::kMay,
                                .layer_norm = true,
                                .norm_bias = true,
                                .gated = false,
                                .activation = Activation::kRelu2,
                                .partial = true};

constexpr LlamaCpp kCohere2 = {.model_type = "cohere2",
                               .name = "cohere2",
                               .tied_only = true,
                               .heads_of_hidden = true,
                               .norms = Norms::kShared,
                               .layer_norm = true,
                               .neighbours = true,
                               .turns = Turns::kSliding,
                               .rope_factors = true,
                               .windows = Windows::kEach,
                               .full_each = 4,
                               .always_slides = true,
                               .logits = LlamaCpp::Logits::kMultiplied};

constexpr LlamaCpp kCohere = {.model_type = "cohere",
                              .name = "command-r",
                              .tied_only = true,
                              .heads_of_hidden = true,
                              .norms = Norms::kShared,
                              .layer_norm = true,
                              .head_norm = Has::kMay,
                              .own_norms = true,
                              .normed_layers = 64,
                              .neighbours = true,
                              .logits = LlamaCpp::Logits::kMultiplied};

constexpr LlamaCpp kExaone4 = {.model_type = "exaone4",
                               .name = "exaone4",
                               .heads_of_hidden = true,
                               .norms = Norms::kAfter,
                               .head_norm = Has::kMust,
                               .turns = Turns::kSliding,
                               .rope_factors = true,
                               .windows = Windows::kEach,
                               .full_each = 4,
                               .window_layers = 64};

constexpr LlamaCpp kAll[] = {kLlama,
                             kMistral,
                             kMinistral3,
                             kQwen2,
                             kQwen3,
                             kQwen3Moe,
                             kMixtral,
                             kOlmoe,
                             kSmolLm3,
                             kArcee,
                             kPhi3,
                             granite("granite"),
                             granite("granitemoehybrid"),
                             olmo("olmo2"),
                             olmo("olmo3"),
                             kGemma,
                             kGemma2,
                             kGemma3,
                             gemma4("gemma4_text"),
                             gemma4("gemma4_unified_text"),
                             kGlm,
                             kGlm4,
                             kGpt2,
                             kStarCoder2,
                             kNemotron,
                             kCohere,
                             kCohere2,
                             kExaone4};

}  // namespace

const LlamaCpp& llama_cpp_of(const ModelSpec& spec) {
  const auto found =
      std::ranges::find_if(kAll, [&](const LlamaCpp& one) { return spec.model_type == one.model_type; });
  const auto has = [](const LayerSpec& layer) { return layer.find<ExpertsSpec>() != nullptr; };
  if (found == std::end(kAll) && std::ranges::any_of(spec.layers, has)) {
    throw Error(Exit::kInput,
                {.area = "FILE-26",
                 .what = "a mixture of experts (" + spec.model_type + ") is not written as GGUF yet",
                 .place = spec.architecture,
                 .next = "leave --gguf out, and convert the exported directory with llama.cpp's own "
                         "convert_hf_to_gguf.py"});
  }
  if (spec.scores()) refuse_gguf("a head of scores of models of type \"" + spec.model_type + "\"", spec);
  if (found == std::end(kAll)) refuse_gguf("models of type \"" + spec.model_type + "\"", spec);
  return *found;
}

void refuse_gguf(const std::string& what, const ModelSpec& spec) {
  throw Error(Exit::kInput, {.area = "FILE-26",
                             .what = "llama.cpp does not support " + what,
                             .place = spec.architecture,
                             .next = "leave --gguf out"});
}

}  // namespace lm
