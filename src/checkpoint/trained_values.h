// What a checkpoint has trained, as fp32: for export, tensor by tensor. One thread.
#pragma once

#include <string>

#include "checkpoint/restore.h"

namespace lm {

class TrainedValues {
 public:
  // `masters`: the fp32 masters, where the checkpoint has them, which know more than the working weights;
  // rounded to bf16 they give these.
  TrainedValues(CheckpointReader& reader, bool masters) : reader_(reader), masters_(masters) {}
  // Elements [first, first + elements) of the block's flat array. Throws as CheckpointReader::read does.
  void read(int64_t block, int64_t first, int64_t elements, float* out) const;

 private:
  CheckpointReader& reader_;
  bool masters_;
};

// The hash of the tensors that an export of the checkpoint would have (weights/verify.h): a model's in the
// type of its weights, an adapter's in fp32. Whatever saved them, their bytes are the same.
std::string trained_hash(CheckpointReader& reader);

}  // namespace lm
