// Any bytes as JSON: refused with Error(11), or the document equals the library's own and survives its text.
#include <cstdint>
#include <cstdlib>

#include "base/error.h"
#include "base/json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const lm::Json value = lm::parse_json(text, "fuzz");
    if (value != lm::Json::parse(text) || lm::parse_json(value.dump(), "dump") != value) std::abort();
  } catch (const lm::Error& error) {
    if (error.code() != lm::Exit::kInput || error.report().size() > 8192) std::abort();
  }
  return 0;
}
