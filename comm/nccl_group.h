// The ranks of a run, each with a GPU of its own, over NCCL: the same two movements as every group, of device
// memory. What is added goes to each rank by sends and receives and is added there in the order of ranks, by
// the caller's kernel in the group's stream, so that sums have the bits of the other groups'.
//
// Calls enqueue in the group's own stream and return: begin_after and end_before say what they follow and
// what follows them. A rank that is lost leaves the others' streams standing still; a thread of the group
// looks for that, aborts what is under way, and check() throws the reason once somebody has waited. It also
// notes how far the GPU is among the calls (call_marks.h), for whoever watches over the rank. The rank owns
// the group; its compute thread calls everything but waits() and device().
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/arena.h"
#include "base/cuda.h"
#include "base/error.h"
#include "base/staging.h"
#include "base/waited.h"
#include "comm/call_marks.h"
#include "comm/group.h"
#include "comm/nccl_api.h"

namespace lm {

struct NcclSetup {
  const NcclApi& api;
  Group& peers;  // the same ranks, over host memory; outlives this group
  // What has become of other ranks, in the operation that is named: asked several times per second by the
  // group's thread.
  std::function<std::optional<Error>(const std::string& what)> lost = {};
  SharedRegion* region = nullptr;             // of all ranks; null where they share none. Outlives this group
  std::string host = {};                      // of this rank, for messages
  int64_t staging = kDeviceRankStagingBytes;  // device memory for what arrives to be added
  double late = 3600;  // seconds after which a call that others do not come to is given up
};

class NcclGroup final : public Group {
 public:
  // All ranks, each with the device selected that it computes on. Throws Error(12) where NCCL cannot be
  // loaded or refuses, Error(40, 41) when others do not come.
  explicit NcclGroup(NcclSetup setup);
  ~NcclGroup() override;  // without leave() what is under way is aborted
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  int rank() const override { return setup_.peers.rank(); }
  int ranks() const override { return setup_.peers.ranks(); }
  // Of all ranks by NCCL's own all-gather, which knows the links of a machine. Across machines that would be
  // a ring over all ranks, which brings a machine its own shards back: the two levels of `share`, each by
  // sends and receives, do not.
  void share_among(const Members& members, const char* what, std::byte* data,
                   std::span<const ByteRange> shards, int64_t longest) override;
  void exchange_among(const Members& members, const char* what, const std::byte* data,
                      std::span<const ByteRange> shards, int64_t longest, const Add& add) override;
  void begin_after(StreamView callers) override;
  void end_before(StreamView callers) override;
  StreamView stream(StreamView) const override { return device_->stream.view(); }
  void check() override;
  bool waits() const override { return waits_ || marks_.waits(); }
  std::optional<DeviceStand> device() const override { return marks_.stand(); }
  // With all others, once nothing is under way any more: leaves in order.
  void leave();

 private:
  void connect();
  void reach_neighbours();
  void share_among_all(const char* what, std::byte* data, std::span<const ByteRange> shards);
  void enqueue(const char* what, const std::function<void(void* comm, void* stream)>& calls);
  void count_empty_call(const char* what);
  void settle(const char* what);
  void must(int result, const char* what) const;
  Error nccl_error(int result, const std::string& what) const;
  Error not_come(const std::string& what, double seconds) const;
  void watch();
  void end_watch();
  std::optional<Error> look();
  Error with_stand(const Error& error) const;
  std::string what_of_call();
  void give_up(const Error& error);
  std::optional<Error> failure();

  // What calls need of the device, made once NCCL has accepted the ranks.
  struct OnDevice {
    explicit OnDevice(int64_t staging_bytes) : staging(DeviceType::kCuda, staging_bytes) {}
    Stream stream{DeviceType::kCuda};
    Memory staging;
    Event order{DeviceType::kCuda};  // recorded anew for each wait
  };
  // Aborted at its end, unless it was left or aborted before.
  struct Communicator {
    const NcclApi& api;
    std::atomic<void*> handle = nullptr;
    ~Communicator() { abort(); }
    void abort() {
      if (void* const ended = handle.exchange(nullptr); ended != nullptr) api.abort(ended);
    }
  };

  const NcclSetup setup_;
  std::unique_ptr<OnDevice> device_;
  CallMarks marks_{DeviceType::kCuda, setup_.region, setup_.peers.rank()};

  // Held during every call of NCCL, none of which waits. Guards what follows.
  std::timed_mutex mutex_;
  Communicator comm_{setup_.api};  // null: aborted, as it may be during a call that is stuck
  std::string what_ = "start";
  Waited waited_;  // since the last call was made

  // Of its own, as the other is held by a call that is stuck when the group's thread gives up.
  std::mutex failure_mutex_;
  std::optional<Error> failure_;

  std::atomic<bool> waits_ = false;  // for NCCL to take a call: it may connect the ranks first

  std::mutex leave_mutex_;
  std::condition_variable leave_;
  bool leaving_ = false;
  std::thread watch_;
};

}  // namespace lm
