#include "simulated_job.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "base/error.h"
#include "checkpoint/restore.h"
#include "checkpoint/save.h"
#include "comm/mpi_group.h"
#include "comm/mpi_link.h"
#include "config/config_text.h"
#include "fibers.h"
#include "mixed.h"
#include "offload/engines.h"
#include "offload/pinned.h"
#include "simulated_mpi.h"

namespace lm::test {
namespace {

constexpr double kLimit = 120;  // seconds

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
    std::unique_ptr<SimulatedSteps> steps;
    std::unique_ptr<Save> save;
    std::vector<float> weights;  // at the end
    int64_t entered = 0;         // operations of the step's list in which the ranks meet
    size_t met = 0;              // since the job began
  };
  // What the first rank that has left an operation has of it.
  struct Met {
    Operation operation;
    uint64_t bits;
  };
  Rank& at(int rank) { return ranks_[static_cast<size_t>(rank)]; }
  RankEnd& end_of(int rank) { return end_.ranks[static_cast<size_t>(rank)]; }

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
    if (!mine.empty())
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

  void compute(int rank, int64_t step) {
    Random random(job_.seed * 1000003 + static_cast<uint64_t>(rank * 1009 + step));
    at(rank).entered = 0;
    fibers_.nap(random.between(0.02, 0.1));
  }

  // What happens to a rank between two operations of its list; and how many times it carries out the next
  // one.
  int enter(int rank, int64_t step, const Operation& next) {
    const int64_t index = at(rank).entered++;
    int times = 1;
    for (const Fault& fault : job_.faults) {
      if (fault.rank != rank || fault.step != step || fault.operation != index) continue;
      if (fault.kind == Fault::Kind::kStraggler) fibers_.nap(fault.seconds);
      if (fault.kind == Fault::Kind::kError)
        throw Error(Exit::kInput, {.area = "DATA-11", .what = "a row is damaged", .place = "", .next = ""});
      // Without its bytes an array cannot be borrowed, nor a unit's input computed, whatever the others do.
      const bool needed = next.kind == OperationKind::kFetch || computes(next.kind);
      if (fault.kind == Fault::Kind::kOtherList) times = needed ? 2 : 0;
    }
    return times;
  }

  // All ranks have to have the same operations, in the same order, with the same bytes behind them.
  void met(int rank, const Operation& operation, uint64_t bits) {
    const size_t index = at(rank).met++;
    if (index == met_.size()) met_.push_back({operation, bits});
    const Met& first = met_[index];
    if (!end_.differs.empty() || (first.operation == operation && first.bits == bits)) return;
    end_.differs = fmt::format(
        "operation {} of rank {} is {} of unit {}, with bits {:x}; another's is {} of unit {}, {:x}", index,
        rank, operation_name(operation.kind), operation.unit, bits, operation_name(first.operation.kind),
        first.operation.unit, first.bits);
  }

  void train(int rank, Group& group) {
    int64_t now = 0;
    if (job_.lists) {
      at(rank).steps = std::make_unique<SimulatedSteps>(SimulatedSteps::Setup{
          .shape = job_.shape,
          .group = group,
          .seed = job_.seed,
          .enter = [this, rank, &now](const Operation& next) { return enter(rank, now, next); },
          .met = [this, rank](const Operation& operation, uint64_t bits) { met(rank, operation, bits); }});
      end_.began = load(rank, group);
    }
    for (int64_t step = end_.began + 1; step <= job_.steps; ++step) {
      now = step;
      compute(rank, step);
      if (job_.lists) at(rank).steps->run(step);
      const std::vector<int> stops = group.gather("whether to stop", 0);
      LM_CHECK(std::ranges::count(stops, 0) == job_.ranks, "nobody stops");
      if (job_.lists && step == job_.evaluate_at) at(rank).steps->evaluate(step);
      if (!job_.directory.empty() && step % job_.save_every == 0) save(rank, group, step);
    }
    if (!job_.lists) return;
    at(rank).steps->flush();
    at(rank).weights = at(rank).steps->all_weights();
  }

  static std::string array_name(int64_t unit) { return fmt::format("block{}.weight", unit); }

  // Of each unit this rank's part, which nobody else has.
  StateCatalogue catalogue(int rank) {
    StateCatalogue out;
    const SimulatedSteps& steps = *at(rank).steps;
    for (int64_t u = 0; u < unit_count(job_.shape); ++u)
      out.push_back(StateEntry{.name = array_name(u),
                               .dtype = DType::kF32,
                               .shape = {steps.elements(u)},
                               .unit = u,
                               .first = steps.first_of_part(u),
                               .elements = part_elements(u)});
    if (rank == 0) out.push_back(StateEntry{.name = "optimizer.t"});
    return out;
  }

  void save(int rank, Group& group, int64_t step) {
    at(rank).steps->flush();
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
    for (int64_t u = 0; u < unit_count(job_.shape); ++u)
      save->write(state[static_cast<size_t>(u)], 0,
                  std::as_bytes(std::span<const float>(at(rank).steps->own_part(u))));
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
    for (int64_t u = 0; u < unit_count(job_.shape); ++u) {
      std::vector<float> whole(static_cast<size_t>(at(rank).steps->elements(u)));
      reader.read(array_name(u), 0, std::as_writable_bytes(std::span(whole)));
      at(rank).steps->set(u, whole);
    }
    return step;
  }

  const Job& job_;
  Fibers fibers_;
  FiberThreads threads_;
  SimulatedMpi mpi_;
  std::vector<Rank> ranks_;
  std::vector<const Fault*> slow_;
  std::vector<Met> met_;
  JobEnd end_;
};

}  // namespace

JobEnd run_job(const Job& job) {
  return Simulation(job).run();
}

}  // namespace lm::test
