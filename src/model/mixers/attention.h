// Causal grouped-query attention over the documents of a micro-batch, on q, k, v as slices of one fused
// projection (spec/mixers/attention.h has its sizes). T rows, Q = (n_h + 2 n_kv) d. In order: the projection,
// the norm of v, the norms of q and k, RoPE, the scale of q by its position, attention, its sinks, the last
// projection.
#pragma once

#include "model/mixers/mixer.h"
#include "model/mixers/sinks.h"
#include "model/virtual_tokens.h"

namespace lm {

struct Attention {
  AttentionSpec spec;
  int64_t layer = 0;    // whose keys and values the batch's cache takes
  Linear qkv;           // [Q, H]; [(n_h + n_kv) d, H] where v is k
  Norm q_norm, k_norm;  // [d], or joint or heads' own [n_h d] and [n_kv d]; undefined without head norms
  Norm v_norm;          // has no weight
  Linear out;           // [H, n_h d]
  Prefix prefix = {};   // undefined without prefix tuning
  Sinks sinks = {};     // unbound without them

  static constexpr bool kKeptWithAttention = true;
  struct Saved {
    View qkv;        // [T, Q], as attention reads them
    View qk;         // [T, (n_h + n_kv) d] before the head norms; undefined without them
    View qk_rstd;    // [T, n_h], then [T, n_kv], fp32; joint [T] and [T]; likewise
    View v;          // [T, n_kv d] before v's norm; undefined without it, and where qk has the same
    View v_rstd;     // [T, n_kv] fp32; undefined without v's norm
    View attention;  // [T, n_h d], behind the sinks
    View lse;        // [n_h, T] fp32, likewise
    LinearSaved qkv_adapters, out_adapters;
  };
  Saved allocate(const Context& context, int64_t rows) const;
  View forward(const Context& context, const DeviceBatch& batch, const View& x, Saved& saved,
               const MixerOutput& output) const;
  void backward(const Context& context, const DeviceBatch& batch, MixerInput& input, const Saved& saved,
                const View& dy, bool first) const;

  template <class Self, class Visitor>
  static void visit(Self& self, Visitor&& visitor) {
    visitor("attn.qkv", self.qkv);
    visitor("attn.q_norm", self.q_norm);
    visitor("attn.k_norm", self.k_norm);
    visitor("attn.out", self.out);
    visitor("attn.prefix", self.prefix);
    if (self.spec.sinks) visitor("attn.sinks", self.sinks);
  }
};

}  // namespace lm
