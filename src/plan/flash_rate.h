// How fast flash attention runs on a named GPU, by head size, length of the documents, and pairs of document
// and head: from published rates (flash_rates.inc), never measured here. For estimates alone. Pure.
#pragma once

#include <functional>

#include "base/dtype.h"
#include "kernels/counting.h"
#include "plan/gpu.h"

namespace lm {

// FLOP/s of a call in a 16-bit type, counted for visible keys alone; empty: nothing is known of the card, or
// of the type. `deterministic`: backward sums dq in a fixed order.
std::function<double(const FlashCall&)> flash_rate(const Gpu& gpu, DType dtype, bool deterministic);

// Share of the multiprocessors that have work, if each computes one block at a time.
double flash_fill(const FlashCall& call, int processors, bool deterministic);

}  // namespace lm
