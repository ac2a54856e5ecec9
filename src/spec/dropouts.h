// Dropouts that a model's config.json names, in its words: those that training applies (EmbeddingSpec,
// SublayerSpec), and the attention's, which it leaves out. Torch-free; any thread.
#pragma once

#include <string>
#include <vector>

namespace lm {

struct NamedDropouts {
  std::vector<std::string> applied, left_out;  // "resid_pdrop = 0.1", ...; without those that are 0
};

// Of a config.json's text. Throws as parse_model_spec does.
NamedDropouts named_dropouts(const std::string& json, const std::string& place);

}  // namespace lm
