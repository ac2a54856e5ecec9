#include "comm/nccl_group.h"

#include <fmt/format.h>
#include <chrono>
#include <thread>
#include <utility>

#include "base/clock.h"

namespace lm {
namespace {

using namespace std::chrono_literals;

constexpr const char *kStart = "start", *kOthers = "other ranks";
constexpr double kLate = Patience().late;
constexpr auto kLook = 200ms;
constexpr auto kNap = 50us;
constexpr double kTold = 0.5;      // seconds in which a rank's end is heard of
constexpr double kReasoned = 2.0;  // and in which the group's thread says why NCCL has failed
// NCCL is left alone for so long; then it is aborted though a call of this rank may be stuck in it.
constexpr auto kStuck = 2s;

// Every shard has the same length, and they lie one behind the other.
bool even(std::span<const ByteRange> shards) {
  for (size_t r = 0; r < shards.size(); ++r) {
    const auto at = shards[0].begin + static_cast<int64_t>(r) * shards[0].bytes;
    if (shards[r].bytes != shards[0].bytes || shards[r].begin != at) return false;
  }
  return true;
}

size_t length(int64_t bytes) {
  return static_cast<size_t>(bytes);
}

}  // namespace

NcclGroup::NcclGroup(NcclSetup setup) : setup_(std::move(setup)) {
  LM_CHECK(setup_.staging >= kReduceScatterPart * ranks(), "staging for a part of every rank");
  connect();
  device_ = std::make_unique<OnDevice>(setup_.staging);
  watch_.emplace(kLook, [this] { return watch(); });
  reach_neighbours();
}

void NcclGroup::connect() {
  NcclId id{};
  if (rank() == 0) must(setup_.api.unique_id(&id), kStart);
  setup_.peers.broadcast("NCCL's id", std::as_writable_bytes(std::span(&id, 1)));
  NcclConfig config;
  void* comm = nullptr;
  const int result = setup_.api.init(&comm, ranks(), id, rank(), &config);
  comm_.handle = comm;
  if (result != kNcclInProgress) must(result, kStart);
  waited_ = Waited(monotonic_seconds());
  settle(kStart);
}

// NCCL connects ranks by the first call that needs it. What connections want and do not find here, such as
// room in /dev/shm, then ends the start and not the first step.
void NcclGroup::reach_neighbours() {
  if (ranks() == 1) return;
  const NcclApi& api = setup_.api;
  std::byte* const bytes = device_->staging.data();
  const int next = (rank() + 1) % ranks(), last = (rank() + ranks() - 1) % ranks();
  enqueue(kStart, [&](void* comm, void* stream) {
    must(api.all_gather(bytes + rank(), bytes, 1, kNcclBytes, comm, stream), kStart);
  });
  enqueue(kStart, [&](void* comm, void* stream) {
    must(api.send(bytes, 1, kNcclBytes, next, comm, stream), kStart);
    must(api.receive(bytes + 1, 1, kNcclBytes, last, comm, stream), kStart);
  });
  synchronize(device_->stream.view());
  check();
}

Error NcclGroup::nccl_error(int result, const std::string& what) const {
  const char* const more =
      setup_.api.last_error(comm_.handle);  // of none: of the call that would have made one
  const std::string detail = more == nullptr ? "" : more;
  const bool no_memory = detail.find("/dev/shm") != std::string::npos;
  const bool starts = what == kStart || no_memory;
  std::string next = "see whether another rank has ended, and its message";
  if (starts) next = "see what `lmlaunch doctor` says of GPUs and NCCL; NCCL_DEBUG=WARN makes NCCL say more";
  if (no_memory)
    next =
        "make /dev/shm larger (of a container --shm-size=1g), or delete what fills it; NCCL_SHM_DISABLE=1 "
        "does without, more slowly";
  return Error(starts ? Exit::kDoesNotFit : Exit::kPeerLost,
               {.area = starts ? "NCCL-34" : "NCCL-10",
                .what = "NCCL has failed in \"" + what + "\": " + setup_.api.error_string(result) +
                        (detail.empty() ? "" : " (" + detail + ")"),
                .place = self().text(),
                .next = next});
}

void NcclGroup::must(int result, const char* what) const {
  if (result != kNcclSuccess) throw nccl_error(result, what);
}

// Until NCCL has taken the calls, which takes longer only where ranks are to be connected. Of an error the
// group's thread may know the reason.
void NcclGroup::settle(const char* what) {
  const bool watched = watch_.has_value();
  Waited waited(monotonic_seconds());
  struct Waiting {
    std::atomic<bool>& waits;
    ~Waiting() { waits = false; }
  } const waiting{waits_};
  waits_ = true;
  for (double failed = 0;;) {
    int result = kNcclSuccess;
    {
      const std::lock_guard lock(mutex_);
      check();
      must(setup_.api.async_error(comm_.handle, &result), what);
    }
    if (result == kNcclSuccess) return;
    if (result != kNcclInProgress) {
      const double now = monotonic_seconds();
      if (failed == 0) failed = now;
      if (!watched || now - failed > kReasoned) return must(result, what);
    }
    if (const double seconds = waited.look(monotonic_seconds()); seconds > kLate)
      throw not_entered(self(), kOthers, {what}, seconds);
    if (!watched) {
      if (const auto error = setup_.lost(what)) throw Error(*error);
    }
    std::this_thread::sleep_for(kNap);
  }
}

void NcclGroup::enqueue(const char* what, const std::function<void(void* comm, void* stream)>& calls) {
  {
    const std::lock_guard lock(mutex_);
    check();
    what_ = what;
    trace_.begin(what, device_->stream.view());
    must(setup_.api.group_start(), what);
    calls(comm_.handle, device_->stream.view().handle);
    const int result = setup_.api.group_end();
    if (result != kNcclInProgress) must(result, what);
  }
  settle(what);
  const std::lock_guard lock(mutex_);
  waited_ = Waited(monotonic_seconds());
  trace_.end(device_->stream.view());
}

// Collectives have the same numbers on all ranks, also where some of them have nothing to move.
void NcclGroup::count_empty(const char* what) {
  trace_.begin(what, device_->stream.view());
  trace_.end(device_->stream.view());
}

void NcclGroup::all_gather_among(const Members& members, const char* what, std::byte* data,
                                 std::span<const ByteRange> shards, int64_t /*longest*/) {
  const size_t count = members.ranks.size(), place = static_cast<size_t>(members.place);
  bool any = false;  // NCCL takes no empty call
  for (size_t k = 0; k < shards.size(); ++k) {
    any = any || (shards[k].bytes > 0 && count > 1);
    if (k % count != place) continue;
    for (const int peer : members.ranks) {
      if (peer != rank()) count_sent(peer, shards[k].bytes);
    }
  }
  if (!any) return count_empty(what);
  if (std::ssize(members.ranks) == ranks()) return nccl_all_gather(what, data, shards);
  enqueue(what, [&](void* comm, void* stream) {
    for (size_t i = 1; i < count; ++i) {
      const size_t other = (place + i) % count;
      for (size_t first = 0; first < shards.size(); first += count) {
        const ByteRange &theirs = shards[first + other], &mine = shards[first + place];
        const int peer = members.ranks[other];
        if (mine.bytes > 0)
          must(setup_.api.send(data + mine.begin, length(mine.bytes), kNcclBytes, peer, comm, stream), what);
        if (theirs.bytes > 0)
          must(setup_.api.receive(data + theirs.begin, length(theirs.bytes), kNcclBytes, peer, comm, stream),
               what);
      }
    }
  });
}

void NcclGroup::nccl_all_gather(const char* what, std::byte* data, std::span<const ByteRange> shards) {
  const NcclApi& api = setup_.api;
  const ByteRange mine = shards[static_cast<size_t>(rank())];
  enqueue(what, [&](void* comm, void* stream) {
    if (even(shards)) {
      must(api.all_gather(data + mine.begin, data + shards[0].begin, length(mine.bytes), kNcclBytes, comm,
                          stream),
           what);
      return;
    }
    for (int r = 0; r < ranks(); ++r) {
      const ByteRange& run = shards[static_cast<size_t>(r)];
      std::byte* const at = data + run.begin;
      if (run.bytes > 0) must(api.broadcast(at, at, length(run.bytes), kNcclBytes, r, comm, stream), what);
    }
  });
}

void NcclGroup::reduce_scatter_among(const Members& members, const char* what, const std::byte* data,
                                     std::span<const ByteRange> shards, int64_t longest, const Add& add) {
  const NcclApi& api = setup_.api;
  const auto count = static_cast<int>(members.ranks.size());
  const int64_t room = device_->staging.size() / count / kReduceScatterPart * kReduceScatterPart;
  const auto of = [&](int i, int64_t at) { return part(shards[static_cast<size_t>(i)], at, room); };
  std::vector<const std::byte*> from;
  for (int i = 0; i < count; ++i) from.push_back(device_->staging.data() + i * room);
  for (int64_t at = 0; at < longest; at += room) {
    const ByteRange mine = of(members.place, at);
    const auto other = [&](int i) { return (members.place + i) % count; };
    bool any = false;
    for (int i = 1; i < count; ++i) any = any || mine.bytes > 0 || of(other(i), at).bytes > 0;
    if (!any) count_empty(what);
    if (any) {
      enqueue(what, [&](void* comm, void* stream) {
        for (int i = 1; i < count; ++i) {
          const ByteRange theirs = of(other(i), at);
          const int peer = members.ranks[static_cast<size_t>(other(i))];
          if (theirs.bytes > 0)
            must(api.send(data + theirs.begin, length(theirs.bytes), kNcclBytes, peer, comm, stream), what);
          if (mine.bytes > 0)
            must(api.receive(device_->staging.data() + other(i) * room, length(mine.bytes), kNcclBytes, peer,
                             comm, stream),
                 what);
          count_sent(peer, theirs.bytes);
        }
      });
    }
    if (mine.bytes == 0) continue;
    // A copy, as the sum may be made where the array is.
    copy_bytes(device_->staging.data() + members.place * room, data + mine.begin, mine.bytes,
               device_->stream.view());
    add(at, mine.bytes, from);
  }
}

void NcclGroup::begin_after(StreamView callers) {
  device_->order.record(callers);
  device_->order.wait(device_->stream.view());
}

void NcclGroup::end_before(StreamView callers) {
  device_->order.record(device_->stream.view());
  device_->order.wait(callers);
}

void NcclGroup::check() {
  const std::lock_guard lock(failure_mutex_);
  if (failure_) throw Error(*failure_);
}

void NcclGroup::leave() {
  setup_.peers.barrier("the end of NCCL");
  const std::lock_guard lock(mutex_);
  check();
  void* const comm = comm_.handle.exchange(nullptr);
  int result = setup_.api.finalize(comm);
  Waited waited(monotonic_seconds());
  while (result == kNcclInProgress && waited.look(monotonic_seconds()) < kLate) {
    setup_.api.async_error(comm, &result);
    std::this_thread::sleep_for(kNap);
  }
  setup_.api.destroy(comm);
}

bool NcclGroup::watch() {
  trace_.look();
  std::optional<Error> error = look();
  if (!error) return true;
  // What NCCL says of a rank that has ended is not the reason.
  const double until = monotonic_seconds() + kTold;
  while (error->text().area == "NCCL-10" && monotonic_seconds() < until) {
    if (const std::optional<Error> reason = setup_.lost(here())) error = with_stand(*reason);
    std::this_thread::sleep_for(kLook / 4);
  }
  give_up(*error);
  return false;
}

std::string NcclGroup::here() {
  const std::unique_lock lock(mutex_, kLook);
  return lock ? what_ : "a call of NCCL";
}

std::optional<Error> NcclGroup::look() {
  const std::string what = here();
  if (const std::optional<Error> error = setup_.lost(what)) return with_stand(*error);
  const std::unique_lock lock(mutex_, kLook);
  if (!lock || comm_.handle == nullptr) return std::nullopt;  // a call is under way, or the ranks have left
  const double waited = waited_.look(monotonic_seconds());
  int result = kNcclSuccess;
  if (const int asked = setup_.api.async_error(comm_.handle, &result); asked != kNcclSuccess)
    return nccl_error(asked, what);
  if (result != kNcclSuccess && result != kNcclInProgress) return nccl_error(result, what);
  const DeviceProgress progress = trace_.latest();
  if (waited < kLate || progress.done == progress.enqueued) return std::nullopt;
  return not_entered(self(), kOthers, {what}, waited);
}

// Of ranks of one machine, whose GPUs one can see: which collective it is about, and who has not entered it.
// What MPI says is the same on all ranks, so that one can say it for all.
Error NcclGroup::with_stand(const Error& error) const {
  if (setup_.region == nullptr) return error;
  ErrorText text = error.text();
  text.what += fmt::format("; on {} the GPU of rank {} {}", setup_.host, rank(), trace_.stand().where);
  return Error(error.code(), text);
}

void NcclGroup::give_up(const Error& error) {
  {
    const std::lock_guard lock(failure_mutex_);
    failure_ = error;
  }
  const std::unique_lock lock(mutex_, kStuck);
  comm_.abort();
}

}  // namespace lm
