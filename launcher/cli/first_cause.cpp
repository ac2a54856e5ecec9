#include "launcher/cli/first_cause.h"

#include <sys/wait.h>

#include "base/error.h"

namespace lm {
namespace {

int weight(int wait_status) {
  if (WIFSIGNALED(wait_status)) return 3;
  const int code = WEXITSTATUS(wait_status);
  if (code == 0) return 0;
  return code == static_cast<int>(Exit::kStopped) ? 1 : code == static_cast<int>(Exit::kPeerLost) ? 2 : 3;
}

}  // namespace

bool ends_well(int wait_status) {
  return WIFEXITED(wait_status) && weight(wait_status) < 2;
}

void FirstCause::take(int rank, int wait_status, bool killed) {
  const bool by_us = killed && WIFSIGNALED(wait_status);
  const bool good = ends_well(wait_status);
  const bool worse = weight(wait_status) > weight(wait_status_);
  if (worse || (rank == 0 && ((good && !failed_) || (by_us && killed_)))) {
    rank_ = rank, wait_status_ = wait_status;
    killed_ = by_us;
  }
  failed_ = failed_ || !good;
}

}  // namespace lm
