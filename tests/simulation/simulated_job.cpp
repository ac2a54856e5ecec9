#include "simulated_job.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "base/error.h"
#include "checkpoint/restore.h"
#include "checkpoint/save.h"
#include "comm/mpi_group.h"
#include "comm/mpi_link.h"
#include "config/config_text.h"
#include "fibers.h"
#include "offload/engines.h"
#include "offload/pinned.h"
#include "simulated_mpi.h"

namespace lm::test {
namespace {

constexpr double kSilence = 2, kLate = 12, kLimit = 120;  // seconds
constexpr int64_t kShard = 1024;                          // values

// SplitMix64: a number of its own for each combination.
uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(mixed(seed)) {}
  int64_t below(int64_t end) { return static_cast<int64_t>(next() % static_cast<uint64_t>(end)); }
  double between(double low, double high) {
    return low + (high - low) * static_cast<double>(next() >> 11) * 0x1p-53;
  }

 private:
  uint64_t next() { return mixed(state_++); }
  uint64_t state_;
};

// Moves bytes as it is asked to, at once.
class PromptEngine final : public IoEngine {
 public:
  explicit PromptEngine(const EngineSetup& setup) : files_(setup.files.begin(), setup.files.end()) {}
  int depth() const override { return 4; }
  void submit(const IoRequest& request) override {
    const int file = files_[static_cast<size_t>(request.file)].descriptor;
    const auto bytes = static_cast<size_t>(request.bytes);
    const ssize_t moved = request.direction == IoDirection::kRead
                              ? ::pread(file, request.memory, bytes, request.offset)
                              : ::pwrite(file, request.memory, bytes, request.offset);
    moved_.push_back({request.id, moved < 0 ? -errno : moved});
  }
  void wait(std::vector<IoResult>& results) override {
    std::unique_lock lock(mutex_);
    if (moved_.empty()) woken_.wait(lock, [this] { return awake_; });
    awake_ = false;
    results.insert(results.end(), moved_.begin(), moved_.end());
    moved_.clear();
  }
  void wake() override {
    const std::lock_guard lock(mutex_);
    awake_ = true;
    woken_.notify_one();
  }
  std::string description() const override { return "prompt"; }

 private:
  const std::vector<IoFile> files_;
  std::vector<IoResult> moved_;  // the I/O thread's
  std::mutex mutex_;
  std::condition_variable woken_;
  bool awake_ = false;
};

class Simulation {
 public:
  explicit Simulation(const Job& job)
      : job_(job), threads_(fibers_), mpi_(fibers_, job.ranks), ranks_(static_cast<size_t>(job.ranks)) {
    end_.ranks.resize(ranks_.size());
    for (const Fault& fault : job.faults) {
      if (fault.kind == Fault::Kind::kSlowLink) slow_.push_back(&fault);
    }
    mpi_.latency = [this](int from, int to) { return latency(from, to); };
  }

  JobEnd run() {
    for (int r = 0; r < job_.ranks; ++r) fibers_.start(r, [this, r] { live(r); });
    for (const Fault& fault : job_.faults) fibers_.start(-1, [this, &fault] { happen(fault); });
    // A link's own thread may wait for a neighbour's goodbye longer than its rank does, which ends the
    // process.
    fibers_.run(kLimit);
    end_.ended =
        std::ranges::none_of(end_.ranks, [](const RankEnd& one) { return one.kind == RankEnd::Kind::kRuns; });
    end_.seconds = fibers_.now();
    return end_;
  }

 private:
  // Owned here: those of a rank that is gone are destroyed with the job.
  struct Rank {
    std::unique_ptr<MpiLink> link;
    std::unique_ptr<MpiGroup> group;
    std::unique_ptr<Save> save;
    std::vector<float> weights;
  };
  Rank& at(int rank) { return ranks_[static_cast<size_t>(rank)]; }
  RankEnd& end_of(int rank) { return end_.ranks[static_cast<size_t>(rank)]; }
  int64_t values() const { return kShard * job_.ranks; }

  double latency(int from, int to) const {
    double seconds = 1e-3;
    for (const Fault* fault : slow_) {
      if (fault->rank == from && fault->peer == to && fibers_.now() >= fault->at) seconds += fault->seconds;
    }
    return seconds;
  }

  void happen(const Fault& fault) {
    using enum Fault::Kind;
    fibers_.nap(fault.at);
    if (end_of(fault.rank).kind != RankEnd::Kind::kRuns) return;
    if (fault.kind == kStop) fibers_.freeze(fault.rank, fibers_.now() + fault.seconds);
    if (fault.kind == kClockJump) threads_.jump(fault.rank, fault.seconds);
    if (fault.kind == kCutLink) mpi_.cut(fault.rank, fault.peer);
    if (fault.kind == kDeath) {
      end_of(fault.rank).kind = RankEnd::Kind::kGone;
      fibers_.stop(fault.rank);
    }
  }

  // As launcher/worker has it.
  void live(int rank) {
    try {
      at(rank).link = std::make_unique<MpiLink>(LinkSetup{.api = SimulatedMpi::api(),
                                                          .silence = kSilence,
                                                          .late = kLate,
                                                          .host = fmt::format("node{}", rank),
                                                          .abandon =
                                                              [this, rank](const Error& error) {
                                                                fail(rank, error);
                                                                fibers_.stop(rank);
                                                              },
                                                          .threads = threads_});
      at(rank).group = std::make_unique<MpiGroup>(*at(rank).link, kReduceScatterPart * job_.ranks);
      Group& group = *at(rank).group;
      if (job_.each > 0) group.set_machines(job_.each);
      agree_on_version(group, "1");
      train(rank, group);
      group.barrier("the end");
      at(rank).link->leave();
    } catch (const Error& error) {
      return fail(rank, error);
    }
    finish(rank);
  }

  void finish(int rank) {
    end_of(rank).kind = RankEnd::Kind::kDone;
    std::vector<float>& mine = at(rank).weights;
    if (end_.weights.empty()) end_.weights = mine;
    end_.weights_differ |= std::memcmp(end_.weights.data(), mine.data(), mine.size() * sizeof(float)) != 0;
  }

  void fail(int rank, const Error& error) {
    RankEnd& end = end_of(rank);
    const ErrorText text = error.text();
    end.code = static_cast<int>(error.code());
    end.text = error.what();
    MpiLink* const link = at(rank).link.get();
    bool said = text.area == "PEER-32";
    if (said && rank == 0 && link != nullptr) link->passed_on(error.code(), error.what(), text.advice());
    if (!said && link != nullptr) said = link->end(error.code(), error.what(), text.advice());
    end.speaks = rank == 0 || (!said && error.code() != Exit::kPeerLost);
    end.kind = RankEnd::Kind::kFailed;
  }

  const Fault* fault_of(Fault::Kind kind, int rank, int64_t step) const {
    const auto found = std::ranges::find_if(job_.faults, [&](const Fault& one) {
      return one.kind == kind && one.rank == rank && one.step == step;
    });
    return found == job_.faults.end() ? nullptr : &*found;
  }

  void compute(int rank, int64_t step) {
    Random random(job_.seed * 1000003 + static_cast<uint64_t>(rank * 1009 + step));
    double seconds = random.between(0.02, 0.1);
    if (const Fault* fault = fault_of(Fault::Kind::kStraggler, rank, step)) seconds += fault->seconds;
    fibers_.nap(seconds);
    if (fault_of(Fault::Kind::kError, rank, step) != nullptr)
      throw Error(Exit::kInput, {.area = "DATA-11", .what = "a row is damaged", .place = "", .next = ""});
  }

  void train(int rank, Group& group) {
    std::vector<float>& weights = at(rank).weights;
    weights.assign(static_cast<size_t>(values()), 1.0F);
    end_.began = load(rank, group);
    std::vector<ByteRange> shards;
    constexpr auto kBytes = static_cast<int64_t>(kShard * sizeof(float));
    for (int r = 0; r < job_.ranks; ++r) shards.push_back({r * kBytes, kBytes});
    std::vector<float> gradient(weights.size());
    for (int64_t step = end_.began + 1; step <= job_.steps; ++step) {
      compute(rank, step);
      if (job_.sums) {
        for (size_t i = 0; i < gradient.size(); ++i)
          gradient[i] = weights[i] * 1e-3F / static_cast<float>(rank + 1 + static_cast<int>(i % 7));
        float* const own = weights.data() + rank * kShard;
        group.reduce_scatter("gradients", reinterpret_cast<const std::byte*>(gradient.data()), shards,
                             [&](int64_t offset, int64_t bytes, std::span<const std::byte* const> from) {
                               add(own + offset / 4, bytes / 4, from);
                             });
        group.all_gather("weights", reinterpret_cast<std::byte*>(weights.data()), shards);
      }
      const std::vector<int> stops = group.gather("whether to stop", 0);
      LM_CHECK(std::ranges::count(stops, 0) == job_.ranks, "nobody stops");
      if (!job_.directory.empty() && step % job_.save_every == 0) save(rank, group, step);
    }
  }

  static void add(float* to, int64_t count, std::span<const std::byte* const> from) {
    for (int64_t i = 0; i < count; ++i) {
      float sum = 0;
      for (const std::byte* part : from) {
        float value = 0;
        std::memcpy(&value, part + i * 4, 4);
        sum += value;
      }
      to[i] = to[i] * 0.75F - sum;
    }
  }

  StateCatalogue catalogue(int rank) const {
    StateCatalogue out = {StateEntry{.name = "block0.weight",
                                     .dtype = DType::kF32,
                                     .shape = {values()},
                                     .unit = 0,
                                     .first = rank * kShard,
                                     .elements = kShard}};
    if (rank == 0) out.push_back(StateEntry{.name = "optimizer.t"});
    return out;
  }

  void save(int rank, Group& group, int64_t step) {
    const StateCatalogue state = catalogue(rank);
    std::unique_ptr<Save>& save = at(rank).save;
    save = std::make_unique<Save>(SaveSetup{
        .directory = job_.directory,
        .step = step,
        .catalogue = state,
        .group = &group,
        .copies = false,
        .buffers = buffers_of(rank),
        .make_engine = [](const EngineSetup& setup) { return std::make_unique<PromptEngine>(setup); }});
    together(group, "writing a shard", [&] {
      if (fails_to_save(rank, step))
        throw Error(Exit::kNoSpace, {.area = "DISK-20", .what = "no space", .place = "", .next = ""});
    });
    save->write(
        state.front(), 0,
        std::as_bytes(std::span(at(rank).weights).subspan(static_cast<size_t>(rank * kShard), kShard)));
    if (rank == 0) save->write(state.back(), 0, std::as_bytes(std::span(&step, 1)));
    Manifest manifest;
    manifest.step = step;
    save->commit(manifest, [this] { fibers_.nap(0.05); });
    save.reset();
    end_of(rank).saved = step;
  }

  // Kept from job to job: their pages are what takes time.
  static std::unique_ptr<PinnedPool>* buffers_of(int rank) {
    static std::map<int, std::unique_ptr<PinnedPool>> pools;
    return &pools[rank];
  }

  bool fails_to_save(int rank, int64_t step) const {
    return std::ranges::any_of(job_.faults, [&](const Fault& one) {
      return one.kind == Fault::Kind::kFailedSave && one.rank == rank && one.step <= step;
    });
  }

  // The step of the checkpoint that it begins with; 0: none.
  int64_t load(int rank, Group& group) {
    if (job_.directory.empty()) return 0;
    int64_t step = 0;
    if (rank == 0) {
      for (const FoundCheckpoint& one : find_checkpoints(job_.directory)) {
        if (one.manifest) step = std::max(step, one.step);
      }
    }
    step = group.gather("the checkpoint", step).front();
    if (step == 0) return 0;
    CheckpointReader reader(job_.directory + "/" + checkpoint_name(step));
    reader.read("block0.weight", 0, std::as_writable_bytes(std::span(at(rank).weights)));
    return step;
  }

  const Job& job_;
  Fibers fibers_;
  FiberThreads threads_;
  SimulatedMpi mpi_;
  std::vector<Rank> ranks_;
  std::vector<const Fault*> slow_;
  JobEnd end_;
};

Fault random_harmless(Random& random, const Job& job) {
  Fault fault{.rank = static_cast<int>(random.below(job.ranks)), .harmless = true};
  fault.at = random.between(0, 1);
  fault.step = 1 + random.below(job.steps);
  fault.kind = static_cast<Fault::Kind>(random.below(4));
  fault.peer = static_cast<int>((fault.rank + 1 + random.below(job.ranks - 1)) % job.ranks);
  double longest = kSilence / 4;
  if (fault.kind == Fault::Kind::kClockJump) longest = 1e4;
  if (fault.kind == Fault::Kind::kStraggler) longest = kLate / 2;
  fault.seconds = random.between(0, longest);
  return fault;
}

Fault random_fatal(Random& random, const Job& job) {
  constexpr Fault::Kind kFatal[] = {Fault::Kind::kDeath,   Fault::Kind::kDeath, Fault::Kind::kStop,
                                    Fault::Kind::kCutLink, Fault::Kind::kError, Fault::Kind::kFailedSave};
  Fault fault{.kind = kFatal[random.below(std::ssize(kFatal))]};
  fault.rank = static_cast<int>(random.below(job.ranks));
  fault.peer = static_cast<int>((fault.rank + 1 + random.below(job.ranks - 1)) % job.ranks);
  fault.at = random.between(0.05, 1.2);
  fault.seconds = random.between(2 * kSilence, 4 * kSilence);
  fault.step = 1 + random.below(job.steps);
  return fault;
}

bool names(const std::string& text, int rank) {
  const std::string name = fmt::format("rank {}", rank);
  for (size_t at = text.find(name); at != std::string::npos; at = text.find(name, at + 1)) {
    if (at + name.size() == text.size() || !std::isdigit(static_cast<unsigned char>(text[at + name.size()])))
      return true;
  }
  return false;
}

// Codes with which a rank may end after this one.
bool explains(const Fault& fault, int code) {
  using enum Fault::Kind;
  switch (fault.kind) {
    case kError:
      return code == static_cast<int>(Exit::kInput);
    case kFailedSave:
      return code == static_cast<int>(Exit::kNoSpace);
    case kDeath:
    case kStop:
    case kCutLink:
      return code == static_cast<int>(Exit::kNoProgress);
    case kClockJump:
    case kStraggler:
    case kSlowLink:
      return false;
  }
  return false;
}

std::string broken_failure(const Job& job, const JobEnd& end) {
  std::set<int> codes;
  std::vector<int> speakers;
  for (int r = 0; r < job.ranks; ++r) {
    const RankEnd& one = end.ranks[static_cast<size_t>(r)];
    if (one.kind != RankEnd::Kind::kFailed) continue;
    codes.insert(one.code);
    if (one.speaks) speakers.push_back(r);
    const bool explained = std::ranges::any_of(job.faults, [&](const Fault& fault) {
      return !fault.harmless && explains(fault, one.code) &&
             // Of a lost message who waits for the one that waits may speak first.
             (fault.kind == Fault::Kind::kCutLink || fault.rank == r || names(one.text, fault.rank));
    });
    if (!explained) return fmt::format("rank {} ends with {}: {}", r, one.code, one.text);
  }
  const auto fatal = std::ranges::count_if(job.faults, [](const Fault& fault) { return !fault.harmless; });
  if (fatal == 1 && codes.size() > 1)
    return fmt::format("the ranks end with {} and {}", *codes.begin(), *codes.rbegin());
  // Rank 0 speaks for all; of a vote it knows who has failed, and that one says why. Who does not hear it, or
  // is stopped meanwhile, speaks, too.
  if (fatal == 1 && speakers.size() > 1 && speakers.front() == 0) {
    const Fault& fault = *std::ranges::find(job.faults, false, &Fault::harmless);
    const bool vote =
        fault.kind == Fault::Kind::kFailedSave && speakers.size() == 2 && speakers.back() == fault.rank;
    const bool apart = fault.kind == Fault::Kind::kCutLink || fault.kind == Fault::Kind::kStop;
    // Who computes, or is reached late, says it when it is next asked for something: others have waited a
    // second.
    const bool busy = std::ranges::any_of(
        job.faults, [](const Fault& one) { return one.harmless && one.kind != Fault::Kind::kClockJump; });
    if (!vote && !apart && !busy)
      return fmt::format("{} ranks say it, the last is {}", speakers.size(), speakers.back());
  }
  return "";
}

}  // namespace

JobEnd run_job(const Job& job) {
  return Simulation(job).run();
}

Job random_job(uint64_t seed, int most_ranks) {
  Random random(seed);
  Job job{.ranks = 2 + static_cast<int>(random.below(most_ranks - 1)), .seed = seed};
  if (job.ranks % 2 == 0 && random.below(2) == 0) job.each = 2;
  const int64_t harmless = random.below(3), fatal = random.below(8) == 0 ? 2 : random.below(4) > 0 ? 1 : 0;
  for (int64_t i = 0; i < harmless; ++i) {
    Fault fault = random_harmless(random, job);
    // Of each jump a second counts as waiting: two at once are as long as the silence that these jobs allow.
    const bool again = i > 0 && fault.kind == Fault::Kind::kClockJump;
    if (!again || job.faults.front().kind != fault.kind) job.faults.push_back(fault);
  }
  for (int64_t i = 0; i < fatal; ++i) job.faults.push_back(random_fatal(random, job));
  return job;
}

std::string broken_promise(const Job& job, const JobEnd& end, const std::vector<float>& calm) {
  if (!end.ended) return fmt::format("not all ranks have ended after {:.0f} s", end.seconds);
  if (end.weights_differ) return "two ranks that are done have other weights";
  if (!end.weights.empty() && !calm.empty() &&
      std::memcmp(end.weights.data(), calm.data(), calm.size() * sizeof(float)) != 0)
    return "the weights are not those of a calm run";
  const bool harmless = std::ranges::all_of(job.faults, &Fault::harmless);
  int64_t saved = 0;
  for (const RankEnd& one : end.ranks) {
    saved = std::max(saved, one.saved);
    if (harmless && one.kind != RankEnd::Kind::kDone) return "a rank ends: " + one.text;
    // Of the last collective nobody can know whether all have left it.
    const bool any_failed = std::ranges::any_of(end.ranks, [](const RankEnd& other) {
      return other.kind == RankEnd::Kind::kFailed && other.text.find("the end") == std::string::npos;
    });
    if (one.kind == RankEnd::Kind::kDone && any_failed) return "a rank is done, and another has failed";
  }
  if (saved > 0 && !job.directory.empty()) {
    int64_t found = 0;
    for (const FoundCheckpoint& one : find_checkpoints(job.directory)) {
      if (one.manifest) found = std::max(found, one.step);
    }
    if (found < saved) return fmt::format("step {} was acknowledged, and step {} is saved", saved, found);
  }
  return broken_failure(job, end);
}

std::string text_of(const Job& job) {
  constexpr const char* kNames[] = {
      "stops for", "has its clock ahead by", "computes for", "has a slow link", "has a cut link",
      "dies",      "has an error",           "cannot save"};
  std::string out = fmt::format("{} ranks, {} a machine", job.ranks, job.each);
  for (const Fault& fault : job.faults) {
    out +=
        fmt::format("; rank {} {} (peer {}, at {:.2f} s, for {:.2f} s, step {})", fault.rank,
                    kNames[static_cast<size_t>(fault.kind)], fault.peer, fault.at, fault.seconds, fault.step);
  }
  return out;
}

}  // namespace lm::test
