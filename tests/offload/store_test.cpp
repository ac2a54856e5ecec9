#include "offload/local_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>

#include "base/bytes.h"
#include "base/error.h"
#include "tests/support/byte_pattern.h"
#include "tests/support/counts.h"
#include "tests/support/sim_disk.h"

namespace lm {
namespace {

// Six arrays, some of them ending inside a chunk, in three slots of a simulated disk.
struct Fixture {
  explicit Fixture(std::vector<SimFaultAt> faults = {}, uint64_t seed = 1, bool verify = true,
                   bool slots_on_device = false, std::vector<char> in_host = {},
                   ChunkSumsKernel chunk_sums = chunk_sums_cpu)
      : bytes{20000, 8192, 40960, 1, 8193, 12288},
        setup{.bytes = bytes,
              .name = [](int64_t a) { return "array " + std::to_string(a); },
              .slots = 3,
              .verify = verify,
              .threads = 2,
              .slots_on_device = slots_on_device,
              .in_host = std::move(in_host),
              .chunk_sums = chunk_sums},
        space({{std::filesystem::temp_directory_path().string(), 1}},
              LocalStore::swap_bytes(bytes, setup.in_host)),
        disk(space.files(), SimSetup{.faults = std::move(faults), .seed = seed, .shuffle = true}),
        pool(DeviceType::kCpu, LocalStore::pinned_bytes(setup)),
        queue(space, [this] { return disk.make_engine(); }, 4096,
              {.tries = 4, .longest_pause = std::chrono::microseconds(500)}),
        store(setup, &space, &queue, pool) {}

  std::vector<int64_t> bytes;
  LocalStoreSetup setup;
  SwapSpace space;
  SimDisk disk;
  PinnedPool pool;
  IoQueue queue;
  LocalStore store;
};

// Generations of every array through the slots, each read back before it is changed.
void churn(Fixture& f, int generations, unsigned seed = 0) {
  std::mt19937 random(seed);
  std::vector<std::vector<std::byte>> now(f.bytes.size());
  for (int g = 0; g < generations; ++g) {
    for (size_t a = 0; a < f.bytes.size(); ++a) {
      const auto array = static_cast<int64_t>(a);
      f.store.fetch(array, static_cast<int64_t>(random() % 3));
      std::byte* const memory = f.store.use(array);
      if (now[a].empty()) now[a].assign(static_cast<size_t>(f.bytes[a]), std::byte{0});
      ASSERT_TRUE(holds(memory, now[a])) << "array " << a << ", generation " << g;
      now[a] = pattern(f.bytes[a], random());
      std::memcpy(memory, now[a].data(), now[a].size());
      f.store.write_back(array);
    }
  }
}

TEST(Store, AnArrayNeverWrittenIsZeros) {
  Fixture f;
  f.store.fetch(2, 0);
  EXPECT_TRUE(holds(f.store.use(2), std::vector<std::byte>(40960)));
  EXPECT_TRUE(f.store.fresh(2));
  EXPECT_EQ(f.queue.counters().read_bytes, 0);
}

TEST(Store, GivesBackWhatWasWrittenThroughAnySlot) {
  Fixture f;
  churn(f, 20);
}

TEST(Store, GivesBackWhatWasWrittenThroughSlotsOfItsOwn) {
  Fixture f({}, 1, true, true);
  churn(f, 20);
}

TEST(Store, TiersInHostMemoryAndOnDiskShareSlots) {
  Fixture f({}, 1, true, true, {1, 0, 1, 1});
  // 20000 -> 24576, 40960 and 1 -> 8192 in host memory; 8192, 8193 -> 16384, 12288 -> 16384 on disk.
  const int64_t swap = LocalStore::swap_bytes(f.bytes, f.setup.in_host);
  EXPECT_EQ(swap, 8192 + 16384 + 16384);
  EXPECT_EQ(LocalStore::pinned_bytes(f.setup), 3 * 40960 + 24576 + 40960 + 8192 + (4 + 6 + 2 + 3 * 6) * 8);
  churn(f, 20);
  f.store.poll();
  f.queue.drain();
  EXPECT_EQ(f.queue.counters().written_bytes, 20 * swap);
}

TEST(Store, AShorterArrayMovesOnlyWhatCounts) {
  Fixture f;
  f.store.resize(2, 9000);
  f.store.allocate_slot(2, 0);
  std::memcpy(f.store.use(2), pattern(9000, 5).data(), 9000);
  f.store.write_back(2);
  f.store.fetch(0, 0);
  f.store.use(0);
  f.store.fetch(2, 1);
  EXPECT_TRUE(holds(f.store.use(2), pattern(9000, 5)));
  EXPECT_EQ(f.queue.counters().read_bytes, 16384);
  EXPECT_THROW(f.store.resize(2, 40961), Error);
}

// Checksums of the device that see other bytes than those in place, as when the link changes them: `changes`
// times from now on.
int changes = 0;
void changed_sums(const ChunkSums& a, StreamView stream) {
  chunk_sums_cpu(a, stream);
  if (changes > 0 && changes-- > 0) a.sums[1] ^= 1;
}

TEST(Store, WhatChangesOnItsWayToTheDeviceIsCopiedOnceMore) {
  for (const int times : {1, 2}) {
    Fixture f({}, 1, true, true, {1, 1, 1, 1, 1, 1}, changed_sums);
    const auto write = [&](unsigned seed) {
      std::memcpy(f.store.use(2), pattern(40960, seed).data(), 40960);
      f.store.write_back(2);
      f.store.forget(2);
    };
    f.store.allocate_slot(2, 0);
    write(1);
    changes = times;
    f.store.fetch(2, 1);
    if (times == 1) {
      EXPECT_TRUE(holds(f.store.use(2), pattern(40960, 1)));
      write(2);
      f.store.fetch(2, 0);
      EXPECT_TRUE(holds(f.store.use(2), pattern(40960, 2)));
    } else {
      try {
        f.store.use(2);
        ADD_FAILURE() << "what was changed twice is used";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Exit::kIntegrity);
        EXPECT_EQ(error.text().place, "between host memory and the GPU");
        EXPECT_NE(error.text().what.find("8192 bytes at 8192 of 40960"), std::string::npos)
            << error.text().what;
      }
    }
  }
}

// A skipped step fetches tiles, does not look at them, and writes them back.
TEST(Store, WhatWasFetchedAndNotUsedIsNotWritten) {
  for (const bool slots_on_device : {false, true}) {
    Fixture f({}, 1, true, slots_on_device);
    f.store.allocate_slot(2, 0);
    std::memcpy(f.store.use(2), pattern(40960, 7).data(), 40960);
    f.store.write_back(2);
    f.queue.drain();
    f.store.poll();
    f.queue.drain();
    f.disk.plan_faults({{SimFault::kDelay, 0, true}});
    f.store.forget(2);
    f.store.fetch(2, 1);
    f.store.write_back(2);  // its read is still on its way
    f.store.forget(2);
    f.store.fetch(2, 0);
    EXPECT_TRUE(holds(f.store.use(2), pattern(40960, 7)));
    EXPECT_EQ(f.queue.counters().written_bytes, 40960);
  }
}

TEST(Store, AFlushBringsEverythingBackOrSaysWhatFailed) {
  for (const bool slots_on_device : {false, true}) {
    Fixture f({}, 1, true, slots_on_device, slots_on_device ? std::vector<char>{0, 1} : std::vector<char>{});
    const auto write = [&](int64_t array) {
      const int64_t bytes = f.bytes[static_cast<size_t>(array)];
      f.store.allocate_slot(array, array);
      std::memcpy(f.store.use(array), pattern(bytes, 3).data(), static_cast<size_t>(bytes));
      f.store.write_back(array);
    };
    f.disk.plan_faults({{SimFault::kDelay, 0, true}});
    for (int64_t array = 0; array < 3; ++array) write(array);
    f.store.flush();
    EXPECT_EQ(f.queue.counters().written_bytes,
              LocalStore::swap_bytes({20000, 8192, 40960}, f.setup.in_host));
    f.disk.plan_faults({{SimFault::kEio, 0, true}});
    write(2);
    EXPECT_THROW(f.store.flush(), Error);
  }
}

// Every byte of a tier in host memory; what lies behind it up to the next chunk is never read.
TEST(Store, FindsWhatChangesInHostMemory) {
  for (const bool verify : {true, false}) {
    int64_t found = 0, flips = 0;
    for (const int64_t array : {0, 2, 3}) {
      const int64_t bytes = std::vector<int64_t>{20000, 0, 40960, 1}[static_cast<size_t>(array)];
      for (int64_t offset = 0; offset < bytes; offset += 797) {
        Fixture f({}, 1, verify, true, {1, 0, 1, 1});
        const std::vector<std::byte> written = pattern(bytes, 9);
        f.store.allocate_slot(array, 0);
        std::memcpy(f.store.use(array), written.data(), written.size());
        f.store.write_back(array);
        (offset % 2 == 0) ? f.store.poll() : f.store.flush();
        f.store.forget(array);
        // Tiers lie behind the slots' staging, in order.
        const int64_t tier_id = 3 * 40960 + (array == 0 ? 0 : array == 2 ? 24576 : 24576 + 40960);
        std::byte* const at = f.pool.memory().data() + tier_id;
        ASSERT_TRUE(holds(at, written));
        at[offset] ^= std::byte{4};
        ++flips;
        try {
          std::vector<std::byte> out(1);
          if (offset % 3 != 0) {
            f.store.fetch(array, 1);
            f.store.use(array);
          } else {
            f.store.read(array, offset, out);
          }
        } catch (const Error& error) {
          ++found;
          EXPECT_EQ(error.code(), Exit::kIntegrity);
          EXPECT_EQ(error.text().place, "host memory");
          const std::string what = "array " + std::to_string(array) + ": 8192 bytes at " +
                                   std::to_string(offset / kChecksumChunk * kChecksumChunk) + " of ";
          EXPECT_TRUE(error.text().what.starts_with(what)) << error.what();
        }
      }
    }
    EXPECT_GT(flips, 70);
    EXPECT_EQ(found, verify ? flips : 0);
  }
}

TEST(Store, WhatIsUsedWithoutASlotIsAnError) {
  Fixture f;
  EXPECT_THROW(f.store.use(1), Error);
  f.store.fetch(1, 0);
  f.store.use(1);
  f.store.fetch(2, 0);
  EXPECT_THROW(f.store.use(1), Error) << "its slot was taken";
}

// Every operation of a small run meets every fault, once and for ever: the run ends with the right bytes, or
// with a message that names the place. Never with wrong bytes.
TEST(Store, SurvivesOrReportsEveryFaultOfEveryOperation) {
  Fixture clean;
  churn(clean, 3);
  clean.queue.drain();
  const int64_t operations = clean.disk.operations();
  ASSERT_GT(operations, 100);
  int cases = 0, retried = 0, reported = 0;
  for (const SimFault fault :
       {SimFault::kEio, SimFault::kEnospc, SimFault::kEintr, SimFault::kEagain, SimFault::kShort,
        SimFault::kZero, SimFault::kLong, SimFault::kDelay, SimFault::kBitFlip, SimFault::kDroppedWrite,
        SimFault::kStrayWrite, SimFault::kStrayRead}) {
    for (const bool for_ever : {false, true}) {
      const int64_t step = for_ever ? 7 : test::counts(3, 1);
      for (int64_t k = 0; k < operations; k += step) {
        Fixture f({{fault, k, for_ever}}, static_cast<uint64_t>(k));
        ++cases;
        try {
          churn(f, 3);
          ASSERT_FALSE(HasFatalFailure()) << "wrong bytes: fault " << static_cast<int>(fault) << " at " << k;
          f.queue.drain();
          ++retried;
        } catch (const Error& error) {
          ++reported;
          EXPECT_NE(std::string(error.what()).find("array "), std::string::npos) << error.what();
          EXPECT_NE(error.text().place.find('+'), std::string::npos) << error.what();
          EXPECT_NE(error.code(), Exit::kInternal) << error.what();
        }
      }
    }
  }
  std::printf("%d cases, %d ended right, %d reported\n", cases, retried, reported);
}

// Every reading of the disk has a wrong bit, the second one, too.
TEST(Store, FindsEveryFlippedBit) {
  int found = 0;
  const unsigned flips = test::counts(200U, 1000U);
  for (unsigned seed = 0; seed < flips; ++seed) {
    Fixture f({{SimFault::kBitFlip, 40 + seed % 60, true}}, seed, true, seed % 2 == 1);
    try {
      churn(f, 3, seed);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kIntegrity);
      EXPECT_NE(error.text().what.find("read twice"), std::string::npos);
      ++found;
    }
    ASSERT_FALSE(HasFatalFailure()) << "seed " << seed;
    EXPECT_GT(f.disk.injected(), 0);
  }
  EXPECT_EQ(found, static_cast<int>(flips));
}

TEST(Store, ReadsOnceMoreWhatCameBackChanged) {
  int64_t healed = 0;
  const unsigned flips = test::counts(200U, 1000U);
  for (unsigned seed = 0; seed < flips; ++seed) {
    Fixture f({{SimFault::kBitFlip, 40 + seed % 60, false}}, seed, true, seed % 2 == 1), plain({}, seed);
    ASSERT_NO_THROW(churn(f, 3, seed)) << "seed " << seed;
    ASSERT_FALSE(HasFatalFailure()) << "seed " << seed;
    if (f.disk.injected() == 0) continue;  // the fault met a write
    churn(plain, 3, seed);
    EXPECT_GT(f.queue.counters().read_bytes, plain.queue.counters().read_bytes) << "seed " << seed;
    ++healed;
  }
  EXPECT_GT(healed, static_cast<int64_t>(flips * 3 / 10));
}

// An array is read where it is: in its slot, on its way back, in place.
TEST(Store, GivesBytesOfAnArrayWhereverItIs) {
  for (const bool on_device : {false, true}) {
    Fixture f({}, 1, true, on_device, on_device ? std::vector<char>{0, 1, 0, 0, 0, 0} : std::vector<char>{});
    for (const int64_t array : {0, 1, 2}) {
      const std::vector<std::byte> want = pattern(f.bytes[static_cast<size_t>(array)], 7);
      const auto expect_there = [&](const char* where) {
        std::vector<std::byte> got(want.size());
        f.store.read(array, 0, got);
        EXPECT_TRUE(got == want) << where;
        std::vector<std::byte> part(100);
        f.store.read(array, 8000, part);
        EXPECT_TRUE(std::equal(part.begin(), part.end(), want.begin() + 8000)) << where;
      };
      std::vector<std::byte> nothing(16, std::byte{1});
      f.store.read(array, 0, nothing);
      EXPECT_TRUE(nothing == std::vector<std::byte>(16));
      f.store.allocate_slot(array, 0);
      std::memcpy(f.store.use(array), want.data(), want.size());
      expect_there("in its slot");
      f.store.write_back(array);
      expect_there("written back");
      f.store.forget(array);
      expect_there("on its way home");
      f.store.flush();
      f.store.fetch(array == 0 ? 3 : 0, 0);  // the slot is another's
      expect_there("at home");
      f.store.fetch(array, 1);
      expect_there("on its way here");
      EXPECT_TRUE(holds(f.store.use(array), want)) << "and it is there still";
      f.store.forget(array);
    }
  }
}

// Array 2, five chunks, is written and lies in its tier; slot 1 holds other bytes.
void write_whole(Fixture& f, unsigned seed) {
  for (const int64_t slot : {0, 1}) {
    f.store.allocate_slot(2, slot);
    const unsigned now = slot == 0 ? seed : seed + 1;
    std::memcpy(f.store.use(2), pattern(40960, now).data(), 40960);
    if (slot == 0) f.store.write_back(2);
    f.store.flush();
    f.store.forget(2);
  }
}

bool same_chunks(const std::byte* memory, const std::vector<std::byte>& want,
                 const std::vector<int>& chunks) {
  return std::ranges::all_of(chunks, [&](int c) {
    return std::memcmp(memory + c * kChecksumChunk, want.data() + c * kChecksumChunk, kChecksumChunk) == 0;
  });
}

// On a disk with slots in host memory and elsewhere, and in host memory.
std::unique_ptr<Fixture> fixture_of_tier(int tier, ChunkSumsKernel sums = chunk_sums_cpu) {
  return std::make_unique<Fixture>(std::vector<SimFaultAt>{}, 1, true, tier > 0,
                                   tier == 2 ? std::vector<char>(6, 1) : std::vector<char>{}, sums);
}

TEST(Store, PartsOfAnArrayComeWhenTheyAreAskedForAndOnce) {
  for (const int tier : {0, 1, 2}) {
    SCOPED_TRACE(tier);
    const std::unique_ptr<Fixture> fixture = fixture_of_tier(tier);
    Fixture& f = *fixture;
    const std::vector<std::byte> want = pattern(40960, 3);
    write_whole(f, 3);
    const int64_t before = f.queue.counters().read_bytes;
    const auto read = [&] { return f.queue.counters().read_bytes - before; };
    const auto chunks = [&](int64_t count) { return tier == 2 ? 0 : count * kChecksumChunk; };
    f.store.fetch_parts(2, 1, std::vector<ByteRange>{{100, 50}, {33000, 10}});
    EXPECT_TRUE(same_chunks(f.store.use(2), want, {0, 4}));
    for (const int c : {1, 2, 3}) EXPECT_FALSE(same_chunks(f.store.use(2), want, {c})) << c << " came, too";
    EXPECT_EQ(read(), chunks(2));
    // What is not in the slot is read in its tier.
    std::vector<std::byte> part(100);
    f.store.read(2, 20000, part);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), want.begin() + 20000));
    const int64_t of_read = read() - chunks(2);
    for (int times = 0; times < 2; ++times) {
      const std::vector<ByteRange> parts = {{8000, 400}, {9000, 100}, {40000, 960}};  // the end of chunk 0
      EXPECT_EQ(f.store.bring(2, parts), times == 0 ? kChecksumChunk : 0);
      EXPECT_TRUE(same_chunks(f.store.use(2), want, {0, 1, 4}));
      EXPECT_FALSE(same_chunks(f.store.use(2), want, {2}));
      EXPECT_EQ(read() - of_read, chunks(3));
    }
    EXPECT_THROW(f.store.write_back(2), Error) << "bytes that never came";
    f.store.bring(2, std::vector<ByteRange>{{16384, 16384}});
    EXPECT_TRUE(holds(f.store.use(2), want));
    EXPECT_EQ(read() - of_read, chunks(5));
    // Of a whole fetch nothing is left, nor of an array that was never written.
    f.store.fetch_parts(2, 1, std::vector<ByteRange>{{0, 1}});
    std::memset(f.store.use(2) + kChecksumChunk, 0, 100);
    f.store.fetch(2, 1);
    EXPECT_TRUE(holds(f.store.use(2), want));
    f.store.bring(2, std::vector<ByteRange>{{0, 40960}});
    EXPECT_TRUE(holds(f.store.use(2), want));
    EXPECT_EQ(read() - of_read, chunks(11));
    f.store.fetch_parts(0, 1, std::vector<ByteRange>{{0, 10}});
    f.store.bring(0, std::vector<ByteRange>{{9000, 10}});
    EXPECT_TRUE(holds(f.store.use(0), std::vector<std::byte>(20000)));
  }
}

TEST(Store, APartThatComesBackChangedIsFoundAndOneThatDidNotComeIsNot) {
  for (const int tier : {0, 1}) {
    SCOPED_TRACE(tier);
    const std::unique_ptr<Fixture> fixture = fixture_of_tier(tier);
    Fixture& f = *fixture;
    write_whole(f, 5);
    f.store.fetch_parts(2, 1, std::vector<ByteRange>{{0, 1}});
    f.store.use(2);
    f.disk.plan_faults({{SimFault::kBitFlip, 0, true}});
    try {
      f.store.bring(2, std::vector<ByteRange>{{25000, 10}});
      ADD_FAILURE() << "a part with a wrong bit is used";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kIntegrity);
      EXPECT_NE(error.text().what.find("8192 bytes at 24576 of 40960"), std::string::npos)
          << error.text().what;
    }
  }
  const std::unique_ptr<Fixture> fixture = fixture_of_tier(2, changed_sums);
  Fixture& f = *fixture;
  write_whole(f, 5);
  f.store.fetch_parts(2, 1, std::vector<ByteRange>{{0, 16384}});
  f.store.use(2);
  std::memset(f.store.use(2) + 16384, 7, kChecksumChunk);
  changes = 1;  // of a run of two chunks the second one's
  f.store.bring(2, std::vector<ByteRange>{{16384, 16384}});
  EXPECT_EQ(changes, 0);
  EXPECT_TRUE(holds(f.store.use(2), [&] {
    std::vector<std::byte> out = pattern(40960, 5);
    std::memcpy(out.data() + 32768, f.store.use(2) + 32768, kChecksumChunk);  // was not asked for
    return out;
  }()));
}

TEST(Store, ResetTakesEveryArrayAsNeverWritten) {
  for (const bool on_device : {false, true}) {
    Fixture f({}, 1, true, on_device, on_device ? std::vector<char>{1, 0, 1, 1, 0, 0} : std::vector<char>{});
    churn(f, 2);
    f.store.flush();
    f.store.fetch(4, 1);
    f.disk.plan_faults({{SimFault::kEio, 0, true}});
    f.store.fetch(5, 2);
    EXPECT_THROW(f.store.use(5), Error);
    f.disk.plan_faults({});
    f.queue.restart();
    f.store.reset();
    for (int64_t array = 0; array < std::ssize(f.bytes); ++array) EXPECT_TRUE(f.store.fresh(array));
    churn(f, 2, 5);
  }
}

TEST(Store, WithoutVerificationAFlippedBitPasses) {
  // That the test above can fail: the same disk, unverified, gives wrong bytes.
  int wrong = 0;
  for (unsigned seed = 0; seed < 50; ++seed) {
    Fixture f({}, seed, false);
    f.store.allocate_slot(0, 0);
    std::memcpy(f.store.use(0), pattern(20000, seed).data(), 20000);
    f.store.write_back(0);
    f.queue.drain();
    f.disk.plan_faults({{SimFault::kBitFlip, 0, false}});
    f.store.fetch(0, 1);
    wrong += !holds(f.store.use(0), pattern(20000, seed));
  }
  EXPECT_GT(wrong, 25);
}

}  // namespace
}  // namespace lm
