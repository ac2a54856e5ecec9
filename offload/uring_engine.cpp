// The io_uring engine. One thread makes it, submits and reaps; completions run in that thread
// (DEFER_TASKRUN), so no interrupt lands on a compute thread. Buffers and files are registered: the kernel
// then neither pins pages nor looks up the file per request, which is two thirds of its CPU time at 1 MiB.
#include <fmt/format.h>
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>

#include "base/bytes.h"
#include "offload/engines.h"
#include "offload/io_failure.h"

namespace lm {
namespace {

constexpr uint64_t kWakeId = ~uint64_t{0};
constexpr int64_t kLargestIovec = kGiB;  // the kernel's limit of one registered buffer
constexpr size_t kMostIovecs = 1024;     // UIO_MAXIOV, the bound of older kernels
constexpr int kMostRefusals = 5000;      // of a submission, 1 ms apart

RefusedCall ring_error(int error, const std::string& call) {
  return RefusedCall(
      error,
      {.area = "IO-18",
       .what = call + " refused: " + errno_text(error),
       .place = "io_uring",
       .next = "allow io_uring (seccomp profile, kernel.io_uring_disabled), or set io.engine = \"threads\""});
}

// The ring and its wake descriptor, released even if construction fails later.
class Ring {
 public:
  explicit Ring(unsigned entries) {
    // Newest flags first; a kernel that does not know one answers EINVAL.
    constexpr unsigned kFlags[] = {
        IORING_SETUP_CLAMP | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
        IORING_SETUP_CLAMP | IORING_SETUP_SINGLE_ISSUER, IORING_SETUP_CLAMP, 0};
    int status = -EINVAL;
    for (unsigned flags : kFlags) {
      params_ = {};
      params_.flags = flags;
      status = ::io_uring_queue_init_params(entries, &ring_, &params_);
      if (status != -EINVAL) break;
    }
    if (status < 0) throw ring_error(-status, "io_uring_setup");
    event_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (event_ < 0) {
      const int error = errno;
      ::io_uring_queue_exit(&ring_);
      throw ring_error(error, "eventfd");
    }
  }
  ~Ring() {
    ::io_uring_queue_exit(&ring_);
    ::close(event_);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  io_uring* get() { return &ring_; }
  int event() const { return event_; }
  bool deferred() const { return (params_.flags & IORING_SETUP_DEFER_TASKRUN) != 0; }
  int completions() const { return static_cast<int>(params_.cq_entries); }

 private:
  io_uring ring_{};
  io_uring_params params_{};
  int event_ = -1;
};

class UringEngine final : public IoEngine {
 public:
  explicit UringEngine(const EngineSetup& setup)
      : ring_(static_cast<unsigned>(std::clamp(setup.depth, 1, 32768)) + 1) {
    // One completion more than requests: the wake's.
    depth_ = std::clamp(setup.depth, 1, ring_.completions() - 1);
    register_files(setup.files);
    register_buffers(setup.buffers);
  }
  ~UringEngine() override {
    // After a failure requests may still be in flight, in memory that the caller is about to free.
    std::vector<IoResult> ignored;
    try {
      while (in_flight_ > 0) wait(ignored);
    } catch (const std::exception&) {
    }
    // The kernel destroys a ring in the background; files and pages must be free now. Returns ENXIO if none
    // are registered.
    ::io_uring_unregister_buffers(ring_.get());
    ::io_uring_unregister_files(ring_.get());
  }

  int depth() const override { return depth_; }
  void submit(const IoRequest& request) override;
  void wait(std::vector<IoResult>& results) override;
  void wake() override {
    const uint64_t one = 1;
    // Fails only when the counter is full, and then the ring wakes up anyway.
    [[maybe_unused]] const ssize_t written = ::write(ring_.event(), &one, sizeof one);
  }
  std::string description() const override;

 private:
  struct Buffer {
    const std::byte* begin;
    const std::byte* end;
    int index;
  };

  void register_files(std::span<const IoFile> files);
  void register_buffers(std::span<const std::span<std::byte>> buffers);
  // The registered buffer that contains the whole request; -1 if none does.
  int buffer_of(const IoRequest& request) const;
  io_uring_sqe* next_entry();
  void arm_wake();
  void reap(std::vector<IoResult>& results, bool* woken);

  Ring ring_;
  int depth_ = 0;
  int files_ = 0;
  std::vector<Buffer> buffers_;  // by address; empty when unregistered
  std::string refusal_;          // why registration of the buffers was refused
  int in_flight_ = 0;
  bool wake_armed_ = false;
};

void UringEngine::register_files(std::span<const IoFile> files) {
  std::vector<int> descriptors;
  for (const IoFile& file : files) descriptors.push_back(file.descriptor);
  files_ = static_cast<int>(descriptors.size());
  if (descriptors.empty()) return;
  const int status =
      ::io_uring_register_files(ring_.get(), descriptors.data(), static_cast<unsigned>(descriptors.size()));
  if (status < 0) throw ring_error(-status, "io_uring_register (files)");
}

void UringEngine::register_buffers(std::span<const std::span<std::byte>> buffers) {
  std::vector<iovec> vectors;
  int64_t total = 0;
  for (std::span<std::byte> buffer : buffers) {
    total += static_cast<int64_t>(buffer.size());
    while (!buffer.empty()) {
      const size_t bytes = std::min(buffer.size(), static_cast<size_t>(kLargestIovec));
      buffers_.push_back({buffer.data(), buffer.data() + bytes, static_cast<int>(vectors.size())});
      vectors.push_back({buffer.data(), bytes});
      buffer = buffer.subspan(bytes);
    }
  }
  if (vectors.empty()) return;
  const int status =
      vectors.size() > kMostIovecs
          ? -E2BIG
          : ::io_uring_register_buffers(ring_.get(), vectors.data(), static_cast<unsigned>(vectors.size()));
  if (status < 0) {
    buffers_.clear();
    refusal_ = errno_name(-status);
    if (status == -ENOMEM) refusal_ += ": RLIMIT_MEMLOCK is below " + format_bytes(total);
  }
  std::sort(buffers_.begin(), buffers_.end(),
            [](const Buffer& a, const Buffer& b) { return std::less<>()(a.begin, b.begin); });
}

int UringEngine::buffer_of(const IoRequest& request) const {
  auto after =
      std::upper_bound(buffers_.begin(), buffers_.end(), request.memory,
                       [](const std::byte* p, const Buffer& b) { return std::less<>()(p, b.begin); });
  if (after == buffers_.begin()) return -1;
  const Buffer& buffer = *--after;
  return request.memory < buffer.end && request.bytes <= buffer.end - request.memory ? buffer.index : -1;
}

io_uring_sqe* UringEngine::next_entry() {
  if (io_uring_sqe* entry = ::io_uring_get_sqe(ring_.get())) return entry;
  const int status = ::io_uring_submit(ring_.get());
  io_uring_sqe* entry = ::io_uring_get_sqe(ring_.get());
  if (entry == nullptr) throw ring_error(status < 0 ? -status : EBUSY, "io_uring_enter");
  return entry;
}

void UringEngine::submit(const IoRequest& request) {
  LM_CHECK(in_flight_ < depth_, "more requests than the ring's depth");
  LM_CHECK(request.id != kWakeId && request.file >= 0 && request.file < files_ && request.bytes > 0 &&
               request.bytes <= kGiB,
           "not a request");
  io_uring_sqe* entry = next_entry();
  const auto bytes = static_cast<unsigned>(request.bytes);
  const auto offset = static_cast<uint64_t>(request.offset);
  const int buffer = buffer_of(request);
  if (request.direction == IoDirection::kRead) {
    if (buffer >= 0) {
      ::io_uring_prep_read_fixed(entry, request.file, request.memory, bytes, offset, buffer);
    } else {
      ::io_uring_prep_read(entry, request.file, request.memory, bytes, offset);
    }
  } else if (buffer >= 0) {
    ::io_uring_prep_write_fixed(entry, request.file, request.memory, bytes, offset, buffer);
  } else {
    ::io_uring_prep_write(entry, request.file, request.memory, bytes, offset);
  }
  ::io_uring_sqe_set_flags(entry, IOSQE_FIXED_FILE);
  ::io_uring_sqe_set_data64(entry, request.id);
  ++in_flight_;
}

void UringEngine::arm_wake() {
  if (wake_armed_) return;
  io_uring_sqe* entry = next_entry();
  ::io_uring_prep_poll_add(entry, ring_.event(), POLLIN);
  ::io_uring_sqe_set_data64(entry, kWakeId);
  wake_armed_ = true;
}

void UringEngine::reap(std::vector<IoResult>& results, bool* woken) {
  io_uring_cqe* completion = nullptr;
  unsigned head = 0, seen = 0;
  int wake_result = 0;
  io_uring_for_each_cqe(ring_.get(), head, completion) {
    ++seen;
    if (completion->user_data == kWakeId) {
      wake_armed_ = false;
      *woken = true;
      wake_result = completion->res;
    } else {
      --in_flight_;
      results.push_back({completion->user_data, completion->res});
    }
  }
  ::io_uring_cq_advance(ring_.get(), seen);
  if (!*woken) return;
  if (wake_result < 0) throw ring_error(-wake_result, "poll in the ring");
  uint64_t count = 0;
  if (::read(ring_.event(), &count, sizeof count) < 0 && errno != EAGAIN && errno != EINTR)
    throw ring_error(errno, "read of the wake descriptor");
}

void UringEngine::wait(std::vector<IoResult>& results) {
  const size_t before = results.size();
  bool woken = false;
  for (int refusals = 0;;) {
    arm_wake();
    const int status = ::io_uring_submit_and_wait(ring_.get(), 1);
    reap(results, &woken);
    if (results.size() > before || woken) return;
    if (status >= 0 || status == -EINTR) continue;
    // EAGAIN, EBUSY: the kernel is out of memory for requests; the queued submissions are retried.
    if ((status != -EAGAIN && status != -EBUSY) || ++refusals > kMostRefusals)
      throw ring_error(-status, "io_uring_enter");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::string UringEngine::description() const {
  std::string text = fmt::format("io_uring, depth {}, registered files", depth_);
  if (!refusal_.empty()) {
    text += ", unregistered buffers (" + refusal_ + ")";
  } else {
    text += buffers_.empty() ? ", unregistered buffers" : ", registered buffers";
  }
  return ring_.deferred() ? text + ", deferred completions" : text;
}

}  // namespace

std::unique_ptr<IoEngine> make_uring_engine(const EngineSetup& setup) {
  return std::make_unique<UringEngine>(setup);
}

}  // namespace lm
