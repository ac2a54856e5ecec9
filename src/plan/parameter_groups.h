// Parameter groups (optimizer.groups, lora.b_lr_ratio): which elements of the blocks' flat arrays have a
// learning rate or a weight decay of their own. The layout itself does not depend on them. Pure.
#pragma once

#include <string>

#include "config/config.h"
#include "spec/block_layout.h"

namespace lm {

// Sets BlockLayout::groups: each trained tensor of the files is in the first group that matches its name. The
// learning rate of an adapter's B and magnitudes is `b_lr_ratio` times that (LoRA+, Hayou et al.).
// Throws Error(10) for a group that matches none, or that ends inside a block of quantized state.
void set_groups(const OptimizerConfig& optimizer, ModelLayout& layout, double b_lr_ratio = 1);

}  // namespace lm
