// What `export --merge` has written, loaded again and compared with the model and its adapter apart. Blocks;
// plans and loads both, one after the other.
#pragma once

#include <string>

#include "launcher/rank/job.h"

namespace lm {

struct MergeCheck {
  double difference = 0;  // the largest between two logits
  double largest = 0;     // logit of the model with its adapter
  std::string skipped;    // why nothing was compared; "" it was
};

// `subject`: the adapter's, its model in fp32; `stored`: of the files in `merged`. Throws Error(22) where the
// difference is more than rounding makes.
MergeCheck check_merged(const Subject& subject, const std::string& merged, DType stored,
                        const CommandLine& line);

}  // namespace lm
