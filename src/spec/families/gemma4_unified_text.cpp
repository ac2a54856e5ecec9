// Gemma 4 12B: the text model of Gemma 4 inside one that also sees and hears.
#include "spec/families/gemma.h"

namespace lm::families {
namespace {

void read_layers(const ConfigReader& config, ModelSpec& spec) {
  if (config.boolean("enable_moe_block", false))
    config.fail("enable_moe_block", "= true is not supported for " + spec.model_type + ": it has no experts");
  read_gemma4_layers(config, 1024, spec);
}

}  // namespace

constinit const Family gemma4_unified_text = [] {
  Family out = kGemma4;
  out.model_type = "gemma4_unified_text";
  out.architecture = "Gemma4UnifiedForCausalLM";
  out.wrapper = "gemma4_unified";
  out.wrapper_architecture = "Gemma4UnifiedForConditionalGeneration";
  out.max_positions = 262144;
  out.read_layers = read_layers;
  return out;
}();

}  // namespace lm::families
