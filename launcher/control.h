// What the door and its rank share while a run is on: a counter of stop requests (door -> rank) and the
// rank's last record (rank -> door), in a memfd that the rank inherits. Both sides map it; lock-free, so that
// a rank that dies at any instruction leaves a readable record. Any thread of the rank publishes; one thread
// of the door asks for stops.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

namespace lm {

// What a rank had reached; `checkpoint` is the path of the last one that is safe on disk ("" none), `repeat`
// the steps after it that a resumed run does again, `reason` why it ends, e.g. "error:NUM-12" ("" unknown);
// `exit_code` that it is about to end with (-1: at work), as the kernel may not let it end.
struct RankRecord {
  int64_t step = 0;
  int64_t repeat = 0;
  std::string checkpoint;
  std::string reason;
  int exit_code = -1;
};

class Control {
 public:
  // By the door; the file descriptor is close-on-exec until the rank is started.
  static Control create();
  // By the rank, from --control-fd, which is this one's from here on; throws Error(70) when it is not a
  // control region.
  static Control attach(int fd);
  ~Control();
  Control(Control&& other) noexcept;
  Control& operator=(Control&&) = delete;

  int fd() const { return fd_; }

  // Door. Counts; the first signal is the run's reason.
  void request_stop(int signal);
  RankRecord latest() const;

  // Rank. 0: go on, 1: finish the step, save and leave with exit code 75, 2 or more: leave now.
  int stop_requests() const;
  int first_signal() const;
  void publish(const RankRecord& record);
  // That the rank is about to end with that code, which later records keep.
  void publish_end(int exit_code);

 private:
  struct Region;
  struct Slot;
  explicit Control(int fd) : fd_(fd) {}
  void write(const RankRecord& record);
  int fd_ = -1;
  Region* region_ = nullptr;
  std::unique_ptr<std::mutex> writing_ = std::make_unique<std::mutex>();  // of this process's threads
};

// "SIGUSR1"; "signal 40" for those without a name.
std::string signal_name(int signal);

}  // namespace lm
