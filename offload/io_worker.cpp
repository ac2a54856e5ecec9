#include "offload/io_worker.h"

#include <fmt/format.h>
#include <algorithm>
#include <bit>
#include <cerrno>
#include <optional>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "offload/io_failure.h"

namespace lm {
namespace {

constexpr std::chrono::microseconds kFirstPause{20};
constexpr int kMostMoves = 2;  // relocations of a request: to another path, then within it

const char* verb(IoDirection direction) {
  return direction == IoDirection::kRead ? "read" : "write";
}

}  // namespace

IoWorker::IoWorker(IoFiles& space, std::unique_ptr<IoEngine> engine, int64_t block, IoRetry retry)
    : space_(space),
      engine_(std::move(engine)),
      block_(block),
      retry_(retry),
      unanswered_(space.files().size()) {
  LM_CHECK(engine_ != nullptr && engine_->depth() > 0, "an I/O queue without an engine");
  slots_.resize(static_cast<size_t>(engine_->depth()));
  for (int i = engine_->depth() - 1; i >= 0; --i) free_.push_back(i);
}

void IoWorker::add(Transfer* transfer) {
  waiting(transfer->direction).push_back(transfer);
}

void IoWorker::submit() {
  while (!free_.empty()) {
    // The direction with fewer bytes in flight goes first, so that a read never queues behind many writes.
    const bool reads = !waiting(IoDirection::kRead).empty(), writes = !waiting(IoDirection::kWrite).empty();
    if (!reads && !writes) return;
    const bool read = reads && (!writes || flying(IoDirection::kRead) <= flying(IoDirection::kWrite));
    std::deque<Transfer*>& row = waiting(read ? IoDirection::kRead : IoDirection::kWrite);
    Transfer* const transfer = row.front();
    start_request(transfer);
    if (transfer->started == transfer->bytes) row.pop_front();
  }
}

void IoWorker::start_request(Transfer* transfer) {
  // The part with the least progress, so that all paths work on the transfer at once.
  const auto fraction = [](const Transfer::Part& part) {
    return static_cast<double>(part.started) / static_cast<double>(part.bytes);
  };
  Transfer::Part& part = *std::min_element(
      transfer->parts.begin(), transfer->parts.end(),
      [&](const Transfer::Part& a, const Transfer::Part& b) { return fraction(a) < fraction(b); });
  const ExtentPiece place =
      relocations_.find(part.file, part.offset + part.started, std::min(block_, part.bytes - part.started));
  const int64_t bytes = place.bytes;
  if (transfer->started == 0) {
    transfer->start_ns = steady_ns();
    if (under_way_++ == 0) busy_since_ = transfer->start_ns;
  }
  const int index = free_.back();
  free_.pop_back();
  Slot& slot = slots_[static_cast<size_t>(index)];
  slot.transfer = transfer;
  slot.tries = 0;
  slot.read_errors = slot.moves = 0;
  slot.own = {part.file, part.offset + part.started, bytes};
  slot.request = {.direction = transfer->direction,
                  .file = place.file,
                  .offset = place.offset,
                  .memory = part.memory + part.started,
                  .bytes = bytes,
                  .id = (static_cast<uint64_t>(++slot.use) << 31) | static_cast<uint64_t>(index)};
  part.started += bytes;
  transfer->started += bytes;
  flying(transfer->direction) += bytes;
  hand_in(slot);
}

void IoWorker::hand_in(Slot& slot) {
  std::atomic<int>& unanswered = unanswered_[static_cast<size_t>(slot.request.file)];
  ++unanswered;
  try {
    engine_->submit(slot.request);
  } catch (...) {
    --unanswered;
    release(slot);  // the engine does not have it: nothing to wait for
    throw;
  }
}

IoWorker::Slot& IoWorker::slot_of(uint64_t id) {
  const uint64_t index = id & 0x7FFFFFFF;
  const bool known =
      index < slots_.size() && slots_[index].transfer != nullptr && slots_[index].request.id == id;
  confused_ = confused_ || !known;
  LM_CHECK(known, fmt::format("the engine reported request {}, which is not under way", id));
  return slots_[index];
}

void IoWorker::release(Slot& slot) {
  flying(slot.request.direction) -= slot.request.bytes;
  slot.transfer = nullptr;
  free_.push_back(static_cast<int>(&slot - slots_.data()));
}

Error IoWorker::failure(const Slot& slot, int error, const std::string& detail) const {
  const IoRequest& request = slot.request;
  const std::string what =
      fmt::format("{} of {}: {}at offset {}, {} of {} bytes done, {}", verb(request.direction),
                  slot.transfer->what, detail, request.offset, slot.transfer->finished, slot.transfer->bytes,
                  device_of(space_.files()[static_cast<size_t>(request.file)].descriptor));
  return disk_error(error, what, fmt::format("{}+{}", space_.path(request.file), request.offset));
}

bool IoWorker::move_elsewhere(Slot& slot, int error) {
  IoRequest& request = slot.request;
  if (slot.moves == kMostMoves) return false;
  const std::optional<ExtentPiece> to = space_.spare(request.file, request.bytes);
  if (!to) return false;
  // A disk that fails often is logged at powers of two only.
  if (std::has_single_bit(++moved_)) {
    log_warning("IO-05",
                fmt::format("{}; rewritten at {}+{} (relocation {})", failure(slot, error, "").what(),
                            space_.path(to->file), to->offset, moved_));
  }
  relocations_.add(slot.own.file, slot.own.offset, *to);
  request.file = to->file;
  request.offset = to->offset;
  ++slot.moves;
  return true;
}

void IoWorker::again(Slot& slot, bool pause) {
  ++retries_;
  if (pause) {
    // One pause for all requests that the engine refused in this round.
    const auto wanted = kFirstPause * (int64_t{1} << std::min(slot.tries, 20));
    pause_ = std::max(pause_, std::min(retry_.longest_pause, wanted));
  }
  slot.request.id = (static_cast<uint64_t>(++slot.use) << 31) | (slot.request.id & 0x7FFFFFFF);
}

bool IoWorker::progress(Slot& slot, int64_t result) {
  IoRequest& request = slot.request;
  if (result == -EINTR || result == -EAGAIN) {
    if (++slot.tries > retry_.tries)
      throw failure(slot, static_cast<int>(-result), fmt::format("given up after {} tries ", retry_.tries));
    again(slot, result == -EAGAIN);
    return false;
  }
  if (result == -EIO && request.direction == IoDirection::kRead) {
    if (++slot.read_errors > retry_.read_errors)
      throw failure(slot, EIO, fmt::format("failed {} times ", slot.read_errors));
    again(slot, true);
    return false;
  }
  if (result < 0) {
    const bool write = request.direction == IoDirection::kWrite;
    if (!write || !move_elsewhere(slot, static_cast<int>(-result)))
      throw failure(slot, static_cast<int>(-result), "");
    again(slot, false);
    return false;
  }
  const std::string told = fmt::format("{} of {} bytes ", result, request.bytes);
  if (result == 0) throw failure(slot, EIO, "ended early, " + told);
  if (result > request.bytes) throw failure(slot, EIO, "the engine reports " + told);
  // Direct transfers continue at a multiple of the alignment; bytes of a short one beyond it are transferred
  // again.
  const int64_t moved = result == request.bytes ? result : result / space_.alignment() * space_.alignment();
  slot.tries = moved > 0 ? 0 : slot.tries + 1;
  if (slot.tries > retry_.tries) throw failure(slot, EIO, "no progress, " + told);
  slot.transfer->finished += moved;
  flying(request.direction) -= moved;
  request.offset += moved;
  slot.own.offset += moved;
  request.memory += moved;
  request.bytes -= moved;
  if (request.bytes == 0) return true;
  again(slot, false);
  return false;
}

void IoWorker::wait(std::vector<Transfer*>& complete) {
  results_.clear();
  engine_->wait(results_);
  std::optional<Error> first;  // the remaining results are still processed: their slots become free
  std::vector<Slot*> repeated;
  for (const IoResult& result : results_) {
    try {
      Slot& slot = slot_of(result.id);
      Transfer* const transfer = slot.transfer;
      ++answers_;
      --unanswered_[static_cast<size_t>(slot.request.file)];
      bool whole = false;
      try {
        whole = progress(slot, result.result);
      } catch (const Error&) {
        release(slot);
        throw;
      }
      if (!whole) {
        repeated.push_back(&slot);
        continue;
      }
      release(slot);
      if (transfer->finished < transfer->bytes) continue;
      transfer->end_ns = steady_ns();
      if (--under_way_ == 0) busy_ns_ += transfer->end_ns - busy_since_;
      complete.push_back(transfer);
    } catch (const Error& error) {
      if (!first) first = error;
    }
  }
  if (first) {
    for (Slot* slot : repeated) release(*slot);
    throw Error(*first);
  }
  if (pause_.count() > 0) std::this_thread::sleep_for(std::exchange(pause_, {}));
  for (size_t i = 0; i < repeated.size(); ++i) {
    try {
      hand_in(*repeated[i]);
    } catch (...) {
      for (size_t k = i + 1; k < repeated.size(); ++k) release(*repeated[k]);
      throw;
    }
  }
}

double IoWorker::busy_seconds() const {
  const int64_t open = under_way_ > 0 ? steady_ns() - busy_since_ : 0;
  return static_cast<double>(busy_ns_ + open) * 1e-9;
}

void IoWorker::settle() noexcept {
  waiting_[0].clear();
  waiting_[1].clear();
  try {
    while (!confused_ && free_.size() < slots_.size()) {
      results_.clear();
      engine_->wait(results_);
      for (const IoResult& result : results_) {
        Slot& slot = slot_of(result.id);
        --unanswered_[static_cast<size_t>(slot.request.file)];
        release(slot);
      }
    }
  } catch (const std::exception&) {
  }
  engine_.reset();  // broken or confused, it still waits for the requests it has
}

}  // namespace lm
