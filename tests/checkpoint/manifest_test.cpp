#include "checkpoint/manifest.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace lm {
namespace {

Manifest small() {
  Manifest out;
  out.step = 7;
  out.files = {{.name = "a.safetensors", .bytes = 24, .chunks = {{0, 16, 1}, {16, 8, 2}}}};
  out.arrays = {
      {.name = "block0.weight", .dtype = DType::kBF16, .first = 0, .elements = 8, .file = 0, .offset = 8}};
  out.tensors = {{.name = "embed", .block = 0, .first = 0, .shape = {2, 4}}};
  out.numbers = {{"optimizer.t", 7}};
  return out;
}

// With `from` replaced by `to`, and the checksum of what that gives.
std::string damaged(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  const size_t end = text.rfind(",\n\"checksum\"");
  return text.substr(0, end) + ",\n\"checksum\": \"" + hash_text(text.substr(0, end)) + "\"\n}\n";
}

Exit refusal(const std::string& text) {
  try {
    parse_manifest(text, "m");
  } catch (const Error& error) {
    return error.code();
  }
  return Exit::kDone;
}

TEST(Manifest, SurvivesItsText) {
  const std::string text = manifest_text(small());
  EXPECT_EQ(manifest_text(parse_manifest(text, "m")), text);
  EXPECT_EQ(refusal(damaged(text, "\"step\": 7", "\"step\": 8")), Exit::kDone);
}

TEST(Manifest, EveryFlippedBitIsSeen) {
  const std::string text = manifest_text(small());
  for (size_t bit = 0; bit < 8 * text.size(); ++bit) {
    std::string flipped = text;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    ASSERT_EQ(refusal(flipped), Exit::kIntegrity) << "bit " << bit;
  }
}

TEST(Manifest, NumbersThatAreNoCountsAreRefused) {
  const std::string text = manifest_text(small());
  for (const char* key :
       {"\"step\": 7", "\"elements\":8", "\"offset\":8", "\"block\":0", "\"optimizer.t\":7"}) {
    const std::string name = std::string(key).substr(0, std::string(key).find(':') + 1);
    for (const char* number : {"1e300", "1.5", "true", "18446744073709551615", "null", "\"7\""})
      EXPECT_EQ(refusal(damaged(text, key, name + number)), Exit::kInput) << name << number;
  }
  EXPECT_EQ(refusal(damaged(text, "[2,4]", "[2,-4]")), Exit::kInput);
  EXPECT_EQ(refusal(damaged(text, "[2,4]", "[2,1e300]")), Exit::kInput);
}

TEST(Manifest, FilesOfMoreBytesThanCanBeCountedAreRefused) {
  Manifest manifest = small();
  for (const char* name : {"b", "c"})
    manifest.files.push_back({.name = name, .bytes = INT64_MAX, .chunks = {{0, INT64_MAX, 3}}});
  manifest.files.erase(manifest.files.begin() + 1, manifest.files.end() - 1);
  EXPECT_EQ(refusal(manifest_text(manifest)), Exit::kInput);
}

TEST(Manifest, PlacesOutsideOfTheirFileAreRefused) {
  const std::string text = manifest_text(small());
  EXPECT_EQ(refusal(damaged(text, "\"elements\":8", "\"elements\":9")), Exit::kInput);
  EXPECT_EQ(refusal(damaged(text, "\"file\":0", "\"file\":1")), Exit::kInput);
  EXPECT_EQ(refusal(damaged(text, "a.safetensors", "../a")), Exit::kInput);
  EXPECT_EQ(refusal(damaged(text, "\"version\": 1", "\"version\": 2")), Exit::kIncompatible);
}

}  // namespace
}  // namespace lm
