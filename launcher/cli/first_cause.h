// Which of a run's ranks ended it, of all that have ended. Pure.
#pragma once

namespace lm {

// Whether a rank with this wait status is done, or has stopped as it was asked to.
bool ends_well(int wait_status);

class FirstCause {
 public:
  // In the order in which ranks are gone. A rank that ended because of another is not the cause; of several
  // causes the first counts. `killed`: all ranks that lived have been killed here, and the order is chance.
  // Then rank 0, whose record says how the run ends, is the cause unless one was known before.
  void take(int rank, int wait_status, bool killed);
  int rank() const { return rank_; }
  int wait_status() const { return wait_status_; }

 private:
  int rank_ = 0, wait_status_ = 0;
  bool failed_ = false, killed_ = false;  // a rank has; the cause was
};

}  // namespace lm
