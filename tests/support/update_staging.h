// The staging memory of updates on the host, as a plan for a GPU sizes it.
#pragma once

#include "optim/host_update.h"

namespace lm {

// Bytes for tiles of at most `elements`.
inline int64_t update_staging_bytes(int64_t elements, DType gradient_dtype, DType weight_dtype) {
  return HostUpdate::kSlots * elements *
         static_cast<int64_t>(dtype_size(gradient_dtype) + dtype_size(weight_dtype));
}

}  // namespace lm
