// Token files as bytes, made by the grammar of token_file.h and independently of the program that writes
// them, so that tests can damage any field.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace lm {

struct TokenFileBytes {
  std::vector<int32_t> tokens;
  std::vector<uint8_t> trained;
  std::vector<uint64_t> offsets;
  std::string summary = R"({"dropped":0,"notes":[],"sample":[]})";
  // Fields as they will stand in the header; -1 = the true value.
  std::string magic = "LMTOKENS";
  uint32_t version = 2, header_bytes = 96;
  int64_t vocab = 32, token_count = -1, trained_count = -1, example_count = -1, summary_bytes = -1,
          file_bytes = -1;
  char reserved = 0;
  bool right_crc = true, right_sums_crc = true;

  static uint32_t crc32(const std::string& data) {
    uint32_t crc = ~0U;
    for (const char c : data) {
      for (int bit = 0; bit < 8; ++bit) {
        const bool odd = ((crc ^ (static_cast<unsigned char>(c) >> bit)) & 1U) != 0;
        crc = (crc >> 1) ^ (odd ? 0xedb88320U : 0U);
      }
    }
    return ~crc;
  }

  std::string bytes() const {
    std::string body;
    const auto put = [](std::string& to, const void* data, size_t size) {
      to.append(static_cast<const char*>(data), size);
    };
    put(body, tokens.data(), tokens.size() * 4);
    put(body, trained.data(), trained.size());
    while ((body.size() + 96) % 8 != 0) body.push_back('\0');
    put(body, offsets.data(), offsets.size() * 8);
    body += summary;
    std::string sums;
    for (size_t at = 0; at < body.size(); at += 65536) {
      const uint32_t sum = crc32(body.substr(at, 65536));
      put(sums, &sum, 4);
    }
    body += sums;
    int64_t ones = 0;
    for (const uint8_t mark : trained) ones += mark;
    const auto field = [](int64_t wanted, size_t real) {
      return wanted == -1 ? static_cast<int64_t>(real) : wanted;
    };
    std::string header = magic;
    put(header, &version, 4);
    put(header, &header_bytes, 4);
    for (const int64_t value :
         {vocab, field(token_count, tokens.size()), field(trained_count, static_cast<size_t>(ones)),
          field(example_count, offsets.size() - 1), field(summary_bytes, summary.size()),
          field(file_bytes, body.size() + 96)}) {
      put(header, &value, 8);
    }
    for (int i = 0; i < 16; ++i) header.push_back(static_cast<char>(i));
    header.append(8, '\0');
    header.back() = reserved;
    const uint32_t sums_crc = crc32(sums) ^ (right_sums_crc ? 0U : 1U);
    put(header, &sums_crc, 4);
    const uint32_t crc = crc32(header) ^ (right_crc ? 0U : 1U);
    put(header, &crc, 4);
    return header + body;
  }
};

// Two examples: 12 17 2 (trained from the second token on) and 5 6.
inline TokenFileBytes good_token_file() {
  TokenFileBytes file;
  file.tokens = {12, 17, 2, 5, 6};
  file.trained = {0, 1, 1, 0, 1};
  file.offsets = {0, 3, 5};
  return file;
}

}  // namespace lm
