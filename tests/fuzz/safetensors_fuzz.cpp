// Any bytes as a safetensors file: refused with Error(11), or the invariants of an accepted one hold. The
// first four bytes are the size of the data behind a header, which is the rest; 0xFFFFFFFF: the rest is the
// whole file.
#include "weights/safetensors.h"

#include <cstring>
#include <utility>

#include "tests/fuzz/support.h"

namespace {

using lm::fuzz::require;

void check_entries(const std::vector<lm::SafetensorsEntry>& entries, int64_t data_bytes) {
  int64_t total = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    const lm::SafetensorsEntry& entry = entries[i];
    int64_t elements = 1;
    for (const int64_t n : entry.shape) elements *= n;
    require(entry.begin >= 0 && entry.begin <= entry.end && entry.end <= data_bytes);
    require(elements == entry.elements() && entry.shape.size() <= 8 && entry.name.size() <= 1024);
    require(i == 0 || entries[i - 1].name < entry.name);
    total += entry.bytes();
  }
  require(total == data_bytes);
}

// What is read piece by piece from a file is what the text says as a whole.
void check_file(const lm::SafetensorsFile& file, std::string_view header, int64_t data_bytes) {
  check_entries(file.entries(), data_bytes);
  const lm::SafetensorsHeader whole =
      lm::parse_safetensors_header([&] { return std::exchange(header, {}); }, data_bytes, "whole");
  require(whole.entries.size() == file.entries().size() && whole.metadata == file.metadata());
  for (const lm::SafetensorsEntry& entry : whole.entries) {
    const lm::SafetensorsEntry* const found = file.find(entry.name);
    require(found != nullptr && found->begin == entry.begin && found->shape == entry.shape);
    if (entry.bytes() > 4096) continue;
    std::vector<std::byte> bytes(static_cast<size_t>(entry.bytes()));
    file.read(*found, 0, bytes);
  }
  require(file.find("a name that is too long for a header\xFF") == nullptr);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static lm::fuzz::MemoryFile memory;
  if (size < 4) return 0;
  uint32_t data_bytes = 0;
  std::memcpy(&data_bytes, data, sizeof data_bytes);
  const std::string_view rest = lm::fuzz::text_of(data + 4, size - 4);
  const bool whole = data_bytes == UINT32_MAX;
  if (whole) {
    memory.set({rest});
  } else {
    memory.set_safetensors(rest, data_bytes);
  }
  const auto file = lm::fuzz::parse(lm::Exit::kInput, [&] { return lm::SafetensorsFile(memory.path()); });
  if (file && whole) {
    uint64_t length = 0;
    std::memcpy(&length, rest.data(), sizeof length);
    check_file(*file, rest.substr(8, length), static_cast<int64_t>(rest.size() - 8 - length));
  } else if (file) {
    check_file(*file, rest, data_bytes);
  }
  return 0;
}
