// MPI between fibers: messages that take their time, in order between two ranks, from a table of functions
// like the plugin's (comm/mpi_api.h). A small message is sent at once; a large one when it has been received.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "comm/link_threads.h"
#include "comm/mpi_api.h"
#include "fibers.h"

namespace lm::test {

// Of a rank's clock and naps.
class FiberThreads final : public LinkThreads {
 public:
  explicit FiberThreads(Fibers& fibers) : fibers_(fibers) {}
  double now() const override;
  void nap(double seconds) const override;
  bool wait_for(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, double seconds,
                const std::function<bool()>& done) const override;
  void start(std::function<void()> work) const override;
  // From now on this rank's clock is so many seconds ahead.
  void jump(int rank, double seconds) { ahead_[rank] += seconds; }

 private:
  Fibers& fibers_;
  std::map<int, double> ahead_;
  mutable double looks_ = 0;  // of nobody's
};

class SimulatedMpi {
 public:
  // The api's functions act on the one that was made last.
  SimulatedMpi(Fibers& fibers, int ranks);
  ~SimulatedMpi();
  SimulatedMpi(const SimulatedMpi&) = delete;
  SimulatedMpi& operator=(const SimulatedMpi&) = delete;

  static const MpiApi& api();
  // Seconds on the way; set before the first message.
  std::function<double(int from, int to)> latency = [](int, int) { return 50e-6; };
  // What is sent from now on does not arrive.
  void cut(int from, int to) { cut_.insert({from, to}); }

 private:
  struct Request;
  struct Message;
  struct Functions;
  using Way = std::tuple<MpiChannel, int, int>;  // from, to

  void* send(std::span<const std::byte> bytes, const MpiAddress& address);
  void* receive(std::span<std::byte> bytes, int from, MpiChannel channel);
  int test(Request& request, MpiArrival* arrival);
  Request& new_request();

  Fibers& fibers_;
  const int ranks_;
  int joined_ = 0;
  std::set<std::pair<int, int>> cut_;
  std::vector<std::unordered_map<int, std::deque<Message>>> data_;  // per receiver, by sender
  std::vector<std::deque<Message>> notices_;                        // per receiver
  std::map<Way, double> last_;                                      // arrival, so that order is kept
  std::deque<Request> requests_;
  std::vector<Request*> free_;
};

}  // namespace lm::test
