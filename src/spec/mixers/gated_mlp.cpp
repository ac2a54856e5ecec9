#include "spec/mixers/gated_mlp.h"

namespace lm {

MixerParameters mixer_parameters(const GatedMlpSpec& spec, int64_t hidden) {
  return {.matrices =
              {{.name = "mlp.gate_up",
                .reads_norm = true,
                .columns = hidden,
                .bias = spec.bias,
                .parts = {{"mlp.gate", spec.ffn}, {"mlp.up", spec.ffn}}},
               {.name = "mlp.down", .columns = spec.ffn, .bias = spec.bias, .parts = {{"mlp.down", hidden}}}},
          .norms = {}};
}

}  // namespace lm
