// Batches of streamed rows: those of a token file, bit for bit, and of any position.
#include "data/stream_loader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "data/loader.h"
#include "memory_source.h"

namespace lm {
namespace {

// Rows in memory. A chunk has seven examples, as if each row gave one.
class MemoryRows : public RowStream {
 public:
  explicit MemoryRows(const MemorySource& source, std::vector<ExampleRange> text = {})
      : source_(source), text_(std::move(text)) {}

  void seek(const RowPosition& position) override {
    next_ = position.rows;
    ++seeks;
  }
  std::optional<RowChunk> next() override {
    if (next_ == source_.examples()) return std::nullopt;
    RowChunk out;
    ExampleBuffer buffer;
    for (const int64_t end = std::min(next_ + 7, source_.examples()); next_ < end; ++next_) {
      const ExampleView view = source_.example(next_, 0, source_.length(next_), buffer);
      out.lengths.push_back(std::ssize(view.tokens));
      out.tokens.insert(out.tokens.end(), view.tokens.begin(), view.tokens.end());
      out.trained.insert(out.trained.end(), view.trained.begin(), view.trained.end());
      out.text.push_back(std::ranges::any_of(
          text_, [&](const ExampleRange& range) { return next_ >= range.begin && next_ < range.end; }));
      if (!labels.empty()) out.labels.push_back(labels[static_cast<size_t>(next_)]);
      ++rows_read;
    }
    if (next_ > bad_row && bad_row >= 0)
      throw Error(Exit::kInput,
                  {.area = "DATA-24", .what = "bad", .place = "a.jsonl:9", .next = "correct it"});
    out.end = {.row = next_, .rows = next_, .done = next_};
    return out;
  }
  int64_t total_bytes() const override { return source_.examples(); }

  int64_t rows_read = 0, seeks = 0, bad_row = -1;
  std::vector<float> labels;

 private:
  const MemorySource& source_;
  std::vector<ExampleRange> text_;
  int64_t next_ = 0;
};

MemorySource many(int32_t examples) {
  MemorySource source;
  for (int32_t i = 0; i < examples; ++i) {
    std::vector<int32_t> tokens(static_cast<size_t>(3 + i * 7 % 41));
    std::iota(tokens.begin(), tokens.end(), 100 * i);
    std::vector<uint8_t> trained(tokens.size(), 1);
    trained[0] = trained[1] = 0;
    source.add(std::move(tokens), std::move(trained));
  }
  return source;
}

StreamOptions small(bool packing, bool shuffle, int64_t window) {
  return {.sequences = {.seed = 7,
                        .max_length = 32,
                        .packing = packing,
                        .global_batch = 4,
                        .micro_batch = 2,
                        .vocab = 1 << 30,
                        .shuffle = shuffle,
                        .name = "rows"},
          .window = window,
          .fingerprint = 5};
}

// All that a model reads of a step.
std::vector<int32_t> flat(const StepBatches& step) {
  std::vector<int32_t> out = {static_cast<int32_t>(step.tokens), static_cast<int32_t>(step.target_tokens)};
  for (const Batch& batch : step.micro) {
    for (const auto* list :
         {&batch.token, &batch.position, &batch.target, &batch.sample, &batch.document_start})
      out.insert(out.end(), list->begin(), list->end());
    for (const float label : batch.label) out.push_back(static_cast<int32_t>(label));
  }
  return out;
}

std::vector<std::vector<int32_t>> steps_of(BatchSource& batches, int64_t count) {
  std::vector<std::vector<int32_t>> out;
  for (int64_t s = 0; s < count; ++s) out.push_back(flat(batches.next()));
  return out;
}

TEST(StreamLoader, GivesATokenFilesBatches) {
  const MemorySource source = many(5000);
  const std::vector<ExampleRange> text = {{100, 300}, {302, 303}};
  for (const bool packing : {false, true}) {
    // In the order of the files any window will do; a window of all documents has the order of an epoch.
    for (const auto& [shuffle, window] :
         std::vector<std::pair<bool, int64_t>>{{false, 1}, {false, 300}, {true, 10000}}) {
      StreamOptions options = small(packing, shuffle, window);
      options.sequences.virtual_tokens = packing && !shuffle ? 3 : 0;
      LoaderOptions whole = options.sequences;
      whole.text = text;
      Loader expected(source, nullptr, whole);
      MemoryRows rows(source, text);
      StreamLoader stream(rows, options);
      while (expected.position().epoch < 2 || expected.position().step < 3) {
        ASSERT_EQ(flat(stream.next()), flat(expected.next()))
            << packing << shuffle << window << " step " << expected.position().step;
        ASSERT_EQ(stream.position().epoch, expected.position().epoch);
        ASSERT_EQ(stream.position().step, expected.position().step);
      }
    }
  }
}

TEST(StreamLoader, EveryDocumentIsTrainedOnceInAnEpochInAnOrderOfItsOwn) {
  const MemorySource source = many(500);
  MemoryRows rows(source);
  StreamLoader stream(rows, small(false, true, 64));
  std::vector<std::vector<int32_t>> orders(2);
  while (stream.position().epoch < 2) {
    const auto epoch = static_cast<size_t>(stream.position().epoch);
    for (const Batch& batch : stream.next().micro)
      for (int64_t d = 0; d < batch.documents(); ++d)
        orders[epoch].push_back(
            batch.sample[static_cast<size_t>(batch.document_start[static_cast<size_t>(d)])]);
  }
  EXPECT_NE(orders[0], orders[1]);
  for (std::vector<int32_t>& order : orders) {
    // Within windows: none is further than a window from its place in the file.
    for (int64_t i = 0; i < std::ssize(order); ++i)
      EXPECT_LT(std::abs(order[static_cast<size_t>(i)] - i), 64);
    EXPECT_FALSE(std::ranges::is_sorted(order));
    std::ranges::sort(order);
    std::vector<int32_t> all(500);
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(order, all);
  }
}

TEST(StreamLoader, ResumesAtEveryStepWithoutTheRowsBeforeIt) {
  const MemorySource source = many(9000);
  for (const bool packing : {false, true}) {
    const StreamOptions options = small(packing, true, 100);
    MemoryRows rows(source);
    StreamLoader stream(rows, options);
    std::vector<LoaderPosition> positions;
    std::vector<std::vector<int32_t>> expected;
    std::vector<double> epochs;
    for (int s = 0; s < 2600; ++s) {
      positions.push_back(stream.position());
      expected.push_back(flat(stream.next()));
      epochs.push_back(stream.epochs());
    }
    ASSERT_GE(stream.position().epoch, 1);
    EXPECT_TRUE(std::ranges::is_sorted(epochs));
    for (size_t s = 0; s + 20 < positions.size(); s += 37) {
      MemoryRows again(source);
      StreamLoader resumed(again, options);
      resumed.restore(positions[s]);
      for (size_t i = s; i < s + 20; ++i) {
        ASSERT_EQ(flat(resumed.next()), expected[i]) << packing << " step " << i << " from " << s;
        EXPECT_EQ(resumed.epochs(), epochs[i]);
        EXPECT_EQ(resumed.position().stream,
                  i + 1 < positions.size() ? positions[i + 1].stream : std::nullopt);
      }
      // Those of a few windows, and of the sequences that packing had not finished.
      EXPECT_LT(again.rows_read, packing ? 4000 : 1800) << s;
    }
  }
}

TEST(StreamLoader, RestoringItsOwnPositionReadsNothing) {
  const MemorySource source = many(100);
  MemoryRows rows(source);
  StreamLoader stream(rows, small(true, true, 10));
  steps_of(stream, 3);
  const int64_t seeks = rows.seeks;
  stream.restore(LoaderPosition(stream.position()));
  steps_of(stream, 1);
  EXPECT_EQ(rows.seeks, seeks);
}

// The bounds do not depend on how many rows there are.
TEST(StreamLoader, HoldsNoMoreThanItsWindowAndUnfinishedSequences) {
  for (const int32_t examples : {3000, 12000}) {
    const MemorySource source = many(examples);
    for (const bool packing : {false, true}) {
      MemoryRows rows(source);
      StreamLoader stream(rows, small(packing, true, 200));
      int64_t window = 0, sequences = 0;
      while (stream.position().epoch < 1) {
        stream.next();
        window = std::max(window, stream.held_in_window());
        sequences = std::max(sequences, stream.held_in_sequences());
      }
      EXPECT_EQ(window, 200);
      // A document has at least three of a sequence's 32 tokens.
      EXPECT_LE(sequences, packing ? (kOpenSequences + 5) * 10 : 5);
    }
  }
}

TEST(StreamLoader, RanksShareAStepAsTheyShareATokenFiles) {
  const MemorySource source = many(300);
  for (int rank = 0; rank < 3; ++rank) {
    StreamOptions options = small(true, false, 50);
    options.sequences.rank = rank;
    options.sequences.world = 3;
    Loader expected(source, nullptr, options.sequences);
    MemoryRows rows(source);
    StreamLoader stream(rows, options);
    EXPECT_EQ(steps_of(stream, 40), steps_of(expected, 40)) << rank;
  }
}

// A checkpoint of three ranks is resumed by one: the position does not depend on them.
TEST(StreamLoader, ThePositionIsThatOfAnyNumberOfRanks) {
  const MemorySource source = many(3000);
  StreamOptions options = small(true, true, 70), of_three = options;
  of_three.sequences.rank = 2;
  of_three.sequences.world = 3;
  MemoryRows rows(source), others(source), again(source);
  StreamLoader alone(rows, options), third(others, of_three), resumed(again, options);
  steps_of(alone, 300);
  steps_of(third, 300);
  EXPECT_EQ(alone.position().stream, third.position().stream);
  resumed.restore(third.position());
  EXPECT_EQ(steps_of(resumed, 30), steps_of(alone, 30));
}

TEST(StreamLoader, ScoredTextsHaveTheirLabels) {
  MemorySource source;
  std::vector<float> labels;
  for (int32_t i = 0; i < 40; ++i) {
    source.add(std::vector<int32_t>(static_cast<size_t>(1 + i % 5), 10 + i));
    labels.push_back(static_cast<float>(i % 3));
  }
  StreamOptions options = small(false, true, 64);
  options.sequences.scored = ScoredData{.labels = 1, .pad_token = 9};
  LoaderOptions whole = options.sequences;
  whole.labels = labels;
  Loader expected(source, nullptr, whole);
  MemoryRows rows(source);
  rows.labels = labels;
  StreamLoader stream(rows, options);
  EXPECT_EQ(steps_of(stream, 15), steps_of(expected, 15));
}

TEST(StreamLoader, ABadRowEndsTheStepThatNeedsIt) {
  const MemorySource source = many(200);
  MemoryRows rows(source);
  rows.bad_row = 120;
  StreamLoader stream(rows, small(false, false, 16));
  try {
    for (;;) stream.next();
  } catch (const Error& error) {
    EXPECT_EQ(error.text().place, "a.jsonl:9");
  }
  EXPECT_GT(stream.position().step, 20);
  // What is in memory is not used again: the same step is made from the rows.
  const LoaderPosition at = stream.position();
  rows.bad_row = -1;
  stream.restore(at);
  MemoryRows others(source);
  StreamLoader fresh(others, small(false, false, 16));
  steps_of(fresh, at.step);
  EXPECT_EQ(steps_of(stream, 20), steps_of(fresh, 20));
}

Exit refused(const StreamOptions& options, const MemorySource& source, const LoaderPosition& position) {
  MemoryRows rows(source);
  StreamLoader stream(rows, options);
  stream.restore(position);
  try {
    stream.next();
  } catch (const Error& error) {
    return error.code();
  }
  return Exit::kDone;
}

TEST(StreamLoader, RefusesWhatIsNoPositionOfItsData) {
  const MemorySource source = many(50);
  const StreamOptions options = small(true, true, 10);
  const LoaderPosition good{.fingerprint = 5};
  EXPECT_EQ(refused(options, source, good), Exit::kDone);
  EXPECT_EQ(refused(options, source, {.fingerprint = 6}), Exit::kInput);
  EXPECT_EQ(refused(options, source, {.epoch = -1, .fingerprint = 5}), Exit::kIncompatible);
  EXPECT_EQ(refused(options, source, {.step = 1000, .fingerprint = 5}), Exit::kIncompatible);
  const auto at = [&](const StreamAnchor& anchor) {
    return refused(options, source, {.step = 1, .fingerprint = 5, .stream = anchor});
  };
  const auto open = [](int64_t sequences, std::vector<int64_t> room) {
    StreamAnchor anchor;
    anchor.sequences = sequences;
    anchor.room = std::move(room);
    return anchor;
  };
  EXPECT_EQ(at(open(5, {1, 1, 1, 1, 1})), Exit::kIncompatible);  // a step has four
  EXPECT_EQ(at(open(2, {1})), Exit::kIncompatible);
  EXPECT_EQ(at(open(1, {32})), Exit::kIncompatible);
  StreamAnchor before = open(0, {}), beyond = before;
  before.rows.row = -1;
  beyond.skip = 100;  // a chunk has seven examples
  EXPECT_EQ(at(before), Exit::kIncompatible);
  EXPECT_EQ(at(beyond), Exit::kIncompatible);
  EXPECT_EQ(at(open(1, {5})), Exit::kDone);
}

TEST(StreamLoader, RefusesDataWithoutTargetsAndForeignIds) {
  MemorySource masked;
  masked.add({1, 2, 3}, {0, 0, 0});
  const LoaderPosition begin{.fingerprint = 5};
  EXPECT_EQ(refused(small(false, true, 10), masked, begin), Exit::kInput);
  EXPECT_EQ(refused(small(false, true, 10), MemorySource(), begin), Exit::kInput);
  MemorySource foreign;
  foreign.add({1, 2, 100});
  StreamOptions options = small(false, true, 10);
  options.sequences.vocab = 100;
  EXPECT_EQ(refused(options, foreign, begin), Exit::kInput);
}

}  // namespace
}  // namespace lm
