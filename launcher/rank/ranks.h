// The ranks of a run, as one of them knows them: itself and the group, over memory that the door has made for
// the ranks of one machine, or over MPI in a job that mpirun or srun has started. The first one leads: it
// measures, prepares data, and writes the run's files; the others write what they have to say to a log of
// their own. One thread, the rank's.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/error.h"
#include "comm/mpi_group.h"
#include "comm/nccl_group.h"
#include "comm/shared_group.h"
#include "launcher/command_line.h"

namespace lm {

class Ranks {
 public:
  // Says an error and ends the process: MPI may still have memory of the call that has failed.
  using Abandon = std::function<void(const Error& error, Ranks& ranks)>;

  // Of work that is not shared.
  Ranks() : group_(std::make_unique<LocalGroup>()) {}
  // From --rank, --ranks-fd and --mpi; a run without them has one rank. In an MPI job, throws what the door
  // of any of the ranks has against the run, on all of them.
  Ranks(const CommandLine& line, const Abandon& abandon);
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  Group& group() { return *group_; }
  // The group for what lies on the device that is selected: the same where that is the CPU or nobody else is
  // there. Call it once, on all of them.
  Group& device_group(DeviceType device);
  int count() const { return group_->ranks(); }
  bool leads() const { return group_->rank() == 0; }
  // Whether this rank's door has no other: then it is told how far the rank is.
  bool own_door() const { return leads() || link_ != nullptr; }

  // The most ranks that share a machine, and the cores that those on the leader's machine have together:
  // mpirun may give each of them others. `cores`: this rank's own.
  int on_machine() const { return on_machine_; }
  // Whether they are numbered machine by machine, equally many on each.
  bool by_machine() const { return by_machine_; }
  int machine_cores(int cores) const {
    return machine_cores_ > 0 && affinity_decides_ ? machine_cores_ : cores;
  }

  // A failure of this rank: to the others, and on the console; one that follows from another's is not worth
  // that.
  void tell(const Error& error);
  // Of ranks that a call of their GPUs has left waiting, the first to give up speaks for all of this machine.
  bool first_to_give_up() { return !gpus_ || link_ || region_->end(); }
  // All have come to their end.
  void leave();

  // What the leader makes, on all of them; `make` is called there alone.
  std::string from_leader(const char* what, const std::function<std::string()>& make);
  // The leader first, then the others: what it makes they find.
  void in_turn(const char* what, const std::function<void()>& work);
  // Whether it is so on any of them.
  bool any(const char* what, bool here);
  // Throws Error(10) on all where `mine` is another text on one of them than on the leader.
  void agree(const char* what, const std::string& mine, const std::string& next);

 private:
  void join(const CommandLine& line, const Abandon& abandon);
  void meet_neighbours();

  int console_ = -1;  // of a rank that does not lead
  std::optional<SharedRegion> region_;
  std::unique_ptr<MpiLink> link_;
  std::unique_ptr<Group> group_;
  std::unique_ptr<NcclGroup> gpus_;
  int on_machine_ = 1, machine_cores_ = 0;
  bool affinity_decides_ = false, by_machine_ = true;
};

}  // namespace lm
