// Shards of whole tensors of the files: no border divides one, together they are the unit, and over all
// blocks the ranks have about as much each, the first one no less than any.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "spec/block_layout.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

ModelSpec llama_8b() {
  ModelSpec spec = llama_spec({.hidden = 4096,
                               .ffn = 14336,
                               .layers = 32,
                               .heads = 32,
                               .kv_heads = 8,
                               .head_dim = 128,
                               .vocab = 128256});
  spec.tied = false;
  return spec;
}

// Tensors of the files begin within a granule of others.
ModelSpec small(bool tied) {
  ModelSpec spec = llama_spec({.layers = 5});
  spec.tied = tied;
  return spec;
}

Sharding of_all(int ranks, int group) {
  return {ranks, group, WholeTensors::kAll};
}

bool divides_none(const BlockLayout& block, int64_t border) {
  bool out = true;
  for (const TensorPlace& place : block.tensors) {
    if (place.frozen) continue;
    place.each_part([&](int64_t first, int64_t rows, int64_t columns) {
      out = out && (border <= first || border >= first + rows * columns);
    });
  }
  return out;
}

TEST(WholeShards, CoverEachUnitAndDivideNoTensor) {
  for (const ModelSpec& spec : {llama_8b(), small(true), small(false)}) {
    const ModelLayout layout = make_layout(spec, nullptr, DType::kBF16);
    for (const Unit& unit : layout.units(false)) {
      const BlockLayout& block = layout.blocks[static_cast<size_t>(unit.block)];
      for (const int group : {1, 2, 3, 4, 7, 16}) {
        const Sharding sharding = of_all(group, group);
        std::vector<Shard> shards = shards_of_unit(unit, sharding);
        ASSERT_EQ(std::ssize(shards), group);
        EXPECT_EQ(longest_shard(unit, sharding), std::ranges::max(shards, {}, &Shard::elements).elements);
        std::ranges::sort(shards, {}, &Shard::first);
        int64_t end = unit.first;
        for (const Shard& shard : shards) {
          EXPECT_EQ(shard.first, end) << block.name << " of " << group;
          EXPECT_TRUE(divides_none(block, shard.first)) << block.name << " of " << group;
          EXPECT_EQ(shard.first % kGranule + shard.elements % kGranule, 0);
          end = shard.end();
        }
        EXPECT_EQ(end, unit.first + unit.elements);
      }
    }
  }
}

// Seven matrices of a block: [q k v o gate], [up down]; [q k v o], [gate], [up], [down].
TEST(WholeShards, TheLongestIsAsShortAsItCanBe) {
  const ModelLayout layout = make_layout(llama_8b(), nullptr, DType::kBF16);
  const Unit unit = layout.units(false)[1];
  const int64_t attention = 4096 * (4096 + 2 * 1024 + 4096), mlp = int64_t{4096} * 14336;
  const int64_t norms = 2 * kGranule;
  EXPECT_EQ(longest_shard(unit, of_all(2, 2)), 2 * mlp + norms);
  EXPECT_EQ(longest_shard(unit, of_all(3, 3)), attention + mlp);
  EXPECT_EQ(longest_shard(unit, of_all(4, 4)), mlp + norms);
  EXPECT_EQ(longest_shard(unit, of_all(8, 8)), mlp);  // of the norms another rank has all
  // Of a rule that takes whole tensors of linear layers alone the embedding is divided anywhere.
  const Sharding linear{4, 4, WholeTensors::kOfLinearLayers};
  EXPECT_EQ(longest_shard(unit, linear), mlp + norms);
  EXPECT_EQ(longest_shard(layout.units(false)[0], linear), int64_t{128256} * 4096 / 4);
  EXPECT_EQ(longest_shard(layout.units(false)[0], of_all(4, 4)), int64_t{128256} * 4096);
}

// Like blocks' longest shards go from rank to rank.
TEST(WholeShards, RanksHaveEquallyMuchOfAllBlocks) {
  const ModelLayout layout = make_layout(llama_8b(), nullptr, DType::kBF16);
  const std::vector<Unit> units = layout.units(false);
  int64_t body = 0;
  for (const Unit& unit : units) body += unit.role == UnitRole::kBody ? unit.elements : 0;
  for (const int ranks : {2, 3, 4, 5, 8, 16}) {
    std::vector<int64_t> of_rank(static_cast<size_t>(ranks)), of_bodies(static_cast<size_t>(ranks));
    for (const Unit& unit : units) {
      const std::vector<Shard> shards = shards_of_unit(unit, of_all(ranks, ranks));
      for (size_t r = 0; r < shards.size(); ++r) {
        of_rank[r] += shards[r].elements;
        if (unit.role == UnitRole::kBody) of_bodies[r] += shards[r].elements;
      }
    }
    EXPECT_EQ(of_rank.front(), std::ranges::max(of_rank)) << ranks;
    const double most = static_cast<double>(std::ranges::max(of_bodies));
    EXPECT_LE(most * ranks / static_cast<double>(body), ranks > 4 ? 1.25 : 1.04) << ranks;
  }
}

// A list of all parts has each rank's, of shards of whole tensors and of others.
TEST(WholeShards, PartsByRankAreThoseOfEachRank) {
  const ModelLayout layout = make_layout(llama_8b(), nullptr, DType::kBF16);
  for (const WholeTensors whole : {WholeTensors::kNone, WholeTensors::kOfLinearLayers, WholeTensors::kAll}) {
    for (const auto& [ranks, group] : {std::pair(1, 1), {12, 3}, {16, 16}, {5, 1}}) {
      const Sharding sharding{ranks, group, whole};
      for (const Unit& unit : layout.units(false)) {
        const std::vector<Shard> parts = parts_of_unit(unit, sharding);
        ASSERT_EQ(std::ssize(parts), ranks);
        for (int rank = 0; rank < ranks; ++rank) {
          const Shard part = part_of(unit, sharding, sharding.part(rank));
          EXPECT_EQ(parts[static_cast<size_t>(rank)].first, part.first) << ranks << " ranks, rank " << rank;
          EXPECT_EQ(parts[static_cast<size_t>(rank)].elements, part.elements) << ranks << ", rank " << rank;
        }
      }
    }
  }
}

TEST(WholeShards, PartsOfThousandsOfRanksAreAllOfTheModel) {
  const ModelLayout layout = make_layout(llama_8b(), nullptr, DType::kBF16);
  int64_t elements = 0;
  for (const Unit& unit : layout.units(false)) {
    for (const Shard& part : parts_of_unit(unit, of_all(4096, 4096))) elements += part.elements;
  }
  EXPECT_EQ(elements, layout.flat_elements);
}

// Each rank of several groups adds up and saves another part of its shard; a part may divide a tensor.
TEST(WholeShards, PartsOfCopiesCoverTheShard) {
  const ModelLayout layout = make_layout(small(true), nullptr, DType::kBF16);
  for (const auto& [ranks, group] : {std::pair(4, 2), {6, 3}, {6, 2}, {3, 1}}) {
    const Sharding sharding = of_all(ranks, group);
    for (const Unit& unit : layout.units(false)) {
      std::set<int64_t> granules;
      int64_t longest = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const Shard own = shard_of(unit, sharding, sharding.place(rank));
        const Shard part = part_of(unit, sharding, sharding.part(rank));
        longest = std::max(longest, part.elements);
        for (int64_t at = part.first; at < part.end(); at += kGranule) {
          EXPECT_TRUE(at >= own.first && at < own.end());
          EXPECT_TRUE(granules.insert(at).second) << "twice";
        }
      }
      EXPECT_EQ(std::ssize(granules) * kGranule, unit.elements);
      EXPECT_EQ(longest_part(unit, sharding), longest);
    }
  }
}

}  // namespace
}  // namespace lm
