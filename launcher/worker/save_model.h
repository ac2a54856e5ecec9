// Writing the trained model: its disk space is reserved before the first step, and if <run>/model cannot be
// written all the same, the model goes to another directory. One thread, the rank's.
#pragma once

#include <string>

#include "launcher/worker/run_files.h"

namespace lm {

// Size of <run>/model, files of the tokenizer included.
int64_t model_bytes(const Job& job);

// Reserved space on the disk of a directory, in an unnamed file: it is free again however the process ends.
class ReservedSpace {
 public:
  // Throws Error(12) with needed and free bytes if there is too little. If the file system cannot reserve,
  // compares with the free space and logs a note.
  ReservedSpace(const std::string& directory, int64_t bytes);
  ~ReservedSpace() { release(); }
  ReservedSpace(const ReservedSpace&) = delete;
  ReservedSpace& operator=(const ReservedSpace&) = delete;
  void release();

 private:
  int fd_ = -1;
};

// Releases `space` and writes <run>/model there. If that fails, writes it below the first directory with room
// among offload.paths, the user's cache, /var/tmp and /tmp, and throws the failure, which names that
// directory and the command to move it. `step`: steps done. `checkpoint`: see RunFiles::write_model.
void save_model(RunFiles& files, const Job& job, Rank& rank, ReservedSpace& space, int64_t step,
                const std::string& checkpoint = "");

}  // namespace lm
