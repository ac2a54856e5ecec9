// The rules of a schedule, checked without knowledge of how it was made: a walk that counts.
#include <algorithm>
#include <vector>

#include "plan/schedule.h"

namespace lm {
namespace {

struct BlockCounts {
  int64_t forwards = 0, recomputes = 0, backwards = 0;  // of micro-batches, in ascending order
  int64_t loans = 0;
  int64_t tiles = 0;  // updated
  bool reduced = false, updated = false;
};

class Checker {
 public:
  explicit Checker(const ScheduleShape& shape)
      : shape_(shape), last_(shape.layers + 1), blocks_(static_cast<size_t>(last_) + 1) {}

  // "" or what is wrong with `op` after all that came before.
  std::string visit(const Operation& op) {
    if (op.block < 0 || op.block > last_) return "no such block";
    const int64_t most = op.kind == OperationKind::kUpdate ? std::max<int64_t>(shape_.tiles_of(op.block), 1)
                                                           : shape_.micro_batches;
    if (op.micro < 0 || op.micro >= most) return "no such micro-batch or tile";
    // Recomputed activations live until the backward that wanted them, and nothing may come between.
    if (recomputed_ && op != Operation{OperationKind::kBackward, op.block, op.micro})
      return "backward must follow its recomputation";
    switch (op.kind) {
      case OperationKind::kAcquire:
        ++at(op.block).loans;
        return "";
      case OperationKind::kRelease:
        return --at(op.block).loans < 0 ? "a loan is returned twice" : "";
      case OperationKind::kForward:
        return forward(op);
      case OperationKind::kHead:
        return head(op);
      case OperationKind::kRecompute:
        return recompute(op);
      case OperationKind::kBackward:
        return backward(op);
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
    for (size_t b = 0; b < blocks_.size(); ++b) {
      const BlockCounts& block = blocks_[b];
      const std::string name = " block " + std::to_string(b);
      if (block.loans != 0) return "a loan of" + name + " is never returned";
      if (block.forwards != shape_.micro_batches) return "a forward of" + name + " is missing";
      if (!training) continue;
      if (block.backwards != shape_.micro_batches) return "a backward of" + name + " is missing";
      if (!block.reduced) return name + " is never reduced";
      if (shape_.deferred(static_cast<int64_t>(b))) continue;
      if (!block.updated) return name + " is never updated";
    }
    if (training && !checked_) return "nothing checks the step";
    return "";
  }

 private:
  BlockCounts& at(int64_t block) { return blocks_[static_cast<size_t>(block)]; }

  std::string use(int64_t block) {
    if (at(block).updated) return "a block is used after its update";
    if (shape_.pending && shape_.deferred(block) && at(block).tiles < shape_.tiles_of(block))
      return "a block is used before its deferred update";
    return at(block).loans == 0 ? "a block is used without a loan" : "";
  }

  // The micro-batch that comes next in a block; every accumulator adds them in this order.
  static std::string ascend(int64_t& count, int64_t micro) {
    return count++ == micro ? "" : "micro-batches must ascend";
  }

  std::string forward(const Operation& op) {
    if (op.block == last_) return "the head's forward belongs to the head operation";
    if (at(op.block).reduced) return "forward after the block's gradient is final";
    if (op.block > 0 && at(op.block - 1).forwards <= op.micro) return "the block before has not been passed";
    const std::string fault = use(op.block);
    return fault.empty() ? ascend(at(op.block).forwards, op.micro) : fault;
  }

  std::string head(const Operation& op) {
    if (op.block != last_) return "only the last block is a head";
    if (at(last_ - 1).forwards <= op.micro) return "the block before has not been passed";
    std::string fault = use(last_);
    if (fault.empty() && shape_.tied) fault = use(0);
    if (!fault.empty()) return fault;
    ++at(last_).backwards;
    return ascend(at(last_).forwards, op.micro);
  }

  std::string recompute(const Operation& op) {
    if (!shape_.recompute) return "nothing is to be recomputed";
    if (op.block == 0 || op.block == last_) return "only transformer blocks are recomputed";
    recomputed_ = true;
    const std::string fault = use(op.block);
    return fault.empty() ? ascend(at(op.block).recomputes, op.micro) : fault;
  }

  std::string backward(const Operation& op) {
    if (op.block == last_) return "the head's backward belongs to the head operation";
    recomputed_ = false;
    if (at(op.block + 1).backwards <= op.micro) return "the block behind has not been passed";
    if (shape_.recompute && op.block > 0 && at(op.block).recomputes <= op.micro) return "not recomputed";
    if (at(op.block).reduced) return "backward after the block's gradient is final";
    if (op.block > 0) {
      const std::string fault = use(op.block);
      if (!fault.empty()) return fault;
    }
    return ascend(at(op.block).backwards, op.micro);
  }

  std::string reduce(const Operation& op) {
    if (at(op.block).reduced) return "reduced twice";
    if (at(op.block).backwards != shape_.micro_batches) return "reduced before its last backward";
    at(op.block).reduced = true;
    return "";
  }

  std::string check() {
    if (checked_) return "checked twice";
    for (const BlockCounts& block : blocks_) {
      if (!block.reduced) return "checked before every gradient is final";
    }
    checked_ = true;
    return "";
  }

  std::string update(const Operation& op) {
    if (!at(op.block).reduced) return "updated before its gradient is final";
    if (shape_.clip == Clip::kGlobal && !checked_) return "updated before the check";
    if (at(op.block).loans != 0) return "updated while on loan";
    if (at(op.block).updated) return "updated twice";
    const std::string fault = ascend(at(op.block).tiles, op.micro);
    if (!fault.empty()) return "tiles must ascend";
    if (at(op.block).tiles < shape_.tiles_of(op.block)) return "";
    at(op.block).updated = true;
    if (shape_.clip != Clip::kGlobal) return "";
    // One order for what is updated at once and what is deferred: the forward's.
    while (shape_.deferred(next_update_)) ++next_update_;
    return op.block == next_update_++ ? "" : "updates must go in forward order";
  }

  // Of the step before: its check has passed, its gradient is final.
  std::string deferred_update(const Operation& op) {
    if (!shape_.pending) return "nothing is deferred";
    if (at(op.block).forwards > 0) return "updated after its forward";
    if (at(op.block).loans != 0) return "updated while on loan";
    if (at(op.block).tiles == shape_.tiles_of(op.block)) return "updated twice";
    return ascend(at(op.block).tiles, op.micro).empty() ? "" : "tiles must ascend";
  }

  const ScheduleShape& shape_;
  int64_t last_;
  std::vector<BlockCounts> blocks_;
  int64_t next_update_ = 0;
  bool checked_ = false;
  bool recomputed_ = false;  // the operation before was a recomputation
};

std::string describe(size_t index, const Operation& op) {
  return " (operation " + std::to_string(index) + ": " + operation_name(op.kind) + ", block " +
         std::to_string(op.block) + ", micro-batch " + std::to_string(op.micro) + ")";
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
