// Any bytes as a run's numerics.json: refused with Error(14), or numbers in their ranges that survive their
// text.
#include "plan/numerics.h"
#include "tests/fuzz/support.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(lm::fuzz::text_of(data, size));
  const auto n = lm::fuzz::parse(lm::Exit::kIncompatible, [&] { return lm::parse_numerics(text, "fuzz"); });
  if (!n) return 0;
  const auto fits = [](int64_t value, int64_t most) { return value >= 1 && value <= most; };
  lm::fuzz::require(fits(n->micro_batch, 1 << 30) && fits(n->row_chunk, 1 << 30));
  lm::fuzz::require(fits(n->threads, 4096) && fits(n->ranks, 1 << 20));
  lm::fuzz::require(lm::parse_numerics(lm::numerics_json(*n), "again") == *n);
  return 0;
}
