#include "data/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "data/shuffle.h"

namespace lm {
namespace {

bool every(int64_t) {
  return true;
}

// One example of `length` tokens 0, 1, 2, ..., of which those from `prompt` on are trained.
MemorySource one(int32_t length, int32_t prompt) {
  MemorySource source;
  std::vector<int32_t> tokens(static_cast<size_t>(length));
  std::iota(tokens.begin(), tokens.end(), 0);
  std::vector<uint8_t> trained(tokens.size(), 1);
  std::fill_n(trained.begin(), prompt, uint8_t{0});
  source.add(std::move(tokens), std::move(trained));
  return source;
}

TEST(Packing, CutsLongExamplesAtTheEnd) {
  PieceCounts counts;
  const auto pieces = cut_pieces(one(25, 4), 10, TooLong::kCut, every, counts);
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_EQ(pieces[0].begin, 0);
  EXPECT_EQ(pieces[0].length, 10);
  EXPECT_EQ(pieces[0].targets, 6);
  EXPECT_EQ(counts.too_long, 1);
  EXPECT_EQ(counts.lost_tokens, 15);
}

TEST(Packing, DropsLongExamplesWhole) {
  PieceCounts counts;
  EXPECT_TRUE(cut_pieces(one(11, 0), 10, TooLong::kDrop, every, counts).empty());
  EXPECT_EQ(counts.too_long, 1);
  EXPECT_EQ(cut_pieces(one(10, 0), 10, TooLong::kDrop, every, counts).size(), 1u);
}

TEST(Packing, SplitsSoThatEachTargetIsLearntExactlyOnce) {
  for (const int32_t length : {2, 9, 10, 11, 19, 20, 28, 29, 100}) {
    for (const int32_t prompt : {0, 1, 12}) {
      PieceCounts counts;
      const auto pieces =
          cut_pieces(one(length, std::min(prompt, length)), 10, TooLong::kSplit, every, counts);
      std::vector<int> learnt(static_cast<size_t>(length), 0);
      for (const Piece& piece : pieces) {
        EXPECT_LE(piece.length, 10);
        for (int64_t i = piece.begin + 1; i < piece.begin + piece.length; ++i)
          learnt[static_cast<size_t>(i)] += i >= prompt;
      }
      for (int32_t i = 1; i < length; ++i)
        EXPECT_EQ(learnt[static_cast<size_t>(i)], i >= prompt) << length << " " << i;
    }
  }
}

TEST(Packing, DropsExamplesWithoutATarget) {
  PieceCounts counts;
  EXPECT_TRUE(cut_pieces(one(8, 8), 10, TooLong::kCut, every, counts).empty());
  EXPECT_TRUE(cut_pieces(one(30, 20), 10, TooLong::kCut, every, counts).empty());  // all targets are cut off
  EXPECT_TRUE(cut_pieces(one(1, 0), 10, TooLong::kCut, every, counts).empty());
  EXPECT_EQ(counts.without_target, 3);
}

std::vector<Piece> pieces_of(int64_t count, int32_t longest) {
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < count; ++i) {
    const auto length = static_cast<int32_t>(2 + i * 7919 % (longest - 1));
    pieces.push_back({.example = static_cast<int32_t>(i), .length = length, .begin = 0, .targets = 1});
  }
  return pieces;
}

TEST(Packing, ConservesEveryPieceAndFitsTheSequences) {
  const std::vector<Piece> pieces = pieces_of(5000, 512);
  const Permutation order(5000, 3, 1, ShufflePurpose::kEpoch);
  const SequenceList list = pack_sequences(pieces, order, true, 512);
  std::vector<int32_t> seen = list.order;
  std::ranges::sort(seen);
  for (int32_t i = 0; i < 5000; ++i) ASSERT_EQ(seen[static_cast<size_t>(i)], i);
  int64_t tokens = 0;
  for (int64_t s = 0; s < list.sequences(); ++s) {
    int64_t length = 0;
    for (const int32_t piece : list.sequence(s)) length += pieces[static_cast<size_t>(piece)].length;
    EXPECT_LE(length, 512);
    EXPECT_GT(length, 0);
    tokens += length;
  }
  // Lengths uniform up to the sequence's: first fit must waste little.
  EXPECT_GT(static_cast<double>(tokens), 0.95 * 512.0 * static_cast<double>(list.sequences()));
}

TEST(Packing, KeepsPiecesApartWhenItIsOff) {
  const std::vector<Piece> pieces = pieces_of(100, 16);
  const Permutation order(100, 3, 1, ShufflePurpose::kEpoch);
  const SequenceList list = pack_sequences(pieces, order, false, 512);
  ASSERT_EQ(list.sequences(), 100);
  for (int64_t s = 0; s < 100; ++s) {
    ASSERT_EQ(list.sequence(s).size(), 1u);
    EXPECT_EQ(list.sequence(s)[0], order(s));
  }
}

}  // namespace
}  // namespace lm
