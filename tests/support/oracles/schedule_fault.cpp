#include "tests/support/oracles/schedule_fault.h"

#include <fmt/format.h>
#include <vector>

namespace lm {
namespace {

// Of a unit.
struct Counts {
  int64_t forwards = 0, recomputes = 0, backwards = 0;  // of micro-batches, in ascending order
  int64_t loans = 0;
  int64_t table_parts = 0;  // of micro-batches, of a tied table's gradient that is made last
  int64_t tiles = 0;        // updated
  bool rows_added = false;  // of the embedding
  bool reduced = false, normed = false, updated = false, gathered = false;
};

// Walks the list and counts.
class Checker {
 public:
  explicit Checker(const StepConfig& shape) : shape_(shape), units_(shape.units.size()) {}

  // "" or what is wrong with `op` after all that came before.
  std::string visit(const Operation& op) {
    if (op.unit < 0 || op.unit >= std::ssize(units_)) return "no such unit";
    const ScheduleUnit& unit = shape_.unit(op.unit);
    const bool updates = op.kind == OperationKind::kUpdate;
    if (updates && (op.tile < unit.first_tile || op.tile >= unit.end_tile)) return "no such tile";
    if (op.micro < 0 || op.micro >= shape_.micro_batches) return "no such micro-batch";
    // Recomputed activations live until the backward that wanted them, and nothing may come between.
    if (recomputed_ && op != Operation{OperationKind::kBackward, op.unit, op.micro})
      return "backward must follow its recomputation";
    switch (op.kind) {
      case OperationKind::kAcquire:
        ++at(op).loans;
        return "";
      case OperationKind::kRelease:
        return --at(op).loans < 0 ? "a loan is returned twice" : "";
      case OperationKind::kForward:
        return forward(op);
      case OperationKind::kHead:
        return head(op);
      case OperationKind::kRecompute:
        return recompute(op);
      case OperationKind::kBackward:
        return backward(op);
      case OperationKind::kTableGradient:
        return table_gradient(op);
      case OperationKind::kAddRows:
        return add_rows(op);
      case OperationKind::kReduceScatter:
        return reduce_scatter(op);
      case OperationKind::kNorm:
        return norm(op);
      case OperationKind::kCheck:
        return check();
      case OperationKind::kUpdate:
        return shape_.deferred(op.unit) ? deferred_update(op) : update(op);
      case OperationKind::kGather:
        return gather(op);
      case OperationKind::kFetch:
      case OperationKind::kAllocateSlot:
      case OperationKind::kWriteBack:
        return "";
    }
    return "unknown operation";
  }

  std::string finish(bool training) const {
    for (int64_t u = 0; u < std::ssize(units_); ++u) {
      const Counts& unit = units_[static_cast<size_t>(u)];
      const std::string name = fmt::format(" unit {}", u);
      if (unit.loans != 0) return "a loan of" + name + " is never returned";
      if (unit.forwards != shape_.micro_batches) return "a forward of" + name + " is missing";
      if (!training || frozen(u)) continue;
      if (unit.backwards != shape_.micro_batches) return "a backward of" + name + " is missing";
      if (last(u) && unit.table_parts != shape_.micro_batches) return "a table gradient is missing";
      if (!unit.normed) return name + " is never normed";
      if (shape_.ranks > 1 && !unit.reduced) return name + " is never exchanged";
      if (role(u) == UnitRole::kEmbedding && !unit.rows_added) return "rows of" + name + " are never added";
      if (shape_.deferred(u)) continue;
      if (!unit.updated && shape_.unit(u).tiles() > 0) return name + " is never updated";
      if (gathers(u) && unit.updated && !unit.gathered) return name + " is never gathered";
    }
    if (training && !checked_) return "nothing checks the step";
    return "";
  }

 private:
  Counts& at(int64_t unit) { return units_[static_cast<size_t>(unit)]; }
  Counts& at(const Operation& op) { return at(op.unit); }
  UnitRole role(int64_t unit) const { return shape_.unit(unit).role; }
  // Before the first trained block.
  bool frozen(int64_t unit) const { return shape_.unit(unit).block < shape_.first_trained; }
  // A tied table whose gradient is made last.
  bool last(int64_t unit) const { return shape_.defer_tied_gradient && role(unit) == UnitRole::kEmbedding; }
  bool gathers(int64_t unit) const { return shape_.sharded && !shape_.unit(unit).in_shards; }

  std::string use(int64_t unit) {
    if (at(unit).updated) return "a unit is used after its update";
    if (shape_.pending && shape_.deferred(unit) && at(unit).tiles < shape_.unit(unit).tiles())
      return "a unit is used before its deferred update";
    if (gathers(unit) && at(unit).tiles > 0 && !at(unit).gathered)
      return "a unit is used before its weights are gathered";
    return at(unit).loans == 0 ? "a unit is used without a loan" : "";
  }

  // With updates inside backward the blocks' gradients share a slot: each ends with its update, or, where
  // only the norm was wanted, with that. A tied embedding's is its own, unless it is made last.
  std::string begin_gradient(const Operation& op) {
    const int64_t block = shape_.unit(op.unit).block;
    if (!shape_.in_backward) return "";
    if (shape_.tied && role(op.unit) == UnitRole::kEmbedding && !last(op.unit)) return "";
    for (int64_t u = 0; u < std::ssize(units_); ++u) {
      const Counts& unit = at(u);
      if (shape_.unit(u).block == block || unit.backwards == 0) continue;
      if (shape_.tied && role(u) == UnitRole::kEmbedding) continue;
      const bool measured = shape_.two_pass_clip() && !checked_ && unit.normed;
      if (!measured && !unit.updated && shape_.unit(u).tiles() > 0)
        return "a gradient begins in the slot of another that is not updated";
    }
    return "";
  }

  // The micro-batch that comes next in a unit; every accumulator adds them in this order.
  static std::string ascend(int64_t& count, int64_t micro) {
    return count++ == micro ? "" : "micro-batches must ascend";
  }

  // Units stand in the forward's order: the final norm picks and norms the rows, then each segment has its
  // part.
  std::string forward(const Operation& op) {
    if (role(op.unit) == UnitRole::kHead) return "the head's forward belongs to the head operation";
    if (final(op)) return "forward after the unit's gradient is final";
    if (op.unit > 0 && at(op.unit - 1).forwards <= op.micro) return "what comes before has not been passed";
    const std::string fault = use(op.unit);
    return fault.empty() ? ascend(at(op).forwards, op.micro) : fault;
  }

  std::string head(const Operation& op) {
    if (role(op.unit) != UnitRole::kHead) return "this unit is no whole head";
    if (at(op.unit - 1).forwards <= op.micro) return "the block before has not been passed";
    std::string fault = use(op.unit);
    for (int64_t u = 0; fault.empty() && shape_.tied && u < std::ssize(units_); ++u) {
      if (role(u) == UnitRole::kEmbedding) fault = use(u);
    }
    if (fault.empty()) fault = begin_gradient(op);
    if (!fault.empty()) return fault;
    ++at(op).backwards;
    return ascend(at(op).forwards, op.micro);
  }

  bool recomputes(int64_t unit) const {
    return shape_.recompute.of(shape_.unit(unit).block) != Recompute::kNone;
  }

  std::string recompute(const Operation& op) {
    if (!recomputes(op.unit)) return "nothing is to be recomputed";
    if (role(op.unit) != UnitRole::kBody) return "only transformer blocks are recomputed";
    if (frozen(op.unit)) return "nothing before the first trained block is recomputed";
    recomputed_ = true;
    const std::string fault = use(op.unit);
    return fault.empty() ? ascend(at(op).recomputes, op.micro) : fault;
  }

  // What a unit's backward follows: the block behind; of a segment the one before it, since dX adds up in
  // their order; of the final norm the last segment. -1: the end of the forward.
  int64_t behind(int64_t unit) const {
    if (role(unit) == UnitRole::kFinalNorm) return std::ssize(units_) - 1;
    if (role(unit) != UnitRole::kVocabularySegment) return unit + 1;
    return role(unit - 1) == UnitRole::kVocabularySegment ? unit - 1 : -1;
  }

  std::string backward(const Operation& op) {
    const UnitRole what = role(op.unit);
    if (what == UnitRole::kHead) return "the head's backward belongs to the head operation";
    recomputed_ = false;
    if (frozen(op.unit)) return "nothing before the first trained block has a backward";
    if (what == UnitRole::kVocabularySegment && units_.back().forwards <= op.micro)
      return "the softmax is not complete";
    const int64_t before = behind(op.unit);
    if (before >= 0 && at(before).backwards <= op.micro) return "what comes behind has not been passed";
    if (what == UnitRole::kBody && recomputes(op.unit) && at(op).recomputes <= op.micro)
      return "not recomputed";
    if (final(op)) return "backward after the unit's gradient is final";
    std::string fault = what == UnitRole::kEmbedding ? "" : use(op.unit);
    // The embedding's backward sums rows, which join its gradient later.
    if (fault.empty() && what != UnitRole::kEmbedding) fault = begin_gradient(op);
    return fault.empty() ? ascend(at(op).backwards, op.micro) : fault;
  }

  // It lies where the blocks' gradients and all activations were.
  std::string table_gradient(const Operation& op) {
    if (!last(op.unit)) return "only a tied table's gradient is made last";
    if (at(op).rows_added) return "the head's part follows the rows";
    if (at(op).backwards != shape_.micro_batches) return "a table gradient begins beside activations";
    std::string fault = use(op.unit);
    if (fault.empty()) fault = begin_gradient(op);
    return fault.empty() ? ascend(at(op).table_parts, op.micro) : fault;
  }

  // A tied matrix has the head's gradient by then.
  std::string add_rows(const Operation& op) {
    if (role(op.unit) != UnitRole::kEmbedding) return "only the embedding has rows to add";
    if (at(op).rows_added) return "rows added twice";
    if (at(op).backwards != shape_.micro_batches) return "rows added before the last backward";
    if (last(op.unit) && at(op).table_parts != shape_.micro_batches)
      return "rows added before the head's part";
    at(op).rows_added = true;
    return begin_gradient(op);
  }

  bool rows_missing(const Operation& op) {
    return role(op.unit) == UnitRole::kEmbedding && !at(op).rows_added;
  }

  std::string reduce_scatter(const Operation& op) {
    if (shape_.ranks == 1) return "one rank has nobody to exchange with";
    if (at(op).reduced) return "exchanged twice";
    if (at(op).backwards != shape_.micro_batches) return "exchanged before its last backward";
    if (rows_missing(op)) return "exchanged before its rows are added";
    at(op).reduced = true;
    return "";
  }

  std::string norm(const Operation& op) {
    if (at(op).normed) return "normed twice";
    if (at(op).backwards != shape_.micro_batches) return "normed before its last backward";
    if (rows_missing(op)) return "normed before its rows are added";
    if (shape_.ranks > 1 && !at(op).reduced) return "normed before its exchange";
    at(op).normed = true;
    return "";
  }

  std::string check() {
    if (checked_) return "checked twice";
    for (int64_t u = 0; u < std::ssize(units_); ++u) {
      if (!at(u).normed && !frozen(u)) return "checked before every gradient is final";
    }
    checked_ = true;
    if (shape_.two_pass_clip()) begin_second_backward();
    return "";
  }

  // Of what recomputation keeps, the forward stands.
  void begin_second_backward() {
    for (int64_t u = 0; u < std::ssize(units_); ++u) {
      const bool kept =
          shape_.recompute.whole() && (role(u) == UnitRole::kEmbedding || role(u) == UnitRole::kBody);
      Counts& unit = at(u);
      unit = {.forwards = kept ? unit.forwards : 0, .loans = unit.loans, .normed = true};
    }
  }

  // The unit's gradient has come to its end; of a second backward its norm is from the first.
  bool final(const Operation& op) {
    const bool second = shape_.two_pass_clip() && checked_;
    return at(op).reduced || at(op).updated || (at(op).normed && !second);
  }

  // With clipping by block, a unit's update needs the norm of its whole block.
  bool final_gradient(const Operation& op) {
    for (int64_t u = 0; u < std::ssize(units_); ++u) {
      if (shape_.unit(u).block != shape_.unit(op.unit).block) continue;
      const Counts& unit = at(u);
      if (!unit.normed || unit.backwards != shape_.micro_batches) return false;
      if (shape_.ranks > 1 && !unit.reduced) return false;
    }
    return !rows_missing(op);
  }

  std::string tile(const Operation& op) {
    return shape_.unit(op.unit).first_tile + at(op).tiles++ == op.tile ? "" : "tiles must ascend";
  }

  std::string update(const Operation& op) {
    if (!final_gradient(op)) return "updated before its gradient is final";
    if (shape_.clip == Clip::kGlobal && !checked_) return "updated before the check";
    if (at(op).loans != 0) return "updated while on loan";
    if (at(op).updated) return "updated twice";
    const std::string fault = tile(op);
    if (!fault.empty() || at(op).tiles < shape_.unit(op.unit).tiles()) return fault;
    at(op).updated = true;
    if (!shape_.updates_at_end()) return "";
    // One order for what is updated at once and what is deferred: the forward's.
    while (next_update_ < std::ssize(units_) &&
           (shape_.deferred(next_update_) || shape_.unit(next_update_).tiles() == 0))
      ++next_update_;
    return op.unit == next_update_++ ? "" : "updates must go in forward order";
  }

  std::string gather(const Operation& op) {
    if (!gathers(op.unit)) return "every rank has what it keeps of the weights";
    if (at(op).gathered) return "gathered twice";
    if (at(op).tiles == 0 || at(op).tiles < shape_.unit(op.unit).tiles())
      return "gathered before every tile is updated";
    if (at(op).loans != 0) return "gathered while on loan";
    at(op).gathered = true;
    return "";
  }

  // Of the step before: its check has passed, its gradient is final.
  std::string deferred_update(const Operation& op) {
    if (!shape_.pending) return "nothing is deferred";
    if (at(op).forwards > 0) return "updated after its forward";
    if (at(op).loans != 0) return "updated while on loan";
    if (at(op).tiles == shape_.unit(op.unit).tiles()) return "updated twice";
    return tile(op);
  }

  const StepConfig& shape_;
  std::vector<Counts> units_;
  int64_t next_update_ = 0;
  bool checked_ = false;
  bool recomputed_ = false;  // the operation before was a recomputation
};

std::string describe(size_t index, const Operation& op) {
  return fmt::format(" (operation {}: {}, unit {}, micro-batch {}, tile {})", index, operation_name(op.kind),
                     op.unit, op.micro, op.tile);
}

}  // namespace

std::string schedule_fault(const StepSchedule& schedule, const StepConfig& shape) {
  Checker checker(shape);
  for (size_t i = 0; i < schedule.operations.size(); ++i) {
    const std::string fault = checker.visit(schedule.operations[i]);
    if (!fault.empty()) return fault + describe(i, schedule.operations[i]);
  }
  return checker.finish(true);
}

std::string evaluation_fault(const StepSchedule& schedule, const StepConfig& shape) {
  Checker checker(shape);
  for (size_t i = 0; i < schedule.operations.size(); ++i) {
    const Operation& op = schedule.operations[i];
    const bool allowed = op.kind == OperationKind::kAcquire || op.kind == OperationKind::kRelease ||
                         op.kind == OperationKind::kForward || op.kind == OperationKind::kHead;
    const std::string fault = allowed ? checker.visit(op) : "an evaluation changes nothing";
    if (!fault.empty()) return fault + describe(i, op);
  }
  return checker.finish(false);
}

}  // namespace lm
