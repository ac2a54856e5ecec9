#include "schedule/schedule.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace lm {
namespace {

class Builder {
 public:
  explicit Builder(const ScheduleShape& shape) : shape_(shape), last_(shape.layers + 1) {}

  // A group of micro-batches [first, end): each block sees all of them before the next one.
  void forward(int64_t first, int64_t end) {
    for (int64_t block = 0; block <= shape_.layers; ++block) {
      if (first == 0) pending_update(block);
      add(OperationKind::kAcquire, block, first);
      for (int64_t micro = first; micro < end; ++micro) add(OperationKind::kForward, block, micro);
      add(OperationKind::kRelease, block, first);
    }
  }

  void head(int64_t first, int64_t end) {
    if (shape_.segments > 0) return cut_head_forward(first, end);
    if (first == 0) pending_update(last_);
    // A tied head multiplies by the embedding's matrix: both blocks are on loan.
    if (shape_.tied) add(OperationKind::kAcquire, 0, first);
    add(OperationKind::kAcquire, last_, first);
    for (int64_t micro = first; micro < end; ++micro) add(OperationKind::kHead, last_, micro);
    add(OperationKind::kRelease, last_, first);
    if (shape_.tied) add(OperationKind::kRelease, 0, first);
  }

  void backward(int64_t first, int64_t end, bool final) {
    if (shape_.segments > 0) cut_head_backward(first, end, final);
    if (final) finished(last_);
    for (int64_t block = shape_.layers; block >= 1; --block) {
      add(OperationKind::kAcquire, block, first);
      for (int64_t micro = first; micro < end; ++micro) {
        if (shape_.recompute) add(OperationKind::kRecompute, block, micro);
        add(OperationKind::kBackward, block, micro);
      }
      add(OperationKind::kRelease, block, first);
      if (final) finished(block);
    }
    // The embedding's backward sums rows and needs no weights. It comes last, so that a tied matrix, whose
    // gradient the head began, is complete only here.
    for (int64_t micro = first; micro < end; ++micro) add(OperationKind::kBackward, 0, micro);
    if (final) finished(0);
  }

  void check_and_update() {
    add(OperationKind::kCheck, 0, 0);
    if (shape_.clip != Clip::kGlobal) return;
    for (int64_t block = 0; block <= last_; ++block) {
      if (!shape_.deferred(block)) update(block);
    }
  }

  void pending_update(int64_t block, int64_t segment = -1) {
    if (shape_.pending && shape_.deferred(block)) update(block, segment);
  }

  void all_pending_updates() {
    for (int64_t block = 0; block <= last_; ++block) pending_update(block);
    for (int64_t segment = 0; segment < shape_.segments; ++segment) pending_update(last_, segment);
  }

  StepSchedule take() { return std::move(schedule_); }

 private:
  void add(OperationKind kind, int64_t block, int64_t micro, int64_t segment = -1) {
    schedule_.operations.push_back({kind, block, micro, segment});
  }

  // What is left of a cut head, or a segment of it, for each micro-batch of a group.
  void pass(OperationKind kind, int64_t segment, int64_t first, int64_t end) {
    add(OperationKind::kAcquire, last_, first, segment);
    for (int64_t micro = first; micro < end; ++micro) add(kind, last_, micro, segment);
    add(OperationKind::kRelease, last_, first, segment);
  }

  void cut_head_forward(int64_t first, int64_t end) {
    if (first == 0) pending_update(last_);
    pass(OperationKind::kForward, -1, first, end);
    for (int64_t segment = 0; segment < shape_.segments; ++segment) {
      if (first == 0) pending_update(last_, segment);
      pass(OperationKind::kForward, segment, first, end);
    }
  }

  void cut_head_backward(int64_t first, int64_t end, bool final) {
    for (int64_t segment = 0; segment < shape_.segments; ++segment) {
      pass(OperationKind::kBackward, segment, first, end);
      if (final) add(OperationKind::kReduce, last_, 0, segment);
    }
    pass(OperationKind::kBackward, -1, first, end);
  }

  void finished(int64_t block) {
    add(OperationKind::kReduce, block, 0);
    if (shape_.clip != Clip::kGlobal) update(block);
  }

  void update(int64_t block) {
    update(block, -1);
    for (int64_t segment = 0; shape_.cut(block) && segment < shape_.segments; ++segment)
      update(block, segment);
  }
  void update(int64_t block, int64_t segment) {
    const ScheduleShape::Tiles tiles = shape_.updates(block, segment);
    for (int64_t tile = tiles.first; tile < tiles.end; ++tile)
      add(OperationKind::kUpdate, block, tile, segment);
  }

  const ScheduleShape& shape_;
  int64_t last_;
  StepSchedule schedule_;
};

}  // namespace

const char* operation_name(OperationKind kind) {
  constexpr const char* kNames[] = {"acquire", "forward", "release", "head",  "recompute", "backward",
                                    "reduce",  "check",   "update",  "fetch", "claim",     "write back"};
  return kNames[static_cast<size_t>(kind)];
}

bool is_transfer(const Operation& operation) {
  return operation.kind == OperationKind::kFetch || operation.kind == OperationKind::kClaim ||
         operation.kind == OperationKind::kWriteBack;
}

const char* pool_name(Pool pool) {
  constexpr const char* kNames[] = {"weights", "gradients", "optimizer", "activations"};
  return kNames[static_cast<size_t>(pool)];
}

ScheduleShape::Tiles ScheduleShape::updates(int64_t block, int64_t segment) const {
  if (!cut(block)) return {0, std::max<int64_t>(tiles_of(block), 1)};
  if (segment_tiles.empty()) return {};
  const auto at = static_cast<size_t>(segment < 0 ? segments : segment);
  return {segment_tiles[at], segment_tiles[at + 1]};
}

bool ScheduleShape::defers() const {
  return clip == Clip::kGlobal && std::any_of(tiles.begin(), tiles.end(), [](int64_t n) { return n > 0; });
}

StepSchedule make_schedule(const ScheduleShape& shape) {
  LM_CHECK(shape.group >= 1, "a group has at least one micro-batch");
  Builder builder(shape);
  for (int64_t first = 0; first < shape.micro_batches; first += shape.group) {
    const int64_t end = std::min(first + shape.group, shape.micro_batches);
    builder.forward(first, end);
    builder.head(first, end);
    builder.backward(first, end, end == shape.micro_batches);
  }
  builder.check_and_update();
  return builder.take();
}

StepSchedule make_flush_schedule(const ScheduleShape& shape) {
  Builder builder(shape);
  builder.all_pending_updates();
  return builder.take();
}

StepSchedule make_evaluation_schedule(const ScheduleShape& shape) {
  LM_CHECK(shape.group >= 1, "a group has at least one micro-batch");
  LM_CHECK(!shape.pending, "an evaluation begins with a flush");
  Builder builder(shape);
  for (int64_t first = 0; first < shape.micro_batches; first += shape.group) {
    const int64_t end = std::min(first + shape.group, shape.micro_batches);
    builder.forward(first, end);
    builder.head(first, end);
  }
  return builder.take();
}

}  // namespace lm
