// Matrices quantized by bitsandbytes, as transformers saves them: codes under the matrix's own name, the
// other tensors beside it (NAME.absmax, .quant_map, .nested_absmax, .nested_quant_map and, as JSON in bytes,
// .quant_state.bitsandbytes__nf4 or __fp4; for 8 bits MODULE.SCB and MODULE.weight_format). They are
// untrusted: an inconsistency is Error(11) "FILE-23" with file and tensor.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "weights/encode.h"
#include "weights/model_files.h"

namespace lm {

struct StoredMatrix {
  EncodingKind kind = EncodingKind::kNf4;
  int64_t slice = 0, slices = 1;  // codes and scales are of so many experts (MXFP4), these of one
  ModelFiles::Tensor codes = {}, scales = {}, nested = {};  // nested: double quantization only
  float mean = 0;                                           // double quantization only
  std::vector<std::string> beside = {};                     // names of all tensors but that of the codes

  // Bytes that are read of it.
  int64_t bytes() const { return codes.entry->bytes() / slices; }
};

// nullopt if the matrix is stored unquantized, or not at all.
std::optional<StoredMatrix> find_stored(const ModelFiles& files, const std::string& name, int64_t rows,
                                        int64_t columns);
// The same of a part, which may be one expert's in MXFP4 (weights/mxfp4.h).
std::optional<StoredMatrix> find_stored(const ModelFiles& files, const ParameterPart& part, int64_t columns);

// Copies the stored codes and scales into components of the same format.
void read_stored(const StoredMatrix& stored, const EncodedMatrix& to);

// Its values as fp32 [rows, columns].
void decode_stored(const StoredMatrix& stored, int64_t rows, int64_t columns, float* out, int threads);

}  // namespace lm
