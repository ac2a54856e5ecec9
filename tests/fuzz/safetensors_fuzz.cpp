// Any bytes as a safetensors header: refused with Error(11), or the invariants of an accepted one hold. The
// first four bytes are the size of the data that would follow.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "weights/safetensors_header.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4) return 0;
  uint32_t data_bytes = 0;
  std::memcpy(&data_bytes, data, 4);
  try {
    const lm::SafetensorsHeader header =
        lm::parse_safetensors_header({reinterpret_cast<const char*>(data) + 4, size - 4}, data_bytes, "fuzz");
    int64_t total = 0;
    for (size_t i = 0; i < header.entries.size(); ++i) {
      const lm::SafetensorsEntry& entry = header.entries[i];
      int64_t elements = 1;
      for (const int64_t n : entry.shape) elements *= n;
      const bool inside = entry.begin >= 0 && entry.begin <= entry.end && entry.end <= int64_t{data_bytes};
      const bool whole = elements == entry.elements() && entry.shape.size() <= 8 && entry.name.size() <= 1024;
      if (!inside || !whole || (i > 0 && !(header.entries[i - 1].name < entry.name))) std::abort();
      total += entry.bytes();
    }
    if (total != int64_t{data_bytes}) std::abort();
  } catch (const lm::Error& error) {
    if (error.code() != lm::Exit::kInput || error.report().size() > 8192) std::abort();
  }
  return 0;
}
