#include "spec/mixers/experts.h"

#include <fmt/format.h>

namespace lm {

std::string expert_name(size_t expert, const char* matrix) {
  return fmt::format("experts.{}.{}", expert, matrix);
}

MixerParameters mixer_parameters(const ExpertsSpec& spec, int64_t hidden) {
  MixerParameters out;
  // Its products decide what is computed at all, and it is small.
  out.matrices.push_back({.name = "experts.router",
                          .reads_norm = !spec.reads_stream(),
                          .columns = hidden,
                          .bias = spec.router_bias,
                          .parts = {{"experts.router", spec.experts}},
                          .plain = true});
  if (spec.corrected()) out.buffers.push_back({"experts.correction", spec.experts});
  if (spec.reads_stream()) {
    out.norms.push_back({"experts.input_norm", hidden, *spec.input_norm});
    out.factors.push_back({"experts.router_norm", hidden});
  }
  if (spec.factors) out.factors.push_back({"experts.factors", spec.experts});
  const std::vector<MatrixSpec::Part> apart = {{"experts.gate", spec.ffn}, {"experts.up", spec.ffn}},
                                      interleaved = {{"experts.gate_up", 2 * spec.ffn}};
  for (int64_t e = 0; e < spec.experts; ++e) {
    const auto number = static_cast<size_t>(e);
    out.matrices.push_back({.name = expert_name(number, "gate_up"),
                            .reads_norm = !spec.reads_stream(),
                            .columns = hidden,
                            .bias = spec.bias,
                            .parts = spec.clamped ? interleaved : apart,
                            .expert = e,
                            .experts = spec.experts});
    out.matrices.push_back({.name = expert_name(number, "down"),
                            .columns = spec.ffn,
                            .bias = spec.bias,
                            .parts = {{"experts.down", hidden}},
                            .expert = e,
                            .experts = spec.experts});
  }
  return out;
}

}  // namespace lm
