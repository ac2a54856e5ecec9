// A group of GPUs whose links have a known rate: after each call its stream sleeps for as long as the busier
// way of this rank's link would take. Every rank's sums and bytes are the real group's.
#pragma once

#include <algorithm>

#include "comm/nccl_group.h"
#include "timed_streams.h"

namespace lm {

class ThrottledGroup final : public Group {
 public:
  ThrottledGroup(NcclGroup& inner, TimedStreams& streams) : inner_(inner), streams_(streams) {}

  double rate = 1e18;  // bytes/s each way
  bool beside = true;  // false: compute waits for each call

  int rank() const override { return inner_.rank(); }
  int ranks() const override { return inner_.ranks(); }
  void all_gather_among(const Members& members, const char* what, std::byte* data,
                        std::span<const ByteRange> shards, int64_t longest) override {
    inner_.all_gather_among(members, what, data, shards, longest);
    const int64_t own = shards[static_cast<size_t>(members.place)].bytes;  // of one machine's ranks
    moved(own * (std::ssize(members.ranks) - 1), sum(shards) - own);
  }
  void reduce_scatter_among(const Members& members, const char* what, const std::byte* data,
                            std::span<const ByteRange> shards, int64_t longest, const Add& add) override {
    inner_.reduce_scatter_among(members, what, data, shards, longest, add);
    const int64_t own = shards[static_cast<size_t>(members.place)].bytes;
    moved(sum(shards) - own, own * (std::ssize(members.ranks) - 1));
  }
  void begin_after(StreamView callers) override {
    callers_ = callers;
    inner_.begin_after(callers);
  }
  void end_before(StreamView callers) override { inner_.end_before(callers); }
  StreamView stream(StreamView callers) const override { return inner_.stream(callers); }
  void check() override { inner_.check(); }
  bool waits() const override { return inner_.waits(); }

 private:
  static int64_t sum(std::span<const ByteRange> shards) {
    int64_t bytes = 0;
    for (const ByteRange& shard : shards) bytes += shard.bytes;
    return bytes;
  }
  void moved(int64_t out, int64_t in) {
    count_sent(rank(), out);
    streams_.hold(inner_.stream(callers_), static_cast<double>(std::max(out, in)) / rate);
    if (!beside) inner_.end_before(callers_);
  }

  NcclGroup& inner_;
  TimedStreams& streams_;
  StreamView callers_;
};

}  // namespace lm
