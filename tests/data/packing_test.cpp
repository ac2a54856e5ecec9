#include "data/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "base/error.h"
#include "data/shuffle.h"
#include "memory_source.h"

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
  EXPECT_EQ(counts.source_tokens - counts.used_tokens, 15);
}

TEST(Packing, DropsLongExamplesWhole) {
  PieceCounts counts;
  EXPECT_TRUE(cut_pieces(one(11, 0), 10, TooLong::kDrop, every, counts).empty());
  EXPECT_EQ(counts.too_long, 1);
  EXPECT_EQ(cut_pieces(one(10, 0), 10, TooLong::kDrop, every, counts).size(), 1u);
}

TEST(Packing, SplitsPlainTextAndCutsOtherRowsUnlessToldOtherwise) {
  MemorySource source;
  for (const int length : {25, 25, 10, 25}) source.add(std::vector<int32_t>(static_cast<size_t>(length), 1));
  const ExampleRange text[] = {{1, 3}};
  PieceCounts counts;
  const auto pieces = cut_pieces(source, 10, TooLong::kAuto, every, counts, text);
  std::vector<int> of(4, 0);
  for (const Piece& piece : pieces) ++of[static_cast<size_t>(piece.example)];
  EXPECT_EQ(of, (std::vector<int>{1, 3, 1, 1}));
  EXPECT_EQ(
      describe_counts(counts, 10),
      "4 rows, 85 tokens, at data.max_length 10: 1 row whole, 2 cut, 1 split into 3, 0 dropped; 55 tokens "
      "used, 30 not");
  PieceCounts cut;
  cut_pieces(source, 10, TooLong::kCut, every, cut, text);
  EXPECT_EQ(cut.cut, 3);
}

// Whatever becomes of them: every row is counted once, and every token.
TEST(Packing, CountsEveryRowAndTokenOnce) {
  MemorySource source;
  int64_t tokens = 0;
  for (int length = 1; length < 40; ++length) {
    std::vector<uint8_t> trained(static_cast<size_t>(length), 0);
    for (int i = length / 2; i < std::min(length, length / 2 + 9); ++i) trained[static_cast<size_t>(i)] = 1;
    source.add(std::vector<int32_t>(static_cast<size_t>(length), 1), trained);
    tokens += length;
  }
  for (const TooLong choice : {TooLong::kCut, TooLong::kSplit, TooLong::kDrop}) {
    PieceCounts counts;
    const auto pieces = cut_pieces(source, 10, choice, every, counts);
    EXPECT_EQ(counts.whole + counts.cut + counts.split + counts.dropped, 39);
    EXPECT_EQ(counts.source_tokens, tokens);
    std::set<std::pair<int32_t, int64_t>> used;
    for (const Piece& piece : pieces)
      for (int64_t i = 0; i < piece.length; ++i) used.emplace(piece.example, piece.begin + i);
    EXPECT_EQ(counts.used_tokens, std::ssize(used));
    EXPECT_LT(counts.used_tokens, tokens);
  }
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
