// A job of N ranks in one thread: each joins over the real link (comm/mpi_link.h), trains a few numbers by
// the real collectives and votes (comm/group.h), saves by the real protocol (checkpoint/save.h) and starts
// from the newest checkpoint, while a seed's faults happen. Simulated are time, threads, messages and deaths.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lm::test {

struct Fault {
  enum class Kind : uint8_t {
    kStop,       // frozen for `seconds`, as by SIGSTOP
    kClockJump,  // its clock is `seconds` ahead
    kStraggler,  // computes for `seconds` in `step`
    kSlowLink,   // what it sends to `peer` is `seconds` on the way
    kCutLink,    // what it sends to `peer` no longer arrives
    kDeath,      // at once, without a word
    kError,      // in `step`, on this rank alone
    kFailedSave  // of this rank's shard, at the first save from `step` on
  };
  Kind kind = Kind::kStop;
  int rank = 0, peer = 0;
  double at = 0;  // from the job's start; of those that name no step
  double seconds = 0;
  int64_t step = 0;
  bool harmless = false;  // the job must go on as if nothing had happened
};

struct Job {
  int ranks = 2;
  int each = 0;  // of a machine; 0: all are on one
  int64_t steps = 6, save_every = 2;
  std::string directory = {};  // of checkpoints; "": none are made
  uint64_t seed = 0;           // of how long each rank computes
  std::vector<Fault> faults = {};
  bool sums = true;  // false: votes alone, as sums go from each to all
};

// What a rank has come to.
struct RankEnd {
  enum class Kind : uint8_t { kRuns, kDone, kFailed, kGone } kind = Kind::kRuns;
  int code = 0;
  std::string text;     // of its error
  bool speaks = false;  // it says so on the console
  int64_t saved = 0;    // the last step that a save has acknowledged to it
};

struct JobEnd {
  std::vector<RankEnd> ranks;
  std::vector<float> weights;  // of the ranks that are done: of the lowest; empty: none is
  bool weights_differ = false;
  int64_t began = 0;   // after this step
  bool ended = false;  // all ranks have, before the limit
  double seconds = 0;  // of the simulated clock
};

JobEnd run_job(const Job& job);

// A job of up to `most_ranks` ranks, and its faults.
Job random_job(uint64_t seed, int most_ranks);

// What of its end breaks a promise: "" nothing. `calm`: the weights of the same job without faults.
std::string broken_promise(const Job& job, const JobEnd& end, const std::vector<float>& calm);

// "3 ranks, rank 1 dies at 0.70 s"
std::string text_of(const Job& job);

}  // namespace lm::test
