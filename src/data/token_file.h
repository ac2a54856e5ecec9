// The token cache, written by data preparation and read by the loader. Integers are little-endian:
//
//   file    = header tokens trained zeros offsets summary sums
//   header  = "LMTOKENS" u32:version u32:96 u64:vocab u64:T u64:trained u64:E u64:S u64:file_bytes
//             key[16] zero[8] u32:crc32(sums) u32:crc32(first 92 bytes)
//   tokens  = i32 × T              token ids of all examples, one after another
// trained = u8 × T 1 = this token is a training target
//   zeros   = 0 to 7 bytes         up to a multiple of 8 in the file
//   offsets = u64 × (E + 1)        example e is tokens [offsets[e], offsets[e + 1]); first 0, last T, never
//                                  falling
// summary = S bytes of JSON the preparation's counts, and one example to display
//   sums    = u32 × C              crc32 of each chunk of 65536 bytes between header and sums, the last
//                                  shorter
//
// `vocab` is the tokenizer's size (0: unknown), `trained` counts the ones, `key` names the content
// (prepare.h). Example: "Hi" = 12 17 with end token 2, trained from the second token on, vocab 32, summary
// "{}":
//   0   4c4d544f4b454e53 02000000 60000000 2000000000000000 0300000000000000 0200000000000000
//   40  0100000000000000 0200000000000000 8600000000000000 key… 0000000000000000 crc32 crc32
//   96  0c000000 11000000 02000000 | 108 00 01 01 | 111 00 | 112 0000000000000000 0300000000000000 | 128 7b7d
//   130 crc32 of the bytes 96 to 129
//
// The file is read with pread: if it were truncated while open, a mapping would end the process with SIGBUS.
// Opening checks the header, every offset and the size of the whole file; a chunk is checked when it is first
// read, so that a start does not read unneeded chunks; ids are checked when batches are built. All failures
// are Error(11). Immutable once published; any thread may read.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "data/source.h"

namespace lm {

inline constexpr uint32_t kTokenFileVersion = 2;
using ContentKey = std::array<uint8_t, 16>;

class TokenFile : public DataSource {
 public:
  explicit TokenFile(const std::string& path);
  ~TokenFile() override;
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;

  int64_t tokens() const { return tokens_; }
  int64_t trained_tokens() const { return trained_tokens_; }
  int64_t vocab() const { return vocab_; }
  const ContentKey& key() const { return key_; }
  const std::string& summary() const { return summary_; }

  int64_t examples() const override { return static_cast<int64_t>(offsets_.size()) - 1; }
  int64_t length(int64_t index) const override;
  ExampleView example(int64_t index, int64_t begin, int64_t count, ExampleBuffer& buffer) const override;
  std::span<const uint8_t> trained(int64_t index, ExampleBuffer& buffer) const override;
  std::string name() const override { return path_; }
  int64_t first_token(int64_t index) const override;
  uint64_t fingerprint() const override;

 private:
  void read_header(int64_t file_bytes);
  void read_sums(uint32_t crc_of_sums);
  // Reads from the body, verified by its chunks' checksums.
  void read_at(int64_t offset, void* out, int64_t bytes) const;
  void check_chunk(int64_t chunk) const;
  void read_raw(int64_t offset, void* out, int64_t bytes) const;
  [[noreturn]] void refuse(const std::string& what) const;

  std::string path_;
  int fd_ = -1;
  int64_t vocab_ = 0, tokens_ = 0, trained_tokens_ = 0;
  int64_t trained_at_ = 0, offsets_at_ = 0, sums_at_ = 0;  // positions in the file
  ContentKey key_{};
  std::vector<uint32_t> sums_;                         // of the chunks
  mutable std::vector<std::atomic<bool>> chunk_good_;  // already verified
  std::vector<uint64_t> offsets_;                      // checked when the file was opened
  std::string summary_;
};

}  // namespace lm
