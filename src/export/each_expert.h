// An adapter with pairs of experts in the form that servers take: by an expert's number and the names of its
// matrices in the base's files, "<layer>.mlp.experts.3.gate_proj.lora_A.weight", as if each were a linear
// layer with a pair of its own. A of gate and up together is A of both, and B's rows are theirs. peft 0.19
// and later reads it, too, where it reads the family's older adapters. Pure.
#pragma once

#include "spec/block_layout.h"

namespace lm {

struct EachExpert {
  AdapterSpec spec;    // whose targets name the matrices
  ModelLayout layout;  // the same, with other names in the files
};
// Throws Error(11) where the adapter has no pairs of experts, and where the base's files have all experts in
// one tensor: there are no names then.
EachExpert each_expert(const AdapterSpec& spec, const ModelLayout& layout);

}  // namespace lm
