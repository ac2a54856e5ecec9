// A job of N ranks in one thread: each joins over the real link (comm/mpi_link.h), walks the real lists of
// its steps (simulated_steps.h) with the real collectives and votes (comm/group.h), saves by the real
// protocol (checkpoint/save.h) and starts from the newest checkpoint, while a seed's faults happen. Simulated
// are time, threads, messages, deaths and what a unit computes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "simulated_steps.h"

namespace lm::test {

struct Fault {
  enum class Kind : uint8_t {
    kStop,        // frozen for `seconds`, as by SIGSTOP
    kClockJump,   // its clock is `seconds` ahead
    kStraggler,   // computes for `seconds` in `step`, before `operation`
    kSlowLink,    // what it sends to `peer` is `seconds` on the way
    kCutLink,     // what it sends to `peer` no longer arrives
    kDeath,       // at once, without a word
    kError,       // in `step`, before `operation`, on this rank alone
    kFailedSave,  // of this rank's shard, at the first save from `step` on
    kOtherList    // it leaves out `operation` of `step`, or carries it out twice
  };
  Kind kind = Kind::kStop;
  int rank = 0, peer = 0;
  double at = 0;  // from the job's start; of those that name no step
  double seconds = 0;
  int64_t step = 0;
  int64_t operation = 0;  // of those of the step's list in which ranks meet, counted from 0
  bool harmless = false;  // the job must go on as if nothing had happened
};

struct Job {
  int ranks = 2;
  int each = 0;  // of a machine; 0: all are on one
  int64_t steps = 4, save_every = 2, evaluate_at = 3;
  StepShape shape = {};
  std::string directory = {};  // of checkpoints; "": none are made
  uint64_t seed = 0;           // of its data, and of how long each rank computes
  std::vector<Fault> faults = {};
  bool lists = true;  // false: votes alone, as sums go from each to all
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
  std::string differs;  // where a rank's operations, or their bytes, are others than another's
  int64_t began = 0;    // after this step
  bool ended = false;   // all ranks have, before the limit
  double seconds = 0;   // of the simulated clock
};

inline constexpr double kSilence = 2, kLate = 12;  // seconds, after which a rank is given up

JobEnd run_job(const Job& job);

// A job of up to `most_ranks` ranks, and its faults.
Job random_job(uint64_t seed, int most_ranks);

// What of its end breaks a promise: "" nothing. `undisturbed`: the weights without faults.
std::string broken_promise(const Job& job, const JobEnd& end, const std::vector<float>& undisturbed);

// "3 ranks, rank 1 dies at 0.70 s"
std::string text_of(const Job& job);

}  // namespace lm::test
