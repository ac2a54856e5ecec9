#include "plan/schedule.h"

#include <map>
#include <set>

namespace lm {
namespace {

class Builder {
 public:
  explicit Builder(const ScheduleShape& shape) : shape_(shape), last_(shape.layers + 1) {}

  void forward(int64_t micro) {
    for (int64_t block = 0; block <= shape_.layers; ++block) {
      use(block, {{OperationKind::kForward, block, micro}});
    }
  }

  void head(int64_t micro) {
    // A tied head multiplies by the embedding's matrix: both blocks are on loan.
    if (shape_.tied) add(OperationKind::kAcquire, 0, micro);
    use(last_, {{OperationKind::kHead, last_, micro}});
    if (shape_.tied) add(OperationKind::kRelease, 0, micro);
  }

  void backward(int64_t micro, bool final) {
    if (final) finished(last_);
    for (int64_t block = shape_.layers; block >= 1; --block) {
      if (shape_.recompute) {
        use(block, {{OperationKind::kRecompute, block, micro}, {OperationKind::kBackward, block, micro}});
      } else {
        use(block, {{OperationKind::kBackward, block, micro}});
      }
      if (final) finished(block);
    }
    add(OperationKind::kBackward, 0, micro);  // the embedding's: needs no weights
    if (final) finished(0);
  }

  void check_and_update() {
    add(OperationKind::kCheck, 0, 0);
    if (shape_.clip != Clip::kGlobal) return;
    for (int64_t block = 0; block <= last_; ++block) add(OperationKind::kUpdate, block, 0);
  }

  Schedule take() { return std::move(schedule_); }

 private:
  void add(OperationKind kind, int64_t block, int64_t micro) { schedule_.operations.push_back({kind, block, micro}); }

  void use(int64_t block, const std::vector<Operation>& operations) {
    add(OperationKind::kAcquire, block, operations.front().micro);
    schedule_.operations.insert(schedule_.operations.end(), operations.begin(), operations.end());
    add(OperationKind::kRelease, block, operations.front().micro);
  }

  void finished(int64_t block) {
    add(OperationKind::kReduce, block, 0);
    if (shape_.clip != Clip::kGlobal) add(OperationKind::kUpdate, block, 0);
  }

  const ScheduleShape& shape_;
  int64_t last_;
  Schedule schedule_;
};

}  // namespace

Schedule make_schedule(const ScheduleShape& shape) {
  Builder builder(shape);
  for (int64_t micro = 0; micro < shape.micro_batches; ++micro) {
    builder.forward(micro);
    builder.head(micro);
    builder.backward(micro, micro + 1 == shape.micro_batches);
  }
  builder.check_and_update();
  return builder.take();
}

std::string schedule_fault(const Schedule& schedule, const ScheduleShape& shape) {
  const int64_t last = shape.layers + 1;
  std::vector<std::pair<int64_t, int64_t>> open;  // (micro, block) forwards without a backward yet
  std::map<int64_t, int64_t> loans, backwards;
  std::set<int64_t> reduced, updated;
  bool checked = false;
  int64_t micro = 0;
  const auto at = [](const Operation& op) {
    return " (block " + std::to_string(op.block) + ", micro-batch " + std::to_string(op.micro) + ")";
  };
  for (const Operation& op : schedule.operations) {
    const bool computes = op.kind == OperationKind::kForward || op.kind == OperationKind::kHead ||
                          op.kind == OperationKind::kRecompute || op.kind == OperationKind::kBackward;
    if (computes && op.micro < micro) return "micro-batches must ascend" + at(op);
    if (computes) micro = op.micro;
    const bool needs_loan = computes && !(op.kind == OperationKind::kBackward && op.block == 0);
    if (needs_loan && loans[op.block] == 0) return "a block is used without a loan" + at(op);
    switch (op.kind) {
      case OperationKind::kAcquire: ++loans[op.block]; break;
      case OperationKind::kRelease:
        if (--loans[op.block] < 0) return "a loan is returned twice" + at(op);
        break;
      case OperationKind::kForward: open.emplace_back(op.micro, op.block); break;
      case OperationKind::kHead: ++backwards[last]; break;
      case OperationKind::kRecompute: break;
      case OperationKind::kBackward:
        if (open.empty() || open.back() != std::pair(op.micro, op.block)) return "backward out of order" + at(op);
        open.pop_back();
        ++backwards[op.block];
        break;
      case OperationKind::kReduce:
        if (backwards[op.block] != shape.micro_batches) return "reduced before its last backward" + at(op);
        if (!reduced.insert(op.block).second) return "reduced twice" + at(op);
        break;
      case OperationKind::kCheck: checked = true; break;
      case OperationKind::kUpdate:
        if (!reduced.contains(op.block)) return "updated before its gradient is final" + at(op);
        if (shape.clip == Clip::kGlobal && !checked) return "updated before the check" + at(op);
        if (loans[op.block] != 0) return "updated while on loan" + at(op);
        if (!updated.insert(op.block).second) return "updated twice" + at(op);
        break;
    }
  }
  if (!open.empty()) return "a forward has no backward";
  for (const auto& [block, count] : loans) {
    if (count != 0) return "a loan of block " + std::to_string(block) + " is never returned";
  }
  if (static_cast<int64_t>(updated.size()) != last + 1) return "not every block is updated";
  if (!checked) return "nothing checks the step";
  return "";
}

}  // namespace lm
