#include "plan/activations.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "plan/arena_walk.h"
#include "plan/device_reserve.h"
#include "schedule/schedule.h"
#include "spec/block_layout.h"

namespace lm {
namespace {

constexpr int64_t kSumRows = 64;  // rows per partial sum (kernels.h)
// Bytes of a thread's attention scratch, at least: tiles of 192 or 96 rows and of 64 keys.
constexpr int64_t attention_scratch(int64_t width) {
  return 66'000 + 2'720 * width;
}

// One adapted slice of a projection.
struct Slice {
  int64_t rows;
};

struct Projection {
  int64_t rows, columns;
  bool bias;
  std::vector<Slice> adapters;
};

// The step's allocations, function by function as src/model has them.
class Model {
 public:
  Model(const ModelSpec& spec, const AdapterSpec* adapter, const ActivationShape& shape, ArenaWalk& walk)
      : spec_(spec),
        adapter_(adapter),
        shape_(shape),
        walk_(walk),
        t_(shape.tokens),
        e_(static_cast<int64_t>(dtype_size(shape.dtype))) {
    qkv_ = projection(spec.qkv_rows(), spec.hidden, spec.qkv_bias,
                      {{"q_proj", spec.q_rows()}, {"k_proj", spec.kv_rows()}, {"v_proj", spec.kv_rows()}});
    out_ = projection(spec.hidden, spec.q_rows(), spec.o_bias, {{"o_proj", spec.hidden}});
    gate_up_ = projection(2 * spec.ffn, spec.hidden, spec.mlp_bias,
                          {{"gate_proj", spec.ffn}, {"up_proj", spec.ffn}});
    down_ = projection(spec.hidden, spec.ffn, spec.mlp_bias, {{"down_proj", spec.hidden}});
  }

  void place_batch() {
    // Rows with targets and these; on a GPU token, position, sample and the documents' starts as well.
    const bool cpu = shape_.device == DeviceType::kCpu;
    walk_.allocate(cpu ? 2 * t_ * 4 : (5 * t_ + document_starts(t_, shape_.documents)) * 4);
  }

  void saved() {
    walk_.allocate(t_ * 4);
    walk_.allocate(t_ * spec_.qkv_rows() * e_);
    if (spec_.qk_norm) {
      walk_.allocate(t_ * (spec_.q_rows() + spec_.kv_rows()) * e_);
      walk_.allocate(t_ * (spec_.heads + spec_.kv_heads) * 4);
    }
    walk_.allocate(t_ * spec_.q_rows() * e_);
    walk_.allocate(spec_.heads * t_ * 4);
    walk_.allocate(t_ * spec_.hidden * e_);
    walk_.allocate(t_ * 4);
    walk_.allocate(t_ * 2 * spec_.ffn * e_);
    for (const Projection* p : {&qkv_, &out_, &gate_up_, &down_}) {
      for (size_t i = 0; i < p->adapters.size(); ++i) walk_.allocate(t_ * adapter_->r * e_);
    }
  }

  void boundary() { walk_.allocate(t_ * spec_.hidden * e_); }

  void block_forward(bool whole) {
    const ArenaWalkFrame frame(walk_);
    hidden();
    reduce(qkv_);
    attention_forward();
    hidden();
    reduce(out_);
    reduce(gate_up_);
    if (!whole && down_.adapters.empty()) return;
    walk_.allocate(t_ * spec_.ffn * e_);
    reduce(down_);
  }

  void block_backward(bool want_dx) {
    mlp_backward();
    attention_block_backward(want_dx);
  }

  void head_loss(bool training) {
    const ArenaWalkFrame frame(walk_);
    // Rows are gathered when some have no target; every document's last one has none.
    hidden();
    hidden();
    walk_.allocate(t_ * 4);
    if (training) hidden();
    {
      const ArenaWalkFrame chunk(walk_);
      const int64_t rows = std::min(t_, shape_.row_chunk);
      for (int i = 0; i < 3; ++i) walk_.allocate(rows * 4);
      for (int64_t first = 0; first < spec_.vocab; first += kVocabularySegment) {
        walk_.allocate(rows * std::min(kVocabularySegment, spec_.vocab - first) * e_);
      }
      if (training) {
        walk_.allocate(rows * spec_.hidden * 4);
        walk_.allocate(rows * spec_.hidden * e_);
        if (adapter_ == nullptr) weight_gradient(std::min(kVocabularySegment, spec_.vocab), spec_.hidden);
      }
    }
    if (training) norm_backward(spec_.hidden);
  }

  void head_begin(bool training) {
    if (!training) hidden();
    for (int i = 0; i < 4; ++i) walk_.allocate(t_ * 4);
    if (training) walk_.allocate(t_ * spec_.hidden * 4);
    const ArenaWalkFrame frame(walk_);
    hidden();
  }

  void head_segment(int64_t segment, bool backward) {
    const ArenaWalkFrame frame(walk_);
    const int64_t rows = std::min(t_, shape_.row_chunk);
    const int64_t columns = std::min(kVocabularySegment, spec_.vocab - segment * kVocabularySegment);
    walk_.allocate(rows * columns * e_);
    if (!backward) return;
    walk_.allocate(rows * spec_.hidden * e_);
    if (adapter_ == nullptr) weight_gradient(columns, spec_.hidden);
  }

  void head_finish() {
    const ArenaWalkFrame frame(walk_);
    hidden();
    hidden();
    norm_backward(spec_.hidden);
  }

 private:
  struct Module {
    const char* name;
    int64_t rows;
  };

  Projection projection(int64_t rows, int64_t columns, bool bias, const std::vector<Module>& modules) {
    Projection out{rows, columns, bias, {}};
    if (adapter_ == nullptr) return out;
    for (const Module& module : modules) {
      if (std::find(adapter_->targets.begin(), adapter_->targets.end(), module.name) !=
          adapter_->targets.end()) {
        out.adapters.push_back({module.rows});
      }
    }
    return out;
  }

  void hidden() { walk_.allocate(t_ * spec_.hidden * e_); }

  // linear_reduce: dropped inputs live in a frame per adapter.
  void reduce(const Projection& p) {
    if (p.adapters.empty() || adapter_->dropout == 0) return;
    const ArenaWalkFrame frame(walk_);
    walk_.allocate(t_ * p.columns * e_);
  }

  void weight_gradient(int64_t rows, int64_t columns) {
    if (shape_.dtype == shape_.gradient_dtype || shape_.device == DeviceType::kCuda) return;
    const ArenaWalkFrame frame(walk_);
    walk_.allocate(rows * columns * e_);
  }

  void column_sums(int64_t width) {
    walk_.allocate(width * 4);
    walk_.allocate(ceil_div(t_, kSumRows) * width * 4);
  }

  void linear_backward(const Projection& p, bool want_dx) {
    if (adapter_ == nullptr) {
      weight_gradient(p.rows, p.columns);
      if (p.bias) {
        const ArenaWalkFrame frame(walk_);
        column_sums(p.rows);
      }
      return;
    }
    for (const Slice& slice : p.adapters) {
      const ArenaWalkFrame frame(walk_);
      walk_.allocate(t_ * adapter_->r * e_);
      weight_gradient(slice.rows, adapter_->r);
      walk_.allocate(t_ * adapter_->r * e_);
      if (adapter_->dropout > 0) walk_.allocate(t_ * p.columns * e_);
      weight_gradient(adapter_->r, p.columns);
      if (want_dx && adapter_->dropout > 0) walk_.allocate(t_ * p.columns * e_);
    }
  }

  void norm_backward(int64_t width) {
    if (adapter_ != nullptr) return;
    const ArenaWalkFrame frame(walk_);
    column_sums(width);
  }

  void attention_forward() {
    if (shape_.device == DeviceType::kCuda) return;
    const ArenaWalkFrame frame(walk_);
    walk_.allocate(attention_forward_bound(spec_.head_dim, shape_.threads));
  }
  void attention_backward() {
    const ArenaWalkFrame frame(walk_);
    if (shape_.device == DeviceType::kCuda) {
      walk_.allocate(2 * 8);  // a random state that nothing reads
    } else {
      walk_.allocate(attention_backward_bound(t_, spec_.kv_heads, spec_.head_dim, shape_.threads));
    }
  }

  void mlp_backward() {
    const ArenaWalkFrame frame(walk_);
    if (!down_.adapters.empty()) {
      walk_.allocate(t_ * spec_.ffn * e_);
      walk_.allocate(t_ * spec_.ffn * e_);
    } else {
      walk_.allocate(t_ * spec_.ffn * e_);
    }
    linear_backward(down_, !down_.adapters.empty());
    hidden();
    hidden();
    linear_backward(gate_up_, true);
    norm_backward(spec_.hidden);
  }

  void attention_block_backward(bool want_dx) {
    const ArenaWalkFrame frame(walk_);
    walk_.allocate(t_ * spec_.qkv_rows() * e_);
    {
      const ArenaWalkFrame inner(walk_);
      walk_.allocate(t_ * spec_.q_rows() * e_);
      linear_backward(out_, true);
      attention_backward();
    }
    if (spec_.qk_norm) norm_backward(spec_.head_dim);
    hidden();
    const bool dnormed = want_dx || adapter_ == nullptr;
    if (dnormed) hidden();
    linear_backward(qkv_, dnormed);
    if (dnormed) norm_backward(spec_.hidden);
  }

  const ModelSpec& spec_;
  const AdapterSpec* adapter_;
  const ActivationShape& shape_;
  ArenaWalk& walk_;
  int64_t t_, e_;
  Projection qkv_, out_, gate_up_, down_;
};

// Walks the operations of one group as the executor does (train/step.cpp); each group begins with an empty
// arena.
class StepWalk {
 public:
  StepWalk(const ModelSpec& spec, const AdapterSpec* adapter, const ActivationShape& shape)
      : shape_(shape), model_(spec, adapter, shape, walk_), mark_(static_cast<size_t>(spec.layers) + 2) {}

  void visit(const Operation& op) {
    if (op.block + 1 == std::ssize(mark_)) return head(op);
    const bool inner = op.block > 0, last = op.micro + 1 == shape_.group;
    switch (op.kind) {
      case OperationKind::kForward:
        inner ? forward(op.block, op.micro == 0) : begin();
        break;
      case OperationKind::kRecompute:
        recomputed_ = walk_.mark();
        model_.saved();
        model_.block_forward(false);
        break;
      case OperationKind::kBackward:
        if (inner) model_.block_backward(op.block > 1 || shape_.train_embedding);
        if (inner && shape_.recompute) walk_.rewind(recomputed_);
        if (last && !(inner && shape_.recompute)) walk_.rewind(inner ? mark(op.block) : 0);
        break;
      default:
        break;  // nothing of the arena
    }
  }

  int64_t high_water() const { return walk_.high_water(); }
  int64_t saved() const { return saved_; }

 private:
  int64_t& mark(int64_t block) { return mark_[static_cast<size_t>(block)]; }

  void head(const Operation& op) {
    const bool forward = op.kind == OperationKind::kForward;
    if (op.kind == OperationKind::kHead) return model_.head_loss(true);
    if (!forward && op.kind != OperationKind::kBackward) return;
    if (op.segment >= 0) return model_.head_segment(op.segment, !forward);
    if (!forward) {
      model_.head_finish();
      if (op.micro + 1 == shape_.group) walk_.rewind(mark(op.block));
      return;
    }
    if (op.micro == 0) mark(op.block) = walk_.mark();
    model_.head_begin(true);
  }

  void input() {
    if (shape_.inputs_elsewhere) return;
    const int64_t before = walk_.mark();
    model_.boundary();
    saved_ += walk_.mark() - before;
  }

  void begin() {
    model_.place_batch();
    model_.boundary();  // dx
    input();
  }

  void forward(int64_t block, bool first) {
    if (shape_.recompute) {
      input();
      const ArenaWalkFrame frame(walk_);
      model_.saved();
      model_.block_forward(true);
      return;
    }
    if (first) mark(block) = walk_.mark();
    const int64_t before = walk_.mark();
    model_.saved();
    saved_ += walk_.mark() - before;
    input();
    model_.block_forward(true);
  }

  const ActivationShape& shape_;
  ArenaWalk walk_;
  Model model_;
  std::vector<int64_t> mark_;  // before a block's saved activations
  int64_t recomputed_ = 0;     // before those of the recomputation under way
  int64_t saved_ = 0;
};

}  // namespace

int64_t attention_forward_bound(int64_t head_dim, int64_t threads) {
  return threads * attention_scratch(round_up(head_dim, 16));
}

int64_t attention_backward_bound(int64_t tokens, int64_t kv_heads, int64_t head_dim, int64_t threads) {
  const int64_t width = round_up(head_dim, 16);
  return kv_heads * tokens * (2 * width + 1) * 4 + 3 * 64 + threads * attention_scratch(width);
}

ArenaNeed arena_need(const ModelSpec& spec, const AdapterSpec* adapter, const ActivationShape& shape) {
  const int64_t segments = shape.cut_head ? ceil_div(spec.vocab, kVocabularySegment) : 0;
  const StepSchedule schedule = make_schedule({.layers = spec.layers,
                                               .micro_batches = shape.group,
                                               .tied = spec.tied,
                                               .recompute = shape.recompute,
                                               .group = shape.group,
                                               .segments = segments});
  StepWalk walk(spec, adapter, shape);
  for (const Operation& operation : schedule.operations) walk.visit(operation);
  ArenaNeed need;
  need.bytes = std::max(walk.high_water(), arena_need_forward(spec, adapter, shape));
  need.saved = walk.saved();
  need.logits = std::min(shape.tokens, shape.row_chunk) *
                (shape.cut_head ? std::min(spec.vocab, kVocabularySegment) : spec.vocab) *
                static_cast<int64_t>(dtype_size(shape.dtype));
  return need;
}

int64_t arena_need_forward(const ModelSpec& spec, const AdapterSpec* adapter, const ActivationShape& shape) {
  ArenaWalk walk;
  Model model(spec, adapter, shape, walk);
  model.place_batch();
  model.boundary();
  model.boundary();
  {
    const ArenaWalkFrame frame(walk);
    model.saved();
    model.block_forward(true);
  }
  if (!shape.cut_head) {
    model.head_loss(false);
    return walk.high_water();
  }
  model.head_begin(false);
  model.head_segment(0, false);  // the largest
  return walk.high_water();
}

}  // namespace lm
