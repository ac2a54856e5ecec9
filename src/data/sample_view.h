// The sample of its data that a run logs before it trains. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "config/config.h"
#include "data/prepare.h"

namespace lm {

// The treatment of the sample if it is longer than a sequence.
struct SampleLength {
  int64_t most = INT64_MAX;  // data.max_length
  TooLong too_long = TooLong::kAuto;
};

// The fraction of trained tokens, the notes, and the sample as it is trained. Trained text is green on a
// terminal, elsewhere between « and ».
std::string sample_view(const Prepared& prepared, bool terminal, const SampleLength& length = {});

}  // namespace lm
