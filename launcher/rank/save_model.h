// The trained model's way to the disk: its room is held from before the first step, and where <run>/model
// cannot be written all the same it goes to another place rather than nowhere. One thread, the rank's.
#pragma once

#include <string>

#include "launcher/rank/run_files.h"

namespace lm {

// Bytes that <run>/model will take, files of the tokenizer included.
int64_t model_bytes(const Job& job);

// Room on the disk of a directory, in a file without a name: whatever ends the process frees it, and nothing
// is left behind.
class ReservedSpace {
 public:
  // Throws Error(12) with need and free bytes when there is too little. Where the file system cannot reserve,
  // what is free is compared and a note says so.
  ReservedSpace(const std::string& directory, int64_t bytes);
  ~ReservedSpace() { release(); }
  ReservedSpace(const ReservedSpace&) = delete;
  ReservedSpace& operator=(const ReservedSpace&) = delete;
  void release();

 private:
  int fd_ = -1;
};

// Writes <run>/model in the room that `space` gives up. If that fails, writes it below the first directory
// with room among offload.paths, the user's cache, /var/tmp and /tmp, and throws the failure, which then says
// where the model is and how to move it. `step`: done.
// `checkpoint`: as RunFiles::write_model says.
void save_model(RunFiles& files, const Job& job, Rank& rank, ReservedSpace& space, int64_t step,
                const std::string& checkpoint = "");

}  // namespace lm
