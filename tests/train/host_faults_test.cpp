// What host memory does wrong to a training run whose state is in place there, as beside a GPU: a byte that
// changes at rest, or a chunk that is as it was at an earlier time, ends the run before it is used. A run
// that meets none has the numbers of one that was left alone.
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <random>
#include <set>

#include "base/bytes.h"
#include "base/error.h"
#include "offloaded_run.h"
#include "tests/faults/rows.h"

namespace lm {
namespace {

using namespace offloaded_run;

constexpr int64_t kChunk = kChecksumChunk;

enum class Tampering { kBit, kStale };

// Tiers in memory that the test owns, in which one bit changes at rest, or a chunk becomes what it was: in
// the store that is polled as the `at`-th. From then on it looks at what becomes of that array's tier.
class TamperedTiers {
 public:
  enum class Fate { kUntouched, kRead, kOverwritten };

  TamperedTiers(Tampering what, int64_t at, uint64_t seed) : what_(what), at_(at), random_(seed) {}

  std::unique_ptr<Store> make_store(const LocalStoreSetup& setup) {
    const int64_t bytes = LocalStore::pinned_bytes(setup);
    pools_.push_back(std::make_unique<PinnedPool>(DeviceType::kCpu, bytes));
    return std::make_unique<Watched>(*this, setup, *pools_.back());
  }
  int64_t polls() const { return polls_; }
  Fate fate() const { return fate_; }
  std::string name() const { return name_; }

 private:
  // A real store, and which of its arrays lie in slots.
  class Watched : public LocalStore {
   public:
    Watched(TamperedTiers& tiers, const LocalStoreSetup& setup, PinnedPool& pool)
        : LocalStore(setup, nullptr, nullptr, pool), tiers_(tiers), setup_(setup), pool_(pool) {
      bytes_ = setup.bytes;
      int64_t stored = 0;
      for (const int64_t bytes : setup.bytes) {
        stored_.push_back(stored);
        stored += round_up(bytes, kChunk);
      }
    }
    void fetch(int64_t array, int64_t slot) override {
      enter(array, slot);
      if (!fresh(array)) tiers_.meet(this, array, Fate::kRead);
      LocalStore::fetch(array, slot);
    }
    void allocate_slot(int64_t array, int64_t slot) override {
      enter(array, slot);
      LocalStore::allocate_slot(array, slot);
    }
    void forget(int64_t array) override {
      in_slot_.erase(array);
      LocalStore::forget(array);
    }
    void write_back(int64_t array) override {
      if (touched_.contains(array)) tiers_.meet(this, array, Fate::kOverwritten);
      LocalStore::write_back(array);
    }
    std::byte* use_unchecked(int64_t array, Arrival* arrival) override {
      touched_.insert(array);
      return LocalStore::use_unchecked(array, arrival);
    }
    void read(int64_t array, int64_t begin, std::span<std::byte> out) override {
      const bool met =
          tiers_.place_.chunk >= begin / kChunk * kChunk && tiers_.place_.chunk < begin + std::ssize(out);
      if (!in_slot_.contains(array) && met) tiers_.meet(this, array, Fate::kRead);
      LocalStore::read(array, begin, out);
    }
    void resize(int64_t array, int64_t bytes) override {
      bytes_[static_cast<size_t>(array)] = bytes;
      LocalStore::resize(array, bytes);
    }
    void poll() override {
      LocalStore::poll();
      tiers_.polled(*this);
    }

    // What lies in place now, to become stale.
    void remember() {
      earlier_.assign(pool_.memory().begin(), pool_.memory().end());
      earlier_bytes_.assign(bytes_.size(), 0);
      for (const int64_t array : written())
        earlier_bytes_[static_cast<size_t>(array)] = bytes_[static_cast<size_t>(array)];
    }
    // A chunk of an array that was written then and has changed since; if there is one.
    void make_stale(std::mt19937_64& random) {
      std::vector<Place> changed;
      for (const int64_t array : earlier_.empty() ? std::vector<int64_t>{} : written()) {
        for (int64_t chunk = 0; chunk < earlier_bytes(array); chunk += kChunk)
          if (!std::ranges::equal(then(array, chunk), now(array, chunk)))
            changed.push_back({this, array, chunk});
      }
      if (changed.empty()) return;
      tiers_.place_ = changed[random() % changed.size()];
      const auto [store, array, chunk] = tiers_.place_;
      std::ranges::copy(then(array, chunk), now(array, chunk).begin());
      tiers_.name_ = setup_.name(array);
    }
    // A place in place that counts, of an array that was written; chunk -1: there is none.
    void flip(std::mt19937_64& random) {
      const std::vector<int64_t> written = this->written();
      if (written.empty()) return;
      const int64_t array = written[random() % written.size()];
      const auto offset =
          static_cast<int64_t>(random() % static_cast<uint64_t>(bytes_[static_cast<size_t>(array)]));
      pool_.memory()[static_cast<size_t>(stored_[static_cast<size_t>(array)] + offset)] ^=
          static_cast<std::byte>(1U << random() % 8);
      tiers_.place_ = {this, array, offset / kChunk * kChunk};
      tiers_.name_ = setup_.name(array);
    }

   private:
    std::vector<int64_t> written() const {
      std::vector<int64_t> out;
      for (size_t a = 0; a < bytes_.size(); ++a) {
        const auto array = static_cast<int64_t>(a);
        if (holds(array) && !fresh(array)) out.push_back(array);
      }
      return out;
    }
    int64_t earlier_bytes(int64_t array) const {
      return std::min(earlier_bytes_[static_cast<size_t>(array)], bytes_[static_cast<size_t>(array)]);
    }
    // Of a chunk in place, the bytes that count.
    std::span<std::byte> of_chunk(std::span<std::byte> memory, int64_t array, int64_t chunk) const {
      const int64_t bytes = std::min(kChunk, earlier_bytes(array) - chunk);
      return memory.subspan(static_cast<size_t>(stored_[static_cast<size_t>(array)] + chunk),
                            static_cast<size_t>(bytes));
    }
    std::span<std::byte> then(int64_t array, int64_t chunk) { return of_chunk(earlier_, array, chunk); }
    std::span<std::byte> now(int64_t array, int64_t chunk) { return of_chunk(pool_.memory(), array, chunk); }
    void enter(int64_t array, int64_t slot) {
      std::erase_if(in_slot_, [&](const auto& entry) { return entry.second == slot; });
      in_slot_[array] = slot;
      touched_.erase(array);
    }

    TamperedTiers& tiers_;
    LocalStoreSetup setup_;
    PinnedPool& pool_;
    std::vector<int64_t> bytes_, stored_;
    std::vector<std::byte> earlier_;      // all tiers; empty: nothing was remembered
    std::vector<int64_t> earlier_bytes_;  // of each array, 0 if it was not written
    std::map<int64_t, int64_t> in_slot_;
    std::set<int64_t> touched_;
  };

  // What has left the device has its checksums then.
  void polled(Watched& store) {
    constexpr int64_t kPollsBetween = 8;
    const int64_t poll = polls_++;
    if (poll == at_) what_ == Tampering::kBit ? store.flip(random_) : store.make_stale(random_);
    if (what_ == Tampering::kStale && poll < at_ && random_() % kPollsBetween == 0) store.remember();
  }
  void meet(const Watched* store, int64_t array, Fate fate) {
    if (fate_ == Fate::kUntouched && place_.store == store && place_.array == array) fate_ = fate;
  }

  struct Place {
    const Watched* store = nullptr;
    int64_t array = 0, chunk = -1;
  };
  const Tampering what_;
  const int64_t at_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<PinnedPool>> pools_;
  int64_t polls_ = 0;
  Place place_;
  std::string name_;
  Fate fate_ = Fate::kUntouched;
};

struct Ending {
  std::optional<Error> error;
  Outcome outcome;
};

Ending run_to_its_end(const Variant& run, TamperedTiers& tiers) {
  Ending out;
  try {
    Training training(run, {}, [&](Pool, const LocalStoreSetup& setup) { return tiers.make_store(setup); });
    out.outcome = training.run();
  } catch (const Error& error) {
    out.error = error;
  }
  return out;
}

bool same(const Variant& run, const Outcome& got) {
  const Outcome& want = reference(run);
  return got.losses == want.losses && got.norms == want.norms && got.state == want.state;
}

// Until so many changes were read.
void run_until(Tampering what, int64_t wanted, Row row) {
  Variant run;
  run.steps = 3, run.threads = 1;
  run.optimizer = run.gradients = run.weights = run.activations = run.recompute = true;
  run.slots_on_device = true, run.host = 1;
  Variant lora = run, block = run;
  lora.lora = true;
  block.clip = Clip::kBlock, block.tied = false;
  const std::vector<Variant> runs = {run, lora, block};
  std::vector<int64_t> polls;
  std::map<std::string, int64_t> found;
  for (const Variant& variant : runs) {
    TamperedTiers tiers(what, -1, 0);
    const Ending ending = run_to_its_end(variant, tiers);
    ASSERT_FALSE(ending.error) << ending.error->report();
    ASSERT_TRUE(same(variant, ending.outcome)) << variant.text();
    polls.push_back(tiers.polls());
  }
  std::mt19937_64 random(21);
  int64_t read = 0, unread = 0;
  for (uint64_t i = 0; read < wanted && !testing::Test::HasFailure(); ++i) {
    const size_t r = i % runs.size();
    TamperedTiers tiers(what, static_cast<int64_t>(random() % static_cast<uint64_t>(polls[r])), i);
    row.tried();
    const Ending ending = run_to_its_end(runs[r], tiers);
    if (tiers.fate() != TamperedTiers::Fate::kRead) {
      ++unread;
      EXPECT_FALSE(ending.error) << runs[r].text() << ending.error->report();
      EXPECT_TRUE(ending.error || same(runs[r], ending.outcome)) << runs[r].text();
      continue;
    }
    ++read;
    ASSERT_TRUE(ending.error) << "changed bytes were read and not found: " << tiers.name() << runs[r].text();
    EXPECT_EQ(ending.error->code(), Exit::kIntegrity) << ending.error->report();
    EXPECT_EQ(ending.error->text().place, "host memory");
    EXPECT_TRUE(ending.error->text().what.starts_with(tiers.name() + ": ")) << ending.error->report();
    ++found[tiers.name().substr(0, tiers.name().find(" of "))];
  }
  row.count("read and found", read);
  row.count("not read", unread);
  for (const auto& [state, count] : found) row.figure(state, count);
  row.write();
  // Gradients in place are mostly written over before they are read.
  const int64_t least = what == Tampering::kBit ? 3 : 1;
  for (const char* state : {"optimizer state", "weights", "gradient", "input"})
    EXPECT_GE(found[state], least) << state;
}

Row flips_row() {
  return {"flips_in_host_memory", "a bit changes in state at home in host memory",
          "in a training run with all state there, between two uses; judged where its bytes are read again"};
}

Row stale_row() {
  return {"stale_chunks_in_host_memory", "a chunk in host memory is as it was at an earlier time",
          "in a training run with all state there, between two uses; judged where its bytes are read again"};
}

TEST(HostFaults, FlippedBitsThatAreReadAreFound) {
  run_until(Tampering::kBit, 60, flips_row());
}

TEST(HostFaults, ChunksOfAnEarlierTimeThatAreReadAreFound) {
  run_until(Tampering::kStale, 60, stale_row());
}

// Half a minute and more each: `./dev test --faults --full`.
TEST(HostFaults, DISABLED_OneThousandFlippedBitsThatAreReadAreFound) {
  run_until(Tampering::kBit, 1000, flips_row());
}

TEST(HostFaults, DISABLED_OneThousandChunksOfAnEarlierTimeThatAreReadAreFound) {
  run_until(Tampering::kStale, 1000, stale_row());
}

}  // namespace
}  // namespace lm
