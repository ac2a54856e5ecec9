// What a disk does wrong to a training run: every byte that comes back changed ends the run before it is used
// (1,000 flipped bits, chunks of an earlier time, chunks in each other's place), and every operation that
// fails is either made good or ends the run with the code that says so. A run that ends well has the numbers
// of one that met nothing.
//
// Tiers in host memory have slots on a device before them, and checksums as disks have. State in host memory
// that compute or the CPU's update works on where it lies has none, as no other memory of the process has.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <random>

#include "base/error.h"
#include "offloaded_run.h"
#include "tests/faults/rows.h"

namespace lm {
namespace {

using namespace offloaded_run;

constexpr int64_t kChunk = kChecksumChunk;

// What happens to bytes at rest.
enum class Tampering {
  kBit,    // one is flipped
  kStale,  // a chunk has its contents of an earlier time
  kSwap,   // two chunks are in each other's place
};

// A disk in memory with one file, on which bytes change at rest, once: when request `at` has been handed in.
// From then on it looks at what becomes of them.
class TamperedDisk {
 public:
  enum class Fate { kUntouched, kRead, kOverwritten };  // by the first request that meets them

  TamperedDisk(Tampering what, int64_t at, uint64_t seed) : what_(what), at_(at), random_(seed) {}

  std::unique_ptr<IoEngine> make_engine(const EngineSetup& setup) {
    EXPECT_EQ(setup.files.size(), 1u);
    disk_ =
        std::make_unique<SimDisk>(setup.files, SimSetup{.faults = {}, .seed = random_(), .shuffle = true});
    last_.assign(disk_->contents(0).begin(), disk_->contents(0).end());
    return std::make_unique<Engine>(*this);
  }

  int64_t requests() const { return requests_; }
  // Read if any of the places was, before it was written over.
  Fate fate() const {
    Fate out = Fate::kUntouched;
    for (const auto& [offset, fate] : places_) {
      if (fate == Fate::kRead) return fate;
      if (fate == Fate::kOverwritten) out = fate;
    }
    return out;
  }
  bool tampered() const { return !places_.empty(); }
  bool touched(int64_t chunk_offset) const {
    return std::any_of(places_.begin(), places_.end(),
                       [&](const auto& place) { return place.first / kChunk * kChunk == chunk_offset; });
  }

 private:
  // Everything happens on the I/O thread, and data move only in `wait`: what changes in `submit` is at rest.
  class Engine final : public IoEngine {
   public:
    explicit Engine(TamperedDisk& disk) : disk_(disk), inner_(disk.disk_->make_engine()) {}
    int depth() const override { return inner_->depth(); }
    void submit(const IoRequest& request) override {
      inner_->submit(request);
      disk_.under_way_[request.id] = request;
      if (disk_.requests_++ == disk_.at_) disk_.tamper();
    }
    void wait(std::vector<IoResult>& results) override {
      const size_t before = results.size();
      inner_->wait(results);
      for (size_t i = before; i < results.size(); ++i) disk_.completed(results[i]);
    }
    void wake() override { inner_->wake(); }
    std::string description() const override { return inner_->description(); }

   private:
    TamperedDisk& disk_;
    std::unique_ptr<IoEngine> inner_;
  };

  void completed(const IoResult& result) {
    const IoRequest request = under_way_.at(result.id);
    under_way_.erase(result.id);
    const bool read = request.direction == IoDirection::kRead;
    for (auto& [offset, fate] : places_) {
      if (fate == Fate::kUntouched && offset >= request.offset && offset < request.offset + request.bytes)
        fate = read ? Fate::kRead : Fate::kOverwritten;
    }
    if (read || tampered()) return;
    // Of what is written over the last contents are kept, for stale chunks.
    const std::span<std::byte> now = disk_->contents(0);
    for (int64_t c = request.offset; c < request.offset + request.bytes; c += kChunk) {
      std::vector<std::byte> was(last_.begin() + c, last_.begin() + c + kChunk);
      std::memcpy(last_.data() + c, now.data() + c, kChunk);
      earlier_[c] = std::move(was);
    }
  }

  int64_t random_below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }

  void tamper() {
    const std::span<std::byte> bytes = disk_->contents(0);
    const auto size = static_cast<int64_t>(bytes.size());
    if (what_ == Tampering::kBit) {
      const int64_t offset = random_below(size);
      bytes[static_cast<size_t>(offset)] ^= static_cast<std::byte>(1u << random_below(8));
      places_[offset] = Fate::kUntouched;
      return;
    }
    if (what_ == Tampering::kStale) {
      if (earlier_.empty()) return;
      auto chunk = earlier_.begin();
      std::advance(chunk, random_below(std::ssize(earlier_)));
      exchange(chunk->first, chunk->second.data(), bytes);
      return;
    }
    const int64_t a = random_below(size / kChunk) * kChunk, b = random_below(size / kChunk) * kChunk;
    std::vector<std::byte> held(bytes.begin() + a, bytes.begin() + a + kChunk);
    exchange(a, bytes.data() + b, bytes);
    exchange(b, held.data(), bytes);
  }

  // Only a chunk that then differs counts.
  void exchange(int64_t chunk, const std::byte* with, std::span<std::byte> bytes) {
    std::byte* const at = bytes.data() + chunk;
    if (std::memcmp(at, with, kChunk) == 0) return;
    std::memcpy(at, with, kChunk);
    places_[chunk] = Fate::kUntouched;
  }

  const Tampering what_;
  const int64_t at_;
  std::mt19937_64 random_;
  std::unique_ptr<SimDisk> disk_;
  int64_t requests_ = 0;
  std::map<uint64_t, IoRequest> under_way_;
  std::vector<std::byte> last_;                        // the file as last written
  std::map<int64_t, std::vector<std::byte>> earlier_;  // by offset: what a chunk was before that
  std::map<int64_t, Fate> places_;                     // by offset: what was changed
};

// Short runs with everything on disk: slots in host memory, where optimizer state is checked and stamped
// inside the update; on the device, as on a GPU; and updated by the CPU beside one.
std::vector<Variant> runs_on_disk(int64_t steps) {
  Variant run;
  run.steps = steps;
  run.threads = 1;  // two would wait for each other more than they work
  run.optimizer = run.gradients = run.weights = run.activations = run.recompute = true;
  std::vector<Variant> out(5, run);
  out[1].slots_on_device = true;
  out[2].slots_on_device = out[2].on_host = true, out[2].master = Master::kF32;
  out[3].lora = true;
  out[4].clip = Clip::kBlock, out[4].granules = 8, out[4].optimizer_threads = 2, out[4].tied = false;
  return out;
}

struct Ending {
  std::optional<Error> error;
  Outcome outcome;
  int64_t retries = 0;
};

Ending run_to_its_end(const Variant& run, const EngineFactory& engine) {
  Ending out;
  std::unique_ptr<Training> training;
  try {
    training = std::make_unique<Training>(run, engine);
    out.outcome = training->run();
  } catch (const Error& error) {
    out.error = error;
  }
  if (training != nullptr) out.retries = training->rank().off_device().counters().retries;
  return out;
}

bool same(const Variant& run, const Outcome& got) {
  const Outcome& want = reference(run);
  return got.losses == want.losses && got.norms == want.norms && got.state == want.state;
}

class TamperedRuns : public ::testing::Test {
 protected:
  // Until `enough` changes have been read.
  void run_until(Tampering what, int64_t enough) {
    constexpr const char* kSuites[] = {"flips_on_disk", "stale_chunks_on_disk", "swapped_chunks_on_disk"};
    constexpr const char* kFailures[] = {"a bit changes in state on disk",
                                         "a chunk on disk is as it was at an earlier time",
                                         "two chunks on disk lie in each other's place"};
    Row row(kSuites[static_cast<int>(what)], kFailures[static_cast<int>(what)],
            "in training runs with all state on disk, between two transfers; judged where its bytes are read "
            "again");
    const std::vector<Variant> runs = runs_on_disk(3);
    std::vector<int64_t> requests;
    for (const Variant& run : runs) {
      TamperedDisk disk(what, -1, 0);
      const Ending ending =
          run_to_its_end(run, [&](const EngineSetup& setup) { return disk.make_engine(setup); });
      ASSERT_FALSE(ending.error) << ending.error->report();
      ASSERT_TRUE(same(run, ending.outcome)) << run.text();
      requests.push_back(disk.requests());
    }
    std::mt19937_64 random(static_cast<uint64_t>(what) + 1);
    for (uint64_t i = 0; read_ < enough && !HasFailure(); ++i) {
      const size_t r = i % runs.size();
      TamperedDisk disk(what, static_cast<int64_t>(random() % static_cast<uint64_t>(requests[r])), i);
      const Ending ending =
          run_to_its_end(runs[r], [&](const EngineSetup& setup) { return disk.make_engine(setup); });
      row.tried();
      judge(runs[r], disk, ending);
    }
    row.count("read and found", read_);
    row.count("written over", overwritten_);
    row.count("never read", untouched_);
    for (const auto& [state, count] : found_) row.figure(state, count);
    row.write();
  }

  void judge(const Variant& run, const TamperedDisk& disk, const Ending& ending) {
    if (disk.fate() != TamperedDisk::Fate::kRead) {
      ++(disk.fate() == TamperedDisk::Fate::kOverwritten ? overwritten_ : untouched_);
      EXPECT_FALSE(ending.error) << run.text() << ending.error->report();
      EXPECT_TRUE(ending.error || same(run, ending.outcome)) << run.text();
      return;
    }
    ++read_;
    ASSERT_TRUE(ending.error) << "changed bytes were read and not found: " << run.text();
    EXPECT_EQ(ending.error->code(), Exit::kIntegrity) << ending.error->report();
    const ErrorText& text = ending.error->text();
    EXPECT_EQ(text.area, "IO-06");
    const std::string directory = std::filesystem::temp_directory_path().string() + "+";
    ASSERT_TRUE(text.place.starts_with(directory)) << ending.error->report();
    EXPECT_TRUE(disk.touched(std::stoll(text.place.substr(directory.size())))) << ending.error->report();
    // "optimizer state of layers.1, tile 0: 8192 bytes at ...", and who checked it there.
    std::string state = text.what.substr(0, text.what.find(" of "));
    if (state == "optimizer state")
      state += run.slots_on_device && !run.on_host ? ", whole" : ", in its update";
    ++found_[state];
  }

  int64_t read_ = 0, overwritten_ = 0, untouched_ = 0;
  std::map<std::string, int64_t> found_;
};

TEST_F(TamperedRuns, FlippedBitsThatAreReadAreFound) {
  run_until(Tampering::kBit, 100);
  EXPECT_GE(found_["optimizer state, in its update"], 3);
}

// Minutes: `./dev test --faults --full`.
TEST_F(TamperedRuns, DISABLED_OneThousandFlippedBitsThatAreReadAreFound) {
  run_until(Tampering::kBit, 1000);
  for (const char* state :
       {"optimizer state, in its update", "optimizer state, whole", "weights", "gradient", "input"})
    EXPECT_GE(found_[state], 3) << state;
}

TEST_F(TamperedRuns, DISABLED_OneThousandChunksOfAnEarlierTimeThatAreReadAreFound) {
  run_until(Tampering::kStale, 1000);
}

// Bytes that change are met in a step or while state is copied; the run goes back to its last copy.
TEST_F(TamperedRuns, ARunThatIsResetAndGivenItsStateEndsAsIfNothingHadHappened) {
  std::mt19937_64 random(11);
  int64_t damages = 0, held = 0;  // the most of the arena that an error left taken
  for (const Variant& run : runs_on_disk(6)) {
    TamperedDisk counting(Tampering::kBit, -1, 0);
    run_to_its_end(run, [&](const EngineSetup& setup) { return counting.make_engine(setup); });
    for (uint64_t i = 0; i < 30; ++i) {
      const auto requests = static_cast<uint64_t>(counting.requests());
      TamperedDisk disk(Tampering::kBit, static_cast<int64_t>(random() % requests), i);
      Training training(run, [&](const EngineSetup& setup) { return disk.make_engine(setup); });
      Outcome out;
      out.losses.resize(static_cast<size_t>(run.steps)), out.norms = out.losses;
      Training::Copy copy = training.copy();
      int64_t copied = 0;  // steps
      for (int64_t s = 1; s <= run.steps; ++s) {
        try {
          const StepResult result = training.step(s);
          out.losses[static_cast<size_t>(s) - 1] = result.loss;
          out.norms[static_cast<size_t>(s) - 1] = result.grad_norm;
          out.state = training.state();
          if (s % 2 == 0) copy = training.copy(), copied = s;
        } catch (const Error& error) {
          ASSERT_EQ(error.code(), Exit::kIntegrity) << error.report();
          ASSERT_TRUE(training.rank().can_reset(error));
          EXPECT_NE(error.text().kept.find("can resume from there"), std::string::npos);
          held = std::max(held, training.rank().arena().mark());
          training.restore(copy);
          ASSERT_EQ(training.rank().arena().mark(), 0) << run.text();
          s = copied;
          ++damages;
        }
      }
      ASSERT_TRUE(same(run, out)) << run.text() << "after " << damages << " damages, request " << i;
    }
  }
  std::printf("%ld damages\n", static_cast<long>(damages));
  EXPECT_GT(damages, 15);
  EXPECT_GT(held, 0) << "no error came while a step had something of the arena";
}

TEST_F(TamperedRuns, ChunksOfAnEarlierTimeAreFound) {
  run_until(Tampering::kStale, 100);
  EXPECT_GE(found_["optimizer state, in its update"], 10);
}

TEST_F(TamperedRuns, ChunksInEachOthersPlaceAreFound) {
  run_until(Tampering::kSwap, 100);
  EXPECT_GE(found_["optimizer state, in its update"], 10);
}

class FailingRuns : public ::testing::Test {
 protected:
  // The fault on every `stride`-th operation of a run, from the first to the last; of the runs as on a GPU on
  // every fifth of these. (LoRA's has few.)
  template <class Check>
  void on_operations(SimFault fault, bool for_ever, int64_t stride, const Check& check) {
    const std::vector<Variant> runs = runs_on_disk(2);
    for (const size_t r : {0, 1, 2, 4}) {
      const Variant& run = runs[r];
      const int64_t operations = with_fault(run, {}).second;
      ASSERT_GT(operations, 50);
      for (int64_t k = 0; k < operations; k += r == 0 ? stride : 5 * stride) {
        const Ending ending = with_fault(run, {{fault, k, for_ever}}).first;
        ++runs_;
        EXPECT_TRUE(ending.error || same(run, ending.outcome)) << "a wrong result";
        check(ending);
        if (!HasFailure()) continue;
        ADD_FAILURE() << "operation " << k << ", " << run.text()
                      << (ending.error ? ending.error->report() : " ended well");
        return;
      }
    }
    std::printf("%ld runs so far\n", static_cast<long>(runs_));
  }

  // And the number of operations.
  std::pair<Ending, int64_t> with_fault(const Variant& run, std::vector<SimFaultAt> faults) {
    std::unique_ptr<SimDisk> disk;
    const bool faulty = !faults.empty();
    const SimFault kind = faulty ? faults.front().fault : SimFault::kDelay;
    const Ending ending = run_to_its_end(run, [&](const EngineSetup& setup) {
      disk = std::make_unique<SimDisk>(setup.files, SimSetup{.faults = std::move(faults), .seed = 5});
      return disk->make_engine();
    });
    // Of a write a flipped bit is none.
    EXPECT_TRUE(kind == SimFault::kBitFlip || (disk->injected() > 0) == faulty);
    const int64_t operations = disk->operations();
    // A thread that never returns still has it.
    if (kind == SimFault::kHang) [[maybe_unused]]
      const SimDisk* const stays = disk.release();
    return {ending, operations};
  }

  static void ends_with(const Ending& ending, Exit code, const std::string& name) {
    ASSERT_TRUE(ending.error) << "nothing was said about " << name;
    EXPECT_EQ(ending.error->code(), code);
    EXPECT_NE(ending.error->text().what.find(name), std::string::npos);
  }

  int64_t runs_ = 0;
};

TEST_F(FailingRuns, EioOnceIsMadeGood) {
  on_operations(SimFault::kEio, false, 1, [&](const Ending& ending) {
    EXPECT_FALSE(ending.error);
    EXPECT_EQ(ending.retries, 1);  // a read where it was, a write elsewhere
  });
}

TEST_F(FailingRuns, EioForEverIsExit21) {
  on_operations(SimFault::kEio, true, 1, [](const Ending& ending) { ends_with(ending, Exit::kIo, "EIO"); });
}

// Nothing reads what a flush has written: it asks for itself. The last write of all fails, so that no later
// one can tell.
TEST_F(FailingRuns, AFlushReportsAWriteThatFailed) {
  for (const bool slots_on_device : {false, true}) {
    Variant run;
    run.optimizer = true, run.slots_on_device = slots_on_device;
    run.clip = Clip::kBlock, run.slots = 1000;  // nothing is deferred, and everything stays in its slot
    const auto flush = [&](std::vector<SimFaultAt> faults) {
      std::unique_ptr<SimDisk> disk;
      Training training(run, [&](const EngineSetup& setup) {
        disk = std::make_unique<SimDisk>(setup.files, SimSetup{.faults = std::move(faults)});
        return disk->make_engine();
      });
      training.step(1);
      EXPECT_EQ(disk->operations(), 0);
      training.flush();
      return disk->operations();
    };
    const int64_t writes = flush({});
    EXPECT_GT(writes, 5);
    try {
      flush({{SimFault::kEio, writes - 1, true}});
      FAIL() << "nothing was said";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kIo) << error.report();
      EXPECT_TRUE(error.text().what.starts_with("write of optimizer state")) << error.report();
    }
  }
}

TEST_F(FailingRuns, EnospcForEverIsExit20) {
  on_operations(SimFault::kEnospc, true, 1,
                [](const Ending& ending) { ends_with(ending, Exit::kNoSpace, "ENOSPC"); });
}

TEST_F(FailingRuns, EnospcOnceIsMadeGoodWhereItWasAWrite) {
  int64_t moved = 0;
  on_operations(SimFault::kEnospc, false, 3, [&](const Ending& ending) {
    if (!ending.error) {
      EXPECT_EQ(ending.retries, 1);
      ++moved;
      return;
    }
    ends_with(ending, Exit::kNoSpace, "ENOSPC");
    EXPECT_TRUE(ending.error->text().what.starts_with("read of "));
  });
  EXPECT_GT(moved, 20);
}

TEST_F(FailingRuns, ADiskThatNoLongerAnswersIsExit21InTime) {
  Variant run = runs_on_disk(2).front();
  run.io_timeout = 1;
  const int64_t operations = with_fault(run, {}).second;
  for (const bool on_device : {false, true}) {
    run.slots_on_device = on_device;
    for (const int64_t k : {int64_t{0}, operations / 3, operations / 2, operations - 20}) {
      const Ending ending = with_fault(run, {{SimFault::kHang, k, true}}).first;
      ends_with(ending, Exit::kIo, "the disk has not answered for 1 s; waiting for the ");
    }
  }
}

// A wrong bit on the way from the disk, once: in what is checked whole and in what is checked in its update.
TEST_F(FailingRuns, BytesThatCameBackChangedAreReadOnceMore) {
  on_operations(SimFault::kBitFlip, false, 3, [](const Ending& ending) { EXPECT_FALSE(ending.error); });
}

TEST_F(FailingRuns, ShortTransfersAreContinued) {
  int64_t continued = 0;
  on_operations(SimFault::kShort, false, 1, [&](const Ending& ending) {
    EXPECT_FALSE(ending.error);
    continued += ending.retries;
  });
  EXPECT_GT(continued, 100);
}

TEST_F(FailingRuns, WhatIsSaidToBeTriedAgainIs) {
  for (const SimFault fault : {SimFault::kEintr, SimFault::kEagain}) {
    on_operations(fault, false, 7, [](const Ending& ending) {
      EXPECT_FALSE(ending.error);
      EXPECT_EQ(ending.retries, 1);
    });
  }
}

// Each request for about a second.
TEST_F(FailingRuns, TryingAgainEnds) {
  const Ending ending = with_fault(runs_on_disk(2).front(), {{SimFault::kEagain, 60, true}}).first;
  ends_with(ending, Exit::kIo, "EAGAIN");
}

TEST_F(FailingRuns, ALateOperationOnlyTakesLonger) {
  on_operations(SimFault::kDelay, false, 7, [](const Ending& ending) {
    EXPECT_FALSE(ending.error);
    EXPECT_EQ(ending.retries, 0);
  });
}

TEST_F(FailingRuns, AnswersThatAreNoneEndTheRun) {
  on_operations(SimFault::kZero, false, 7,
                [](const Ending& ending) { ends_with(ending, Exit::kIo, "ended early"); });
  on_operations(SimFault::kLong, false, 7,
                [](const Ending& ending) { ends_with(ending, Exit::kIo, "the engine reports"); });
  for (const SimFault fault : {SimFault::kDuplicate, SimFault::kUnknown}) {
    on_operations(fault, false, 7, [](const Ending& ending) {
      ASSERT_TRUE(ending.error);
      EXPECT_EQ(ending.error->code(), Exit::kInternal);
    });
  }
}

}  // namespace
}  // namespace lm
