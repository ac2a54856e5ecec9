// What llama.cpp (its convert_hf_to_gguf.py and src/models) computes for each architecture that a family of
// ours is written as: a model that needs anything else is refused by name before a byte is written. Values,
// found by the model_type of config.json; whoever adds a family adds a row in llama_cpp.cpp, or it is
// refused.
#pragma once

#include <cstdint>
#include <string>

#include "base/activation.h"
#include "spec/model_spec.h"

namespace lm {

struct LlamaCpp {
  // Of what only some models of the architecture have.
  enum class Has : uint8_t { kNever, kMay, kMust };
  // Where the norms of a sublayer stand; kShared: one norm before attention and the MLP beside it.
  enum class Norms : uint8_t { kBefore, kAround, kAfter, kShared };
  // kNone: the file declares the window as its context. kEach: all layers slide but each n-th. kList: the
  // file lists the layers.
  enum class Windows : uint8_t { kNone, kEach, kList };
  // Which layers turn q and k. kAllOrNone: as the file has it. kSliding: those with a window, and all where
  // no layer has one.
  enum class Turns : uint8_t { kAll, kNone, kAllOrNone, kButEach, kSliding };
  // Of q·k. kGemma: 1 / sqrt(d), in the largest size 1 / sqrt(hidden / heads). kGiven: the file's number.
  enum class Scale : uint8_t { kPlain, kGemma, kOne, kGiven };
  // Of the embedding's rows.
  enum class Embedding : uint8_t { kPlain, kRoot, kGiven };
  // What the file's number does to logits.
  enum class Logits : uint8_t { kPlain, kMultiplied, kDivided };

  const char* model_type = "";  // of config.json
  const char* name = "";        // of the architecture

  // ---- Tensors
  bool joined_qkv = false, joined_gate_up = false;  // one matrix: attn_qkv, ffn_up
  bool tied_only = false;                           // it has no place for a head of its own
  bool needs_head = false;                          // it has one even if the embedding is tied
  bool heads_of_hidden = false;                     // heads * head_dim must be the hidden size
  bool heads_alike = false;                         // as many heads of k and v as of q
  Has qkv_bias = Has::kNever, out_bias = Has::kNever, mlp_bias = Has::kNever;

  // ---- A layer
  Norms norms = Norms::kBefore;
  bool layer_norm = false, norm_bias = false;
  bool gated = true;
  Activation activation = Activation::kSilu;
  bool experts = false;       // in every layer, each matrix of all of them one tensor
  bool renormalised = false;  // their weights add up to 1
  Has head_norm = Has::kNever;
  bool joint_norm = false;    // of all heads together
  bool own_norms = false;     // with a weight for each head
  int64_t normed_layers = 0;  // kMay: it norms q and k if it has so many layers or more, and else does not
  // Normed values, keys as values, a number and an input for each layer, sizes by layer, borrowed keys,
  // experts beside the MLP, whose gate and up are one tensor.
  bool gemma4 = false;
  bool residual_scale = false;

  // ---- Positions
  bool learned_positions = false;
  bool neighbours = false;  // its RoPE turns rows 0 and 1, 2 and 3, ... of a head instead of 0 and d/2, ...
  Turns turns = Turns::kAll;
  int64_t unturned_each = 0;  // kButEach: each n-th layer is not turned
  bool partial = false;       // a part of a head may stay
  bool rope_factors = false;  // reads divisors of frequencies: Llama 3's scaling
  bool longrope = false;
  bool plain_in_windows = false;     // layers with a window are turned without scaling
  bool own_base_in_windows = false;  // and by another base
  bool position_scale = false;       // of q, by the logarithm of its position

  // ---- Attention and head
  Windows windows = Windows::kNone;
  int64_t full_each = 0;       // kEach: n where the file is silent
  int64_t window_layers = 0;   // it slides if it has so many layers, and else does not; 0: any number
  bool always_slides = false;  // a window must be there
  Scale scale = Scale::kPlain;
  int64_t largest_layers = 0;  // kGemma: of the largest size
  Has score_cap = Has::kNever, logit_cap = Has::kNever;
  Embedding embedding = Embedding::kPlain;
  Logits logits = Logits::kPlain;

  const char* tokenizer = nullptr;  // tokenizer.ggml.model; null: by tokenizer.json
};

// Throws Error(11) for a family that llama.cpp does not know.
const LlamaCpp& llama_cpp_of(const ModelSpec& spec);

// Error(11): llama.cpp does not support `what`.
[[noreturn]] void refuse_gguf(const std::string& what, const ModelSpec& spec);

}  // namespace lm
