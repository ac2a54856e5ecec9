// What a model or a type of weights does not allow of LoRA adapters: Error(10) with the keys and the next
// step. Pure.
#pragma once

#include <string>

#include "base/error.h"
#include "base/host_device.h"
#include "config/config.h"
#include "spec/model_spec.h"
#include "spec/parameter.h"

namespace lm {

Error lora_error(std::string what, std::string next);

// lora.bias, as it is written, names some biases of the model.
void require_biases(const ModelSpec& model, const AdapterSpec& adapter);
// What is trained has one type, and the products of embedding and head are made in the model's.
void require_type_of_model(const ModelSpec& model, const Config& config, const AdapterSpec& adapter);
// An adapter of the head or the embedding has neither magnitudes nor a start from the base; the head's has no
// dropout where others have it, and the embedding's none at all, as peft's.
void require_plain_vocabulary(const ModelSpec& model, const AdapterSpec& adapter);
// lora.experts = true, and the model has experts that pairs may be on.
void require_experts(const ModelSpec& model);
// Pairs of experts have no dropout, as peft's, no magnitudes and no start from the base.
void require_plain_experts(const ModelSpec& model, const AdapterSpec& adapter, LoraStart start);

}  // namespace lm
