#include "data/prefetch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <numeric>

#include "base/error.h"
#include "data/loader.h"
#include "memory_source.h"

namespace lm {
namespace {

// Each example that is read takes a second of `clock`. Reading waits at a gate, and may be refused.
class GatedSource : public MemorySource {
 public:
  ExampleView example(int64_t index, int64_t begin, int64_t count, ExampleBuffer& buffer) const override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return reads_ < allowed_; });
    ++reads_;
    clock_ += 1;
    changed_.notify_all();
    if (index == damaged_)
      throw Error(Exit::kInput, {.area = "DATA-24", .what = "damaged", .place = "memory", .next = "repair"});
    return MemorySource::example(index, begin, count, buffer);
  }
  void allow(int64_t reads) {
    const std::lock_guard lock(mutex_);
    allowed_ = reads;
    changed_.notify_all();
  }
  void damage(int64_t index) {
    const std::lock_guard lock(mutex_);
    damaged_ = index;
  }
  void wait_for(int64_t reads) const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return reads_ >= reads; });
  }
  int64_t reads() const {
    const std::lock_guard lock(mutex_);
    return reads_;
  }
  double seconds() const {
    const std::lock_guard lock(mutex_);
    return clock_;
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  mutable int64_t reads_ = 0;
  mutable double clock_ = 0;
  int64_t allowed_ = 1000000, damaged_ = -1;
};

void fill(MemorySource& source, int32_t examples) {
  for (int32_t i = 0; i < examples; ++i) {
    std::vector<int32_t> tokens(static_cast<size_t>(4 + i % 9));
    std::iota(tokens.begin(), tokens.end(), 100 * i);
    source.add(std::move(tokens));
  }
}

LoaderOptions small(bool packing = false) {
  return {.seed = 3,
          .max_length = 16,
          .packing = packing,
          .global_batch = 4,
          .micro_batch = 2,
          .vocab = 100000,
          .rank = 0,
          .world = 1};
}

// All that a model reads of a step.
std::vector<int32_t> flat(const StepBatches& step) {
  std::vector<int32_t> out = {static_cast<int32_t>(step.tokens), static_cast<int32_t>(step.target_tokens)};
  for (const Batch& batch : step.micro) {
    for (const auto* list :
         {&batch.token, &batch.position, &batch.target, &batch.sample, &batch.document_start})
      out.insert(out.end(), list->begin(), list->end());
  }
  return out;
}

std::pair<int64_t, int64_t> place(const LoaderPosition& at) {
  return {at.epoch, at.step};
}

TEST(Prefetch, GivesTheLoadersBatchesInItsOrder) {
  MemorySource source;
  fill(source, 22);
  for (const bool packing : {false, true}) {
    Loader expected(source, nullptr, small(packing)), ahead(source, nullptr, small(packing));
    Prefetch prefetch(ahead);
    double epoch = 0;
    for (int s = 0; s < 17; ++s) {
      EXPECT_EQ(place(prefetch.position()), place(expected.position()));
      const StepBatches wanted = expected.next();
      const ReadyStep step = prefetch.next(s + 1 < 17);
      EXPECT_EQ(flat(step.batches), flat(wanted)) << s;
      EXPECT_EQ(place(step.position), place(expected.position()));
      EXPECT_EQ(static_cast<int64_t>(step.epoch), expected.position().epoch);
      EXPECT_GT(step.epoch, epoch);
      epoch = step.epoch;
    }
    EXPECT_GT(epoch, 2);
  }
}

TEST(Prefetch, ReadsOneStepAheadAndNoFurther) {
  GatedSource source;
  fill(source, 20);
  Loader loader(source, nullptr, small());
  Prefetch prefetch(loader);
  EXPECT_EQ(source.reads(), 0);  // nothing before the first step
  prefetch.next(true);
  source.wait_for(8);
  // The position does not count the step that is only prepared.
  EXPECT_EQ(place(prefetch.position()), std::pair(int64_t{0}, int64_t{1}));
  prefetch.next(false);
  EXPECT_EQ(source.reads(), 8);
  EXPECT_EQ(place(prefetch.position()), std::pair(int64_t{0}, int64_t{2}));
}

TEST(Prefetch, ResumesFromItsPositionWhateverIsPrepared) {
  GatedSource source;
  fill(source, 20);
  Loader whole(source, nullptr, small());
  std::vector<std::vector<int32_t>> steps;
  for (int s = 0; s < 8; ++s) steps.push_back(flat(whole.next()));
  Loader loader(source, nullptr, small());
  LoaderPosition saved;
  {
    Prefetch prefetch(loader);
    EXPECT_EQ(flat(prefetch.next(true).batches), steps[0]);
    EXPECT_EQ(flat(prefetch.next(true).batches), steps[1]);
    saved = prefetch.position();
    EXPECT_EQ(flat(prefetch.next(true).batches), steps[2]);
    prefetch.restore(saved);  // drops what is prepared, or is being prepared
    EXPECT_EQ(flat(prefetch.next(true).batches), steps[2]);
    EXPECT_EQ(flat(prefetch.next(true).batches), steps[3]);
  }  // with a step prepared
  Prefetch resumed(loader);
  resumed.restore(saved);
  for (size_t s = 2; s < steps.size(); ++s) EXPECT_EQ(flat(resumed.next(true).batches), steps[s]) << s;
}

// The order of the first epoch decides which step has the damaged example.
TEST(Prefetch, AnErrorIsThatOfTheStepThatNeedsTheData) {
  GatedSource source;
  fill(source, 20);
  Loader loader(source, nullptr, small());
  std::vector<StepBatches> steps;
  for (int s = 0; s < 4; ++s) steps.push_back(loader.next());
  loader.restore({.fingerprint = loader.position().fingerprint});
  source.damage(steps[2].micro[1].sample[0]);
  Prefetch prefetch(loader);
  EXPECT_EQ(flat(prefetch.next(true).batches), flat(steps[0]));
  EXPECT_EQ(flat(prefetch.next(true).batches), flat(steps[1]));  // prepares the damaged one
  for (int again = 0; again < 2; ++again) {
    try {
      prefetch.next(true);
      FAIL() << "a damaged example is trained";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kInput);
      EXPECT_EQ(error.text().what, "damaged");
    }
    EXPECT_EQ(place(prefetch.position()), std::pair(int64_t{0}, int64_t{2}));
  }
  source.damage(-1);
  EXPECT_EQ(flat(prefetch.next(true).batches), flat(steps[2]));
  EXPECT_EQ(flat(prefetch.next(false).batches), flat(steps[3]));
}

TEST(Prefetch, CountsTheTimeThatTheCallerWaits) {
  GatedSource source;
  fill(source, 20);
  Loader loader(source, nullptr, small());
  Prefetch prefetch(loader, [&] { return source.seconds(); });
  EXPECT_EQ(prefetch.next(true).waited_seconds, 4);  // four examples, and nothing was prepared
  source.wait_for(8);
  EXPECT_EQ(prefetch.next(false).waited_seconds, 0);
  EXPECT_EQ(prefetch.next(false).waited_seconds, 4);
}

TEST(Prefetch, EndsWithAStepPreparedOrInPreparation) {
  GatedSource source;
  fill(source, 20);
  Loader loader(source, nullptr, small());
  { const Prefetch unused(loader); }
  {
    Prefetch prefetch(loader);
    source.allow(6);
    prefetch.next(true);
    source.wait_for(6);  // the second step's third example is waited for
    source.allow(1000);
  }
  EXPECT_EQ(source.reads(), 8);
}

}  // namespace
}  // namespace lm
