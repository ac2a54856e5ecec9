// Which of a run's ranks ended it, of all that have ended. Pure.
#pragma once

namespace lm {

// Whether a rank with this wait status is done, or has stopped as it was asked to.
bool ends_well(int wait_status);

class FirstCause {
 public:
  // In the order in which ranks are gone. A rank that ended because of another is not the cause, unless no
  // other one has ended by itself; of several causes the first counts. `killed`: all ranks that lived have
  // been killed here, and the order is chance. Such a death is no cause where any rank has failed by itself:
  // of rank 0 that is how it has `reported` that it ends (an exit code; -1: it has not). Where none has,
  // rank 0 is the cause.
  void take(int rank, int wait_status, bool killed, int reported = -1);
  int rank() const { return rank_; }
  int wait_status() const { return wait_status_; }
  // The first rank that was killed here and had not reported how it ends; -1: there is none.
  int killed_here() const { return killed_here_; }

 private:
  int rank_ = 0, wait_status_ = 0;
  int weight_ = 0, killed_here_ = -1;
  bool failed_ = false, killed_ = false;  // a rank has; the cause was
};

}  // namespace lm
