#include "spec/mixers/attention.h"

namespace lm {

MixerParameters mixer_parameters(const AttentionSpec& spec, int64_t hidden) {
  MixerParameters out;
  out.matrices = {
      {.name = "attn.qkv",
       .reads_norm = true,
       .columns = hidden,
       .bias = spec.qkv_bias,
       .parts = {{"attn.q", spec.q_rows()}, {"attn.k", spec.kv_rows()}, {"attn.v", spec.kv_rows()}}},
      {.name = "attn.out", .columns = spec.q_rows(), .bias = spec.out_bias, .parts = {{"attn.o", hidden}}}};
  if (spec.values_are_keys) out.matrices.front().parts.pop_back();
  if (spec.borrows()) out.matrices.front().parts.resize(1);
  if (spec.head_norm) {
    const auto norm = [&](const char* name, int64_t heads) {
      const bool all = spec.joint_norm || spec.own_norms;
      return InnerNorm{.name = name,
                       .width = all ? heads * spec.head_dim : spec.head_dim,
                       .spec = *spec.head_norm,
                       .own = spec.own_norms ? heads : 0};
    };
    out.norms = {norm("attn.q_norm", spec.heads), norm("attn.k_norm", spec.kv_heads)};
  }
  if (spec.borrows() && spec.head_norm) out.norms.pop_back();
  if (spec.sinks) out.sinks.push_back({"attn.sinks", spec.heads});
  return out;
}

}  // namespace lm
