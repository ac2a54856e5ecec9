// adapter_config.json of PEFT's IA3 and LN tuning: which modules such an adapter has; and of its prefix and
// prompt tuning: how many virtual tokens. The texts are untrusted; errors are Error(11) with the key's name.
#pragma once

#include <string>

#include "base/json.h"
#include "spec/adapter_sites.h"

namespace lm {

// Whether a key may have a value here: it changes nothing, or is read.
bool is_known_without_pairs(AdapterKind kind, const std::string& key);

// Sets the targets of `out`, whose kind is known: the modules that have tensors in the file. Throws unless
// target_modules chooses the same of the base's modules, and feedforward_modules those whose input is scaled
// here.
void read_without_pairs(const Json& config, const std::string& directory, const ModelSpec& base,
                        AdapterSpec& out);

// Sets the number of virtual tokens of `out`, whose kind is known. Throws unless the sizes are the base's;
// null: it is unknown.
void read_virtual_tokens(const Json& config, const std::string& directory, const ModelSpec* base,
                         AdapterSpec& out);

}  // namespace lm
