#include "spec/mixers/layer_input.h"

namespace lm {

MixerParameters mixer_parameters(const LayerInputSpec& spec, int64_t hidden) {
  return {.matrices = {{.name = "input.gate",
                        .reads_norm = true,
                        .columns = hidden,
                        .parts = {{"input.gate", spec.width}}},
                       {.name = "input.out", .columns = spec.width, .parts = {{"input.out", hidden}}}},
          .norms = {}};
}

}  // namespace lm
