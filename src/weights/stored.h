// Matrices that bitsandbytes quantised, as transformers saves them: codes under the matrix's own name, the
// rest beside it (NAME.absmax, .quant_map, .nested_absmax, .nested_quant_map and, as JSON in bytes,
// .quant_state.bitsandbytes__nf4 or __fp4; of 8 bits MODULE.SCB and MODULE.weight_format). Nobody vouches for
// them: what does not fit together is Error(11) "FILE-23" with file and tensor.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "weights/encode.h"
#include "weights/model_files.h"

namespace lm {

struct StoredMatrix {
  EncodingKind kind = EncodingKind::kNf4;
  ModelFiles::Tensor codes = {}, scales = {}, nested = {};  // the last of double scales alone
  float mean = 0;                                           // of double scales
  std::vector<std::string> beside = {};                     // names of all tensors but that of the codes
};

// Nothing where the matrix is stored as elements, or not at all.
std::optional<StoredMatrix> find_stored(const ModelFiles& files, const std::string& name, int64_t rows,
                                        int64_t columns);

// As it is stored, into pieces of its own kind.
void read_stored(const StoredMatrix& stored, const EncodedMatrix& to);

// Its values as fp32 [rows, columns].
void decode_stored(const StoredMatrix& stored, int64_t rows, int64_t columns, float* out, int threads);

}  // namespace lm
