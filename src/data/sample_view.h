// What a run prints of its data before it trains. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "config/config.h"
#include "data/prepare.h"

namespace lm {

// What becomes of the example that is shown where it is longer than a sequence.
struct SampleLength {
  int64_t most = INT64_MAX;  // data.max_length
  TooLong too_long = TooLong::kAuto;
};

// The share of trained tokens, the notes, and the sample as it is trained. On a terminal trained text is
// green, elsewhere it stands between « and ».
std::string sample_view(const Prepared& prepared, bool terminal, const SampleLength& length = {});

}  // namespace lm
