// Causal grouped-query attention (Ainslie et al., "GQA"): n_h query heads of size d share n_kv heads of keys
// and values. What the model computes with it is in model/mixers/attention.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>

#include "spec/mixers/parameters.h"
#include "spec/norm_spec.h"

namespace lm {

struct AttentionSpec {
  static constexpr const char* norm_name() { return "attn.norm"; }  // the weight of the norm before it

  int64_t heads = 0;                       // n_h
  int64_t kv_heads = 0;                    // n_kv
  int64_t head_dim = 0;                    // d
  int64_t window = 0;                      // sliding window in tokens; 0: every earlier token of the document
  int rope = 0;                            // index into ModelSpec::ropes; kNoRope: q and k know no positions
  std::optional<NormSpec> head_norm = {};  // of each head of q and k, before RoPE
  bool joint_norm = false;                 // that norm is one of all heads together, [n_h d] and [n_kv d]
  bool own_norms = false;                  // each head has a weight of its own in that norm
  std::optional<NormSpec> value_norm = {};  // of each head of v; without a weight
  bool values_are_keys = false;             // v is what k is before its norm and RoPE: there is no attn.v
  int64_t source = -1;                      // an earlier layer, whose keys and values it reads; -1: its own
  bool lends = false;                       // later layers read its keys and values
  bool qkv_bias = false;
  bool out_bias = false;
  double softmax_scale = 0;  // multiplies q·k before the softmax; 0: 1 / sqrt(d)
  // Each head has a trained logit that joins its softmax's sum and has no value (gpt-oss).
  bool sinks = false;
  double softcap = 0;  // c: scores become c tanh(score / c) before the mask; 0: none
  // q at position p is multiplied by 1 + slope * ln(1 + floor(p / period)), after RoPE; period 0: not at all.
  double position_slope = 0;
  int64_t position_period = 0;

  static constexpr int kNoRope = -1;
  bool rotates() const { return rope != kNoRope; }
  int64_t q_rows() const { return heads * head_dim; }
  int64_t kv_rows() const { return kv_heads * head_dim; }
  bool borrows() const { return source >= 0; }  // has no attn.k, no attn.v and no norms of these
  int64_t own_kv_heads() const { return borrows() ? 0 : kv_heads; }
  int64_t qk_rows() const { return q_rows() + own_kv_heads() * head_dim; }
  int64_t qkv_rows() const { return qk_rows() + own_kv_heads() * head_dim; }
  // Of attn.qkv.
  int64_t projected_rows() const { return values_are_keys ? qk_rows() : qkv_rows(); }
  // Multiplies q·k before the softmax.
  float scale() const {
    return static_cast<float>(softmax_scale > 0 ? softmax_scale
                                                : 1.0 / std::sqrt(static_cast<double>(head_dim)));
  }
  bool operator==(const AttentionSpec&) const = default;
};

// attn.qkv [n_h d + 2 n_kv d, H], attn.out [H, n_h d]; with head norms attn.q_norm and attn.k_norm, [d] or,
// joint and of each head's own, [n_h d] and [n_kv d]; with sinks attn.sinks [n_h].
MixerParameters mixer_parameters(const AttentionSpec& spec, int64_t hidden);

}  // namespace lm
