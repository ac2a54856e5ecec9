// The rules of a schedule, checked without knowledge of how it was made: a walk that counts.
#include <algorithm>
#include <vector>

#include "schedule/schedule.h"

namespace lm {
namespace {

// Of a block or a segment of the head.
struct Counts {
  int64_t forwards = 0, recomputes = 0, backwards = 0;  // of micro-batches, in ascending order
  int64_t loans = 0;
  int64_t tiles = 0;  // updated
  bool reduced = false, updated = false;
};

class Checker {
 public:
  explicit Checker(const ScheduleShape& shape)
      : shape_(shape), last_(shape.layers + 1), units_(static_cast<size_t>(last_ + 1 + shape.segments)) {}

  // "" or what is wrong with `op` after all that came before.
  std::string visit(const Operation& op) {
    if (op.block < 0 || op.block > last_) return "no such block";
    if (op.segment != -1 && (!shape_.cut(op.block) || op.segment < 0 || op.segment >= shape_.segments))
      return "no such segment";
    const bool tile = op.kind == OperationKind::kUpdate;
    const ScheduleShape::Tiles tiles = shape_.updates(op.block, op.segment);
    if (tile ? op.micro < tiles.first || op.micro >= tiles.end
             : op.micro < 0 || op.micro >= shape_.micro_batches)
      return "no such micro-batch or tile";
    // Recomputed activations live until the backward that wanted them, and nothing may come between.
    if (recomputed_ && op != Operation{OperationKind::kBackward, op.block, op.micro})
      return "backward must follow its recomputation";
    switch (op.kind) {
      case OperationKind::kAcquire:
        ++at(op).loans;
        return "";
      case OperationKind::kRelease:
        return --at(op).loans < 0 ? "a loan is returned twice" : "";
      case OperationKind::kForward:
        return shape_.cut(op.block) ? head_forward(op) : forward(op);
      case OperationKind::kHead:
        return head(op);
      case OperationKind::kRecompute:
        return recompute(op);
      case OperationKind::kBackward:
        return shape_.cut(op.block) ? head_backward(op) : backward(op);
      case OperationKind::kReduce:
        return reduce(op);
      case OperationKind::kCheck:
        return check();
      case OperationKind::kUpdate:
        return shape_.deferred(op.block) ? deferred_update(op) : update(op);
      case OperationKind::kFetch:
      case OperationKind::kClaim:
      case OperationKind::kWriteBack:
        return "";
    }
    return "unknown operation";
  }

  std::string finish(bool training) const {
    for (int64_t u = 0; u < std::ssize(units_); ++u) {
      const Counts& unit = units_[static_cast<size_t>(u)];
      const std::string name =
          u > last_ ? " segment " + std::to_string(u - last_ - 1) : " block " + std::to_string(u);
      if (unit.loans != 0) return "a loan of" + name + " is never returned";
      if (unit.forwards != shape_.micro_batches) return "a forward of" + name + " is missing";
      if (!training) continue;
      if (unit.backwards != shape_.micro_batches) return "a backward of" + name + " is missing";
      if (!unit.reduced) return name + " is never reduced";
      if (shape_.deferred(std::min(u, last_))) continue;
      if (!unit.updated && updates_of(u) > 0) return name + " is never updated";
    }
    if (training && !checked_) return "nothing checks the step";
    return "";
  }

 private:
  Counts& at(int64_t unit) { return units_[static_cast<size_t>(unit)]; }
  Counts& at(const Operation& op) { return at(op.unit(shape_.layers)); }
  Counts& segment(int64_t s) { return at(last_ + 1 + s); }
  int64_t updates_of(int64_t unit) const {
    const ScheduleShape::Tiles tiles =
        unit > last_ ? shape_.updates(last_, unit - last_ - 1) : shape_.updates(unit);
    return tiles.end - tiles.first;
  }

  std::string use(const Operation& op) { return use(op.block, op.unit(shape_.layers)); }
  std::string use(int64_t block, int64_t unit) {
    if (at(unit).updated) return "a block is used after its update";
    if (shape_.pending && shape_.deferred(block) && at(unit).tiles < updates_of(unit))
      return "a block is used before its deferred update";
    return at(unit).loans == 0 ? "a block is used without a loan" : "";
  }

  // The micro-batch that comes next in a block; every accumulator adds them in this order.
  static std::string ascend(int64_t& count, int64_t micro) {
    return count++ == micro ? "" : "micro-batches must ascend";
  }

  std::string forward(const Operation& op) {
    if (op.block == last_) return "the head's forward belongs to the head operation";
    if (at(op.block).reduced) return "forward after the block's gradient is final";
    if (op.block > 0 && at(op.block - 1).forwards <= op.micro) return "the block before has not been passed";
    const std::string fault = use(op);
    return fault.empty() ? ascend(at(op.block).forwards, op.micro) : fault;
  }

  std::string head(const Operation& op) {
    if (op.block != last_) return "only the last block is a head";
    if (shape_.cut(op.block)) return "a cut head comes in segments";
    if (at(last_ - 1).forwards <= op.micro) return "the block before has not been passed";
    std::string fault = use(op);
    if (fault.empty() && shape_.tied) fault = use(0, 0);
    if (!fault.empty()) return fault;
    ++at(last_).backwards;
    return ascend(at(last_).forwards, op.micro);
  }

  // A cut head: the block's rest picks and norms the rows, then each segment in order has its part.
  std::string head_forward(const Operation& op) {
    const Counts& before = op.segment < 0    ? at(last_ - 1)
                           : op.segment == 0 ? at(last_)
                                             : segment(op.segment - 1);
    if (before.forwards <= op.micro) return "what comes before has not been passed";
    if (at(op).reduced) return "forward after the gradient is final";
    const std::string fault = use(op);
    return fault.empty() ? ascend(at(op).forwards, op.micro) : fault;
  }

  std::string head_backward(const Operation& op) {
    if (segment(shape_.segments - 1).forwards <= op.micro) return "the softmax is not complete";
    const int64_t before = op.segment < 0 ? shape_.segments - 1 : op.segment - 1;
    if (before >= 0 && segment(before).backwards <= op.micro) return "the segment before has not been passed";
    if (at(op).reduced) return "backward after the gradient is final";
    const std::string fault = use(op);
    return fault.empty() ? ascend(at(op).backwards, op.micro) : fault;
  }

  std::string recompute(const Operation& op) {
    if (!shape_.recompute) return "nothing is to be recomputed";
    if (op.block == 0 || op.block == last_) return "only transformer blocks are recomputed";
    recomputed_ = true;
    const std::string fault = use(op);
    return fault.empty() ? ascend(at(op.block).recomputes, op.micro) : fault;
  }

  std::string backward(const Operation& op) {
    if (op.block == last_) return "the head's backward belongs to the head operation";
    recomputed_ = false;
    if (at(op.block + 1).backwards <= op.micro) return "the block behind has not been passed";
    if (shape_.recompute && op.block > 0 && at(op.block).recomputes <= op.micro) return "not recomputed";
    if (at(op.block).reduced) return "backward after the block's gradient is final";
    if (op.block > 0) {
      const std::string fault = use(op);
      if (!fault.empty()) return fault;
    }
    return ascend(at(op.block).backwards, op.micro);
  }

  std::string reduce(const Operation& op) {
    if (at(op).reduced) return "reduced twice";
    if (at(op).backwards != shape_.micro_batches) return "reduced before its last backward";
    at(op).reduced = true;
    return "";
  }

  std::string check() {
    if (checked_) return "checked twice";
    for (const Counts& unit : units_) {
      if (!unit.reduced) return "checked before every gradient is final";
    }
    checked_ = true;
    return "";
  }

  // With clipping by block, a segment's update needs the norm of its whole block.
  bool final_gradient(const Operation& op) {
    for (int64_t s = 0; shape_.cut(op.block) && s < shape_.segments; ++s) {
      if (!segment(s).reduced) return false;
    }
    return at(op.block).reduced;
  }

  std::string tile(const Operation& op) {
    const int64_t first = shape_.updates(op.block, op.segment).first;
    return first + at(op).tiles++ == op.micro ? "" : "tiles must ascend";
  }

  std::string update(const Operation& op) {
    if (!final_gradient(op)) return "updated before its gradient is final";
    if (shape_.clip == Clip::kGlobal && !checked_) return "updated before the check";
    if (at(op).loans != 0) return "updated while on loan";
    if (at(op).updated) return "updated twice";
    const std::string fault = tile(op);
    const int64_t unit = op.unit(shape_.layers);
    if (!fault.empty() || at(op).tiles < updates_of(unit)) return fault;
    at(op).updated = true;
    if (shape_.clip != Clip::kGlobal) return "";
    // One order for what is updated at once and what is deferred: the forward's.
    while (next_update_ < std::ssize(units_) &&
           (shape_.deferred(std::min(next_update_, last_)) || updates_of(next_update_) == 0))
      ++next_update_;
    return unit == next_update_++ ? "" : "updates must go in forward order";
  }

  // Of the step before: its check has passed, its gradient is final.
  std::string deferred_update(const Operation& op) {
    if (!shape_.pending) return "nothing is deferred";
    if (at(op).forwards > 0) return "updated after its forward";
    if (at(op).loans != 0) return "updated while on loan";
    if (at(op).tiles == updates_of(op.unit(shape_.layers))) return "updated twice";
    return tile(op);
  }

  const ScheduleShape& shape_;
  int64_t last_;
  std::vector<Counts> units_;  // blocks, then segments
  int64_t next_update_ = 0;
  bool checked_ = false;
  bool recomputed_ = false;  // the operation before was a recomputation
};

std::string describe(size_t index, const Operation& op) {
  return " (operation " + std::to_string(index) + ": " + operation_name(op.kind) + ", block " +
         std::to_string(op.block) + (op.segment < 0 ? "" : ", segment " + std::to_string(op.segment)) +
         ", micro-batch " + std::to_string(op.micro) + ")";
}

}  // namespace

std::string schedule_fault(const StepSchedule& schedule, const ScheduleShape& shape) {
  Checker checker(shape);
  for (size_t i = 0; i < schedule.operations.size(); ++i) {
    const std::string fault = checker.visit(schedule.operations[i]);
    if (!fault.empty()) return fault + describe(i, schedule.operations[i]);
  }
  return checker.finish(true);
}

std::string evaluation_fault(const StepSchedule& schedule, const ScheduleShape& shape) {
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
