// OLMo 3: OLMo 2 with windows in three of four layers, and scaled RoPE in the others alone.
#include "spec/families/olmo.h"

namespace lm::families {
namespace {

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  read_olmo_layers(config, spec);
  read_pattern(config, read_window(config, 4096), 4, spec);
}

// A rope_theta beside the tables is that of layers without a window alone, as the reference has it.
void read_ropes(const ConfigReader& config, const Family&, ModelSpec& spec) {
  read_ropes_by_kind(config, {.full_theta = 5e5, .sliding_theta = 5e5}, spec);
}

}  // namespace

const Family olmo3 = {.model_type = "olmo3",
                      .architecture = "Olmo3ForCausalLM",
                      .max_positions = 2048,
                      .norm_eps = 1e-5,
                      .pad_token = 1,
                      .norm = NormKind::kRmsLate,
                      .names = norms_after_names,
                      .read_layers = read_layers,
                      .read_ropes = read_ropes};

}  // namespace lm::families
