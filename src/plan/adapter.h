// The adapter that a run trains: as [lora] describes it, or as the directory of lora.init has it. Pure.
#pragma once

#include <string>

#include "config/config.h"
#include "spec/parameter.h"

namespace lm {

// The shape of a new adapter for this model: modules by lora.targets, exclude and layers, ranks and alphas
// by lora.r, alpha, ranks and alphas, in the shortest form (set_sites). Throws Error(10) for a name that is
// no linear layer, a pattern that matches nothing, and where no module is left.
AdapterSpec configured_adapter(const ModelSpec& model, const LoraConfig& lora);

// The same for any kind of adapter, by train.method. Without pairs of low rank the modules are those of
// lora.targets, or peft's default for the architecture; Error(10) where it has none.
AdapterSpec configured_adapter(const ModelSpec& model, const Config& config);

// train.method of an adapter of this kind.
Method method_of(AdapterKind kind);

// The shape of an adapter that is trained further: `given`, as read from `directory`, with the configured
// dropout. Keys of [lora] that were written must agree with it (alpha by what the output is scaled by), or
// Error(10) names both values.
AdapterSpec continued_adapter(const ModelSpec& model, const LoraConfig& lora, const AdapterSpec& given,
                              const std::string& directory);

// The same for any kind of adapter; Error(10) if it is not train.method's.
AdapterSpec continued_adapter(const ModelSpec& model, const Config& config, const AdapterSpec& given,
                              const std::string& directory);

// Throws Error(10) if the adapter cannot be trained further: peft's lora_alpha may be any number, a run's
// must be positive.
void require_trainable(const ModelSpec& model, const AdapterSpec& given, const std::string& directory);

// `lora` with every key as `adapter` has it: what a run records.
LoraConfig resolved_lora(const ModelSpec& model, const LoraConfig& lora, const AdapterSpec& adapter);

}  // namespace lm
