// Two checkpoints compared bit by bit: the trained weights tensor by tensor, and the optimizer's state. The
// ranks that saved them may differ in number: arrays are read whole. Both must be of the same layout of
// blocks; what only one has is counted. One thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/restore.h"

namespace lm {

struct TensorDifference {
  std::string name;  // a weight's in the manifest; of state with the state tensor's behind it, " m"
  int64_t elements = 0, differ = 0;
  // The largest |a - b|; infinite if a value is not finite. Empty: codes, or arrays of different shapes.
  std::optional<double> largest;
};

struct StateDifference {
  int64_t compared = 0, differ = 0;       // tensors that both have
  int64_t only_a = 0, only_b = 0;         // tensors that the other does not have
  std::optional<TensorDifference> first;  // in the order of the model
  std::optional<double> largest;          // of all tensors
  bool equal() const { return differ == 0 && only_a == 0 && only_b == 0; }
};

// Both throw as CheckpointReader::read does.
StateDifference compare_weights(CheckpointReader& a, CheckpointReader& b);
// State with one value per element is compared tensor by tensor, any other as whole arrays ("block3 m_rows"),
// and the number of updates as a tensor of one element.
StateDifference compare_optimizer(CheckpointReader& a, CheckpointReader& b);

}  // namespace lm
