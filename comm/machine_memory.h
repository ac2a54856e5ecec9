// Memory that the ranks of one machine have in common: one of them fills it, and afterwards all read it. It
// is a memfd of the machine's first rank, which the others open through /proc and which has no name: it is
// free once its processes have ended, however they did. Each rank may register its mapping with its GPU.
// Owned by a rank's process, and outlives what its GPU does with the memory; called by its compute thread,
// and by all ranks of the group alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

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
  Group& group() const { return group_; }

  // More of it: zeros, to which only the first rank may write. On kCuda all of them are resident already,
  // and registered with the selected GPU, so that its copies run at the link's speed; refusal() says where
  // that failed. REQUIRES: works(), bytes > 0, not filled() yet. Throws Error(31).
  std::span<std::byte> map(int64_t bytes, DeviceType device = DeviceType::kCpu);
  // "" where CUDA has registered all that it was asked to; else its reason.
  const std::string& refusal() const { return refusal_; }
  // Waits until the first rank has filled it, if any is mapped. From here on no process can write to it, and
  // all of it is resident in every rank.
  void filled();
  // Of the mapped bytes that are resident here now what this rank's share leaves to the other ranks of its
  // machine: its resident memory counts all of those, and none that the kernel has swapped out.
  int64_t of_others() const;

 private:
  struct Mapping {
    std::byte* memory = nullptr;
    int64_t bytes = 0;
    bool registered = false;  // with CUDA
    std::span<std::byte> all() const { return {memory, static_cast<size_t>(bytes)}; }
  };
  void touch_by_turns(const Mapping& mapping);
  void register_with_gpu(Mapping& mapping, int64_t offset);

  Group& group_;
  int each_;
  bool works_ = false;
  int fd_ = -1;  // until it is filled
  std::vector<Mapping> mappings_;
  int64_t end_ = 0;  // of the file
  std::string refusal_;
};

}  // namespace lm
