// The ranks of a run, each with a GPU of its own, over NCCL: the same two collectives as every group, of
// device memory. What is added goes to each rank by sends and receives and is added there in the order of
// ranks, by the caller's kernel in the group's stream, so that sums have the bits of the other groups'.
//
// Calls enqueue in the group's own stream and return: begin_after and end_before say what they follow and
// what follows them. A rank that is lost leaves the others' streams standing still; a thread of the group
// looks for that, aborts what is under way, and check() throws the reason once somebody has waited. It also
// traces how far the GPU is among the collectives (collective_trace.h), for whoever watches over the rank.
// The rank owns the group; its compute thread calls everything but waits() and device().
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/arena.h"
#include "base/cuda.h"
#include "base/error.h"
#include "base/staging.h"
#include "base/waited.h"
#include "comm/collective_trace.h"
#include "comm/group.h"
#include "comm/nccl_api.h"
#include "comm/periodic.h"

namespace lm {

struct NcclSetup {
  const NcclApi& api;
  Group& peers;  // the same ranks, over host memory; outlives this group
  // Needed: what has become of other ranks, in the collective that is named. The group's thread asks several
  // times per second.
  std::function<std::optional<Error>(const std::string& what)> lost = {};
  SharedRegion* region = nullptr;             // of all ranks; null where they share none. Outlives this group
  std::string host = {};                      // of this rank, for messages
  int64_t staging = kDeviceRankStagingBytes;  // device memory for what arrives to be added
};

class NcclGroup final : public Group {
 public:
  // All ranks, each with the device selected that it computes on. Throws Error(12) where NCCL cannot be
  // loaded or refuses, Error(40, 41) when others do not come.
  explicit NcclGroup(NcclSetup setup);
  // Without leave() its end aborts what is under way.
  ~NcclGroup() override = default;

  int rank() const override { return setup_.peers.rank(); }
  int ranks() const override { return setup_.peers.ranks(); }
  // Among all ranks by NCCL's own all-gather, which knows the links of a machine. Across machines that would
  // be a ring over all ranks, which brings a machine its own shards back: the two levels of `all_gather`,
  // each by sends and receives, do not.
  void all_gather_among(const Members& members, const char* what, std::byte* data,
                        std::span<const ByteRange> shards, int64_t longest) override;
  void reduce_scatter_among(const Members& members, const char* what, const std::byte* data,
                            std::span<const ByteRange> shards, int64_t longest, const Add& add) override;
  void begin_after(StreamView callers) override;
  void end_before(StreamView callers) override;
  StreamView stream(StreamView) const override { return device_->stream.view(); }
  void check() override;
  bool waits() const override { return waits_ || trace_.waits(); }
  std::optional<DeviceStand> device() const override { return trace_.stand(); }
  // With all others, once nothing is under way any more: leaves in order.
  void leave();

 private:
  void connect();
  void reach_neighbours();
  void nccl_all_gather(const char* what, std::byte* data, std::span<const ByteRange> shards);
  void enqueue(const char* what, const std::function<void(void* comm, void* stream)>& calls);
  void count_empty(const char* what);
  void settle(const char* what);
  void must(int result, const char* what) const;
  Error nccl_error(int result, const std::string& what) const;
  RankName self() const { return {rank(), setup_.host}; }
  bool watch();
  std::optional<Error> look();
  Error with_stand(const Error& error) const;
  std::string here();
  void give_up(const Error& error);

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
  CollectiveTrace trace_{DeviceType::kCuda, setup_.region, setup_.peers.rank()};

  // Held during every call of NCCL, none of which waits. Guards what follows.
  std::timed_mutex mutex_;
  Communicator comm_{setup_.api};  // null: aborted, as it may be during a call that is stuck
  std::string what_ = "start";
  Waited waited_;  // since the last collective was enqueued

  // A separate mutex: a stuck call holds the other one when the group's thread gives up.
  std::mutex failure_mutex_;
  std::optional<Error> failure_;

  std::atomic<bool> waits_ = false;  // for NCCL to take a call: it may connect the ranks first

  std::optional<Periodic> watch_;
};

}  // namespace lm
