// The part of config_visit.h that is of adapters: [lora] and [prompt].
#pragma once

#include "config/config.h"
#include "config/config_names.h"
#include "config/key_info.h"

namespace lm {

template <class LoraT, class V>
void visit_lora(LoraT& lora, V& v) {
  using enum KeyTag;
  v.table("lora", "adapters; used with every train.method but \"full\"");
  v.key("lora", "r", lora.r, {kState, "rank of the adapters", {.low = 1, .high = 65536}});
  v.key("lora", "alpha", lora.alpha,
        {kNumerics, "the adapter's output is multiplied by alpha / r (rslora: alpha / sqrt(r))", kPositive});
  v.key("lora", "dropout", lora.dropout, {kNumerics, "dropout on the adapter's input", kFraction});
  v.key("lora", "dtype", lora.dtype,
        {kState, "dtype of the adapters; auto: model.dtype; fp32 over a bf16 model is peft's default"});
  v.key("lora", "targets", lora.targets,
        {kState,
         "layers that get adapters: \"all-linear\", names such as q_proj or layers.3.mlp.up_proj, or "
         "\"regex:...\", which is found anywhere in a module's path; ia3 and norms: peft's default for the "
         "model, "
         "unless given",
         {},
         true});
  v.key("lora", "exclude", lora.exclude,
        {kState, "layers of lora.targets that get no adapter; the same names"});
  v.key("lora", "layers", lora.layers,
        {kState, "numbers of the transformer layers that get adapters; []: all", {.low = 0, .high = 1e6}});
  v.key("lora", "experts", lora.experts,
        {kState,
         "mixtures of experts: also adapt the matrices of all experts, gate_up_proj and down_proj, as peft's "
         "target_parameters; lora.targets = [\"experts.down_proj\"] names one of the two"});
  v.key("lora", "ranks", lora.ranks,
        {kState,
         "ranks in place of lora.r, by names as in lora.targets; the first match decides",
         {.low = 1, .high = 65536}});
  v.key("lora", "alphas", lora.alphas,
        {kNumerics, "values in place of lora.alpha, by names as in lora.targets; the first match decides",
         kPositive});
  v.key("lora", "rslora", lora.rslora, {kNumerics, "rank-stabilized scaling: alpha / sqrt(r)"});
  v.key("lora", "also", lora.also,
        {kState,
         "modules trained whole beside the adapters: embed_tokens, lm_head, norms, or ends of their paths; a "
         "tied lm_head is the embedding"});
  v.key("lora", "tokens", lora.tokens,
        {kState,
         "tokens, by text or number, whose rows of the embedding (and of a tied head) are trained beside the "
         "adapters"});
  v.key("lora", "dora", lora.dora,
        {kState, "DoRA: also train the length of each row of the adapted matrices W + s B A"});
  v.key(
      "lora", "bias", lora.bias,
      {kState, "also train biases of the model: all, or lora_only: those of the layers that have adapters"});
  v.key("lora", "b_lr_ratio", lora.b_lr_ratio,
        {kNumerics,
         "LoRA+: B, DoRA's magnitudes and biases learn at this times optimizer.lr, A at optimizer.lr",
         kPositive});
  v.key(
      "lora", "start", lora.start,
      {kNumerics,
       "loftq: initialize the adapters with the rank-r approximation of the quantization error; pissa: with "
       "that of each matrix, a frozen copy of which is subtracted"});
  v.key("lora", "init", lora.init,
        {kNumerics,
         "a PEFT adapter or a run to train further; its settings replace those left out here; \"\": new "
         "adapters"});
}

template <class PromptT, class V>
void visit_prompt(PromptT& prompt, V& v) {
  using enum KeyTag;
  v.table("prompt",
          "virtual tokens before each document; used with train.method = \"prefix\", \"prompt\" and "
          "\"ptuning\"");
  v.key("prompt", "length", prompt.length,
        {kState,
         "number of virtual tokens; they are part of data.max_length, so that a document has room for the "
         "rest of it",
         {.low = 1, .high = 65536}});
  v.key("prompt", "start", prompt.start,
        {kNumerics,
         "initial values. normal: random numbers of standard deviation 1, as peft; zero: a prefix of zeros; "
         "vocabulary: a prompt of embeddings of random tokens"});
  v.key("prompt", "hidden", prompt.hidden,
        {kState,
         "with ptuning: inner size of the MLP that makes the embeddings, peft's encoder_hidden_size; auto: "
         "the model's hidden size",
         {.low = 1, .high = 65536}});
}

}  // namespace lm
