// Any bytes as a token file: refused with Error(11), or every example of an accepted one can be read. With an
// odd first byte the rest is a file up to its checksums, which are added, so that damage reaches what lies
// behind them; the byte's next two bits make the summary longer, since a file of several chunks is longer
// than an input.
#include "data/token_file.h"

#include <zlib.h>

#include <cstring>
#include <span>

#include "tests/fuzz/support.h"

namespace {

using lm::fuzz::require;

constexpr size_t kHeader = 96, kChunk = 65536;

void put(std::vector<unsigned char>& file, size_t at, uint32_t value) {
  std::memcpy(file.data() + at, &value, sizeof value);
}

uint32_t crc(std::span<const unsigned char> bytes) {
  return static_cast<uint32_t>(crc32_z(0, bytes.data(), bytes.size()));
}

// Puts `zeros` bytes more into the summary, which is the last of the body, and the checksums behind it.
void add_checksums(std::vector<unsigned char>& file, size_t zeros) {
  if (file.size() < kHeader) return;
  file.resize(file.size() + zeros);
  const size_t end = file.size(), chunks = (end - kHeader + kChunk - 1) / kChunk;
  file.resize(end + 4 * chunks);
  const std::span<const unsigned char> bytes(file);
  for (size_t c = 0; c < chunks; ++c) {
    const size_t begin = kHeader + c * kChunk;
    put(file, end + 4 * c, crc(bytes.subspan(begin, std::min(kChunk, end - begin))));
  }
  put(file, 88, crc(bytes.subspan(end)));
  put(file, 92, crc(bytes.first(92)));
}

// Returns true, or throws what reading throws.
bool read_everything(const std::string& path) {
  const lm::TokenFile file(path);
  lm::ExampleBuffer buffer;
  int64_t tokens = 0;
  for (int64_t e = 0; e < file.examples(); ++e) {
    require(file.first_token(e) == tokens);
    const int64_t length = file.length(e);
    require(std::ssize(file.trained(e, buffer)) == length);
    const lm::ExampleView view = file.example(e, length / 2, length - length / 2, buffer);
    require(std::ssize(view.tokens) == length - length / 2);
    tokens += length;
  }
  require(tokens == file.tokens() && file.trained_tokens() <= tokens && file.vocab() >= 0);
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static lm::fuzz::MemoryFile memory;
  if (size == 0) return 0;
  std::vector<unsigned char> bytes(data + 1, data + size);
  if ((data[0] & 1) != 0) add_checksums(bytes, size_t{data[0]} / 2 % 4 * 40000);
  memory.set({lm::fuzz::text_of(bytes.data(), bytes.size())});
  lm::fuzz::parse(lm::Exit::kInput, [&] { return read_everything(memory.path()); });
  return 0;
}
