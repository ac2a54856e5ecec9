// Memory that the CLI process and its rank share during a run: a counter of stop requests (CLI -> rank) and
// the rank's last progress record (rank -> CLI), in a memfd that the rank inherits. Both sides map it;
// lock-free, so that a rank that dies at any instruction leaves a readable record. Any thread of the rank
// publishes; one thread of the CLI requests stops.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

namespace lm {

// Last progress record of a rank. `checkpoint` is the path of the last committed checkpoint ("": none),
// `repeat` the number of steps after it that a resumed run repeats, `reason` why it ends, e.g. "error:NUM-12"
// ("": unknown), `exit_code` the code that it is about to end with (-1: running), in case the kernel does not
// let it end.
struct WorkerRecord {
  int64_t step = 0;
  int64_t repeat = 0;
  std::string checkpoint;
  std::string reason;
  int exit_code = -1;
};

class Control {
 public:
  // Called by the CLI; the file descriptor is close-on-exec until the rank is started.
  static Control create();
  // Called by the rank, with the descriptor of --control-fd, which the object then owns; throws Error(70) if
  // it is not a control region.
  static Control attach(int fd);
  ~Control();
  Control(Control&& other) noexcept;
  Control& operator=(Control&&) = delete;

  int fd() const { return fd_; }

  // CLI: adds a stop request; the first signal is the run's reason.
  void request_stop(int signal);
  WorkerRecord latest() const;

  // Rank. 0: continue, 1: finish the step, save and exit with code 75, 2 or more: exit now.
  int stop_requests() const;
  int first_signal() const;
  void publish(const WorkerRecord& record);
  // Records that the rank is about to end with that code, which later records keep.
  void publish_end(int exit_code);

 private:
  struct Region;
  struct Slot;
  explicit Control(int fd) : fd_(fd) {}
  void write(const WorkerRecord& record);
  int fd_ = -1;
  Region* region_ = nullptr;
  std::unique_ptr<std::mutex> writing_ = std::make_unique<std::mutex>();  // serializes this process's writers
};

// "SIGUSR1"; "signal 40" for a signal without a name.
std::string signal_name(int signal);

}  // namespace lm
