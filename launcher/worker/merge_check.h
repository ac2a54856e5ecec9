// Compares the logits of a model that `export --merge` has written with those of the base model with its
// adapter. Blocks; plans and loads both, one after the other.
#pragma once

#include <string>

#include "launcher/worker/job.h"

namespace lm {

struct MergeCheck {
  double difference = 0;  // largest difference between two logits
  double largest = 0;     // largest logit of the model with its adapter
  std::string skipped;    // why nothing was compared; "": it was
};

// `subject`: the adapter, over its model in fp32; `stored`: dtype of the files in `merged`. Throws Error(22)
// if the difference is more than rounding explains.
MergeCheck check_merged(const Subject& subject, const std::string& merged, DType stored,
                        const CommandLine& line);

}  // namespace lm
