// Collectives among the ranks of a run. There are two: all-gather (`all_gather`: every rank has made a range
// of an array, and afterwards all have all of it) and reduce-scatter (`reduce_scatter`: every rank has an
// array of its own, and each adds up its range of all of them). An all-to-all is a reduce-scatter that adds
// nothing up; the rest is made of the first. Every rank enters the same collectives in the same order. A
// group belongs to a rank and is called by its compute thread; calls return when their bytes are there, but
// those of a group of GPUs (nccl_group.h), which enqueue.
//
// Throws Error(40) when another rank has ended, and Error(41) when one has not entered the same collective
// within the deadline (liveness.h); after either the group is of no more use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/byte_range.h"
#include "base/cuda.h"
#include "comm/liveness.h"

namespace lm {

// Of an array, the bytes that belong to each rank.
int64_t longest_of(std::span<const ByteRange> ranges);
// From its byte `at` on, at most `most`.
ByteRange part(const ByteRange& range, int64_t at, int64_t most);

// Some ranks of a group, while the others enter the same collective among themselves.
struct Members {
  std::vector<int> ranks;  // ascending; in every such set equally many
  int place = 0;           // of this rank among them
};
// `count` ranks, `step` apart.
Members every(int step, int first, int count, int place);

class Group {
 public:
  virtual ~Group() = default;
  virtual int rank() const = 0;
  virtual int ranks() const = 0;

  // Ranks are numbered machine by machine, `each` on every one, which divides them: what is shared goes to
  // another machine once, and not once for each of its ranks. Before the first call that is to do so, on all.
  void set_machines(int each);

  // shards[r] of `data` is what rank r has made; every rank's are the same, and they do not overlap. `what`
  // names the collective in a message. On several machines of several ranks in two levels: what ranks with
  // one place have made among these, and then what each machine's have of one another's. Only bytes move.
  // Fewer shards than ranks are of groups of so many neighbouring ranks, which divide all: in each of them
  // they are the same, and its ranks share them among themselves.
  void all_gather(const char* what, std::byte* data, std::span<const ByteRange> shards);
  // The same among `members`: shards[k] is what members.ranks[k % members] has made. All ranks make the call
  // at once; `longest`: bytes of the longest shard that any of them has.
  virtual void all_gather_among(const Members& members, const char* what, std::byte* data,
                                std::span<const ByteRange> shards, int64_t longest) = 0;
  // Copies of what groups of `group` neighbouring ranks have: shards[r] is what rank r has made, and those
  // with its place in the other groups get it.
  void share_copies(int group, const char* what, std::byte* data, std::span<const ByteRange> shards);
  // Of every rank's array of the same size, shards[r] goes to rank r: add(offset, bytes, from) is called
  // there for each part of its range, `offset` from its begin, with every rank's bytes in the order of ranks
  // (its own among them). They are valid during the call; parts are multiples of kReduceScatterPart but the
  // last.
  using Add = std::function<void(int64_t offset, int64_t bytes, std::span<const std::byte* const> from)>;
  void reduce_scatter(const char* what, const std::byte* data, std::span<const ByteRange> shards,
                      const Add& add);
  // The same among `members`: shards[i] goes to members.ranks[i], and `from` has their bytes alone. All ranks
  // make the call at once; `longest`: bytes of the longest shard that any of them has.
  virtual void reduce_scatter_among(const Members& members, const char* what, const std::byte* data,
                                    std::span<const ByteRange> shards, int64_t longest, const Add& add) = 0;

  // Of every rank's array of the same size, shards[r] goes to rank r: take(rank, offset, bytes) is called
  // there for each part of what each rank sends, which is valid during the call.
  using Take = std::function<void(int rank, int64_t offset, std::span<const std::byte> bytes)>;
  void all_to_all(const char* what, const std::byte* data, std::span<const ByteRange> shards,
                  const Take& take);

  // For a group of GPUs, which has its own stream. begin_after: the group's stream waits for the work
  // enqueued in `callers` so far; end_before: `callers` waits for the group's stream.
  virtual void begin_after(StreamView /*callers*/) {}
  virtual void end_before(StreamView /*callers*/) {}
  // Where additions of a reduce_scatter belong, of a caller that works in that stream.
  virtual StreamView stream(StreamView callers) const { return callers; }
  // After a wait for a collective: throws the error that it ended with, if any.
  virtual void check() {}

  // Bytes sent to other ranks so far; and the part of them sent to other machines.
  int64_t sent_bytes() const { return sent_; }
  int64_t sent_between_machines() const { return sent_between_; }
  // For any thread: whether this rank waits in a collective for others.
  virtual bool waits() const { return false; }
  // For any thread, of a group of GPUs; nothing of one whose calls return when they are done.
  virtual std::optional<DeviceStand> device() const { return std::nullopt; }

  // Every rank's value, in the order of ranks.
  template <class T>
  std::vector<T> gather(const char* what, const T& mine) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> all(static_cast<size_t>(ranks()));
    std::vector<ByteRange> shards;
    for (int r = 0; r < ranks(); ++r)
      shards.push_back({r * static_cast<int64_t>(sizeof(T)), static_cast<int64_t>(sizeof(T))});
    all[static_cast<size_t>(rank())] = mine;
    all_gather(what, reinterpret_cast<std::byte*>(all.data()), shards);
    return all;
  }
  // Nobody goes on before all have come.
  void barrier(const char* what) { gather(what, char{}); }
  // Rank 0's bytes, of a length that all know.
  void broadcast(const char* what, std::span<std::byte> bytes) {
    std::vector<ByteRange> shards(static_cast<size_t>(ranks()));
    shards[0].bytes = std::ssize(bytes);
    all_gather(what, bytes.data(), shards);
  }

 protected:
  void count_sent(int to, int64_t bytes);  // where the bytes leave
  // The caller's next collective belongs to the one at hand: who hears of another's end meanwhile finishes
  // both.
  bool continues() const { return continues_; }

 private:
  int machine_of(int rank) const { return machine_ranks_ > 0 ? rank / machine_ranks_ : 0; }

  int machine_ranks_ = 0;  // 0: all are on one
  int64_t sent_ = 0, sent_between_ = 0;
  bool continues_ = false;
};

inline constexpr int64_t kReduceScatterPart = 4096;  // bytes

// Every rank's text, in the order of ranks.
std::vector<std::string> gather_texts(Group& group, const char* what, const std::string& mine);

// Runs `work` on every rank. If it throws an Error on one, all throw, with the code of the first rank that
// failed; the others name that rank. An error that several ranks have in common is reported once.
void together(Group& group, const char* what, const std::function<void()>& work);

// An array that a collective in the group's stream has written: its next user waits for that, once.
class Moved {
 public:
  explicit Moved(DeviceType device) : event_(device) {}
  void record(StreamView stream) {
    event_.record(stream);
    waits_ = true;
  }
  void wait(StreamView callers) {
    if (std::exchange(waits_, false)) event_.wait(callers);
  }

 private:
  Event event_;
  bool waits_ = false;
};

// A run with one rank: nothing moves.
class LocalGroup final : public Group {
 public:
  int rank() const override { return 0; }
  int ranks() const override { return 1; }
  void all_gather_among(const Members& /*members*/, const char* /*what*/, std::byte* /*data*/,
                        std::span<const ByteRange> /*shards*/, int64_t /*longest*/) override {}
  void reduce_scatter_among(const Members& /*members*/, const char* /*what*/, const std::byte* data,
                            std::span<const ByteRange> shards, int64_t /*longest*/, const Add& add) override {
    const std::byte* const from[] = {data + shards[0].begin};
    if (shards[0].bytes > 0) add(0, shards[0].bytes, from);
  }
};

// The first thing that ranks of a job say, as the rest of what they say has no version of its own. Throws
// Error(10) on all of them where one is of another lmlaunch than rank 0.
void agree_on_version(Group& group, const std::string& mine);

}  // namespace lm
