// What ranks read of a checkpoint that others have saved: their own shards, and hardly more.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

#include "base/bytes.h"
#include "checkpoint/restore.h"
#include "checkpoint/save.h"
#include "checkpoint/shard_writer.h"
#include "comm/shared_group.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

ModelSpec one_block() {
  ModelSpec spec =
      llama_spec({.hidden = 768, .ffn = 2048, .heads = 12, .kv_heads = 12, .head_dim = 64, .vocab = 8192});
  spec.tied = true;
  return spec;
}

// Of an array's bytes from `offset` on, a multiple of 4096.
void fill(const std::string& name, int64_t offset, std::span<std::byte> out) {
  const auto of_name = std::hash<std::string>()(name);
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = static_cast<std::byte>(of_name + (static_cast<size_t>(offset) + i) / 4096 * 7);
}

int64_t first_byte(const StateEntry& entry) {
  return entry.first * static_cast<int64_t>(dtype_size(entry.dtype));
}

std::string save(const std::string& directory, const ModelLayout& layout, NumericsPlan numerics, int ranks) {
  SharedRegion region = SharedRegion::create(ranks);
  numerics.ranks = ranks;
  std::string path;
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      SharedGroup group(region, r);
      const StateCatalogue catalogue = list_state(layout, numerics, false, true, {{ranks, 1}, r});
      Save save({.directory = directory, .step = ranks, .catalogue = catalogue, .group = &group});
      std::vector<std::byte> bytes;
      for (const StateEntry& entry : catalogue) {
        bytes.assign(static_cast<size_t>(entry.bytes()), std::byte{0});
        if (entry.unit >= 0) fill(entry.name, first_byte(entry), bytes);
        save.write(entry, 0, bytes);
      }
      Manifest manifest;
      manifest.step = ranks;
      const std::string made = save.commit(std::move(manifest));
      if (r == 0) path = made;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return path;
}

TEST(Reshard, ReadsNoMoreThanEachRankNeedsAndATwentieth) {
  const fs::path directory = fs::path(testing::TempDir()) / ("reshard_reads_" + std::to_string(getpid()));
  const ModelSpec spec = one_block();
  const ModelLayout layout = make_layout(spec, nullptr, DType::kBF16);
  NumericsPlan numerics;
  for (const int saving : {1, 4}) {
    const std::string path = save(directory.string(), layout, numerics, saving);
    for (const int loading : {1, 3, 5, 8}) {
      numerics.ranks = loading;
      for (int r = 0; r < loading; ++r) {
        CheckpointReader reader(path);
        const int64_t before = reader.read_bytes();  // headers
        int64_t needed = 0;
        std::vector<std::vector<std::byte>> memory;
        std::vector<StateReader::Part> parts;
        const StateCatalogue catalogue = list_state(layout, numerics, false, true, {{loading, 1}, r});
        memory.reserve(catalogue.size());
        for (const StateEntry& entry : catalogue) {
          if (entry.unit < 0) continue;
          memory.emplace_back(static_cast<size_t>(entry.bytes()));
          parts.push_back({entry.name, first_byte(entry), memory.back()});
          needed += entry.bytes();
        }
        reader.read(parts);
        EXPECT_GE(reader.read_bytes() - before, needed);
        EXPECT_LE(static_cast<double>(reader.read_bytes() - before), 1.05 * static_cast<double>(needed))
            << saving << " ranks saved, rank " << r << " of " << loading;
        std::vector<std::byte> want;
        for (const StateReader::Part& part : parts) {
          want.resize(part.bytes.size());
          fill(part.array, part.offset, want);
          EXPECT_TRUE(std::ranges::equal(want, part.bytes)) << part.array;
        }
      }
    }
    fs::remove_all(directory);
  }
}

TEST(Reshard, TheManifestDoesNotGrowWithTheRanks) {
  constexpr int64_t kArray = 512 << 20;
  for (const int ranks : {16, 64}) {
    const std::string path = testing::TempDir() + "chunks_" + std::to_string(getpid());
    const std::vector<std::byte> shard(static_cast<size_t>(kArray / ranks));
    ShardWriter writer({.path = path, .arrays = {{"a", DType::kU8, {std::ssize(shard)}}}, .ranks = ranks});
    writer.write(0, 0, shard);
    EXPECT_LE(writer.finish().chunks.size() * static_cast<size_t>(ranks), 1100U) << ranks;  // of one: 512
    fs::remove(path);
  }
}

}  // namespace
}  // namespace lm
