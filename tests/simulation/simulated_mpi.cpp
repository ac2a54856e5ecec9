#include "simulated_mpi.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <span>
#include <tuple>

#include "base/error.h"

namespace lm::test {
namespace {

constexpr double kLeastNap = 5e-3;    // as on a machine with many processes; keeps the number of turns small
constexpr int64_t kSentAtOnce = 512;  // bytes, and all notices

SimulatedMpi* world = nullptr;

}  // namespace

double FiberThreads::now() const {
  if (fibers_.owner() < 0) return fibers_.now() + ++looks_;  // after the job: nobody waits for what is gone
  const auto found = ahead_.find(fibers_.owner());
  return fibers_.now() + (found == ahead_.end() ? 0 : found->second);
}

void FiberThreads::nap(double seconds) const {
  fibers_.nap(std::max(seconds, kLeastNap));
}

bool FiberThreads::wait_for(std::condition_variable& /*changed*/, std::unique_lock<std::mutex>& lock,
                            double seconds, const std::function<bool()>& done) const {
  if (fibers_.owner() < 0) return done();
  const double until = fibers_.now() + seconds;
  while (!done()) {
    if (fibers_.now() >= until) return false;
    lock.unlock();
    fibers_.nap(kLeastNap);
    lock.lock();
  }
  return true;
}

void FiberThreads::start(std::function<void()> work) const {
  fibers_.start(fibers_.owner(), std::move(work));
}

struct SimulatedMpi::Request {
  bool sends = false, done = false;
  std::span<std::byte> into;
  int from = -1, at = 0;
  MpiChannel channel = MpiChannel::kData;
};

struct SimulatedMpi::Message {
  int from = 0, tag = 0;
  double arrives = 0;
  std::vector<std::byte> bytes;
  Request* sender = nullptr;  // which waits until it is received
};

struct SimulatedMpi::Functions {
  static int join(int* rank, int* ranks, char* /*text*/, int /*size*/) {
    *rank = world->fibers_.owner();
    *ranks = world->ranks_;
    ++world->joined_;
    while (world->joined_ < world->ranks_) world->fibers_.nap(kLeastNap);
    return 0;
  }
  static void* send(const void* data, int64_t bytes, const MpiAddress* address, char* /*text*/,
                    int /*size*/) {
    return world->send({static_cast<const std::byte*>(data), static_cast<size_t>(bytes)}, *address);
  }
  static void* receive(void* data, int64_t bytes, int from, MpiChannel channel, char* /*text*/,
                       int /*size*/) {
    return world->receive({static_cast<std::byte*>(data), static_cast<size_t>(bytes)}, from, channel);
  }
  static int test(void* request, MpiArrival* arrival, char* /*text*/, int /*size*/) {
    return world->test(*static_cast<Request*>(request), arrival);
  }
  static void leave() {}
};

SimulatedMpi::SimulatedMpi(Fibers& fibers, int ranks)
    : fibers_(fibers),
      ranks_(ranks),
      data_(static_cast<size_t>(ranks)),
      notices_(static_cast<size_t>(ranks)) {
  world = this;
}

SimulatedMpi::~SimulatedMpi() {
  world = nullptr;
}

const MpiApi& SimulatedMpi::api() {
  static const MpiApi functions{.join = Functions::join,
                                .send = Functions::send,
                                .receive = Functions::receive,
                                .test = Functions::test,
                                .leave = Functions::leave};
  return functions;
}

SimulatedMpi::Request& SimulatedMpi::new_request() {
  if (free_.empty()) return requests_.emplace_back();
  Request& request = *free_.back();
  free_.pop_back();
  return request = Request();
}

void* SimulatedMpi::send(std::span<const std::byte> bytes, const MpiAddress& address) {
  const int from = fibers_.owner(), to = address.to;
  const bool notice = address.channel == MpiChannel::kNotices;
  Request& request = new_request();
  request.sends = true;
  request.done = notice || std::ssize(bytes) <= kSentAtOnce;
  double& last = last_[{address.channel, from, to}];
  last = cut_.contains({from, to}) ? std::numeric_limits<double>::infinity()
                                   : std::max(last, fibers_.now() + latency(from, to));
  Message message{.from = from,
                  .tag = address.tag,
                  .arrives = last,
                  .bytes = {bytes.begin(), bytes.end()},
                  .sender = request.done ? nullptr : &request};
  const auto receiver = static_cast<size_t>(to);
  (notice ? notices_[receiver] : data_[receiver][from]).push_back(std::move(message));
  return &request;
}

void* SimulatedMpi::receive(std::span<std::byte> bytes, int from, MpiChannel channel) {
  Request& request = new_request();
  request.into = bytes;
  request.from = from;
  request.at = fibers_.owner();
  request.channel = channel;
  return &request;
}

int SimulatedMpi::test(Request& request, MpiArrival* arrival) {
  if (request.sends) {
    if (request.done) free_.push_back(&request);
    return request.done ? 1 : 0;
  }
  const auto at = static_cast<size_t>(request.at);
  std::deque<Message>& waiting =
      request.channel == MpiChannel::kNotices ? notices_[at] : data_[at][request.from];
  const auto come = [this](const Message& one) { return one.arrives <= fibers_.now(); };
  const auto found = request.from >= 0 ? waiting.begin() : std::ranges::find_if(waiting, come);
  if (found == waiting.end() || !come(*found)) return 0;
  const bool longer = found->bytes.size() > request.into.size();
  if (!longer) std::ranges::copy(found->bytes, request.into.begin());
  *arrival = {.from = found->from, .tag = found->tag, .bytes = longer ? -1 : std::ssize(found->bytes)};
  if (found->sender != nullptr) found->sender->done = true;
  waiting.erase(found);
  free_.push_back(&request);
  return 1;
}

}  // namespace lm::test
