// The two sides of a link: what the compute thread asks for, and the thread that makes all MPI calls. They
// meet under one mutex, which nobody holds during an MPI call.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "comm/liveness.h"
#include "comm/mpi_link.h"

namespace lm {

// What a rank posts of itself: to the next rank, or at its end to all.
struct Notice {
  enum class Kind : int32_t { kHeartbeat, kLeave, kEnd };
  Kind kind = Kind::kHeartbeat;
  int32_t code = 0;
  int32_t rank = 0;     // whose it is: rank 0 passes on an end that another has told it
  uint64_t number = 0;  // of the last collective that the rank has entered, which `what` names
  char what[64] = "", host[64] = "", why[1024] = "", next[256] = "";
};
static_assert(std::is_trivially_copyable_v<Notice>);

inline constexpr double kHeartbeatSeconds = 0.2;
inline constexpr double kTellSeconds = 1;    // for telling the others why this rank ends
inline constexpr double kHearSeconds = 1;    // for hearing that rank 0 ends for the same reason
inline constexpr double kLookSeconds = 0.1;  // of the two above, what counts at most between two looks
inline constexpr double kComeSeconds = 0.1;  // for what was sent before a rank has ended

class MpiWorker {
 public:
  explicit MpiWorker(LinkSetup setup) : setup_(std::move(setup)), liveness_(self(), 1, patience(), 0) {}

  void run();  // the thread (mpi_worker.cpp)

 private:
  friend class MpiLink;  // the compute thread's side

  struct Order {
    std::string what = {};  // a copy: the thread may have it when the caller is gone
    uint64_t number = 0;
    int tag = 0;
    std::span<const Transfer> transfers;
    double began = 0;
    bool continues = false;  // the next one belongs to it
  };
  struct Pending {
    void* request = nullptr;
    const Transfer* transfer = nullptr;
    int64_t bytes = 0;
  };

  // Ends a collective that has failed.
  [[noreturn]] void fail(std::unique_lock<std::mutex>& lock, const Error& error);
  bool wait(std::unique_lock<std::mutex>& lock, double seconds, const std::function<bool()>& done);
  bool wait_ended(std::unique_lock<std::mutex>& lock, double seconds);
  bool someone_ended() const { return setup_.ended && setup_.ended(); }
  double clock() const { return setup_.threads.now(); }
  RankName self() const { return {rank_, setup_.host}; }
  Patience patience() const { return {setup_.silence, setup_.late}; }
  Error mpi_error() const;
  // The thread's.
  bool turn();
  void take_order();
  void begin_order();
  bool advance_order();
  void take_notices();
  void take(const Notice& notice, int from);
  void post_heartbeat();
  void look_at_neighbour(double now);
  void look_at_late(double now);
  // Until kTellSeconds have been waited.
  void tell_all(const Notice& notice, Waited& waited);
  void fail_with_it();
  void speak_once(std::optional<Notice> last_word);
  bool say_goodbye();
  bool finish(void*& request, MpiArrival* arrival = nullptr);
  void* begun(void* request) const;
  void* begin_send(const Notice& notice, int to);
  void give_up(const Error& error);
  Notice notice(Notice::Kind kind) const;
  Notice end_notice(Exit code, const std::string& why, const std::string& next) const;

  const LinkSetup setup_;
  int rank_ = 0, ranks_ = 1;  // once joined

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  // Guarded by the mutex.
  std::optional<Order> asked_;  // until it is done
  std::optional<Notice> last_word_;
  std::optional<Error> failure_;
  std::optional<Notice> heard_word_;  // with which another rank has ended the run
  std::string told_by_leader_;        // why rank 0 ends
  bool joined_ = false, leaving_ = false, stopping_ = false;
  bool released_ = false;  // the thread begins nothing of what it was asked to move any more
  bool taken_ = false;     // the thread has begun what `asked_` says, and MPI may have its memory
  bool ended_ = false;
  uint64_t turns_ = 0;  // of the thread: it is not stuck in MPI

  // The thread's own.
  std::optional<Order> order_;
  bool continues_ = false;  // what belongs to the last one comes next
  std::vector<Pending> pending_;
  char text_[512] = "";       // why MPI has failed
  std::deque<Notice> words_;  // of an end, which MPI may still read
  Liveness liveness_;
  Posted neighbour_;
  Notice heard_, spoken_;
  void *hearing_ = nullptr, *speaking_ = nullptr;
  double spoken_at_ = 0;
  bool neighbour_left_ = false;
  bool leader_lost_ = false;        // it says nothing any more
  std::optional<Error> heard_end_;  // another rank has ended the run
};

}  // namespace lm
