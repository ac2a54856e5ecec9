// Copies of a run's checkpoints in a second directory (checkpoint.mirror): the local disk first, a shared one
// behind it. A copy is made by the protocol of a save (save.h): everything is written under a temporary name,
// synced, read back and compared with the manifest's checksums; then the directory is renamed. So a copy that
// is visible is valid, whenever its writer was killed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace lm {

// Copies the checkpoint in `from` to `directory`/<its name>, and replaces one of that name. Chunks are
// compared when they are read. Polls `stopped` between chunks: then nothing is left behind, and it returns
// false. Throws Error(20, 21, 22) as a save and a restore do.
bool copy_checkpoint(const std::string& from, const std::string& directory,
                     const std::function<bool()>& stopped);

struct MirrorSetup {
  std::string run;        // the run's directory; those of `files` that it has are copied before a checkpoint
  std::string directory;  // the mirror of this run: checkpoints come to <directory>/checkpoints
  std::vector<std::string> files = {};
  int64_t keep = 1;
  std::function<bool(const std::string& from, const std::string& directory,
                     const std::function<bool()>& stopped)>
      copy = copy_checkpoint;  // for tests
};

// Copies checkpoints in a thread of its own. If checkpoints come faster than they can be copied, the newest
// is copied next and those between are left out. A failure is a warning: the next checkpoint tries again. The
// owner's calls come from one thread.
class Mirror {
 public:
  explicit Mirror(MirrorSetup setup);
  ~Mirror();  // abandons a copy that is not finished
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  // The checkpoint in `path` is committed. `kept`: steps that stay in the mirror besides the newest `keep`.
  void add(const std::string& path, int64_t step, const std::vector<int64_t>& kept);
  // Steps that wait or are being copied: their checkpoints must not be deleted.
  std::vector<int64_t> in_use();
  // Waits until nothing waits and nothing is copied; `each` is called about ten times per second meanwhile.
  void wait(const std::function<void()>& each);

 private:
  struct Task {
    std::string path;
    int64_t step = 0;
    std::vector<int64_t> kept;
  };
  void work();
  void copy(const Task& task);

  const MirrorSetup setup_;
  std::mutex mutex_;  // guards the next three
  std::optional<Task> next_, now_;
  bool leave_ = false;
  std::condition_variable changed_;
  std::thread thread_;
};

}  // namespace lm
