// A chunked head and one in two phases give the bits of a fused one: loss, nll of each row, gradient of its
// input and of its parameters, logits. And they give what torch's own cross-entropy and autograd do.
#include "model/head_loss.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <stdexcept>

#include "base/bytes.h"
#include "kernels/aten.h"
#include "kernels/library.h"
#include "kernels/runtime.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

constexpr int64_t kHidden = 24, kTokens = 50;

struct Variant {
  int64_t vocab = 20000;
  int64_t row_chunk = 16;
  DType dtype = DType::kBF16, gradient_dtype = DType::kF32;
  bool trained = true, evaluation = false, weighted = false;
  HeadSpec head = {};
  NormKind norm = NormKind::kRms;
  // Of each micro-batch: every how manyth row has a target; 1: all, 0: none.
  std::vector<int> targets = {3, 1};
};

View view(const at::Tensor& x) {
  if (!x.defined()) return {};
  const int64_t columns = x.dim() == 2 ? x.size(1) : 1;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64, DType::kI32, DType::kI64}) {
    if (torch_type(dtype) == x.scalar_type()) return {x.data_ptr(), dtype, x.size(0), columns, columns};
  }
  throw std::runtime_error("element type outside our set");
}

// The tensors of a head.
struct HeadTensors {
  NormSpec spec;
  at::Tensor norm, bias, weight, norm_gradient, bias_gradient, weight_gradient;
  std::vector<RowRun> runs = {};  // of tokens whose rows are trained
  at::Tensor rows = {}, rows_gradient = {};
  Head head() const {
    return {{spec, {view(norm), view(norm_gradient)}, {view(bias), view(bias_gradient)}},
            {view(weight), view(weight_gradient)},
            {{view(rows), view(rows_gradient)}, runs}};
  }
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
        spec_(spec(v)),
        stream_(start_torch(DeviceType::kCpu, 2, true)),
        arena_(DeviceType::kCpu, int64_t{64} << 20),
        rope_(spec_, kTokens, v.dtype, DeviceType::kCpu, stream_),
        context_{spec_,  v.dtype, DeviceType::kCpu, library_kernels(DeviceType::kCpu), stream_,
                 arena_, rope_,   uploads_} {
    at::manual_seed(5);
    const auto random = [&](at::IntArrayRef shape) {
      return at::randn(shape, at::kFloat).mul_(0.3).to(torch_type(v.dtype));
    };
    head_.spec.kind = v.norm;
    head_.norm = random({kHidden}).add_(1);
    head_.weight = random({v.vocab, kHidden});
    if (head_.spec.has_bias()) head_.bias = random({kHidden});
    if (v.trained) {
      // What is there at first must not matter: the step's first micro-batch overwrites it.
      head_.norm_gradient = at::full({kHidden}, 7, torch_type(v.gradient_dtype));
      if (head_.bias.defined()) head_.bias_gradient = at::full({kHidden}, 7, torch_type(v.gradient_dtype));
      head_.weight_gradient = at::full({v.vocab, kHidden}, 7, torch_type(v.gradient_dtype));
    }
    std::mt19937 engine(3);
    for (size_t m = 0; m < v.targets.size(); ++m) {
      Batch& batch = batches_.emplace_back();
      for (int64_t t = 0; t < kTokens; ++t) {
        const bool target = v.targets[m] > 0 && t % v.targets[m] == 0;
        batch.token.push_back(0);
        batch.target.push_back(target ? static_cast<int32_t>(engine() % static_cast<uint32_t>(v.vocab)) : -1);
        if (v.weighted) batch.weight.push_back(static_cast<float>(engine() % 9) * 0.25F);  // some are 0
      }
      x_.push_back(random({kTokens, kHidden}));
      dx_.push_back(v.evaluation ? at::Tensor() : random({kTokens, kHidden}));
    }
    for (const Batch& batch : batches_) {
      placed_.push_back(place_batch(context_, batch));
      nll_rows_.emplace_back();
    }
  }

  void whole() {
    for (size_t m = 0; m < x_.size(); ++m) {
      if (v_.evaluation) {
        two_phases(m, nullptr);
      } else {
        head_loss(context_, head_.head(), placed_[m], {view(x_[m]), view(dx_[m])}, &sums_, options(m));
      }
    }
  }

  // As with an objective, to which the nll of each micro-batch's rows is given before their weights are
  // known.
  using Weights = std::vector<float> (*)(const at::Tensor& nll);
  void in_two_phases(Weights weights) {
    for (size_t m = 0; m < x_.size(); ++m) two_phases(m, weights);
  }

  // As a schedule's group does it: a segment sees all micro-batches before the next one.
  void cut() {
    std::vector<HeadRows> rows;
    for (size_t m = 0; m < x_.size(); ++m)
      rows.push_back(
          head_begin(context_, head_.head().norm, placed_[m], view(x_[m]), view(dx_[m]), options(m)));
    std::vector<Piece> pieces = cut_matrix();
    for (const Piece& piece : pieces) {
      for (size_t m = 0; m < x_.size(); ++m)
        head_segment_forward(context_, piece.segment, rows[m], &sums_, options(m));
    }
    for (size_t m = 0; m < x_.size(); ++m) nll_rows_[m] = copy_of(rows[m].nll);
    if (v_.evaluation) return;
    for (const Piece& piece : pieces) {
      for (size_t m = 0; m < x_.size(); ++m)
        head_segment_backward(context_, piece.segment, rows[m], options(m));
    }
    for (size_t m = 0; m < x_.size(); ++m)
      head_finish(context_, head_.head().norm, view(x_[m]), rows[m], view(dx_[m]), options(m));
    if (!v_.trained) return;
    for (const Piece& piece : pieces) {
      const View& gradient = piece.segment.weight.gradient;
      head_.weight_gradient.narrow(0, piece.segment.first_row, gradient.rows)
          .copy_(tensor_of(gradient, DeviceType::kCpu));
    }
  }

  // As where a tied table's gradient is made last: the head keeps what the matrix's is then made of.
  void whole_with_its_matrix_last() {
    std::vector<at::Tensor> normed, max, sum, nll;
    for (size_t m = 0; m < x_.size(); ++m) {
      normed.push_back(at::empty({kTokens, kHidden}, torch_type(v_.dtype)));
      for (auto* column : {&max, &sum, &nll}) column->push_back(at::empty({kTokens}, at::kFloat));
      HeadRows kept;
      kept.normed = view(normed[m]);
      kept.max = view(max[m]), kept.sum = view(sum[m]), kept.nll = view(nll[m]);
      Head head = head_.head();
      head.weight.gradient = {};
      LossOptions keeping = options(m);
      keeping.keep = &kept;
      head_loss(context_, head, placed_[m], {view(x_[m]), view(dx_[m])}, &sums_, keeping);
      nll_rows_[m] = nll[m].narrow(0, 0, placed_[m].targets.count).clone();
    }
    for (size_t m = 0; m < x_.size(); ++m) {
      HeadRows rows;
      rows.targets = placed_[m].targets;
      rows.normed = view(normed[m]).row_range(0, rows.targets.count);
      rows.max = view(max[m]), rows.sum = view(sum[m]);
      head_matrix_backward(context_, head_.head(), rows, options(m));
    }
  }

  // Of one row alone, as generation asks for them.
  at::Tensor logits_of_a_row() {
    const ArenaFrame frame(arena_);
    const at::Tensor out = at::empty({1, v_.vocab}, torch_type(v_.dtype));
    head_logits(context_, head_.head(), view(x_[0]).row_range(0, 1), view(out));
    return out;
  }

  at::Tensor logits(bool in_segments) {
    const ArenaFrame frame(arena_);
    const at::Tensor out = at::empty({kTokens, v_.vocab}, torch_type(v_.dtype));
    if (!in_segments) {
      head_logits(context_, head_.head(), view(x_[0]), view(out));
      return out;
    }
    const View normed = head_normed(context_, head_.head().norm, view(x_[0]));
    for (const Piece& piece : cut_matrix()) head_segment_logits(context_, piece.segment, normed, view(out));
    return out;
  }

  HeadTensors head_;
  std::vector<at::Tensor> x_, dx_;
  std::vector<Batch> batches_;
  LossSums sums_;
  std::vector<at::Tensor> nll_rows_;  // of the rows with targets; undefined after a fused pass
  static constexpr float kScale = 0.01F;

 private:
  static ModelSpec spec(const Variant& v) {
    ModelSpec out =
        llama_spec({.hidden = kHidden, .heads = 1, .kv_heads = 1, .head_dim = kHidden, .vocab = v.vocab});
    out.head = v.head;
    return out;
  }

  LossOptions options(size_t m) const {
    return {.row_chunk = v_.row_chunk, .scale = kScale, .first = m == 0};
  }

  static at::Tensor copy_of(const View& column) {
    return tensor_of(column, DeviceType::kCpu).flatten().clone();
  }

  // `weights` null: the batch's.
  void two_phases(size_t m, Weights weights) {
    const ArenaFrame frame(arena_);
    const Head head = head_.head();
    HeadRows rows = head_begin(context_, head.norm, placed_[m], view(x_[m]), view(dx_[m]), options(m));
    head_matrix_forward(context_, head, rows, &sums_, options(m));
    nll_rows_[m] = copy_of(rows.nll);
    if (v_.evaluation) return;
    std::vector<float> made;
    if (weights != nullptr) {
      made = weights(nll_rows_[m]);
      rows.targets.weight = made.data();
    }
    head_matrix_backward(context_, head, rows, options(m));
    head_finish(context_, head.norm, view(x_[m]), rows, view(dx_[m]), options(m));
  }

  std::vector<Piece> cut_matrix() const {
    std::vector<Piece> out;
    for (int64_t row = 0; row < v_.vocab; row += kVocabularySegment) {
      const int64_t rows = std::min(kVocabularySegment, v_.vocab - row);
      const auto own = [&](const at::Tensor& all, DType type, Memory& memory) {
        const auto bytes = rows * kHidden * static_cast<int64_t>(dtype_size(type));
        memory = Memory(DeviceType::kCpu, bytes);
        const View part = view_of(memory.data(), type, rows, kHidden);
        tensor_of(part, DeviceType::kCpu).copy_(all.narrow(0, row, rows));
        return part;
      };
      Piece& piece = out.emplace_back();
      piece.segment.first_row = row;
      piece.segment.weight.weight = own(head_.weight, v_.dtype, piece.weight);
      if (v_.trained)
        piece.segment.weight.gradient = own(head_.weight_gradient, v_.gradient_dtype, piece.gradient);
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
  std::vector<DeviceBatch> placed_;
};

bool same(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  return a.nbytes() == b.nbytes() && a.is_contiguous() && b.is_contiguous() &&
         (a.nbytes() == 0 || std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0);
}

void expect_same(const Variant& v, const std::string& text) {
  HeadRun whole(v), cut(v), phases(v), last(v);
  whole.whole();
  cut.cut();
  phases.in_two_phases(nullptr);
  for (size_t m = 0; m < cut.nll_rows_.size(); ++m)
    EXPECT_TRUE(same(phases.nll_rows_[m], cut.nll_rows_[m])) << "nll of micro-batch " << m << ", " << text;
  if (v.trained && !v.evaluation) {
    last.whole_with_its_matrix_last();
    EXPECT_TRUE(same(whole.head_.weight_gradient, last.head_.weight_gradient)) << "dW made last, " << text;
    for (size_t m = 0; m < cut.nll_rows_.size(); ++m)
      EXPECT_TRUE(same(last.nll_rows_[m], cut.nll_rows_[m])) << "fused nll of " << m << ", " << text;
  }
  for (const HeadRun* other : {&cut, &phases}) {
    SCOPED_TRACE(text + (other == &cut ? ", cut" : ", in two phases"));
    EXPECT_EQ(whole.sums_.nll, other->sums_.nll);
    EXPECT_EQ(whole.sums_.correct, other->sums_.correct);
    for (size_t m = 0; m < whole.dx_.size(); ++m)
      EXPECT_TRUE(same(whole.dx_[m], other->dx_[m])) << "dx of micro-batch " << m;
    EXPECT_TRUE(same(whole.head_.weight_gradient, other->head_.weight_gradient)) << "dW";
    EXPECT_TRUE(same(whole.head_.norm_gradient, other->head_.norm_gradient)) << "norm";
    EXPECT_TRUE(same(whole.head_.bias_gradient, other->head_.bias_gradient)) << "bias";
  }
}

TEST(ChunkedHead, GivesTheBitsOfAWholeOneForEveryNumberOfSegments) {
  for (const int64_t vocab : {500, 8192, 8193, 20000, 33000}) {
    for (const int64_t row_chunk : {7, 16, 512})
      expect_same({.vocab = vocab, .row_chunk = row_chunk},
                  "vocab " + std::to_string(vocab) + ", rows " + std::to_string(row_chunk));
  }
}

TEST(ChunkedHead, GivesTheSameBitsInEveryTypeFrozenOrEvaluated) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const DType gradient : {DType::kBF16, DType::kF32}) {
      if (dtype == DType::kF32 && gradient == DType::kBF16) continue;
      expect_same({.dtype = dtype, .gradient_dtype = gradient}, "trained");
    }
    expect_same({.dtype = dtype, .trained = false}, "frozen");
    expect_same({.dtype = dtype, .trained = false, .evaluation = true}, "evaluated");
    expect_same({.dtype = dtype, .weighted = true}, "weighted");
  }
}

TEST(ChunkedHead, GivesTheSameBitsWhereMicroBatchesHaveNoTargets) {
  for (const std::vector<int>& targets :
       {std::vector<int>{0}, {0, 0}, {0, 2}, {2, 0}, {1, 0, 5}, {1, 1, 1}, {60}}) {
    expect_same({.targets = targets}, std::to_string(targets.front()));
    expect_same({.norm = NormKind::kLayer, .targets = targets}, std::to_string(targets.front()) + ", bias");
  }
}

constexpr HeadSpec kScaled{.logit_scale = 0.125}, kCapped{.logit_cap = 1.5},
    kScaledAndCapped{.logit_scale = 3, .logit_cap = 2};

TEST(ChunkedHead, GivesTheSameBitsOfScaledAndCappedLogits) {
  for (const HeadSpec& head : {kScaled, kCapped, kScaledAndCapped}) {
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      expect_same({.dtype = dtype, .head = head}, "trained");
      expect_same({.dtype = dtype, .evaluation = true, .head = head}, "evaluated");
    }
  }
}

// A gradient that nobody's target gives is zero, not what lay there.
TEST(HeadLoss, ZeroesTheFinalNormsGradientsWhereThereIsNoTarget) {
  for (const bool cut : {false, true}) {
    HeadRun run({.norm = NormKind::kLayer, .targets = {0}});
    cut ? run.cut() : run.whole();
    EXPECT_EQ(run.head_.norm_gradient.abs().max().item<double>(), 0) << cut;
    EXPECT_EQ(run.head_.bias_gradient.abs().max().item<double>(), 0) << cut;
  }
}

// |got - want| / |want|, as arrays.
double apart(const at::Tensor& got, const at::Tensor& want) {
  const at::Tensor exact = want.detach(), difference = got.to(at::kDouble).sub(exact);
  return difference.norm().item<double>() / exact.norm().item<double>();
}

// What the model calls its logits, of their products.
at::Tensor as_logits(const HeadSpec& head, const at::Tensor& products) {
  const at::Tensor scaled = products * head.logit_scale;
  return head.logit_cap > 0 ? at::tanh(scaled / head.logit_cap) * head.logit_cap : scaled;
}

at::Tensor normed_by(const NormSpec& spec, const at::Tensor& x, const at::Tensor& weight,
                     const at::Tensor& bias) {
  const at::Tensor about = spec.centred() ? x - x.mean(-1, true) : x;
  const at::Tensor out = about * about.square().mean(-1, true).add(spec.eps).rsqrt() * weight;
  return spec.has_bias() ? out + bias : out;
}

// torch's cross-entropy of each row times its weight, in fp64 and with autograd, of the same numbers.
void expect_as_torch(const Variant& v, bool cut, double bound) {
  HeadRun run(v);
  cut ? run.cut() : run.whole();
  const c10::InferenceMode with_autograd(false);
  const auto leaf = [](const at::Tensor& x) { return x.to(at::kDouble).requires_grad_(); };
  const at::Tensor norm = leaf(run.head_.norm), weight = leaf(run.head_.weight);
  const at::Tensor bias = run.head_.bias.defined() ? leaf(run.head_.bias) : at::Tensor();
  std::vector<at::Tensor> x, nll;
  at::Tensor loss = at::zeros({}, at::kDouble);
  double correct = 0;
  for (size_t m = 0; m < run.x_.size(); ++m) {
    x.push_back(leaf(run.x_[m]));
    std::vector<int64_t> row, target;
    std::vector<double> of_row;
    const Batch& batch = run.batches_[m];
    for (size_t t = 0; t < batch.target.size(); ++t) {
      if (batch.target[t] < 0) continue;
      row.push_back(static_cast<int64_t>(t)), target.push_back(batch.target[t]);
      of_row.push_back(v.weighted ? batch.weight[t] : 1);
    }
    const at::Tensor some = x[m].index_select(0, at::tensor(row));
    const at::Tensor normed = normed_by(run.head_.spec, some, norm, bias);
    const at::Tensor logits = as_logits(v.head, at::mm(normed, weight.t()));
    correct += at::argmax(logits, 1).eq(at::tensor(target)).sum().item<double>();
    nll.push_back(at::cross_entropy_loss(logits, at::tensor(target), {}, at::Reduction::None));
    loss = loss.add(nll[m].mul(at::tensor(of_row, at::kDouble)).sum());
  }
  loss.mul(static_cast<double>(HeadRun::kScale)).backward();
  if (v.dtype == DType::kF32) {
    EXPECT_EQ(run.sums_.correct, correct);
  }
  double worst = std::abs(run.sums_.nll - loss.item<double>()) / loss.item<double>();
  for (size_t m = 0; m < x.size(); ++m) {
    worst = std::max(worst, apart(run.dx_[m], x[m].grad()));
    if (cut) worst = std::max(worst, apart(run.nll_rows_[m], nll[m]));
  }
  worst = std::max(
      {worst, apart(run.head_.weight_gradient, weight.grad()), apart(run.head_.norm_gradient, norm.grad())});
  if (bias.defined()) worst = std::max(worst, apart(run.head_.bias_gradient, bias.grad()));
  EXPECT_LE(worst, bound) << dtype_name(v.dtype) << (cut ? ", cut" : ", whole")
                          << (v.weighted ? ", weighted" : "");
  std::printf("%s%s%s: %.1e\n", dtype_name(v.dtype), cut ? " cut" : " whole", v.weighted ? " weighted" : "",
              worst);
}

TEST(HeadLoss, AgreesWithTorchWithAndWithoutAWeightPerRow) {
  for (const bool cut : {false, true}) {
    for (const bool weighted : {false, true}) {
      expect_as_torch({.dtype = DType::kF32, .weighted = weighted}, cut, 2e-6);
      expect_as_torch({.dtype = DType::kBF16, .weighted = weighted}, cut, 2e-2);
    }
  }
}

// Weights that only the nll gives, some of them negative.
TEST(HeadLoss, AgreesWithTorchWhereWeightsAreMadeOfTheNll) {
  HeadRun run({.dtype = DType::kF32});
  run.in_two_phases([](const at::Tensor& nll) {
    const at::Tensor weight = nll.sub(nll.mean());
    return std::vector<float>(weight.data_ptr<float>(), weight.data_ptr<float>() + weight.numel());
  });
  const c10::InferenceMode with_autograd(false);
  const auto leaf = [](const at::Tensor& x) { return x.to(at::kDouble).requires_grad_(); };
  const at::Tensor norm = leaf(run.head_.norm), weight = leaf(run.head_.weight);
  at::Tensor loss = at::zeros({}, at::kDouble);
  std::vector<at::Tensor> x;
  for (size_t m = 0; m < run.x_.size(); ++m) {
    x.push_back(leaf(run.x_[m]));
    std::vector<int64_t> target;
    for (const int32_t id : run.batches_[m].target) target.push_back(id >= 0 ? id : -100);  // ignored
    const at::Tensor logits = at::mm(normed_by(run.head_.spec, x[m], norm, {}), weight.t());
    const at::Tensor nll = at::cross_entropy_loss(logits, at::tensor(target), {}, at::Reduction::None);
    const at::Tensor counts = at::tensor(target).ge(0);
    const at::Tensor mean = nll.detach().sum() / counts.sum();
    loss = loss.add(nll.mul((nll.detach() - mean) * counts).sum());
  }
  loss.mul(static_cast<double>(HeadRun::kScale)).backward();
  for (size_t m = 0; m < x.size(); ++m) EXPECT_LE(apart(run.dx_[m], x[m].grad()), 2e-5);
  EXPECT_LE(apart(run.head_.weight_gradient, weight.grad()), 2e-5);
  EXPECT_LE(apart(run.head_.norm_gradient, norm.grad()), 2e-5);
}

TEST(HeadLoss, AgreesWithTorchOfScaledAndCappedLogits) {
  for (const bool cut : {false, true}) {
    for (const HeadSpec& head : {kScaled, kCapped, kScaledAndCapped})
      expect_as_torch({.dtype = DType::kF32, .head = head}, cut, 1e-5);
    expect_as_torch({.dtype = DType::kF32, .norm = NormKind::kLayer}, cut, 1e-5);
  }
}

// Of many rows and of one, whole and in segments.
TEST(HeadLoss, GenerationReadsScaledAndCappedLogits) {
  for (const HeadSpec& head : {kScaled, kCapped, kScaledAndCapped}) {
    HeadRun run({.dtype = DType::kF32, .head = head});
    const at::Tensor whole = run.logits(false), row = run.logits_of_a_row();
    EXPECT_TRUE(same(whole, run.logits(true)));
    const at::Tensor x = run.x_[0].to(at::kDouble);
    const at::Tensor normed = normed_by(run.head_.spec, x, run.head_.norm.to(at::kDouble), {});
    const at::Tensor expected = as_logits(head, at::mm(normed, run.head_.weight.to(at::kDouble).t()));
    EXPECT_LE(apart(whole, expected), 2e-6);
    EXPECT_LE(apart(row, expected.narrow(0, 0, 1)), 2e-6);
  }
}

TEST(ChunkedHead, GivesTheSameLogits) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const int64_t vocab : {500, 20000}) {
      HeadRun run({.vocab = vocab, .dtype = dtype});
      const at::Tensor whole = run.logits(false);
      EXPECT_TRUE(same(whole, run.logits(true)));
      // And they are logits: of the first row, by hand.
      const at::Tensor x = run.x_[0][0].to(at::kFloat);
      const at::Tensor normed = x.mul(x.square().mean().add(1e-6).rsqrt()).mul(run.head_.norm.to(at::kFloat));
      const at::Tensor expected = at::mv(run.head_.weight.to(at::kFloat), normed);
      EXPECT_TRUE(at::allclose(whole[0].to(at::kFloat), expected, 0.05, 0.05));
    }
  }
}

// Rows of a tied matrix that are trained alone, some of them at the border of two segments.
TEST(HeadLoss, ChosenRowsHaveTheMatrixsGradient) {
  const std::vector<int64_t> tokens = {8190, 8191, 8192, 8193, 5, 19999};
  for (const std::vector<int>& targets : {std::vector{3, 1}, std::vector{0, 2}, std::vector{0, 0}}) {
    HeadRun all({.dtype = DType::kF32, .targets = targets}), some({.dtype = DType::kF32, .targets = targets});
    some.head_.weight_gradient = at::Tensor(), some.head_.runs = row_runs(tokens);
    some.head_.rows = some.head_.rows_gradient = at::full({6, kHidden}, 7, at::kFloat);  // is overwritten
    all.whole(), targets[0] == 0 ? some.whole() : some.in_two_phases(nullptr);
    const at::Tensor want = all.head_.weight_gradient.index_select(0, at::tensor(tokens));
    EXPECT_LE((some.head_.rows_gradient - want).norm().item<float>(), 1e-6F * want.norm().item<float>());
    for (size_t m = 0; m < targets.size(); ++m) EXPECT_TRUE(at::equal(all.dx_[m], some.dx_[m])) << m;
  }
}

}  // namespace
}  // namespace lm
