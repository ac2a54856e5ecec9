// Memory that the ranks of one machine have in common: one of them fills it, and afterwards all read it. It
// is a memfd of the machine's first rank, which the others open through /proc and which has no name: it is
// free once its processes have ended, however they did. Owned by a rank's process; called by its compute
// thread, and by all ranks of the group alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "comm/group.h"

namespace lm {

class MachineMemory {
 public:
  // `each`: ranks of every machine, numbered machine by machine. Nothing is allocated yet.
  MachineMemory(Group& group, int each);
  ~MachineMemory();
  MachineMemory(const MachineMemory&) = delete;
  MachineMemory& operator=(const MachineMemory&) = delete;

  // Whether all ranks reach the memory of their machine's first one: those in containers of their own may
  // not.
  bool works() const { return works_; }
  // The rank that fills it.
  bool first() const { return group_.rank() % each_ == 0; }

  // Zeros, once; only the first rank may write to them. REQUIRES: works(), bytes > 0. Throws Error(31).
  std::span<std::byte> map(int64_t bytes);
  // Waits until the first rank has filled it, if it is mapped. From here on nobody can write to it, and all
  // of it is resident in every rank.
  void filled();
  // Of the mapped bytes that are resident here now what this rank's share leaves to the other ranks of its
  // machine: its resident memory counts all of those, and none that the kernel has swapped out.
  int64_t of_others() const;

 private:
  Group& group_;
  int each_;
  bool works_ = false;
  int fd_ = -1;  // until it is mapped
  std::byte* memory_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace lm
