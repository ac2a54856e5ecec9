// The weights of a checkpoint as its export has them: the trained tensors of the checkpoint, and what was
// frozen of the base model's files. Borrows the job; one thread. Errors are those of CheckpointReader and
// FileSource.
#pragma once

#include <string>

#include "checkpoint/restore.h"
#include "export/export_source.h"
#include "launcher/worker/job.h"

namespace lm {

class CheckpointWeights {
 public:
  // `stored`: the type of the run's weights, from which the codes of a quantized base were computed. With
  // `merge` the adapter is merged into the frozen weights.
  CheckpointWeights(const Job& job, const std::string& checkpoint, DType stored, Merge merge = {});
  WeightSource source();  // borrows this

 private:
  CheckpointReader reader_;
  FileSource source_;
};

}  // namespace lm
