// The embedding's rows and their gradients over the micro-batches of a step, against LibTorch's autograd in
// fp64: a factor, learned positions, a token without a gradient, and what the head of a tied model has begun.
#include "model/embedding.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/library.h"
#include "kernels/runtime.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

constexpr int64_t kHidden = 40, kVocab = 30, kPositions = 16, kPad = 3;

// Documents of these lengths; tokens come again, in other micro-batches too.
Batch batch_of(const std::vector<int64_t>& lengths, int64_t seed) {
  Batch batch;
  for (size_t d = 0; d < lengths.size(); ++d) {
    batch.document_start.push_back(static_cast<int32_t>(batch.token.size()));
    for (int64_t p = 0; p < lengths[d]; ++p) {
      batch.token.push_back(static_cast<int32_t>((seed * 7 + std::ssize(batch.token) * 11) % kVocab));
      batch.position.push_back(static_cast<int32_t>(p));
      batch.sample.push_back(0);
      batch.target.push_back(-1);
    }
  }
  batch.document_start.push_back(static_cast<int32_t>(batch.token.size()));
  return batch;
}

struct Fixture {
  explicit Fixture(const EmbeddingSpec& embedding)
      : spec(
            llama_spec({.hidden = kHidden, .heads = 1, .kv_heads = 1, .head_dim = kHidden, .vocab = kVocab})),
        stream(start_torch(DeviceType::kCpu, 1, true)),
        rope(spec, kPositions, DType::kF32, DeviceType::kCpu, stream) {
    spec.embedding = embedding;
    spec.pad_token = kPad;
    at::manual_seed(7);
    table = at::randn({kVocab, kHidden}, at::kFloat);
    positions = at::randn({kPositions, kHidden}, at::kFloat);
    batches = {batch_of({9, 5}, 0), batch_of({16}, 1), batch_of({1, 3, 2}, 2)};
    for (const Batch& batch : batches) dx.push_back(at::randn({batch.tokens(), kHidden}, at::kFloat));
  }

  static View view(const at::Tensor& t) {
    return t.defined() ? view_of(t.data_ptr(), DType::kF32, t.size(0), t.size(1)) : View();
  }
  Embedding tables(const at::Tensor& dtable, const at::Tensor& dpositions) const {
    Embedding out{.table = {view(table), view(dtable)}, .positions = {}};
    if (spec.embedding.positions > 0) out.positions = {view(positions), view(dpositions)};
    return out;
  }

  // The rows' gradients of a step, added to what is there.
  void step(EmbeddingGradient& gradient, const at::Tensor& dtable, const at::Tensor& dpositions) const {
    gradient.begin(context, batches);
    for (size_t m = 0; m < batches.size(); ++m) gradient.add(context, m, {.dx = view(dx[m])});
    gradient.finish(context, tables(dtable, dpositions));
  }

  ModelSpec spec;
  StreamView stream;
  Arena arena{DeviceType::kCpu, int64_t{1} << 20};
  RopeTable rope;
  Uploads uploads;
  Context context{spec,  DType::kF32, DeviceType::kCpu, library_kernels(DeviceType::kCpu), stream,
                  arena, rope,        uploads};
  at::Tensor table, positions;
  std::vector<Batch> batches;
  std::vector<at::Tensor> dx;
};

at::Tensor indices(const std::vector<int32_t>& list) {
  return at::tensor(std::vector<int64_t>(list.begin(), list.end()));
}

double apart(const at::Tensor& got, const at::Tensor& want) {
  return got.to(at::kDouble).sub(want).norm().item<double>() / want.norm().item<double>();
}

// The embedding by its formula; the row that gets no gradient is taken from a copy.
struct Reference {
  explicit Reference(const Fixture& f)
      : table(f.table.to(at::kDouble).requires_grad_()),
        positions(f.positions.to(at::kDouble).requires_grad_()) {
    for (const Batch& batch : f.batches) {
      const at::Tensor token = indices(batch.token);
      at::Tensor rows = table.index_select(0, token);
      rows = at::where(token.eq(f.spec.pad_token).unsqueeze(1), rows.detach(), rows);
      at::Tensor out = rows * f.spec.embedding.scale;
      if (f.spec.embedding.positions > 0) out = out + positions.index_select(0, indices(batch.position));
      x.push_back(out);
    }
  }
  at::Tensor table, positions;
  std::vector<at::Tensor> x;
};

TEST(Embedding, IsTheScaledRowAndThatOfItsPosition) {
  for (const EmbeddingSpec& embedding :
       {EmbeddingSpec{}, EmbeddingSpec{.scale = 6.25}, EmbeddingSpec{.positions = kPositions},
        EmbeddingSpec{.scale = 0.3, .positions = kPositions}}) {
    Fixture f(embedding);
    for (const Batch& batch : f.batches) {
      const ArenaFrame frame(f.arena);
      const at::Tensor out = at::empty({batch.tokens(), kHidden}, at::kFloat);
      embedding_forward(f.context, f.tables({}, {}), place_batch(f.context, batch), Fixture::view(out));
      const c10::InferenceMode with_autograd(false);
      EXPECT_LE(apart(out, Reference(f).x[static_cast<size_t>(&batch - f.batches.data())].detach()), 2e-7);
    }
  }
}

// What is kept of the sum is scaled, and zeros are where the same number of another key is not.
TEST(Embedding, DropsTheSumOfBothRows) {
  const Fixture f({.positions = kPositions});
  const Batch& batch = f.batches[1];
  const auto forward = [&](const DropoutMask& dropout) {
    const ArenaFrame frame(const_cast<Arena&>(f.arena));
    const at::Tensor out = at::empty({batch.tokens(), kHidden}, at::kFloat);
    Embedding tables = f.tables({}, {});
    tables.dropout = dropout;
    embedding_forward(f.context, tables, place_batch(f.context, batch), Fixture::view(out));
    return out;
  };
  const at::Tensor whole = forward({}), some = forward({.p = 0.25F, .key = 3});
  const at::Tensor kept = some.ne(0);
  EXPECT_LE(apart(some, whole.to(at::kDouble) * kept / 0.75), 2e-7);
  EXPECT_NEAR(kept.to(at::kDouble).mean().item<double>(), 0.75, 0.06);  // of 640
  EXPECT_FALSE(kept.equal(forward({.p = 0.25F, .key = 4}).ne(0)));
}

TEST(Embedding, ItsGradientsAreThoseOfAutograd) {
  for (const EmbeddingSpec& embedding :
       {EmbeddingSpec{}, EmbeddingSpec{.scale = 6.25}, EmbeddingSpec{.positions = kPositions},
        EmbeddingSpec{.scale = 0.3, .positions = kPositions}}) {
    Fixture f(embedding);
    EmbeddingGradient gradient(f.spec, updated_rows(f.spec, 36, 16), 16, DeviceType::kCpu);
    // A tied head has begun the table's.
    const at::Tensor begun = at::randn({kVocab, kHidden}, at::kFloat);
    const at::Tensor dtable = begun.clone(), dpositions = at::zeros({kPositions, kHidden}, at::kFloat);
    f.step(gradient, dtable, dpositions);
    const c10::InferenceMode with_autograd(false);
    Reference reference(f);
    at::Tensor sum = at::zeros({}, at::kDouble);
    for (size_t m = 0; m < f.dx.size(); ++m) sum = sum + reference.x[m].mul(f.dx[m].to(at::kDouble)).sum();
    sum.backward();
    EXPECT_LE(apart(dtable, reference.table.grad() + begun.to(at::kDouble)), 1e-6) << embedding.scale;
    if (embedding.positions == 0) continue;
    EXPECT_LE(apart(dpositions, reference.positions.grad()), 1e-6) << embedding.scale;
  }
}

// Of tokens whose rows alone are trained: the table's gradient at these rows, and lookups of the new rows.
TEST(Embedding, ChosenRowsHaveTheTablesGradientAndReplaceItsRows) {
  Fixture f({.scale = 6.25});
  const std::vector<int64_t> tokens = {5, 6, 2};
  const auto runs = row_runs(tokens);
  ASSERT_EQ(runs.size(), 2U);
  EXPECT_TRUE(runs[0].row == 5 && runs[0].count == 2 && runs[1].row == 2 && runs[1].first == 2);
  const at::Tensor whole = at::zeros({kVocab, kHidden}, at::kFloat),
                   rows = at::zeros({3, kHidden}, at::kFloat);
  EmbeddingGradient table(f.spec, updated_rows(f.spec, 36, 16), 16, DeviceType::kCpu),
      chosen(f.spec, {.chosen = 3}, 16, DeviceType::kCpu, tokens);
  f.step(table, whole, {});
  chosen.begin(f.context, f.batches);
  for (size_t m = 0; m < f.dx.size(); ++m) chosen.add(f.context, m, {.dx = Fixture::view(f.dx[m])});
  Embedding tables = f.tables({}, {});
  const at::Tensor fresh = at::randn({3, kHidden}, at::kFloat);
  tables.tokens = {{Fixture::view(fresh), Fixture::view(rows)}, runs};
  chosen.finish(f.context, tables);
  for (size_t i = 0; i < tokens.size(); ++i)
    EXPECT_TRUE(at::equal(rows[static_cast<int64_t>(i)], whole[tokens[i]])) << i;
  const at::Tensor own = f.table.clone();
  write_token_rows(f.context, tables.tokens, tables.table.weight);
  for (size_t i = 0; i < tokens.size(); ++i) {
    EXPECT_TRUE(at::equal(f.table[tokens[i]], fresh[static_cast<int64_t>(i)]));
    own[tokens[i]].copy_(fresh[static_cast<int64_t>(i)]);
  }
  EXPECT_TRUE(at::equal(f.table, own)) << "other rows stay";
}

// LoRA of the table: rows table + s B A, and both gradients; a pad token's row of B gets none.
TEST(Embedding, AnAdapterOfTheTableIsThatOfAutograd) {
  constexpr int64_t kRank = 3;
  for (const EmbeddingSpec& embedding :
       {EmbeddingSpec{}, EmbeddingSpec{.scale = 6.25, .positions = kPositions}}) {
    Fixture f(embedding);
    const at::Tensor a = at::randn({kRank, kHidden}, at::kFloat), b = at::randn({kVocab, kRank}, at::kFloat),
                     da = at::zeros_like(a), db = at::zeros_like(b);
    Embedding tables = f.tables({}, {});
    tables.adapter = {{Fixture::view(a), Fixture::view(da)}, {Fixture::view(b), Fixture::view(db)}, 0.5F};
    EmbeddingGradient gradient(f.spec, {.pairs = kVocab}, 16, DeviceType::kCpu, {}, kRank);
    gradient.begin(f.context, f.batches);
    std::vector<at::Tensor> outs;
    for (size_t m = 0; m < f.batches.size(); ++m) {
      const ArenaFrame frame(f.arena);
      const DeviceBatch batch = place_batch(f.context, f.batches[m]);
      outs.push_back(at::empty({f.batches[m].tokens(), kHidden}, at::kFloat));
      embedding_forward(f.context, tables, batch, Fixture::view(outs.back()));
      gradient.add(f.context, m,
                   {.pairs = table_adapter_backward(f.context, tables.adapter, batch, Fixture::view(f.dx[m]),
                                                    m == 0)});
    }
    gradient.finish(f.context, tables);
    const c10::InferenceMode with_autograd(false);
    const at::Tensor a64 = a.to(at::kDouble).requires_grad_(), b64 = b.to(at::kDouble).requires_grad_();
    const Reference plain(f);
    at::Tensor sum = at::zeros({}, at::kDouble);
    for (size_t m = 0; m < f.dx.size(); ++m) {
      const at::Tensor token = indices(f.batches[m].token);
      at::Tensor rows = b64.index_select(0, token);
      rows = at::where(token.eq(kPad).unsqueeze(1), rows.detach(), rows);
      const at::Tensor x = plain.x[m].detach() + 0.5 * embedding.scale * rows.matmul(a64);
      EXPECT_LE(apart(outs[m], x.detach()), 1e-6);
      sum = sum + x.mul(f.dx[m].to(at::kDouble)).sum();
    }
    sum.backward();
    EXPECT_LE(apart(da, a64.grad()), 1e-6) << embedding.scale;
    EXPECT_LE(apart(db, b64.grad()), 1e-6) << embedding.scale;
    EXPECT_EQ(db[kPad].abs().sum().item<double>(), 0);
  }
}

// The next step's rows are its own.
TEST(Embedding, EachStepNumbersItsRowsAnew) {
  Fixture f({.positions = kPositions});
  EmbeddingGradient used(f.spec, updated_rows(f.spec, 36, 16), 16, DeviceType::kCpu),
      fresh(f.spec, updated_rows(f.spec, 36, 16), 16, DeviceType::kCpu);
  const auto zeros = [](int64_t rows) { return at::zeros({rows, kHidden}, at::kFloat); };
  f.step(used, zeros(kVocab), zeros(kPositions));
  f.batches = {f.batches[2]}, f.dx = {f.dx[2]};
  const at::Tensor got = zeros(kVocab), got_positions = zeros(kPositions), want = zeros(kVocab),
                   want_positions = zeros(kPositions);
  f.step(used, got, got_positions);
  f.step(fresh, want, want_positions);
  EXPECT_TRUE(at::equal(got, want));
  EXPECT_TRUE(at::equal(got_positions, want_positions));
  EXPECT_EQ(got_positions.narrow(0, 3, kPositions - 3).abs().sum().item<double>(), 0);
}

// Gemma's factor is the square root of the width, as the weights' type has it.
TEST(Embedding, ItsFactorIsRoundedToTheModelsType) {
  const auto scale = [](int64_t hidden, bool rounded, DType dtype) {
    return embedding_scale({.scale = std::sqrt(static_cast<double>(hidden)), .round_scale = rounded}, dtype);
  };
  EXPECT_EQ(scale(2304, true, DType::kBF16), 48);
  EXPECT_EQ(scale(1152, true, DType::kBF16), 34);
  EXPECT_EQ(scale(5376, true, DType::kBF16), 73.5F);
  EXPECT_EQ(scale(1152, false, DType::kBF16), std::sqrt(1152.F));
  EXPECT_EQ(scale(1152, true, DType::kF32), std::sqrt(1152.F));
}

TEST(Embedding, AStepUpdatesNoMoreRowsThanItHasTokensAndPositions) {
  ModelSpec spec = llama_spec({.vocab = 300});
  EXPECT_EQ(updated_rows(spec, 1000, 64).tokens, 300);
  EXPECT_EQ(updated_rows(spec, 100, 64).all(), 100);
  spec.embedding.positions = 128;
  EXPECT_EQ(updated_rows(spec, 100, 64).positions, 64);
  EXPECT_EQ(updated_rows(spec, 1000, 512).all(), 300 + 128);
}

}  // namespace
}  // namespace lm
