// The trained values of a checkpoint as fp32, for export, tensor by tensor. One thread.
#pragma once

#include <string>

#include "checkpoint/restore.h"

namespace lm {

class TrainedValues {
 public:
  // `masters`: read the fp32 masters if the checkpoint has them; they are more precise than the working
  // weights, and equal these when rounded to bf16.
  TrainedValues(CheckpointReader& reader, bool masters) : reader_(reader), masters_(masters) {}
  // Elements [first, first + elements) of the block's flat array. Throws as CheckpointReader::read does.
  void read(int64_t block, int64_t first, int64_t elements, float* out) const;

 private:
  CheckpointReader& reader_;
  bool masters_;
};

// Throws Error(11) about `place` for a shape whose elements cannot be counted.
int64_t elements_of(const SavedTensor& tensor, const std::string& place);

// The hash of the tensors of an export of the checkpoint (weights/verify.h): a model's in the type of its
// weights, an adapter's in fp32. It does not depend on how they were saved.
std::string trained_hash(CheckpointReader& reader);

}  // namespace lm
