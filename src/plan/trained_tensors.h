// Freezing (train.only): which tensors of the model a full run trains. Pure.
#pragma once

#include "config/config.h"
#include "spec/block_layout.h"

namespace lm {

// What train.only chooses of the model's parameters; empty without that key. Throws Error(10) for a name that
// matches no tensor that can be trained, and where it matches only some of those that are one parameter here.
TrainedFilter trained_filter(const TrainConfig& train, const ModelSpec& spec);

}  // namespace lm
