// A mixture of experts (Shazeer et al., "Outrageously Large Neural Networks"; Fedus et al., "Switch
// Transformers"): a router chooses k of E gated MLPs for each token, and the layer's output is the sum of
// theirs by the router's weights. What the model computes with it is in model/mixers/experts.h.
//
// Each expert's matrices are parameters of their own, gate_up and down of one expert side by side in the
// block. So everything that walks a block's tensors (files, shards, encodings, optimizer ranges, catalogue)
// has no notion of experts, each matrix of the files is encoded and orthogonalised by itself, and an expert
// is one contiguous range, which can become a unit of loan of its own.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/activation.h"
#include "spec/mixers/parameters.h"
#include "spec/norm_spec.h"

namespace lm {

// What a router makes of a token's logits.
enum class RouterScores : uint8_t {
  kSoftmax,  // over all experts; those with the largest logits are chosen
  // Of each expert by itself. Chosen are the largest score + correction, a number of each expert that the
  // files hold and nobody trains (DeepSeek-V3: it balances their load); the weights are made of the scores
  // alone.
  kSigmoid,
};

// (up + 1) g sigmoid(alpha g) of g = min(gate, limit) and of up, limited on both sides, in place of
// activation(gate) up (gpt-oss). Rows 2i and 2i + 1 of gate_up are gate and up of column i, as its files have
// them.
struct ClampedGlu {
  double alpha = 0, limit = 0;
  bool operator==(const ClampedGlu&) const = default;
};

struct ExpertsSpec {
  // The weight of the norm before it: beside an MLP with norms of its own these have the MLP's names.
  const char* norm_name() const { return reads_stream() ? "experts.norm" : "mlp.norm"; }

  Activation activation = Activation::kSilu;
  int64_t experts = 0;         // E
  int64_t chosen = 0;          // k
  int64_t ffn = 0;             // I, of each expert
  bool renormalise = false;    // the weights of the chosen are divided by their sum
  bool round_weights = false;  // to the model's type
  RouterScores scores = RouterScores::kSoftmax;
  // Of sigmoid scores: experts in `groups` of one size, of which those of the `kept_groups` best can be
  // chosen, by the sum of a group's two best.
  int64_t groups = 1, kept_groups = 1;
  double weight_scale = 1;   // multiplies the weights
  bool wide_logits = false;  // logits are fp32 products, whatever the model's type
  bool corrected() const { return scores == RouterScores::kSigmoid; }
  bool bias = false;  // of the experts' matrices
  bool router_bias = false;
  std::optional<ClampedGlu> clamped = {};  // in place of `activation`
  // Both or none: no norm is before the mixer, and the experts and the router read norms of their own of the
  // residual stream. The router's is multiplied by 1 / sqrt(H) (Gemma 4).
  std::optional<NormSpec> input_norm = {}, router_norm = {};
  bool reads_stream() const { return input_norm.has_value(); }
  bool factors = false;  // the weights are multiplied by a trained number of each expert
  bool operator==(const ExpertsSpec&) const = default;
};

// "experts.3.gate_up"
std::string expert_name(size_t expert, const char* matrix);

// experts.router [E, H]; of sigmoid scores the buffer experts.correction [E], fp32; of each expert e
// experts.<e>.gate_up [2I, H] and experts.<e>.down [H, I]; with norms of their own experts.input_norm and
// experts.router_norm [H]; experts.factors [E].
MixerParameters mixer_parameters(const ExpertsSpec& spec, int64_t hidden);

}  // namespace lm
