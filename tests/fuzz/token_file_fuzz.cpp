// Any bytes as a token file: refused with Error(11), or every example of an accepted one can be read. With an
// odd first byte the checksums of the rest are made right, so that damage reaches what lies behind them.
#include <zlib.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "data/token_file.h"

namespace {

constexpr size_t kHeader = 96, kChunk = 65536;

void put(std::vector<unsigned char>& file, size_t at, uint32_t value) {
  std::memcpy(file.data() + at, &value, sizeof value);
}

uint32_t crc(std::span<const unsigned char> bytes) {
  return static_cast<uint32_t>(crc32_z(0, bytes.data(), bytes.size()));
}

// One or two chunks: inputs have at most 65536 bytes.
void make_checksums_right(std::vector<unsigned char>& file) {
  if (file.size() < kHeader + 4) return;
  const size_t chunks = file.size() - kHeader - 4 <= kChunk ? 1 : 2;
  const size_t sums = file.size() - 4 * chunks;
  const std::span<const unsigned char> bytes(file);
  for (size_t c = 0; c < chunks; ++c) {
    const size_t begin = kHeader + c * kChunk;
    put(file, sums + 4 * c, crc(bytes.subspan(begin, std::min(kChunk, sums - begin))));
  }
  put(file, 88, crc(bytes.subspan(sums)));
  put(file, 92, crc(bytes.first(92)));
}

void read_everything(const std::string& path) {
  const lm::TokenFile file(path);
  lm::ExampleBuffer buffer;
  int64_t tokens = 0;
  for (int64_t e = 0; e < file.examples(); ++e) {
    if (file.first_token(e) != tokens) std::abort();
    const int64_t length = file.length(e);
    if (static_cast<int64_t>(file.trained(e, buffer).size()) != length) std::abort();
    const lm::ExampleView view = file.example(e, length / 2, length - length / 2, buffer);
    if (static_cast<int64_t>(view.tokens.size()) != length - length / 2) std::abort();
    tokens += length;
  }
  if (tokens != file.tokens() || file.trained_tokens() > tokens || file.vocab() < 0) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  std::vector<unsigned char> bytes(data + 1, data + size);
  if ((data[0] & 1) != 0) make_checksums_right(bytes);
  const int fd = memfd_create("token_file_fuzz", MFD_CLOEXEC);
  if (fd < 0 || write(fd, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) std::abort();
  try {
    read_everything("/proc/self/fd/" + std::to_string(fd));
  } catch (const lm::Error& error) {
    if (error.code() != lm::Exit::kInput || error.report().size() > 8192) std::abort();
  }
  close(fd);
  return 0;
}
