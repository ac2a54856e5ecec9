// Checkpoints of a state that needs no model: whatever bit of them is flipped, no byte of it is used; and
// what is given to a save may be changed at once.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <random>

#include "../faults/rows.h"
#include "../weights/support.h"
#include "checkpoint/restore.h"
#include "checkpoint/save.h"

namespace lm {
namespace {

using test::TemporaryDirectory;
using Arrays = std::map<std::string, std::vector<std::byte>>;

constexpr int kFlips = 1000, kSnapshots = 100;

// One array is of two chunks and a part, the others are of a page.
StateCatalogue catalogue() {
  const auto array = [](const char* name, DType dtype, int64_t elements) {
    return StateEntry{.name = name, .dtype = dtype, .shape = {elements}, .unit = 0, .elements = elements};
  };
  return {array("block0.weight", DType::kBF16, 4608 * 1024), array("block1.weight", DType::kF32, 4096),
          array("block1.exp_avg", DType::kF32, 4096), StateEntry{.name = "optimizer.t"}};
}

std::vector<std::byte> random_bytes(int64_t bytes, std::mt19937_64& random) {
  std::vector<std::byte> out(static_cast<size_t>(bytes));
  for (size_t i = 0; i < out.size(); i += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(out.data() + i, &word, std::min(sizeof word, out.size() - i));
  }
  return out;
}

// Saves random arrays, given in pieces from one buffer that is overwritten as soon as a piece has been taken.
std::string save(const std::string& directory, int64_t step, std::mt19937_64& random, Arrays* arrays,
                 std::unique_ptr<PinnedPool>* buffers = nullptr) {
  constexpr int64_t kPiece = 5 << 20;
  const StateCatalogue state = catalogue();
  Save save({.directory = directory, .step = step, .catalogue = state, .buffers = buffers});
  std::vector<std::byte> buffer;
  for (const StateEntry& entry : state) {
    if (entry.unit < 0) {
      save.write(entry, 0, std::as_bytes(std::span(&step, 1)));
      continue;
    }
    std::vector<std::byte>& bytes = (*arrays)[entry.name] = random_bytes(entry.bytes(), random);
    for (int64_t at = 0; at < entry.bytes(); at += kPiece) {
      const auto from = bytes.begin() + at;
      buffer.assign(from, from + std::min(kPiece, entry.bytes() - at));
      save.write(entry, at, buffer);
      std::ranges::fill(buffer, std::byte{0xEE});
    }
  }
  Manifest manifest;
  manifest.step = step;
  return save.commit(manifest);
}

// How many arrays a reader refuses; what it gives is as it was saved.
int refused(const std::string& checkpoint, const Arrays& arrays) {
  try {
    CheckpointReader reader(checkpoint);
    int out = 0;
    for (const auto& [name, bytes] : arrays) {
      std::vector<std::byte> got(bytes.size());
      try {
        reader.read(name, 0, got);
        EXPECT_EQ(got, bytes) << name;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Exit::kIntegrity) << error.report();
        ++out;
      }
    }
    return out;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kIntegrity) << error.report();
    return static_cast<int>(arrays.size());
  }
}

// Flips a bit, and back when it goes.
class Flip {
 public:
  Flip(const std::string& path, int64_t byte, int bit)
      : fd_(::open(path.c_str(), O_RDWR)), byte_(byte), bit_(bit) {
    turn();
  }
  ~Flip() {
    turn();
    ::close(fd_);
  }
  Flip(const Flip&) = delete;
  Flip& operator=(const Flip&) = delete;

 private:
  void turn() const {
    unsigned char value = 0;
    EXPECT_EQ(::pread(fd_, &value, 1, byte_), 1);
    value ^= static_cast<unsigned char>(1U << bit_);
    EXPECT_EQ(::pwrite(fd_, &value, 1, byte_), 1);
  }
  int fd_;
  int64_t byte_;
  int bit_;
};

uint64_t chosen_seed() {
  const char* const given = std::getenv("LM_FAULTS_SEED");
  return given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
}

TEST(Damage, AThousandFlippedBitsAreFoundAndNoByteIsUsed) {
  Row row("flips_in_process", "a bit flips in a checkpoint",
          "one random bit at a time: every second flip in the manifest, the others in the shard");
  const TemporaryDirectory directory;
  const uint64_t seed = chosen_seed();
  row.seed(seed);
  std::mt19937_64 random(seed);
  Arrays arrays;
  const std::string checkpoint = save(directory.path(), 100, random, &arrays);
  ASSERT_EQ(refused(checkpoint, arrays), 0);
  for (int i = 0; i < kFlips; ++i) {
    const std::string path = checkpoint + (i % 2 == 0 ? "/rank00000.safetensors" : "/MANIFEST.json");
    const auto byte = static_cast<int64_t>(random() % std::filesystem::file_size(path));
    const auto bit = static_cast<int>(random() % 8);
    const Flip flip(path, byte, bit);
    // Which arrays are refused is a matter of the chunk that was hit; of the header, all are.
    const bool seen = refused(checkpoint, arrays) > 0;
    EXPECT_TRUE(seen) << path << " byte " << byte << " bit " << bit << ", LM_FAULTS_SEED=" << seed;
    row.tried();
    row.count(seen ? "found, no byte used" : "missed");
  }
  EXPECT_EQ(refused(checkpoint, arrays), 0) << "a flip was not taken back";
  row.write();
}

TEST(Damage, VerifyFindsAFlipInEveryChunk) {
  const TemporaryDirectory directory;
  std::mt19937_64 random(chosen_seed());
  Arrays arrays;
  CheckpointReader reader(save(directory.path(), 100, random, &arrays));
  reader.verify();
  const CheckpointFile& file = reader.manifest().files.front();
  ASSERT_GE(file.chunks.size(), 5u);
  for (const FileChunk& chunk : file.chunks) {
    const Flip flip(reader.directory() + "/" + file.name,
                    chunk.offset + static_cast<int64_t>(random() % static_cast<uint64_t>(chunk.bytes)), 3);
    const std::string message = test::refusal([&] { reader.verify(); }, Exit::kIntegrity);
    EXPECT_TRUE(test::contains(message, "offset " + std::to_string(chunk.offset) + ",")) << message;
  }
}

TEST(Damage, AManifestOfAnotherStepIsRefused) {
  const TemporaryDirectory directory;
  std::mt19937_64 random(chosen_seed());
  Arrays arrays;
  const std::string saved = save(directory.path(), 100, random, &arrays);
  std::filesystem::rename(saved, directory / "step_00000200");
  const std::vector<FoundCheckpoint> found = find_checkpoints(directory.path());
  ASSERT_EQ(found.size(), 1u);
  EXPECT_FALSE(found.front().manifest);
  EXPECT_TRUE(test::contains(found.front().problem, "the manifest is of step 100")) << found.front().problem;
}

TEST(Damage, WhatWasGivenToASaveMayBeChangedAtOnce) {
  const TemporaryDirectory directory;
  std::mt19937_64 random(chosen_seed());
  for (int i = 0; i < kSnapshots; ++i) {
    Arrays arrays;
    EXPECT_EQ(refused(save(directory.path(), 100, random, &arrays), arrays), 0) << "snapshot " << i;
  }
}

TEST(Damage, ASaveTakesTheBuffersOfTheOneBeforeIt) {
  const TemporaryDirectory directory;
  std::mt19937_64 random(chosen_seed());
  std::unique_ptr<PinnedPool> buffers;
  const std::byte* memory = nullptr;
  for (int64_t step = 100; step < 104; ++step) {
    Arrays arrays;
    EXPECT_EQ(refused(save(directory.path(), step, random, &arrays, &buffers), arrays), 0) << step;
    ASSERT_NE(buffers, nullptr) << step;
    EXPECT_TRUE(memory == nullptr || buffers->memory().data() == memory) << step;
    memory = buffers->memory().data();
  }
}

}  // namespace
}  // namespace lm
