#include "launcher/cli/first_cause.h"

#include <sys/wait.h>

#include <algorithm>
#include <csignal>

#include "base/error.h"

namespace lm {
namespace {

// From what ends well to what ends a run by itself.
constexpr int kDone = 0, kStopped = 1, kKilledHere = 2, kPeerLost = 3, kItself = 4;

int weight_of_code(int code) {
  if (code == 0) return kDone;
  if (code == static_cast<int>(Exit::kStopped)) return kStopped;
  return code == static_cast<int>(Exit::kPeerLost) ? kPeerLost : kItself;
}

int weight(int wait_status) {
  return WIFSIGNALED(wait_status) ? kItself : weight_of_code(WEXITSTATUS(wait_status));
}

}  // namespace

bool ends_well(int wait_status) {
  return WIFEXITED(wait_status) && weight(wait_status) <= kStopped;
}

void FirstCause::take(int rank, int wait_status, bool killed, int reported) {
  const bool by_us = killed && WIFSIGNALED(wait_status) && WTERMSIG(wait_status) == SIGKILL;
  const int mine = by_us ? std::max(kKilledHere, weight_of_code(std::max(reported, 0))) : weight(wait_status);
  const bool good = ends_well(wait_status);
  if (by_us && reported < 0 && killed_here_ < 0) killed_here_ = rank;
  if (mine > weight_ || (rank == 0 && ((good && !failed_) || (by_us && killed_)))) {
    rank_ = rank, wait_status_ = wait_status, weight_ = mine;
    killed_ = by_us;
  }
  failed_ = failed_ || !good;
}

}  // namespace lm
