#include "spec/mixers/shared_expert.h"

namespace lm {

MixerParameters mixer_parameters(const SharedExpertSpec& spec, int64_t hidden) {
  MixerParameters out;
  out.matrices = {{.name = "shared.gate_up",
                   .reads_norm = true,
                   .columns = hidden,
                   .parts = {{"shared.gate", spec.ffn}, {"shared.up", spec.ffn}}},
                  {.name = "shared.down", .columns = spec.ffn, .parts = {{"shared.down", hidden}}}};
  // One row, which would gain nothing from an encoding.
  if (spec.gated) {
    out.matrices.push_back({.name = "shared.weight",
                            .reads_norm = true,
                            .columns = hidden,
                            .parts = {{"shared.weight", 1}},
                            .plain = true});
  }
  return out;
}

}  // namespace lm
