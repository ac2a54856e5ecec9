// What PiSSA begins with (Meng et al., "PiSSA: Principal Singular Values and Singular Vectors Adaptation"):
// of each adapted matrix the best approximation s B0 A0 of rank r. The base stays as it is; A0 and B0 stay
// frozen beside A and B (spec/trainable.h). They are in no checkpoint: the same base and seed give the same
// bits on every machine and with any number of threads, so whoever opens a run computes them again.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "spec/block_layout.h"
#include "weights/model_files.h"

namespace lm {

// The base of an adapter, as a run computes with it.
struct PairBase {
  std::string directory;  // "": initialised with `seed`
  uint64_t seed = 0;
  DType dtype = DType::kBF16;  // of the run's model: its values are rounded, or quantized from this type
  int threads = 1;
};

// fp32, with values of the base's type: a [r, columns], b [rows, r].
struct PrincipalPair {
  std::vector<float> a, b;
};

class PrincipalPairs {
 public:
  // `adapter` is borrowed.
  PrincipalPairs(PairBase base, const AdapterSpec& adapter);

  // The pair for the matrix that `a`, an entry of `block` with the role kLoraA, belongs to. A rank beyond the
  // matrix's is as in a fresh adapter: a row of A0, and zeros in B0. Holds the matrix once in fp32, and where
  // it is quantized once more, with its codes (plan/sizes.cpp counts it).
  PrincipalPair pair(const BlockLayout& block, const Trainable& a) const;

 private:
  PairBase base_;
  const AdapterSpec& adapter_;
  std::optional<ModelFiles> files_;
};

}  // namespace lm
