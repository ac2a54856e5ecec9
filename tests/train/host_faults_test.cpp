// What host memory does wrong to a training run whose state is at home there, as beside a GPU: a byte that
// changes at rest ends the run before it is used. A run that meets none has the numbers of one that was left
// alone.
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <random>
#include <set>

#include "base/bytes.h"
#include "base/error.h"
#include "offloaded_run.h"

namespace lm {
namespace {

using namespace offloaded_run;

constexpr int64_t kChunk = kChecksumChunk;

// Homes in memory that the test owns, in which one bit changes at rest: in the store that is polled as the
// `at`-th. From then on it looks at what becomes of that array's home.
class TamperedHomes {
 public:
  enum class Fate { kUntouched, kRead, kOverwritten };

  TamperedHomes(int64_t at, uint64_t seed) : at_(at), random_(seed) {}

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
    Watched(TamperedHomes& homes, const LocalStoreSetup& setup, PinnedPool& pool)
        : LocalStore(setup, nullptr, nullptr, pool), homes_(homes), setup_(setup), pool_(pool) {
      bytes_ = setup.bytes;
      int64_t home = 0;
      for (const int64_t bytes : setup.bytes) {
        home_.push_back(home);
        home += round_up(bytes, kChunk);
      }
    }
    void fetch(int64_t array, int64_t slot) override {
      enter(array, slot);
      if (!fresh(array)) homes_.meet(this, array, Fate::kRead);
      LocalStore::fetch(array, slot);
    }
    void claim(int64_t array, int64_t slot) override {
      enter(array, slot);
      LocalStore::claim(array, slot);
    }
    void forget(int64_t array) override {
      in_slot_.erase(array);
      LocalStore::forget(array);
    }
    void write_back(int64_t array) override {
      if (touched_.contains(array)) homes_.meet(this, array, Fate::kOverwritten);
      LocalStore::write_back(array);
    }
    std::byte* use_unchecked(int64_t array, Arrival* arrival) override {
      touched_.insert(array);
      return LocalStore::use_unchecked(array, arrival);
    }
    void read(int64_t array, int64_t begin, std::span<std::byte> out) override {
      const bool met =
          homes_.place_.chunk >= begin / kChunk * kChunk && homes_.place_.chunk < begin + std::ssize(out);
      if (!in_slot_.contains(array) && met) homes_.meet(this, array, Fate::kRead);
      LocalStore::read(array, begin, out);
    }
    void resize(int64_t array, int64_t bytes) override {
      bytes_[static_cast<size_t>(array)] = bytes;
      LocalStore::resize(array, bytes);
    }
    void poll() override {
      LocalStore::poll();
      homes_.polled(*this);
    }

    // A place at home that counts, of an array that was written; chunk -1: there is none.
    void flip(std::mt19937_64& random) {
      std::vector<int64_t> written;
      for (size_t a = 0; a < bytes_.size(); ++a) {
        const auto array = static_cast<int64_t>(a);
        if (holds(array) && !fresh(array)) written.push_back(array);
      }
      if (written.empty()) return;
      const int64_t array = written[random() % written.size()];
      const auto offset =
          static_cast<int64_t>(random() % static_cast<uint64_t>(bytes_[static_cast<size_t>(array)]));
      pool_.memory()[static_cast<size_t>(home_[static_cast<size_t>(array)] + offset)] ^=
          static_cast<std::byte>(1U << random() % 8);
      homes_.place_ = {this, array, offset / kChunk * kChunk};
      homes_.name_ = setup_.name(array);
    }

   private:
    void enter(int64_t array, int64_t slot) {
      std::erase_if(in_slot_, [&](const auto& entry) { return entry.second == slot; });
      in_slot_[array] = slot;
      touched_.erase(array);
    }

    TamperedHomes& homes_;
    LocalStoreSetup setup_;
    PinnedPool& pool_;
    std::vector<int64_t> bytes_, home_;
    std::map<int64_t, int64_t> in_slot_;
    std::set<int64_t> touched_;
  };

  // What has left the device has its checksums then.
  void polled(Watched& store) {
    if (polls_++ == at_) store.flip(random_);
  }
  void meet(const Watched* store, int64_t array, Fate fate) {
    if (fate_ == Fate::kUntouched && place_.store == store && place_.array == array) fate_ = fate;
  }

  struct Place {
    const Watched* store = nullptr;
    int64_t array = 0, chunk = -1;
  };
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

Ending run_to_its_end(const Variant& run, TamperedHomes& homes) {
  Ending out;
  try {
    Training training(run, {}, [&](Pool, const LocalStoreSetup& setup) { return homes.make_store(setup); });
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

// Until so many flips were read.
void flip_bits(int64_t wanted) {
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
    TamperedHomes homes(-1, 0);
    const Ending ending = run_to_its_end(variant, homes);
    ASSERT_FALSE(ending.error) << ending.error->report();
    ASSERT_TRUE(same(variant, ending.outcome)) << variant.text();
    polls.push_back(homes.polls());
  }
  std::mt19937_64 random(21);
  int64_t read = 0, unread = 0;
  for (uint64_t i = 0; read < wanted && !testing::Test::HasFailure(); ++i) {
    const size_t r = i % runs.size();
    TamperedHomes homes(static_cast<int64_t>(random() % static_cast<uint64_t>(polls[r])), i);
    const Ending ending = run_to_its_end(runs[r], homes);
    if (homes.fate() != TamperedHomes::Fate::kRead) {
      ++unread;
      EXPECT_FALSE(ending.error) << runs[r].text() << ending.error->report();
      EXPECT_TRUE(ending.error || same(runs[r], ending.outcome)) << runs[r].text();
      continue;
    }
    ++read;
    ASSERT_TRUE(ending.error) << "changed bytes were read and not found: " << homes.name() << runs[r].text();
    EXPECT_EQ(ending.error->code(), Exit::kIntegrity) << ending.error->report();
    EXPECT_EQ(ending.error->text().place, "host memory");
    EXPECT_TRUE(ending.error->text().what.starts_with(homes.name() + ": ")) << ending.error->report();
    ++found[homes.name().substr(0, homes.name().find(" of "))];
  }
  std::printf("read and found %ld, not read %ld;", static_cast<long>(read), static_cast<long>(unread));
  for (const auto& [state, count] : found) std::printf(" %s: %ld", state.c_str(), static_cast<long>(count));
  std::printf("\n");
  for (const char* state : {"optimizer state", "weights", "gradient", "input"})
    EXPECT_GE(found[state], 3) << state;
}

TEST(HostFaults, FlippedBitsThatAreReadAreFound) {
  flip_bits(60);
}

// Half a minute and more: `./dev test --faults`.
TEST(HostFaults, DISABLED_OneThousandFlippedBitsThatAreReadAreFound) {
  flip_bits(1000);
}

}  // namespace
}  // namespace lm
