#include "data/token_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <optional>
#include <span>

#include "base/bytes.h"
#include "base/error.h"

namespace lm {
namespace {

constexpr int64_t kHeaderBytes = 96, kSumsCrcAt = 88, kCrcAt = 92;
constexpr int64_t kChunkBytes = 65536;
constexpr int64_t kMaxExamples =
    std::numeric_limits<int32_t>::max() - 1;  // batches use 32-bit indices of examples
constexpr int64_t kMaxSummary = 16 * kMiB;
constexpr int64_t kTrainedWindow = 4 * kMiB;  // one system call per window in a pass over all marks

uint32_t crc32(std::span<const unsigned char> bytes) {
  return static_cast<uint32_t>(::crc32_z(0, bytes.data(), bytes.size()));
}

template <class T>
T load(const unsigned char* header, int64_t at) {
  T value;
  std::memcpy(&value, header + at, sizeof value);
  return value;
}

// The offsets of the sections, if the counts of a header are plausible.
struct Layout {
  int64_t trained, offsets, summary, sums, end;
};

std::optional<Layout> layout(int64_t tokens, int64_t examples, int64_t summary) {
  if (examples < 0 || examples > kMaxExamples || summary < 0 || summary > kMaxSummary) return std::nullopt;
  // 2^60 tokens are far beyond any disk and keep the sums below from overflowing.
  if (tokens < 0 || tokens > (int64_t{1} << 60)) return std::nullopt;
  Layout at{};
  at.trained = kHeaderBytes + 4 * tokens;
  at.offsets = round_up(at.trained + tokens, 8);
  at.summary = at.offsets + 8 * (examples + 1);
  at.sums = at.summary + summary;
  at.end = at.sums + 4 * ceil_div(at.sums - kHeaderBytes, kChunkBytes);
  return at;
}

}  // namespace

void TokenFile::refuse(const std::string& what) const {
  throw Error(Exit::kInput, {.area = "DATA-24",
                             .what = "damaged token file: " + what,
                             .place = path_,
                             .next = "delete it; the next start rebuilds it"});
}

TokenFile::TokenFile(const std::string& path) : path_(path) {
  // Without O_NONBLOCK a FIFO of that name would hang here.
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd_ < 0) {
    throw Error(Exit::kInput, {.area = "DATA-24",
                               .what = std::string("cannot open the token file: ") + std::strerror(errno),
                               .place = path,
                               .next = "check data.cache_dir"});
  }
  try {
    struct stat info {};
    if (::fstat(fd_, &info) != 0 || !S_ISREG(info.st_mode)) refuse("not a regular file");
    read_header(info.st_size);
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

TokenFile::~TokenFile() {
  ::close(fd_);
}

void TokenFile::read_header(int64_t file_bytes) {
  if (file_bytes < kHeaderBytes) refuse(fmt::format("only {} bytes", file_bytes));
  unsigned char header[kHeaderBytes];
  read_raw(0, header, kHeaderBytes);
  if (std::memcmp(header, "LMTOKENS", 8) != 0) refuse("it does not begin with LMTOKENS");
  if (load<uint32_t>(header, kCrcAt) != crc32(std::span(header).first(kCrcAt)))
    refuse("the header's checksum is wrong");
  if (load<uint32_t>(header, 8) != kTokenFileVersion || load<uint32_t>(header, 12) != kHeaderBytes) {
    refuse(fmt::format("version {} instead of {}", load<uint32_t>(header, 8), kTokenFileVersion));
  }
  // A value beyond int64 becomes negative and is refused with the others.
  vocab_ = load<int64_t>(header, 16);
  tokens_ = load<int64_t>(header, 24);
  trained_tokens_ = load<int64_t>(header, 32);
  const auto examples = load<int64_t>(header, 40), summary_bytes = load<int64_t>(header, 48);
  const std::optional<Layout> at = layout(tokens_, examples, summary_bytes);
  if (!at || vocab_ < 0 || trained_tokens_ < 0 || trained_tokens_ > tokens_)
    refuse("impossible counts in the header");
  if (at->end != file_bytes || load<int64_t>(header, 56) != file_bytes) {
    refuse(fmt::format("{} bytes instead of {}", file_bytes, at->end));
  }
  std::copy_n(header + 64, key_.size(), key_.begin());
  if (std::any_of(header + 80, header + kSumsCrcAt, [](unsigned char c) { return c != 0; }))
    refuse("reserved bytes in use");
  trained_at_ = at->trained;
  offsets_at_ = at->offsets;
  sums_at_ = at->sums;
  read_sums(load<uint32_t>(header, kSumsCrcAt));
  // The sizes have been checked against the file's, so these allocations are bounded by the disk.
  offsets_.resize(static_cast<size_t>(examples) + 1);
  read_at(offsets_at_, offsets_.data(), 8 * (examples + 1));
  if (offsets_.front() != 0 || offsets_.back() != static_cast<uint64_t>(tokens_) ||
      !std::ranges::is_sorted(offsets_)) {
    refuse(fmt::format("the examples' offsets do not rise from 0 to {}", tokens_));
  }
  summary_.resize(static_cast<size_t>(summary_bytes));
  read_at(at->summary, summary_.data(), summary_bytes);
}

void TokenFile::read_sums(uint32_t crc_of_sums) {
  sums_.resize(static_cast<size_t>(ceil_div(sums_at_ - kHeaderBytes, kChunkBytes)));
  read_raw(sums_at_, sums_.data(), static_cast<int64_t>(sums_.size() * sizeof(uint32_t)));
  const std::span bytes(reinterpret_cast<const unsigned char*>(sums_.data()),
                        sums_.size() * sizeof(uint32_t));
  if (crc32(bytes) != crc_of_sums) refuse("the checksum of its checksums is wrong");
  chunk_good_ = std::vector<std::atomic<bool>>(sums_.size());
}

void TokenFile::read_at(int64_t offset, void* out, int64_t bytes) const {
  const int64_t body = offset - kHeaderBytes;
  for (int64_t chunk = body / kChunkBytes; chunk * kChunkBytes < body + bytes; ++chunk) check_chunk(chunk);
  read_raw(offset, out, bytes);
}

// 65536 bytes cost some 30 us, once. Two threads may both verify it.
void TokenFile::check_chunk(int64_t chunk) const {
  std::atomic<bool>& good = chunk_good_[static_cast<size_t>(chunk)];
  if (good.load(std::memory_order_relaxed)) return;
  const int64_t begin = kHeaderBytes + chunk * kChunkBytes, end = std::min(begin + kChunkBytes, sums_at_);
  std::vector<unsigned char> bytes(static_cast<size_t>(end - begin));
  read_raw(begin, bytes.data(), end - begin);
  if (crc32(bytes) != sums_[static_cast<size_t>(chunk)]) {
    refuse(fmt::format("bytes {} to {} have changed since they were written", begin, end - 1));
  }
  good.store(true, std::memory_order_relaxed);
}

void TokenFile::read_raw(int64_t offset, void* out, int64_t bytes) const {
  auto* to = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t got = ::pread(fd_, to, static_cast<size_t>(bytes), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(fmt::format("cannot read at {}: {}", offset, std::strerror(errno)));
    if (got == 0) refuse(fmt::format("it ends at {}, {} bytes too early", offset, bytes));
    to += got;
    offset += got;
    bytes -= got;
  }
}

int64_t TokenFile::first_token(int64_t index) const {
  LM_CHECK(index >= 0 && index < examples(), fmt::format("example {}", index));
  return static_cast<int64_t>(offsets_[static_cast<size_t>(index)]);
}

int64_t TokenFile::length(int64_t index) const {
  return static_cast<int64_t>(offsets_[static_cast<size_t>(index) + 1]) - first_token(index);
}

ExampleView TokenFile::example(int64_t index, int64_t begin, int64_t count, ExampleBuffer& buffer) const {
  LM_CHECK(begin >= 0 && count >= 0 && begin <= length(index) - count,
           fmt::format("range of example {}", index));
  const int64_t first = first_token(index) + begin;
  buffer.tokens.resize(static_cast<size_t>(count));
  buffer.trained.resize(static_cast<size_t>(count));
  buffer.trained_first = first;
  read_at(kHeaderBytes + 4 * first, buffer.tokens.data(), 4 * count);
  read_at(trained_at_ + first, buffer.trained.data(), count);
  return {buffer.tokens, buffer.trained};
}

std::span<const uint8_t> TokenFile::trained(int64_t index, ExampleBuffer& buffer) const {
  const int64_t first = first_token(index), count = length(index);
  const int64_t held = buffer.trained_first + static_cast<int64_t>(buffer.trained.size());
  if (first < buffer.trained_first || first + count > held) {
    const int64_t window = std::min(std::max(count, kTrainedWindow), tokens_ - first);
    buffer.trained.resize(static_cast<size_t>(window));
    buffer.trained_first = first;
    read_at(trained_at_ + first, buffer.trained.data(), window);
  }
  return std::span<const uint8_t>(buffer.trained)
      .subspan(static_cast<size_t>(first - buffer.trained_first), static_cast<size_t>(count));
}

uint64_t TokenFile::fingerprint() const {
  uint64_t low;
  std::memcpy(&low, key_.data(), sizeof low);
  return low;
}

}  // namespace lm
