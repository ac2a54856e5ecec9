#include "data/loader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "base/error.h"
#include "memory_source.h"

namespace lm {
namespace {

// Example i: `length` tokens i * 100, i * 100 + 1, ...; the first `untrained` of them are prompt.
void add_example(MemorySource& source, int64_t length, int64_t untrained = 1) {
  const auto i = static_cast<int32_t>(source.examples());
  std::vector<int32_t> tokens(static_cast<size_t>(length));
  std::iota(tokens.begin(), tokens.end(), i * 100);
  std::vector<uint8_t> trained(tokens.size(), 1);
  std::fill_n(trained.begin(), std::min<int64_t>(untrained, length), uint8_t{0});
  source.add(std::move(tokens), std::move(trained));
}

MemorySource many(int64_t examples) {
  MemorySource source;
  for (int64_t i = 0; i < examples; ++i) add_example(source, 5 + i * 7 % 29, 1 + i % 3);
  return source;
}

LoaderOptions small() {
  return {.seed = 7,
          .max_length = 32,
          .too_long = TooLong::kCut,
          .packing = false,
          .global_batch = 4,
          .micro_batch = 2,
          .vocab = 100000,
          .eval_fraction = 0.0,
          .rank = 0,
          .world = 1};
}

// Everything a model would see of a step, flat.
std::vector<int32_t> flat(const StepBatches& step) {
  std::vector<int32_t> out;
  for (const Batch& batch : step.micro) {
    for (const auto* list : {&batch.token, &batch.position, &batch.target, &batch.sample}) {
      out.insert(out.end(), list->begin(), list->end());
    }
    out.insert(out.end(), batch.document_start.begin(), batch.document_start.end());
  }
  return out;
}

// One entry per document of a step: its tokens, in order.
std::vector<std::vector<int32_t>> documents(const StepBatches& step) {
  std::vector<std::vector<int32_t>> out;
  for (const Batch& batch : step.micro) {
    for (size_t d = 0; d + 1 < batch.document_start.size(); ++d) {
      out.emplace_back(batch.token.begin() + batch.document_start[d],
                       batch.token.begin() + batch.document_start[d + 1]);
    }
  }
  return out;
}

TEST(Loader, CountsWhatAnEpochHas) {
  MemorySource source;
  for (const int64_t length : {5, 12, 40}) add_example(source, length, 2);
  LoaderOptions options = small();
  const auto counted = [&] { return Loader(source, nullptr, options).counts_of(0); };
  const EpochCounts plain = counted();
  EXPECT_EQ(plain.sequences, 3);
  EXPECT_EQ(plain.tokens, 5 + 12 + 32);  // the longest is cut
  EXPECT_EQ(plain.targets, 3 + 10 + 30);
  EXPECT_EQ(plain.squares, 25 + 144 + 1024);
  options.packing = true;
  const EpochCounts packed = counted();
  EXPECT_EQ(packed.sequences, 2);
  EXPECT_EQ(packed.tokens, plain.tokens);
  EXPECT_EQ(packed.squares, plain.squares);  // documents do not see each other
  options.weights = {{{0, 1}, 3}, {{1, 3}, 1}};
  EXPECT_EQ(counted().tokens, 3 * 5 + 12 + 32);
}

TEST(Loader, ShiftsTargetsInsideEachDocument) {
  MemorySource source;
  source.add({5, 6, 7, 8}, {0, 0, 1, 1});
  source.add({11, 12}, {1, 1});
  LoaderOptions options = small();
  options.micro_batch = 4;
  Loader loader(source, nullptr, options);
  const StepBatches step = loader.next();
  ASSERT_EQ(step.micro.size(), 1u);
  const Batch& batch = step.micro[0];
  EXPECT_EQ(step.target_tokens, 3);
  ASSERT_EQ(batch.documents(), 2);
  EXPECT_EQ(batch.document_start.back(), 6);
  const bool first_is_long = batch.document_start[1] == 4;
  using List = std::vector<int32_t>;
  EXPECT_EQ(batch.token, first_is_long ? (List{5, 6, 7, 8, 11, 12}) : (List{11, 12, 5, 6, 7, 8}));
  EXPECT_EQ(batch.target, first_is_long ? (List{-1, 7, 8, -1, 12, -1}) : (List{12, -1, -1, 7, 8, -1}));
  EXPECT_EQ(batch.position, first_is_long ? (List{0, 1, 2, 3, 0, 1}) : (List{0, 1, 0, 1, 2, 3}));
  EXPECT_EQ(batch.sample, first_is_long ? (List{0, 0, 0, 0, 1, 1}) : (List{1, 1, 0, 0, 0, 0}));
}

TEST(Loader, GivesEachExampleExactlyOncePerEpoch) {
  const MemorySource source = many(37);
  for (const bool packing : {false, true}) {
    LoaderOptions options = small();
    options.packing = packing;
    Loader loader(source, nullptr, options);
    std::vector<std::vector<int32_t>> orders;
    for (int64_t epoch = 0; epoch < 3; ++epoch) {
      std::vector<int32_t> seen;
      for (int64_t s = 0; s < loader.steps_in_epoch(epoch); ++s) {
        EXPECT_EQ(loader.position().epoch, epoch);
        for (const Batch& batch : loader.next().micro) {
          for (size_t d = 0; d + 1 < batch.document_start.size(); ++d) {
            seen.push_back(batch.sample[static_cast<size_t>(batch.document_start[d])]);
          }
        }
      }
      orders.push_back(seen);
      std::ranges::sort(seen);
      std::vector<int32_t> all(37);
      std::iota(all.begin(), all.end(), 0);
      EXPECT_EQ(seen, all);
    }
    EXPECT_NE(orders[0], orders[1]);
    EXPECT_NE(orders[1], orders[2]);
  }
}

TEST(Loader, CountsTargetsBeforeTheStep) {
  const MemorySource source = many(23);
  Loader loader(source, nullptr, small());
  int64_t targets = 0;
  for (int64_t s = 0; s < loader.steps_per_epoch(); ++s) {
    const StepBatches step = loader.next();
    int64_t counted = 0;
    for (const Batch& batch : step.micro)
      counted += std::ranges::count_if(batch.target, [](int32_t t) { return t >= 0; });
    EXPECT_EQ(step.target_tokens, counted);
    targets += counted;
  }
  EXPECT_EQ(targets, loader.counts_of(0).targets);
}

TEST(Loader, RepeatsForTheSameSeedAndDiffersForAnother) {
  const MemorySource source = many(40);
  LoaderOptions other = small();
  other.seed = 8;
  Loader a(source, nullptr, small()), b(source, nullptr, small()), c(source, nullptr, other);
  bool differs = false;
  for (int i = 0; i < 25; ++i) {
    const auto step = flat(a.next());
    EXPECT_EQ(step, flat(b.next()));
    differs = differs || step != flat(c.next());
  }
  EXPECT_TRUE(differs);
}

TEST(Loader, ContinuesExactlyFromARestoredPosition) {
  const MemorySource source = many(21);
  for (const bool packing : {false, true}) {
    LoaderOptions options = small();
    options.packing = packing;
    Loader reference(source, nullptr, options);
    std::vector<std::vector<int32_t>> steps;
    std::vector<LoaderPosition> saved;
    for (int i = 0; i < 15; ++i) {
      saved.push_back(reference.position());
      steps.push_back(flat(reference.next()));
    }
    for (size_t i = 0; i < steps.size(); ++i) {
      Loader resumed(source, nullptr, options);
      if (i % 2 == 1) resumed.next();  // whatever it did before must not matter
      resumed.restore(saved[i]);
      for (size_t j = i; j < steps.size(); ++j) EXPECT_EQ(flat(resumed.next()), steps[j]) << i << " " << j;
    }
  }
}

TEST(Loader, RefusesAPositionOfOtherData) {
  const MemorySource source = many(21), other = many(22);
  Loader before(source, nullptr, small());
  Loader after(other, nullptr, small());
  after.restore(before.position());
  try {
    after.next();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kInput);
  }
}

TEST(Loader, GivesTheSameSequencesForEveryMicroBatchAndWorldSize) {
  const MemorySource source = many(45);
  for (const bool packing : {false, true}) {
    LoaderOptions options = small();
    options.packing = packing;
    options.global_batch = 8;
    options.micro_batch = 8;
    Loader whole(source, nullptr, options);
    options.micro_batch = 1;
    Loader single(source, nullptr, options);
    options.micro_batch = 3;
    options.world = 2;
    Loader first(source, nullptr, options);
    options.rank = 1;
    Loader second(source, nullptr, options);
    for (int i = 0; i < 12; ++i) {
      const StepBatches step = whole.next(), ones = single.next(), left = first.next(), right = second.next();
      EXPECT_LE(step.micro.size(), 1u);
      EXPECT_LE(ones.micro.size(), 8u);
      EXPECT_EQ(documents(step), documents(ones));
      // Both make the same calls; what one of them lacks is there without a target.
      EXPECT_EQ(left.micro.size(), right.micro.size());
      StepBatches joined = left;
      joined.micro.insert(joined.micro.end(), right.micro.begin(), right.micro.end());
      std::erase_if(joined.micro, [](const Batch& batch) {
        return std::ranges::all_of(batch.target, [](int32_t target) { return target < 0; });
      });
      EXPECT_EQ(documents(step), documents(joined));
      for (const StepBatches* other : {&ones, &left, &right})
        EXPECT_EQ(other->target_tokens, step.target_tokens);
    }
  }
}

TEST(Loader, EndsAnEpochWithAShortStep) {
  const MemorySource source = many(10);
  Loader loader(source, nullptr, small());
  EXPECT_EQ(loader.steps_per_epoch(), 3);
  EXPECT_EQ(loader.total_steps(1.0), 3);
  EXPECT_EQ(loader.total_steps(2.5), 8);
  EXPECT_EQ(loader.total_steps(0.1), 1);
  EXPECT_EQ(loader.next().micro.size(), 2u);
  EXPECT_EQ(loader.next().micro.size(), 2u);
  const StepBatches last = loader.next();
  ASSERT_EQ(last.micro.size(), 1u);
  EXPECT_EQ(last.micro[0].documents(), 2);
  EXPECT_EQ(loader.position().epoch, 1);
}

TEST(Loader, CountsStepsOfPackedEpochsAsTheyWillCome) {
  const MemorySource source = many(200);
  LoaderOptions options = small();
  options.packing = true;
  Loader counting(source, nullptr, options), walking(source, nullptr, options);
  const int64_t expected = counting.total_steps(4.0);
  int64_t steps = 0;
  while (walking.position().epoch < 4) {
    walking.next();
    ++steps;
  }
  EXPECT_EQ(steps, expected);
}

TEST(Loader, HoldsOutExamplesThatAreNeverTrainedOn) {
  const MemorySource source = many(50);
  LoaderOptions options = small();
  options.eval_fraction = 0.2;
  Loader loader(source, nullptr, options), again(source, nullptr, options);
  const std::vector<EvalBatches> first = loader.eval_sets(), second = again.eval_sets();
  std::set<int32_t> held, trained;
  for (const Batch& batch : first.at(0).batches) held.insert(batch.sample.begin(), batch.sample.end());
  for (int64_t s = 0; s < loader.steps_per_epoch(); ++s) {
    for (const Batch& batch : loader.next().micro) trained.insert(batch.sample.begin(), batch.sample.end());
  }
  EXPECT_EQ(held.size(), 10u);
  EXPECT_EQ(trained.size(), 40u);
  for (const int32_t sample : held) EXPECT_FALSE(trained.contains(sample));
  std::set<int32_t> repeated;
  for (const Batch& batch : second.at(0).batches) repeated.insert(batch.sample.begin(), batch.sample.end());
  EXPECT_EQ(held, repeated);
}

TEST(Loader, HoldsOutNothingOfASingleExample) {
  const MemorySource source = many(1);
  LoaderOptions options = small();
  options.eval_fraction = 0.5;
  Loader loader(source, nullptr, options);
  EXPECT_FALSE(loader.has_eval());
  EXPECT_EQ(loader.counts_of(0).sequences, 1);
}

TEST(Loader, RefusesAPositionOutsideTheEpoch) {
  const MemorySource source = many(21);
  Loader loader(source, nullptr, small());
  LoaderPosition position = loader.position();
  for (const int64_t step : {int64_t{6}, int64_t{-1}, int64_t{1} << 60}) {
    position.step = step;
    loader.restore(position);
    try {
      loader.next();
      FAIL() << step;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kIncompatible);
    }
  }
}

// Sets of names stand in the order in which they were given.
TEST(Loader, EvaluatesEachSetByItself) {
  const MemorySource train = many(8), code = many(3), chat = many(5);
  Loader loader(train, {{.source = &code, .set = "code"}, {.source = &chat, .set = "chat"}}, small());
  const Loader alone(train, &chat, small());
  const std::vector<EvalBatches> sets = loader.eval_sets();
  ASSERT_EQ(sets.size(), 2u);
  EXPECT_EQ(sets[0].set + " " + sets[1].set, "code chat");
  EXPECT_EQ(sets[0].batches.size(), 2u);
  ASSERT_EQ(sets[1].batches.size(), 3u);
  for (size_t i = 0; i < 3; ++i)
    EXPECT_EQ(sets[1].batches[i].token, alone.eval_sets().at(0).batches[i].token);
  EXPECT_NE(loader.length_report().find("\ndata: eval code: 3 rows"), std::string::npos);
  EXPECT_NE(loader.length_report().find("\ndata: eval chat: 5 rows"), std::string::npos);
  EXPECT_NE(alone.length_report().find("\ndata: eval: 5 rows"), std::string::npos);
  EXPECT_EQ(loader.steps_per_epoch(), Loader(train, nullptr, small()).steps_per_epoch());
}

TEST(Loader, EvaluatesASecondSourceInFileOrder) {
  const MemorySource train = many(8), eval = many(5);
  Loader loader(train, &eval, small());
  const std::vector<Batch> batches = loader.eval_sets().at(0).batches;
  ASSERT_EQ(batches.size(), 3u);
  std::vector<int32_t> order;
  for (const Batch& batch : batches) {
    for (size_t d = 0; d + 1 < batch.document_start.size(); ++d) {
      order.push_back(batch.sample[static_cast<size_t>(batch.document_start[d])]);
    }
  }
  EXPECT_EQ(order, (std::vector<int32_t>{0, 1, 2, 3, 4}));
}

TEST(Loader, RefusesIdsOutsideTheVocabulary) {
  for (const int32_t bad : {1000, -1}) {
    MemorySource source;
    source.add({1, 2, 3});
    source.add({4, bad, 5});
    LoaderOptions options = small();
    options.vocab = 1000;
    Loader loader(source, nullptr, options);
    try {
      loader.next();
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kInput);
      EXPECT_EQ(error.text().area, "DATA-24");
      EXPECT_NE(error.text().what.find("token 4 = " + std::to_string(bad)), std::string::npos)
          << error.text().what;
    }
  }
}

TEST(Loader, StopsWhenThereIsNothingToLearn) {
  MemorySource empty, untrained;
  untrained.add({1, 2, 3}, {1, 0, 0});  // a first token has no predecessor
  for (const MemorySource* source : {&empty, &untrained}) {
    try {
      Loader loader(*source, nullptr, small());
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kInput);
    }
  }
}

// What is refused names what the user wrote, not a file of the cache.
TEST(Loader, NamesTheUsersFiles) {
  MemorySource untrained, good, bad;
  untrained.add({1, 2, 3}, {1, 0, 0});
  good.add({1, 2, 3});
  bad.add({1, 5000, 3});
  LoaderOptions options = small();
  options.name = "rows.jsonl";
  const auto place = [&](const MemorySource& train, const MemorySource* eval) {
    try {
      std::vector<EvalSource> evals;
      if (eval != nullptr) evals.push_back({.source = eval, .name = "held.jsonl"});
      Loader loader(train, evals, options);
      loader.eval_sets();
      loader.next();
    } catch (const Error& error) {
      return error.text().place;
    }
    return std::string("nothing is refused");
  };
  options.vocab = 1000;
  EXPECT_EQ(place(untrained, nullptr), "rows.jsonl");
  EXPECT_EQ(place(good, &untrained), "held.jsonl");
  EXPECT_EQ(place(bad, nullptr), "rows.jsonl");
  EXPECT_EQ(place(good, &bad), "held.jsonl");
  options.weights = {{{0, 1}, 0.0}};
  EXPECT_EQ(place(good, nullptr), "rows.jsonl");
  Loader loader(good, nullptr, small());
  LoaderOptions other = small();
  other.name = "rows.jsonl";
  Loader changed(bad, nullptr, other);
  changed.restore(loader.position());
  try {
    changed.next();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.text().place, "rows.jsonl");
  }
}

TEST(Loader, CountsAnswersThatLoseTheirEnd) {
  MemorySource source;
  for (int i = 0; i < 40; ++i) source.add({1, 2, 3, 4, 5, 6}, {0, 0, 0, 1, 1, 1});
  source.add({1, 2, 3}, {0, 1, 1});
  source.add({1, 2, 3, 4, 5, 6}, {0, 1, 1, 0, 0, 0});  // nothing that is trained is lost
  LoaderOptions options = small();
  options.name = "rows.jsonl";
  options.max_length = 5;
  const auto said = [&] {
    testing::internal::CaptureStderr();
    const Loader loader(source, nullptr, options);
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_NE(said().find(
                "40 of 42 examples in rows.jsonl are cut at data.max_length 5 before their last answer ends, "
                "and lose 40 trained tokens"),
            std::string::npos)
      << said();
  options.eval_fraction = 0.5;  // of the same file: once
  const std::string once = said();
  EXPECT_EQ(once.find("are cut at"), once.rfind("are cut at")) << once;
  options.eval_fraction = 0;
  options.max_length = 6;
  EXPECT_EQ(said(), "");
  options.max_length = 5;
  options.too_long = TooLong::kDrop;
  EXPECT_EQ(said(), "");
  options.too_long = TooLong::kSplit;
  EXPECT_EQ(said(), "");
}

// How often each example occurs in an epoch.
std::map<int32_t, int> occurrences(Loader& loader, int64_t epoch) {
  std::map<int32_t, int> out;
  loader.restore({.epoch = epoch, .step = 0, .fingerprint = loader.position().fingerprint});
  for (int64_t steps = loader.steps_in_epoch(epoch); steps > 0; --steps) {
    for (const Batch& batch : loader.next().micro) {
      for (size_t d = 0; d + 1 < batch.document_start.size(); ++d)
        ++out[batch.sample[static_cast<size_t>(batch.document_start[d])]];
    }
  }
  return out;
}

TEST(Loader, WeightsSayHowOftenExamplesOccur) {
  const MemorySource source = many(30);
  for (const bool packing : {false, true}) {
    LoaderOptions options = small();
    options.packing = packing;
    options.weights = {{{0, 10}, 2.0}, {{10, 20}, 0.3}, {{20, 30}, 1.5}};
    Loader loader(source, nullptr, options);
    std::map<int32_t, int> over_epochs;
    for (int64_t epoch = 0; epoch < 8; ++epoch) {
      const std::map<int32_t, int> seen = occurrences(loader, epoch);
      int second = 0, third = 0;
      for (const auto& [example, times] : seen) {
        EXPECT_EQ(example < 10 ? times : 2, 2) << example;
        if (example >= 10 && example < 20) second += times;
        if (example >= 20) third += times;
        EXPECT_LE(times, 2);
        over_epochs[example] += times;
      }
      EXPECT_EQ(std::ranges::count_if(seen, [](const auto& e) { return e.first < 10; }), 10);
      EXPECT_EQ(second, 3);
      EXPECT_EQ(third, 15);
    }
    EXPECT_GT(over_epochs.size(), 27u) << "other examples in each epoch";
  }
}

TEST(Loader, WeightsOfOneChangeNothing) {
  const MemorySource source = many(30);
  LoaderOptions options = small(), weighted = small();
  weighted.weights = {{{0, 12}, 1.0}, {{12, 30}, 1.0}};
  Loader plain(source, nullptr, options), same(source, nullptr, weighted);
  for (int i = 0; i < 12; ++i) EXPECT_EQ(flat(plain.next()), flat(same.next()));
}

TEST(Loader, WeightsThatLeaveNothingAreRefused) {
  const MemorySource source = many(3);
  LoaderOptions options = small();
  options.weights = {{{0, 3}, 0.1}};
  EXPECT_THROW(Loader(source, nullptr, options), Error);
}

}  // namespace
}  // namespace lm
