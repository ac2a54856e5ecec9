// A rank's place in an MPI job: a thread of its own that makes all MPI calls, and the messages between it and
// the rank's compute thread, which makes none. The thread moves what it is asked to and sends the next rank
// five heartbeats a second, with the collective that this one is in. Each rank watches the one before it:
// whoever is stopped, or behind a link that is down, is given up after `silence` seconds without a heartbeat;
// whoever works is waited for. Who gives up tells all others, as does who ends with an error, so that all end
// with one reason.
//
// The compute thread constructs, calls and destroys. An Error that `move` has thrown is the end of the link,
// and MPI has none of the collective's memory. Where one fails whose messages MPI may still read or write,
// `move` does not throw: it calls `abandon`, which ends the process without giving memory back. Cancelling
// the messages instead is no way out: Open MPI cancels neither a send nor a receive whose message has begun
// to come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/error.h"
#include "comm/link_threads.h"
#include "comm/mpi_api.h"

namespace lm {

// Bytes to or from another rank: `to` is null for what is sent, `from` for what is received.
struct Transfer {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  int64_t bytes = 0;
  int peer = 0;
};

struct LinkSetup {
  const MpiApi& api;  // outlives the process's last call
  double silence = 60;
  double late = 3600;                // seconds after which one that lives and does not come is given up
  std::function<bool()> ended = {};  // whether somebody outside of MPI knows that a rank has ended
  std::string host = {};             // of this rank, for the others' messages
  // Says the error and ends the process. Without it the error is thrown, which only those may leave out whose
  // memory outlives the link's thread.
  std::function<void(const Error&)> abandon = {};
  const LinkThreads& threads = machine_threads();  // outlives the link's own thread
};

class MpiWorker;

class MpiLink {
 public:
  // Joins the job; throws Error(41) when not all of it come within twice `silence`, Error(40) when MPI fails.
  explicit MpiLink(LinkSetup setup);
  ~MpiLink();
  MpiLink(const MpiLink&) = delete;
  MpiLink& operator=(const MpiLink&) = delete;

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }

  // All transfers of one collective, which every rank enters in the same order and by the same name.
  // `continues`: the next one belongs to it, and is finished, too, by who hears of another rank's end
  // meanwhile.
  void move(const char* what, std::span<const Transfer> transfers, bool continues = false);
  // For any thread: whether a collective is on its way, here or at another rank.
  bool moving() const;
  // For any thread, while this rank waits for others outside of MPI: what has become of them.
  std::optional<Error> lost() const;
  // Tells the others that this rank ends with an error and what mends it, as far as they can be reached
  // within a second. Gives whether rank 0, which speaks for all, ends with the same one.
  bool end(Exit code, std::string why, const std::string& next = "see that rank's log");
  // By rank 0, once it has said `said` on the console: if that has the words with which another rank has
  // ended the run, that one's `end` gives true. If not, as after a vote, of which rank 0 knows who has failed
  // and not why, `end` gives false at once: mpirun ends the job a second after rank 0.
  void passed_on(Exit code, const std::string& said, const std::string& next);
  // With all others, once nobody calls any more: leaves MPI in order.
  void leave();

 private:
  std::shared_ptr<MpiWorker> worker_;  // shared with its thread, which may be stuck in MPI for ever
  int rank_ = 0, ranks_ = 1;
  uint64_t collectives_ = 0;
};

}  // namespace lm
