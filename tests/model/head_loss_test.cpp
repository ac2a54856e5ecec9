// A cut head gives the bits of a whole one: loss, gradient of its input and of its parameters, logits.
#include "model/head_loss.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "base/bytes.h"
#include "kernels/runtime.h"

namespace lm {
namespace {

constexpr int64_t kHidden = 24, kTokens = 50;

struct Variant {
  int64_t vocab = 20000;
  int64_t row_chunk = 16;
  DType dtype = DType::kBF16, gradient_dtype = DType::kF32;
  bool trained = true, evaluation = false;
  // Of each micro-batch: every how manyth row has a target; 1: all, 0: none.
  std::vector<int> targets = {3, 1};
};

// Every segment at an address of its own, as in slots.
struct Piece {
  Memory weight, gradient;
  HeadSegment segment;
};

class HeadRun {
 public:
  explicit HeadRun(const Variant& v)
      : v_(v),
        spec_(spec(v.vocab)),
        stream_(start_torch(DeviceType::kCpu, 2, true)),
        arena_(DeviceType::kCpu, int64_t{64} << 20),
        rope_(spec_, kTokens, v.dtype, DeviceType::kCpu, stream_),
        context_{spec_,  v.dtype, DeviceType::kCpu, kernels(DeviceType::kCpu), stream_,
                 arena_, rope_,   uploads_} {
    at::manual_seed(5);
    const auto random = [&](at::IntArrayRef shape) {
      return at::randn(shape, at::kFloat).mul_(0.3).to(torch_type(v.dtype));
    };
    head_.norm.weight = random({kHidden}).add_(1);
    head_.weight.weight = random({v.vocab, kHidden});
    if (v.trained) {
      // What is there at first must not matter: the step's first micro-batch overwrites it.
      head_.norm.gradient = at::full({kHidden}, 7, torch_type(v.gradient_dtype));
      head_.weight.gradient = at::full({v.vocab, kHidden}, 7, torch_type(v.gradient_dtype));
    }
    std::mt19937 engine(3);
    for (size_t m = 0; m < v.targets.size(); ++m) {
      Batch& batch = batches_.emplace_back();
      for (int64_t t = 0; t < kTokens; ++t) {
        const bool target = v.targets[m] > 0 && t % v.targets[m] == 0;
        batch.token.push_back(0);
        batch.target.push_back(target ? static_cast<int32_t>(engine() % static_cast<uint32_t>(v.vocab)) : -1);
      }
      x_.push_back(random({kTokens, kHidden}));
      dx_.push_back(v.evaluation ? at::Tensor() : random({kTokens, kHidden}));
    }
    for (const Batch& batch : batches_) placed_.push_back(place_batch(context_, batch));
  }

  void whole() {
    for (size_t m = 0; m < x_.size(); ++m) {
      head_loss(context_, head_, placed_[m], x_[m], dx_[m], &nll_, options(m));
    }
  }

  // As a schedule's group does it: a segment sees all micro-batches before the next one.
  void cut() {
    std::vector<HeadRows> rows;
    for (size_t m = 0; m < x_.size(); ++m)
      rows.push_back(head_begin(context_, head_.norm, placed_[m], x_[m], dx_[m]));
    std::vector<Piece> pieces = cut_matrix();
    for (const Piece& piece : pieces) {
      for (size_t m = 0; m < x_.size(); ++m)
        head_segment_forward(context_, piece.segment, rows[m], &nll_, options(m));
    }
    if (v_.evaluation) return;
    for (const Piece& piece : pieces) {
      for (size_t m = 0; m < x_.size(); ++m)
        head_segment_backward(context_, piece.segment, rows[m], options(m));
    }
    for (size_t m = 0; m < x_.size(); ++m)
      head_finish(context_, head_.norm, x_[m], rows[m], dx_[m], options(m));
    if (!v_.trained) return;
    for (const Piece& piece : pieces) {
      head_.weight.gradient.narrow(0, piece.segment.first_row, piece.segment.weight.gradient.size(0))
          .copy_(piece.segment.weight.gradient);
    }
  }

  at::Tensor logits(bool in_segments) {
    const ArenaFrame frame(arena_);
    const at::Tensor out = at::empty({kTokens, v_.vocab}, torch_type(v_.dtype));
    if (!in_segments) {
      head_logits(context_, head_, x_[0], out);
      return out;
    }
    const at::Tensor normed = head_normed(context_, head_.norm, x_[0]);
    for (const Piece& piece : cut_matrix()) head_segment_logits(piece.segment, normed, out);
    return out;
  }

  Head head_;
  std::vector<at::Tensor> x_, dx_;
  double nll_ = 0;

 private:
  static ModelSpec spec(int64_t vocab) {
    ModelSpec spec;
    spec.hidden = kHidden;
    spec.vocab = vocab;
    spec.heads = spec.kv_heads = 1;
    spec.head_dim = kHidden;
    return spec;
  }

  LossOptions options(size_t m) const { return {.row_chunk = v_.row_chunk, .scale = 0.01F, .first = m == 0}; }

  std::vector<Piece> cut_matrix() const {
    std::vector<Piece> out;
    for (int64_t row = 0; row < v_.vocab; row += kVocabularySegment) {
      const int64_t rows = std::min(kVocabularySegment, v_.vocab - row);
      const auto own = [&](const at::Tensor& all, DType type, Memory& memory) {
        const auto bytes = rows * kHidden * static_cast<int64_t>(dtype_size(type));
        memory = Memory(DeviceType::kCpu, bytes);
        at::Tensor part = view_memory(memory.data(), {rows, kHidden}, type, DeviceType::kCpu);
        part.copy_(all.narrow(0, row, rows));
        return part;
      };
      Piece& piece = out.emplace_back();
      piece.segment.first_row = row;
      piece.segment.weight.weight = own(head_.weight.weight, v_.dtype, piece.weight);
      if (v_.trained)
        piece.segment.weight.gradient = own(head_.weight.gradient, v_.gradient_dtype, piece.gradient);
    }
    return out;
  }

  Variant v_;
  ModelSpec spec_;
  StreamView stream_;
  Arena arena_;
  RopeTable rope_;
  Uploads uploads_;
  Context context_;
  std::vector<Batch> batches_;
  std::vector<DeviceBatch> placed_;
};

bool same(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  return a.nbytes() == b.nbytes() && a.is_contiguous() && b.is_contiguous() &&
         std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0;
}

void expect_same(const Variant& v, const std::string& text) {
  HeadRun whole(v), cut(v);
  whole.whole();
  cut.cut();
  EXPECT_EQ(whole.nll_, cut.nll_) << text;
  for (size_t m = 0; m < whole.dx_.size(); ++m)
    EXPECT_TRUE(same(whole.dx_[m], cut.dx_[m])) << "dx of micro-batch " << m << ", " << text;
  EXPECT_TRUE(same(whole.head_.weight.gradient, cut.head_.weight.gradient)) << "dW, " << text;
  EXPECT_TRUE(same(whole.head_.norm.gradient, cut.head_.norm.gradient)) << "norm, " << text;
}

TEST(CutHead, GivesTheBitsOfAWholeOneForEveryNumberOfSegments) {
  for (const int64_t vocab : {500, 8192, 8193, 20000, 33000}) {
    for (const int64_t row_chunk : {7, 16, 512})
      expect_same({.vocab = vocab, .row_chunk = row_chunk},
                  "vocab " + std::to_string(vocab) + ", rows " + std::to_string(row_chunk));
  }
}

TEST(CutHead, GivesTheSameBitsInEveryTypeFrozenOrEvaluated) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const DType gradient : {DType::kBF16, DType::kF32}) {
      if (dtype == DType::kF32 && gradient == DType::kBF16) continue;
      expect_same({.dtype = dtype, .gradient_dtype = gradient}, "trained");
    }
    expect_same({.dtype = dtype, .trained = false}, "frozen");
    expect_same({.dtype = dtype, .trained = false, .evaluation = true}, "evaluated");
  }
}

TEST(CutHead, GivesTheSameBitsWhereMicroBatchesHaveNoTargets) {
  for (const std::vector<int>& targets :
       {std::vector<int>{0}, {0, 0}, {0, 2}, {2, 0}, {1, 0, 5}, {1, 1, 1}, {60}})
    expect_same({.targets = targets}, std::to_string(targets.front()));
}

TEST(CutHead, GivesTheSameLogits) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const int64_t vocab : {500, 20000}) {
      HeadRun run({.vocab = vocab, .dtype = dtype});
      const at::Tensor whole = run.logits(false);
      EXPECT_TRUE(same(whole, run.logits(true)));
      // And they are logits: of the first row, by hand.
      const at::Tensor x = run.x_[0][0].to(at::kFloat);
      const at::Tensor normed =
          x.mul(x.square().mean().add(1e-6).rsqrt()).mul(run.head_.norm.weight.to(at::kFloat));
      const at::Tensor expected = at::mv(run.head_.weight.weight.to(at::kFloat), normed);
      EXPECT_TRUE(at::allclose(whole[0].to(at::kFloat), expected, 0.05, 0.05));
    }
  }
}

}  // namespace
}  // namespace lm
