// The ranks of a run as seen by one of them: itself and the group, over memory that the CLI process has made
// for the ranks of one machine, or over MPI in a job that mpirun or srun has started. Rank 0 leads: it
// measures, prepares data, and writes the run's files; the others print to logs of their own. One thread, the
// rank's.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/error.h"
#include "comm/machine_memory.h"
#include "comm/mpi_group.h"
#include "comm/nccl_group.h"
#include "comm/shared_group.h"
#include "launcher/command_line.h"

namespace lm {

class Ranks {
 public:
  // Reports an error and ends the process: MPI may still use memory of the collective that failed.
  using Abandon = std::function<void(const Error& error, Ranks& ranks)>;

  // A single rank.
  Ranks() : group_(std::make_unique<LocalGroup>()) {}
  // From --rank, --ranks-fd and --mpi; a run without them has one rank. In an MPI job, if any rank's CLI
  // process refuses the run, throws that error on all ranks.
  Ranks(const CommandLine& line, const Abandon& abandon);
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  Group& group() { return *group_; }
  // The group for memory of the selected device: `group()` itself on the CPU or with one rank. Call it once,
  // on all ranks.
  Group& device_group(DeviceType device);
  int count() const { return group_->ranks(); }
  bool leads() const { return group_->rank() == 0; }
  // Whether this rank's CLI process supervises no other rank: then this rank sends it progress records.
  bool own_cli() const { return leads() || link_ != nullptr; }

  // The largest number of ranks on one machine, and the cores that those on rank 0's machine have together:
  // mpirun may give each of them others. `cores`: this rank's own.
  int on_machine() const { return on_machine_; }
  // Whether ranks are numbered machine by machine, equally many on each.
  bool by_machine() const { return by_machine_; }
  int machine_cores(int cores) const {
    return machine_cores_ > 0 && affinity_decides_ ? machine_cores_ : cores;
  }

  // Finds out, on all ranks, whether those of a machine can have their frozen weights in common; if they
  // cannot, machine_memory() stays null, and the log says why.
  void share_memory();
  MachineMemory* machine_memory() { return memory_ ? &*memory_ : nullptr; }

  // Reports a failure of this rank to the others, and on the console unless it follows from another rank's
  // failure.
  void tell(const Error& error);
  // If ranks wait in a collective of their GPUs, the first one to give up reports it for all on this machine.
  bool first_to_give_up() { return !gpus_ || link_ || region_->end(); }
  // Waits until all ranks have reached their end.
  void leave();

  // Returns what `make` returns on rank 0, the only rank that calls it.
  std::string from_leader(const char* what, const std::function<std::string()>& make);
  // Runs `work` on rank 0 first, then on the others, which find what it made.
  void in_turn(const char* what, const std::function<void()>& work);
  // Whether `here` is true on any rank.
  bool any(const char* what, bool here);
  // Throws Error(10) on all ranks if one of them has another `mine` than rank 0.
  void agree(const char* what, const std::string& mine, const std::string& next);

 private:
  void join(const CommandLine& line, const Abandon& abandon);
  void meet_neighbours();

  int console_ = -1;  // of every rank but rank 0
  std::optional<SharedRegion> region_;
  std::unique_ptr<MpiLink> link_;
  std::unique_ptr<Group> group_;
  std::unique_ptr<NcclGroup> gpus_;
  std::optional<MachineMemory> memory_;
  int on_machine_ = 1, machine_cores_ = 0;
  bool affinity_decides_ = false, by_machine_ = true;
};

}  // namespace lm
