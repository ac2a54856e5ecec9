// Command R7B and Command A: Command R with windows in three of four layers; the others know no positions.
#include "spec/families/cohere.h"

namespace lm::families {
namespace {

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  read_cohere_layers(config, spec);
  if (config.boolean("use_qk_norm", false))
    config.fail("use_qk_norm", "= true is not supported for cohere2: its class has no norms of q and k");
  const int64_t pattern = config.size("sliding_window_pattern", 4, kMostPositions);
  read_pattern(config, read_window(config, 4096), pattern, spec);
  for (LayerSpec& layer : spec.layers) {
    if (layer.attention().window == 0) layer.attention().rope = AttentionSpec::kNoRope;
  }
}

}  // namespace

const Family cohere2 = {.model_type = "cohere2",
                        .architecture = "Cohere2ForCausalLM",
                        .aliases = kCohereAliases,
                        .max_positions = 8192,
                        .norm_eps = 1e-5,
                        .tied = true,
                        .pad_token = 0,
                        .norm = NormKind::kLayerNoBias,
                        .neighbours = true,
                        .read_layers = read_layers};

}  // namespace lm::families
