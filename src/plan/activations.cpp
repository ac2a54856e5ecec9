#include "plan/activations.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/bytes.h"

namespace lm {
namespace {

constexpr int64_t kAlignment = 256;          // base/arena.h
constexpr int64_t kSumRows = 64;             // rows per partial sum (kernels.h)
// Bytes of a thread's attention scratch, at least: tiles of 192 or 96 rows and of 64 keys.
constexpr int64_t attention_scratch(int64_t width) { return 66'000 + 2'720 * width; }
constexpr int64_t kSegment = 8192;           // vocabulary rows per segment (model/head_loss.h)

// Mimics an arena: sizes only.
class Walk {
 public:
  void take(int64_t bytes) {
    used_ += round_up(bytes, kAlignment);
    high_ = std::max(high_, used_);
  }
  int64_t mark() const { return used_; }
  void rewind(int64_t mark) { used_ = mark; }
  int64_t high() const { return high_; }

 private:
  int64_t used_ = 0, high_ = 0;
};

class Frame {
 public:
  explicit Frame(Walk& walk) : walk_(walk), mark_(walk.mark()) {}
  ~Frame() { walk_.rewind(mark_); }
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

 private:
  Walk& walk_;
  int64_t mark_;
};

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
  Model(const ModelSpec& spec, const AdapterSpec* adapter, const ActivationShape& shape, Walk& walk)
      : spec_(spec), adapter_(adapter), shape_(shape), walk_(walk), t_(shape.tokens),
        e_(static_cast<int64_t>(dtype_size(shape.dtype))) {
    qkv_ = projection(spec.qkv_rows(), spec.hidden, spec.qkv_bias,
                      {{"q_proj", spec.q_rows()}, {"k_proj", spec.kv_rows()}, {"v_proj", spec.kv_rows()}});
    out_ = projection(spec.hidden, spec.q_rows(), spec.o_bias, {{"o_proj", spec.hidden}});
    gate_up_ = projection(2 * spec.ffn, spec.hidden, spec.mlp_bias, {{"gate_proj", spec.ffn}, {"up_proj", spec.ffn}});
    down_ = projection(spec.hidden, spec.ffn, spec.mlp_bias, {{"down_proj", spec.hidden}});
  }

  void place_batch() {
    if (shape_.device == DeviceType::kCpu) return;
    for (int i = 0; i < 3; ++i) walk_.take(t_ * 4);
  }

  void saved() {
    walk_.take(t_ * 4);
    walk_.take(t_ * spec_.qkv_rows() * e_);
    if (spec_.qk_norm) {
      walk_.take(t_ * (spec_.q_rows() + spec_.kv_rows()) * e_);
      walk_.take(t_ * (spec_.heads + spec_.kv_heads) * 4);
    }
    walk_.take(t_ * spec_.q_rows() * e_);
    walk_.take(spec_.heads * t_ * 4);
    walk_.take(t_ * spec_.hidden * e_);
    walk_.take(t_ * 4);
    walk_.take(t_ * 2 * spec_.ffn * e_);
    for (const Projection* p : {&qkv_, &out_, &gate_up_, &down_}) {
      for (size_t i = 0; i < p->adapters.size(); ++i) walk_.take(t_ * adapter_->r * e_);
    }
  }

  void boundary() { walk_.take(t_ * spec_.hidden * e_); }

  void block_forward(bool whole) {
    const Frame frame(walk_);
    hidden();
    reduce(qkv_);
    attention_forward();
    hidden();
    reduce(out_);
    reduce(gate_up_);
    if (!whole && down_.adapters.empty()) return;
    walk_.take(t_ * spec_.ffn * e_);
    reduce(down_);
  }

  void block_backward(bool want_dx) {
    mlp_backward();
    attention_block_backward(want_dx);
  }

  void head_loss(bool training) {
    const Frame frame(walk_);
    walk_.take(t_ * 4);
    walk_.take(t_ * 4);
    // Rows are gathered when some have no target; every document's last one has none.
    hidden();
    hidden();
    walk_.take(t_ * 4);
    if (training) hidden();
    {
      const Frame chunk(walk_);
      const int64_t rows = std::min(t_, shape_.row_chunk);
      for (int i = 0; i < 3; ++i) walk_.take(rows * 4);
      for (int64_t first = 0; first < spec_.vocab; first += kSegment) {
        walk_.take(rows * std::min(kSegment, spec_.vocab - first) * e_);
      }
      if (training) {
        walk_.take(rows * spec_.hidden * 4);
        walk_.take(rows * spec_.hidden * e_);
        if (adapter_ == nullptr) weight_gradient(std::min(kSegment, spec_.vocab), spec_.hidden);
      }
    }
    if (training) norm_backward(spec_.hidden);
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
      if (std::find(adapter_->targets.begin(), adapter_->targets.end(), module.name) != adapter_->targets.end()) {
        out.adapters.push_back({module.rows});
      }
    }
    return out;
  }

  void hidden() { walk_.take(t_ * spec_.hidden * e_); }

  // linear_reduce: dropped inputs live in a frame per adapter.
  void reduce(const Projection& p) {
    if (p.adapters.empty() || adapter_->dropout == 0) return;
    const Frame frame(walk_);
    walk_.take(t_ * p.columns * e_);
  }

  void weight_gradient(int64_t rows, int64_t columns) {
    if (shape_.dtype == shape_.gradient_dtype || shape_.device == DeviceType::kCuda) return;
    const Frame frame(walk_);
    walk_.take(rows * columns * e_);
  }

  void column_sums(int64_t width) {
    walk_.take(width * 4);
    walk_.take(ceil_div(t_, kSumRows) * width * 4);
  }

  void linear_backward(const Projection& p, bool want_dx) {
    if (adapter_ == nullptr) {
      weight_gradient(p.rows, p.columns);
      if (p.bias) {
        const Frame frame(walk_);
        column_sums(p.rows);
      }
      return;
    }
    for (const Slice& slice : p.adapters) {
      const Frame frame(walk_);
      walk_.take(t_ * adapter_->r * e_);
      weight_gradient(slice.rows, adapter_->r);
      walk_.take(t_ * adapter_->r * e_);
      if (adapter_->dropout > 0) walk_.take(t_ * p.columns * e_);
      weight_gradient(adapter_->r, p.columns);
      if (want_dx && adapter_->dropout > 0) walk_.take(t_ * p.columns * e_);
    }
  }

  void norm_backward(int64_t width) {
    if (adapter_ != nullptr) return;
    const Frame frame(walk_);
    column_sums(width);
  }

  // At least what kernels.h's attention_forward_scratch and attention_backward_scratch say, for the CPU; GPUs
  // take the documents' starts.
  void attention_forward() {
    const Frame frame(walk_);
    if (shape_.device == DeviceType::kCuda) {
      walk_.take((shape_.documents + 1) * 4);
    } else {
      walk_.take(shape_.threads * attention_scratch(round_up(spec_.head_dim, 16)));
    }
  }
  void attention_backward() {
    const Frame frame(walk_);
    if (shape_.device == DeviceType::kCuda) {
      walk_.take((shape_.documents + 1) * 4);
      walk_.take(0);
    } else {
      const int64_t width = round_up(spec_.head_dim, 16);
      walk_.take(spec_.kv_heads * t_ * (2 * width + 1) * 4 + 3 * 64 +
                 shape_.threads * attention_scratch(width));
    }
  }

  void mlp_backward() {
    const Frame frame(walk_);
    if (!down_.adapters.empty()) {
      walk_.take(t_ * spec_.ffn * e_);
      walk_.take(t_ * spec_.ffn * e_);
    } else {
      walk_.take(t_ * spec_.ffn * e_);
    }
    linear_backward(down_, !down_.adapters.empty());
    hidden();
    hidden();
    linear_backward(gate_up_, true);
    norm_backward(spec_.hidden);
  }

  void attention_block_backward(bool want_dx) {
    const Frame frame(walk_);
    walk_.take(t_ * spec_.qkv_rows() * e_);
    {
      const Frame inner(walk_);
      walk_.take(t_ * spec_.q_rows() * e_);
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
  Walk& walk_;
  int64_t t_, e_;
  Projection qkv_, out_, gate_up_, down_;
};

}  // namespace

ArenaNeed arena_need(const ModelSpec& spec, const AdapterSpec* adapter, const ActivationShape& shape) {
  Walk walk;
  Model model(spec, adapter, shape, walk);
  ArenaNeed need;
  model.place_batch();
  walk.take(shape.tokens * spec.hidden * static_cast<int64_t>(dtype_size(shape.dtype)));  // dx
  const int64_t before = walk.mark();
  model.boundary();
  std::vector<int64_t> mark(static_cast<size_t>(spec.layers) + 1);
  for (int64_t block = 1; block <= spec.layers; ++block) {
    mark[static_cast<size_t>(block)] = walk.mark();
    if (shape.recompute) {
      model.boundary();
      const Frame frame(walk);
      model.saved();
      model.block_forward(true);
    } else {
      model.saved();
      model.boundary();
      model.block_forward(true);
    }
  }
  need.saved = walk.mark() - before;
  model.head_loss(true);
  for (int64_t block = spec.layers; block >= 1; --block) {
    if (shape.recompute) {
      const Frame frame(walk);
      model.saved();
      model.block_forward(false);
      model.block_backward(block > 1 || shape.train_embedding);
    } else {
      model.block_backward(block > 1 || shape.train_embedding);
      walk.rewind(mark[static_cast<size_t>(block)]);
    }
  }
  need.bytes = std::max(walk.high(), arena_need_forward(spec, adapter, shape));
  need.logits = std::min(shape.tokens, shape.row_chunk) * spec.vocab * static_cast<int64_t>(dtype_size(shape.dtype));
  return need;
}

int64_t arena_need_forward(const ModelSpec& spec, const AdapterSpec* adapter, const ActivationShape& shape) {
  Walk walk;
  Model model(spec, adapter, shape, walk);
  model.place_batch();
  model.boundary();
  model.boundary();
  {
    const Frame frame(walk);
    model.saved();
    model.block_forward(true);
  }
  model.head_loss(false);
  return walk.high();
}

}  // namespace lm
