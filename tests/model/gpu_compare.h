// How far two outcomes of one training are apart, as the worst figure of each kind and where it was found.
#pragma once

#include "gpu_training.h"

namespace lm {

struct Worst {
  double value = 0;
  std::string where;
};

// Each 0 where both agree to the bit. NaN or a tensor that one side lacks: infinite.
struct Differences {
  double logits = 0;      // largest difference / largest logit
  double loss = 0;        // relative, over the steps and the evaluation
  double norm = 0;        // relative, over the steps
  Worst gradient;         // largest difference / largest entry, of the worst tensor
  Worst direction;        // 1 - cosine, of the worst gradient
  Worst length;           // |ratio of norms - 1|, of the worst gradient
  double change = 0;      // of all weights together: |difference| / |change|
  Worst change_of_one;    // of the worst tensor
  Worst turn;             // 1 - cosine, of the worst tensor's change
  double whole_turn = 0;  // 1 - cosine, of the change of all weights together
};

Differences compare(const Outcome& device, const Outcome& cpu);
// One line of figures.
std::string text(const Differences& differences);

}  // namespace lm
