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

#include "base/waited.h"
#include "comm/mpi_link.h"

namespace lm {

// What a rank says of itself, between it and its neighbour or to all.
struct Sign {
  enum class Kind : int32_t { kBeat, kLeave, kEnd };
  Kind kind = Kind::kBeat;
  int32_t code = 0;
  uint64_t call = 0;  // the last one that the rank has come to, named in `what`
  char what[64] = "", host[64] = "", why[1024] = "", next[256] = "";
};
static_assert(std::is_trivially_copyable_v<Sign>);

inline constexpr double kBeatSeconds = 0.2;
inline constexpr double kTellSeconds = 1;    // for telling the others why this rank ends
inline constexpr double kHearSeconds = 1;    // for hearing that rank 0 ends for the same reason
inline constexpr double kLookSeconds = 0.1;  // of the two above, what counts at most between two looks
inline constexpr double kComeSeconds = 0.1;  // for what was sent before a rank has ended
inline constexpr char kLookForRank[] =
    "see whether that process is stopped or its machine unreachable; then start the same command again";

// "2.5 s"
std::string seconds_of(double value);
void copy_text(char* to, size_t size, const std::string& from);

class MpiWorker {
 public:
  explicit MpiWorker(LinkSetup setup) : setup_(std::move(setup)) {}

  // The compute thread's side (mpi_link.cpp).
  void wait_joined();
  void move(const char* what, std::span<const Transfer> transfers, bool continues);
  std::optional<Error> lost();
  bool moving();
  bool end(Exit code, std::string why, const std::string& next);
  void passed_on(Exit code, const std::string& said, const std::string& next);
  bool leave();
  // Whether the thread has ended.
  bool stop();
  int rank = 0, ranks = 1;

  void run();  // the thread (mpi_worker.cpp)

 private:
  struct Order {
    const char* what = "";
    uint64_t call = 0;
    int tag = 0;
    std::span<const Transfer> transfers;
    double began = 0;
    Waited waited = {};
    bool continues = false;  // the next one belongs to it
  };
  struct Pending {
    void* request = nullptr;
    const Transfer* transfer = nullptr;
  };

  // Ends a call of the compute thread's that has failed.
  [[noreturn]] void fail(std::unique_lock<std::mutex>& lock, const Error& error);
  bool wait(std::unique_lock<std::mutex>& lock, double seconds, const std::function<bool()>& done);
  std::string here() const { return "rank " + std::to_string(rank); }
  Error mpi_error(const std::string& reason) const;
  // The thread's.
  bool turn();
  void take_order();
  void begin_order();
  bool advance_order();
  void take_signs();
  void take(const Sign& sign, int from);
  void beat();
  void look_at_neighbour();
  void look_at_late();
  // Until kTellSeconds have been waited.
  void tell_all(const Sign& sign, Waited& waited);
  void fail_with_it();
  void speak_once(std::optional<Sign> last_word);
  bool say_goodbye();
  bool finish(void*& request, MpiArrival* arrival = nullptr);
  void* begin_send(const Sign& sign, int to);
  void give_up(const Error& error);
  Sign sign(Sign::Kind kind) const;
  Sign word_of_end(Exit code, const std::string& why, const std::string& next) const;

  const LinkSetup setup_;

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  // Guarded by the mutex.
  std::optional<Order> asked_;  // until it is done
  std::optional<Sign> last_word_;
  std::optional<Error> failure_;
  std::optional<Sign> heard_word_;  // with which another rank has ended the run
  std::string told_by_leader_;      // why rank 0 ends
  bool joined_ = false, leaving_ = false, stopping_ = false;
  bool released_ = false;  // the thread begins nothing of what it was asked to move any more
  bool taken_ = false;     // the thread has begun what `asked_` says, and MPI may have its memory
  bool ended_ = false;
  uint64_t turns_ = 0;  // of the thread: it is not stuck in MPI

  // The thread's own.
  std::optional<Order> order_;
  bool continues_ = false;  // what belongs to the last one comes next
  std::vector<Pending> pending_;
  std::deque<Sign> words_;  // of an end, which MPI may still read
  uint64_t call_ = 0;
  std::string what_ = "start";
  Sign heard_, spoken_, neighbour_;
  void *hearing_ = nullptr, *speaking_ = nullptr;
  double heard_at_ = 0, spoken_at_ = 0, turned_at_ = 0;
  bool neighbour_left_ = false;
  bool leader_lost_ = false;        // it says nothing any more
  std::optional<Error> heard_end_;  // another rank has ended the run

  uint64_t calls_ = 0;  // the compute thread's
};

}  // namespace lm
