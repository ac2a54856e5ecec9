#include "schedule/schedule.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace lm {
namespace {

class Builder {
 public:
  explicit Builder(const StepConfig& step) : step_(step) {
    for (int64_t u = 0; u < std::ssize(step.units); ++u) {
      const UnitRole role = step.unit(u).role;
      if (role == UnitRole::kEmbedding) embedding_ = u;
      if (role == UnitRole::kBody) body_.push_back(u);
      if (role == UnitRole::kHead || role == UnitRole::kFinalNorm) head_ = u;
      if (role == UnitRole::kVocabularySegment) segments_.push_back(u);
    }
  }

  // A group of micro-batches [first, end): each unit sees all of them before the next one.
  void forward(int64_t first, int64_t end) {
    pass_forward(embedding_, first, end);
    for (const int64_t unit : body_) pass_forward(unit, first, end);
  }

  void head(int64_t first, int64_t end) {
    if (cut()) {
      pass_forward(head_, first, end);
      for (const int64_t unit : segments_) pass_forward(unit, first, end);
      return;
    }
    if (first == 0) pending_update(head_);
    // A tied head multiplies by the embedding's matrix: both units are on loan.
    if (step_.tied) add(OperationKind::kAcquire, embedding_, first);
    pass(OperationKind::kHead, head_, first, end);
    if (step_.tied) add(OperationKind::kRelease, embedding_, first);
  }

  // `final`: the gradients are complete, and are normed.
  void backward(int64_t first, int64_t end, bool final) {
    for (const int64_t unit : segments_) {
      pass(OperationKind::kBackward, unit, first, end);
      if (final) complete(unit);
    }
    if (cut()) pass(OperationKind::kBackward, head_, first, end);
    if (final) finished(head_);
    for (auto unit = body_.rbegin(); unit != body_.rend(); ++unit) {
      if (step_.unit(*unit).block < step_.first_trained) return;
      const bool recomputed = step_.recompute.of(step_.unit(*unit).block) != Recompute::kNone;
      add(OperationKind::kAcquire, *unit, first);
      for (int64_t micro = first; micro < end; ++micro) {
        if (recomputed) add(OperationKind::kRecompute, *unit, micro);
        add(OperationKind::kBackward, *unit, micro);
      }
      add(OperationKind::kRelease, *unit, first);
      if (final) finished(*unit);
    }
    if (step_.first_trained > 0) return;
    // The embedding's backward sums rows, and needs its unit only for what it makes for the layers, for a
    // prompt and for an adapter. It comes last, so that a tied matrix, whose gradient the head began, is
    // complete only here.
    if (step_.layer_inputs || step_.embedding_adapted) {
      pass(OperationKind::kBackward, embedding_, first, end);
    } else {
      for (int64_t micro = first; micro < end; ++micro) add(OperationKind::kBackward, embedding_, micro);
    }
    if (!final) return;
    if (step_.defer_tied_gradient) pass(OperationKind::kTableGradient, embedding_, 0, end);
    add(OperationKind::kAddRows, embedding_, 0);
    finished(embedding_);
  }

  void check_and_update() {
    add(OperationKind::kCheck, 0, 0);
    if (!step_.updates_at_end()) return;
    for (int64_t u = 0; u < std::ssize(step_.units); ++u) {
      if (!step_.deferred(u)) update(u);
    }
  }

  // The same micro-batches once more, their norm known: what the first backward has measured is updated.
  void second_backward(int64_t end) {
    measured_ = true;
    if (!step_.recompute.whole()) forward(0, end);
    head(0, end);
    backward(0, end, true);
  }

  void all_pending_updates() {
    for (int64_t u = 0; u < std::ssize(step_.units); ++u) pending_update(u);
  }

  StepSchedule take() { return std::move(schedule_); }

 private:
  bool cut() const { return !segments_.empty(); }

  void add(OperationKind kind, int64_t unit, int64_t micro, int64_t tile = 0) {
    schedule_.operations.push_back({kind, unit, micro, tile});
  }

  // Each micro-batch of a group through a unit.
  void pass(OperationKind kind, int64_t unit, int64_t first, int64_t end) {
    add(OperationKind::kAcquire, unit, first);
    for (int64_t micro = first; micro < end; ++micro) add(kind, unit, micro);
    add(OperationKind::kRelease, unit, first);
  }

  void pass_forward(int64_t unit, int64_t first, int64_t end) {
    if (first == 0) pending_update(unit);
    pass(OperationKind::kForward, unit, first, end);
  }

  // The unit's last backward has been.
  void complete(int64_t unit) {
    if (step_.ranks > 1) add(OperationKind::kReduceScatter, unit, 0);
    if (!measured_) add(OperationKind::kNorm, unit, 0);
  }

  // The last of a block's units is: the final norm comes after its segments.
  void finished(int64_t unit) {
    complete(unit);
    if (step_.clip == Clip::kGlobal && !measured_) return;
    update(unit);
    if (unit != head_) return;
    for (const int64_t segment : segments_) update(segment);
  }

  void update(int64_t unit) {
    const ScheduleUnit& range = step_.unit(unit);
    for (int64_t tile = range.first_tile; tile < range.end_tile; ++tile)
      add(OperationKind::kUpdate, unit, 0, tile);
    if (step_.sharded && range.tiles() > 0 && !range.in_shards) add(OperationKind::kGather, unit, 0);
  }

  void pending_update(int64_t unit) {
    if (step_.pending && step_.deferred(unit)) update(unit);
  }

  const StepConfig& step_;
  bool measured_ = false;             // a backward has been for the norm alone
  int64_t embedding_ = 0, head_ = 0;  // units; the head's, or its final norm's
  std::vector<int64_t> body_, segments_;
  StepSchedule schedule_;
};

}  // namespace

const char* operation_name(OperationKind kind) {
  constexpr const char* kNames[] = {
      "acquire",  "forward", "release", "head",   "recompute", "backward", "table gradient", "add rows",
      "exchange", "norm",    "check",   "update", "gather",    "fetch",    "claim",          "write back"};
  return kNames[static_cast<size_t>(kind)];
}

bool computes(OperationKind kind) {
  return kind == OperationKind::kForward || kind == OperationKind::kHead ||
         kind == OperationKind::kRecompute || kind == OperationKind::kBackward ||
         kind == OperationKind::kTableGradient;
}

bool is_transfer(const Operation& operation) {
  return operation.kind == OperationKind::kFetch || operation.kind == OperationKind::kAllocateSlot ||
         operation.kind == OperationKind::kWriteBack;
}

const char* pool_name(Pool pool) {
  constexpr const char* kNames[] = {"weights",     "gradients",     "optimizer",
                                    "activations", "weight shards", "gradient shards"};
  return kNames[static_cast<size_t>(pool)];
}

std::vector<ScheduleUnit> schedule_units(int64_t layers, int64_t segments) {
  std::vector<ScheduleUnit> out;
  out.reserve(static_cast<size_t>(layers + 2 + segments));
  int64_t segment = 0;  // in the block's array the matrix comes before the norm
  for (const Unit& unit : list_units(layers, segments)) {
    const int64_t tile = unit.segment() ? segment++ : unit.role == UnitRole::kFinalNorm ? segments : 0;
    out.push_back({.block = unit.block, .role = unit.role, .first_tile = tile, .end_tile = tile + 1});
  }
  return out;
}

bool StepConfig::defers() const {
  return updates_at_end() && std::ranges::any_of(units, &ScheduleUnit::off_device);
}

int64_t StepConfig::segments() const {
  return std::ranges::count(units, UnitRole::kVocabularySegment, &ScheduleUnit::role);
}

bool StepConfig::uses_slots() const {
  return std::ranges::any_of(pools, [](const PoolShape& pool) { return pool.slots > 0; });
}

StepSchedule make_schedule(const StepConfig& step) {
  LM_CHECK(step.group >= 1, "a group has at least one micro-batch");
  LM_CHECK(!step.in_backward || step.group >= step.micro_batches,
           "updates inside backward want all micro-batches of a step in one group");
  LM_CHECK(!step.defer_tied_gradient || (step.tied && !step.layer_inputs && !step.two_pass_clip()),
           "a gradient that is made last is a tied table's alone, of a step with one backward");
  LM_CHECK(!step.defer_tied_gradient || step.first_trained == 0,
           "a gradient that is made last is of a trained table");
  Builder builder(step);
  for (int64_t first = 0; first < step.micro_batches; first += step.group) {
    const int64_t end = std::min(first + step.group, step.micro_batches);
    builder.forward(first, end);
    builder.head(first, end);
    builder.backward(first, end, end == step.micro_batches);
  }
  builder.check_and_update();
  if (step.two_pass_clip()) builder.second_backward(step.micro_batches);
  return builder.take();
}

StepSchedule make_flush_schedule(const StepConfig& step) {
  Builder builder(step);
  builder.all_pending_updates();
  return builder.take();
}

StepSchedule make_evaluation_schedule(const StepConfig& step) {
  LM_CHECK(step.group >= 1, "a group has at least one micro-batch");
  LM_CHECK(!step.pending, "an evaluation begins with a flush");
  Builder builder(step);
  for (int64_t first = 0; first < step.micro_batches; first += step.group) {
    const int64_t end = std::min(first + step.group, step.micro_batches);
    builder.forward(first, end);
    builder.head(first, end);
  }
  return builder.take();
}

}  // namespace lm
