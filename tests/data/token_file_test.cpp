#include "data/token_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <utility>

#include "base/error.h"
#include "tests/data/token_file_bytes.h"

namespace lm {
namespace {

class TokenFileTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/lm_token_file_XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    dir_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  std::string write(const std::string& bytes) {
    const std::string path = dir_ + "/train.tokens";
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
    return path;
  }
  void expect_refused(const std::string& path, const std::string& label) {
    try {
      const TokenFile file(path);
      FAIL() << "accepted: " << label;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kInput) << label;
      EXPECT_EQ(error.text().area, "DATA-24") << label;
      EXPECT_EQ(error.text().place, path) << label;
    }
  }
  std::string dir_;
};

TEST_F(TokenFileTest, ReadsWhatTheGrammarDescribes) {
  const TokenFile file(write(good_token_file().bytes()));
  EXPECT_EQ(file.examples(), 2);
  EXPECT_EQ(file.tokens(), 5);
  EXPECT_EQ(file.trained_tokens(), 3);
  EXPECT_EQ(file.vocab(), 32);
  EXPECT_EQ(file.key()[15], 15);
  EXPECT_EQ(file.length(0), 3);
  EXPECT_EQ(file.first_token(1), 3);
  ExampleBuffer buffer;
  const ExampleView whole = file.example(0, 0, 3, buffer);
  EXPECT_EQ(std::vector<int32_t>(whole.tokens.begin(), whole.tokens.end()),
            (std::vector<int32_t>{12, 17, 2}));
  EXPECT_EQ(std::vector<uint8_t>(whole.trained.begin(), whole.trained.end()),
            (std::vector<uint8_t>{0, 1, 1}));
  const ExampleView part = file.example(1, 1, 1, buffer);
  EXPECT_EQ(part.tokens[0], 6);
  EXPECT_EQ(file.trained(0, buffer).size(), 3u);
  EXPECT_EQ(file.trained(1, buffer)[1], 1);
  EXPECT_EQ(file.trained(0, buffer)[1], 1);
}

TEST_F(TokenFileTest, MatchesTheWorkedExampleOfTheHeader) {
  TokenFileBytes bytes;
  bytes.tokens = {12, 17, 2};
  bytes.trained = {0, 1, 1};
  bytes.offsets = {0, 3};
  bytes.summary = "{}";
  const std::string text = bytes.bytes();
  EXPECT_EQ(text.size(), 134u);
  EXPECT_EQ(text.substr(96, 4), std::string("\x0c\0\0\0", 4));
  EXPECT_EQ(text.substr(108, 4), std::string("\0\1\1\0", 4));
  EXPECT_EQ(text.substr(128, 2), "{}");
  EXPECT_EQ(TokenFile(write(text)).length(0), 3);
}

TEST_F(TokenFileTest, RefusesHostileHeaders) {
  const int64_t huge = int64_t{1} << 62;
  const std::vector<std::pair<const char*, std::function<void(TokenFileBytes&)>>> cases{
      {"magic", [](auto& f) { f.magic = "LMTOKENZ"; }},
      {"version", [](auto& f) { f.version = 1; }},
      {"header size", [](auto& f) { f.header_bytes = 128; }},
      {"checksum", [](auto& f) { f.right_crc = false; }},
      {"checksum of the checksums", [](auto& f) { f.right_sums_crc = false; }},
      {"reserved byte", [](auto& f) { f.reserved = 1; }},
      {"negative vocabulary", [](auto& f) { f.vocab = -2; }},
      {"one token more", [](auto& f) { f.token_count = 6; }},
      {"one token less", [](auto& f) { f.token_count = 4; }},
      {"tokens that overflow when multiplied", [=](auto& f) { f.token_count = huge; }},
      {"negative tokens", [](auto& f) { f.token_count = -5; }},
      {"more trained than tokens", [](auto& f) { f.trained_count = 6; }},
      {"negative trained", [](auto& f) { f.trained_count = -7; }},
      {"one example more", [](auto& f) { f.example_count = 3; }},
      {"examples beyond 32 bits", [](auto& f) { f.example_count = int64_t{1} << 32; }},
      {"examples that overflow", [=](auto& f) { f.example_count = huge; }},
      {"negative examples", [](auto& f) { f.example_count = -2; }},
      {"summary too long", [](auto& f) { f.summary_bytes = 1 << 20; }},
      {"summary beyond the cap", [=](auto& f) { f.summary_bytes = huge; }},
      {"negative summary", [](auto& f) { f.summary_bytes = -3; }},
      {"file size", [](auto& f) { f.file_bytes = 1; }},
      {"offsets that fall",
       [](auto& f) {
         f.offsets = {0, 6, 5};
       }},
      {"offsets that begin late",
       [](auto& f) {
         f.offsets = {1, 3, 5};
       }},
      {"offsets that end early",
       [](auto& f) {
         f.offsets = {0, 3, 4};
       }},
      {"offsets beyond the tokens",
       [](auto& f) {
         f.offsets = {0, uint64_t{1} << 63, 5};
       }},
  };
  for (const auto& [label, damage] : cases) {
    TokenFileBytes file = good_token_file();
    damage(file);
    expect_refused(write(file.bytes()), label);
  }
}

TEST_F(TokenFileTest, RefusesEveryTruncation) {
  const std::string bytes = good_token_file().bytes();
  for (size_t size = 0; size < bytes.size(); ++size) {
    expect_refused(write(bytes.substr(0, size)), "cut to " + std::to_string(size));
  }
  expect_refused(write(bytes + "x"), "one byte more");
}

TEST_F(TokenFileTest, RefusesEveryFlippedHeaderBit) {
  const std::string bytes = good_token_file().bytes();
  for (size_t bit = 0; bit < 96 * 8; ++bit) {
    std::string damaged = bytes;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    expect_refused(write(damaged), "bit " + std::to_string(bit));
  }
}

// Reads everything the way a run does: all marks first, then every example.
void read_all(const std::string& path) {
  const TokenFile file(path);
  ExampleBuffer buffer;
  for (int64_t e = 0; e < file.examples(); ++e) file.trained(e, buffer);
  for (int64_t e = 0; e < file.examples(); ++e) file.example(e, 0, file.length(e), buffer);
}

TEST_F(TokenFileTest, NoticesEveryFlippedBitOfTheBodyWhenItIsRead) {
  const std::string bytes = good_token_file().bytes();
  for (size_t bit = 96 * 8; bit < bytes.size() * 8; ++bit) {
    std::string damaged = bytes;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    const std::string path = write(damaged);
    try {
      read_all(path);
      FAIL() << "accepted: bit " << bit;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kInput) << bit;
      EXPECT_EQ(error.text().place, path) << bit;
    }
  }
}

TEST_F(TokenFileTest, ADamagedChunkIsNamedAndTheOthersStayReadable) {
  TokenFileBytes big;
  for (int32_t t = 0; t < 60000; ++t) big.tokens.push_back(t % 32), big.trained.push_back(1);
  big.offsets = {0, 100, 59900, 60000};  // 240000 bytes of tokens: chunks of 16384 tokens
  std::string bytes = big.bytes();
  read_all(write(bytes));
  const size_t at = 96 + 2 * 65536 + 7;
  bytes[at] = static_cast<char>(bytes[at] ^ 4);
  const std::string path = write(bytes);
  const TokenFile file(path);
  ExampleBuffer buffer;
  EXPECT_EQ(file.example(0, 0, 100, buffer).tokens[33], 1);
  EXPECT_EQ(file.example(1, 2 * 16384 - 101, 1, buffer).tokens[0], (2 * 16384 - 1) % 32);
  EXPECT_EQ(file.example(2, 99, 1, buffer).tokens[0], 59999 % 32);
  EXPECT_EQ(file.trained(1, buffer).size(), 59800u);
  for (int i = 0; i < 2; ++i) {
    try {
      file.example(1, 2 * 16384 - 101, 2, buffer);
      FAIL() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kInput);
      EXPECT_NE(error.text().what.find("bytes 131168 to 196703"), std::string::npos) << error.text().what;
      EXPECT_EQ(error.text().place, path);
      EXPECT_NE(error.text().next.find("delete it"), std::string::npos);
    }
  }
}

TEST_F(TokenFileTest, ReportsAFileCutShortWhileItIsOpen) {
  const std::string path = write(good_token_file().bytes());
  const TokenFile file(path);
  ASSERT_EQ(::truncate(path.c_str(), 100), 0);
  ExampleBuffer buffer;
  try {
    file.example(0, 0, 1, buffer);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kInput);
    EXPECT_NE(error.text().what.find("too early"), std::string::npos) << error.text().what;
  }
}

TEST_F(TokenFileTest, RefusesWhatIsNoRegularFile) {
  expect_refused(dir_, "directory");
  expect_refused(dir_ + "/absent", "absent");
  const std::string fifo = dir_ + "/fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  expect_refused(fifo, "fifo");
}

TEST_F(TokenFileTest, AcceptsNoExamples) {
  TokenFileBytes bytes;
  bytes.offsets = {0};
  const TokenFile file(write(bytes.bytes()));
  EXPECT_EQ(file.examples(), 0);
}

}  // namespace
}  // namespace lm
