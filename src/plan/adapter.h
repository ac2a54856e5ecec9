// The adapter that a run trains: as [lora] describes it, or as the directory of lora.init has it. Pure.
#pragma once

#include <string>

#include "config/config.h"
#include "spec/parameter.h"

namespace lm {

// Of a fresh adapter of a model with these names. Throws Error(10) for targets that are no linear layer.
AdapterSpec configured_adapter(const NameMap& names, const LoraConfig& lora);

// Of one that is continued: `given`, as read from `directory`, with the configured dropout. Keys of [lora]
// that were written must agree with it (alpha by what the output is scaled by), or Error(10) names both
// values.
AdapterSpec continued_adapter(const NameMap& names, const LoraConfig& lora, const AdapterSpec& given,
                              const std::string& directory);

// `lora` with every key as `adapter` has it: what a run records.
LoraConfig resolved_lora(const LoraConfig& lora, const AdapterSpec& adapter);

}  // namespace lm
