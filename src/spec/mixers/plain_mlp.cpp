#include "spec/mixers/plain_mlp.h"

namespace lm {

MixerParameters mixer_parameters(const PlainMlpSpec& spec, int64_t hidden) {
  return {.matrices =
              {{.name = "mlp.up",
                .reads_norm = true,
                .columns = hidden,
                .bias = spec.bias,
                .parts = {{"mlp.up", spec.ffn}}},
               {.name = "mlp.down", .columns = spec.ffn, .bias = spec.bias, .parts = {{"mlp.down", hidden}}}},
          .norms = {}};
}

}  // namespace lm
