// Adapters where a family's files have their matrices: each by itself or several joined. A projection with
// its adapters against torch's autograd in fp64.
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "base/bytes.h"
#include "kernels/aten.h"
#include "kernels/library.h"
#include "kernels/runtime.h"
#include "model/bind.h"
#include "model/merge.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

constexpr int64_t kRows = 9;

ModelSpec small(bool joined) {
  ModelSpec spec = llama_spec({.ffn = 96, .layers = 2});
  if (joined)
    spec.names.modules = {{"self_attn.qkv_proj", "attn.q", "attn.v"},
                          {"self_attn.o_proj", "attn.o"},
                          {"mlp.gate_up_proj", "mlp.gate", "mlp.up"},
                          {"mlp.down_proj", "mlp.down"}};
  return spec;
}

// An adapted module: its rows of the projection, written down by hand.
struct Rows {
  const char* module;
  int64_t first, rows;
};
struct Expected {
  const char* projection;
  std::vector<Rows> modules;
};

std::vector<Expected> expected(bool joined) {
  const Expected out{"attn.out", {{"o_proj", 0, 64}}}, down{"mlp.down", {{"down_proj", 0, 64}}};
  if (joined)
    return {{"attn.qkv", {{"qkv_proj", 0, 128}}}, out, {"mlp.gate_up", {{"gate_up_proj", 0, 192}}}, down};
  return {{"attn.qkv", {{"q_proj", 0, 64}, {"k_proj", 64, 32}, {"v_proj", 96, 32}}},
          out,
          {"mlp.gate_up", {{"gate_proj", 0, 96}, {"up_proj", 96, 96}}},
          down};
}

// The second layer of a LoRA model in fp32, with a context to compute in.
struct Fixture {
  explicit Fixture(bool joined, bool dora = false, bool pissa = false)
      : spec(small(joined)),
        adapter{.r = 4,
                .alpha = 6,
                .dora = dora,
                .pissa = pissa,
                .targets = resolve_targets(spec.names, {"all-linear"}, "test")},
        layout(make_layout(spec, &adapter, DType::kF32)),
        stream(start_torch(DeviceType::kCpu, 1, true)),
        rope(spec, kRows, DType::kF32, DeviceType::kCpu, stream) {
    at::manual_seed(3);
    trainable = at::randn({layout.blocks[2].flat_elements}, at::kFloat);
    gradients = at::full({layout.blocks[2].flat_elements}, 7, at::kFloat);
    frozen = at::randn({layout.blocks[2].frozen_bytes / 4}, at::kFloat);
    block = bind(2);
  }

  TransformerBlock bind(int64_t number) const {
    const auto at = [](const at::Tensor& x) { return static_cast<std::byte*>(x.data_ptr()); };
    const BlockMemory memory{.trainable = at(trainable), .frozen = at(frozen), .gradients = at(gradients)};
    return ModelBinding(spec, layout, &adapter)
        .transformer(number, memory, {.dtype = DType::kF32, .training = true});
  }

  // The tensor `name` of the layer, in one of the arrays.
  at::Tensor find(const at::Tensor& array, const std::string& name) const {
    const TensorPlace& place = *layout.blocks[2].find("layers.1." + name);
    const int64_t offset = place.frozen ? place.offset / 4 : place.offset;
    return array.narrow(0, offset, place.parameter.elements())
        .view({place.parameter.rows, place.parameter.columns});
  }

  static const Linear& linear(const TransformerBlock& block, std::string_view matrix) {
    const auto& attention = std::get<Attention>(block.sublayers[0].mixer);
    const auto& mlp = std::get<GatedMlp>(block.sublayers[1].mixer);
    if (matrix == "attn.qkv") return attention.qkv;
    if (matrix == "attn.out") return attention.out;
    return matrix == "mlp.gate_up" ? mlp.gate_up : mlp.down;
  }

  ModelSpec spec;
  AdapterSpec adapter;
  ModelLayout layout;
  StreamView stream;
  Arena arena{DeviceType::kCpu, int64_t{4} << 20};
  RopeTable rope;
  Uploads uploads;
  Context context{spec,  DType::kF32, DeviceType::kCpu, library_kernels(DeviceType::kCpu), stream,
                  arena, rope,        uploads};
  at::Tensor trainable, gradients, frozen;
  TransformerBlock block;
};

void expect_near(const at::Tensor& got, const at::Tensor& want, const std::string& what) {
  const at::Tensor exact = want.detach();
  EXPECT_LE(got.to(at::kDouble).sub(exact).norm().item<double>() / exact.norm().item<double>(), 1e-6) << what;
}

void expect_as_torch(const Fixture& f, const Expected& e) {
  const ArenaFrame frame(const_cast<Arena&>(f.arena));
  const Linear& linear = f.linear(f.block, e.projection);
  ASSERT_EQ(linear.adapters.size(), e.modules.size()) << e.projection;
  const int64_t out = linear.weight.weight.rows, in = linear.weight.weight.columns;
  const at::Tensor x = at::randn({kRows, in}, at::kFloat), dy = at::randn({kRows, out}, at::kFloat);
  const at::Tensor y = at::empty_like(dy), dx = at::empty_like(x);
  const auto view = [](const at::Tensor& t) {
    return View{t.data_ptr(), DType::kF32, t.size(0), t.size(1), t.size(1)};
  };
  DeviceBatch batch;
  batch.tokens = batch.rows = kRows;
  LinearSaved saved = allocate_saved(f.context, linear, kRows);
  linear_forward(f.context, linear, batch, {view(x), view(y)}, saved);
  linear_backward(f.context, linear, batch, {view(x), view(dy), view(dx)}, saved, true);

  const c10::InferenceMode with_autograd(false);
  const auto leaf = [](const at::Tensor& t) { return t.to(at::kDouble).requires_grad_(); };
  const at::Tensor input = leaf(x);
  const at::Tensor base = at::mm(input, f.find(f.frozen, e.projection).to(at::kDouble).t());
  const at::Tensor weight = f.find(f.frozen, e.projection).to(at::kDouble);
  at::Tensor loss = base.mul(dy.to(at::kDouble)).sum(), want = base.detach().clone();
  std::vector<at::Tensor> factors, lengths;
  for (const Rows& rows : e.modules) {
    const std::string name = rows.module;
    const at::Tensor a = leaf(f.find(f.trainable, name + ".lora_A")),
                     b = leaf(f.find(f.trainable, name + ".lora_B"));
    at::Tensor part = at::mm(at::mm(input, a.t()), b.t()).mul(f.adapter.scale());
    if (f.adapter.pissa) {  // A0 and -B0, which have no gradients
      const at::Tensor start_a = f.find(f.frozen, name + ".start_A").to(at::kDouble),
                       start_b = f.find(f.frozen, name + ".start_B").to(at::kDouble);
      part = part.add(at::mm(at::mm(input, start_a.t()), start_b.t()).mul(f.adapter.scale()));
    }
    if (f.adapter.dora) {  // what it adds to the base's output; the norms are constants
      const at::Tensor of_base = base.narrow(1, rows.first, rows.rows);
      const at::Tensor sum = weight.narrow(0, rows.first, rows.rows).add(at::mm(b, a).mul(f.adapter.scale()));
      const at::Tensor magnitude = leaf(f.find(f.trainable, name + ".lora_magnitude_vector"));
      const at::Tensor factor = magnitude.flatten().div(sum.detach().square().sum(1).sqrt());
      part = part.add(of_base).mul(factor).sub(of_base);
      lengths.push_back(magnitude);
    }
    loss = loss.add(part.mul(dy.to(at::kDouble).narrow(1, rows.first, rows.rows)).sum());
    want.narrow(1, rows.first, rows.rows).add_(part.detach());
    factors.push_back(a), factors.push_back(b);
  }
  loss.backward();
  expect_near(y, want, e.projection);
  expect_near(dx, input.grad(), e.projection);
  for (size_t m = 0; m < e.modules.size(); ++m) {
    const std::string name = e.modules[m].module;
    expect_near(f.find(f.gradients, name + ".lora_A"), factors[2 * m].grad(), name + " A");
    expect_near(f.find(f.gradients, name + ".lora_B"), factors[2 * m + 1].grad(), name + " B");
    if (f.adapter.dora)
      expect_near(f.find(f.gradients, name + ".lora_magnitude_vector"), lengths[m].grad(), name + " m");
  }
}

TEST(Adapters, OfAFamilysModulesComputeWhatTorchDoes) {
  for (const bool joined : {false, true}) {
    for (const bool dora : {false, true}) {
      const Fixture f(joined, dora);
      for (const Expected& e : expected(joined)) expect_as_torch(f, e);
    }
    const Fixture pissa(joined, false, true);
    for (const Expected& e : expected(joined)) expect_as_torch(pissa, e);
  }
}

// fp32 adapters over a bf16 projection, in peft's order: the projection is rounded, the adapter works on its
// input and output in fp32, and the sum is rounded once. Small integers make every product exact.
TEST(Adapters, InFp32AddToABf16ProjectionAndRoundOnce) {
  const Fixture f(false);
  Context context{f.spec,           DType::kBF16,
                  DeviceType::kCpu, library_kernels(DeviceType::kCpu),
                  f.stream,         const_cast<Arena&>(f.arena),
                  f.rope,           const_cast<Uploads&>(f.uploads)};
  const ArenaFrame frame(context.arena);
  const auto integers = [](int64_t rows, int64_t columns, int64_t most) {
    return at::randint(-most, most + 1, {rows, columns}, at::kFloat);
  };
  const auto half = [](const at::Tensor& x) { return x.to(at::kBFloat16); };
  const auto view = [](const at::Tensor& t) {
    return View{t.data_ptr(), t.scalar_type() == at::kFloat ? DType::kF32 : DType::kBF16, t.size(0),
                t.size(1), t.size(1)};
  };
  constexpr int64_t kIn = 16, kOut = 48, kR = 4, kFirst = 16, kAdapted = 32;
  const at::Tensor weight = half(integers(kOut, kIn, 2)), x = half(integers(kRows, kIn, 2)),
                   dy = half(integers(kRows, kOut, 2));
  // Nine bits are no bf16 number: adapters or inner products of that type would round them.
  const at::Tensor a = integers(kR, kIn, 300).div(512), b = integers(kAdapted, kR, 300).div(512);
  const at::Tensor da = at::zeros_like(a), db = at::zeros_like(b), y = half(at::zeros({kRows, kOut})),
                   dx = half(at::zeros({kRows, kIn}));
  Linear linear;
  linear.weight.weight = view(weight);
  linear.adapters.push_back(
      {.first = kFirst, .rows = kAdapted, .a = {view(a), view(da)}, .b = {view(b), view(db)}, .scale = 2});
  DeviceBatch batch;
  batch.tokens = batch.rows = kRows;
  LinearSaved saved = allocate_saved(context, linear, kRows);
  linear_forward(context, linear, batch, {view(x), view(y)}, saved);
  linear_backward(context, linear, batch, {view(x), view(dy), view(dx)}, saved, true);

  const at::Tensor wide = x.to(at::kFloat), up = dy.to(at::kFloat).narrow(1, kFirst, kAdapted);
  const at::Tensor reduced = wide.mm(a.t()), dreduced = up.mm(b).mul(2);
  at::Tensor want = half(wide.mm(weight.to(at::kFloat).t()));
  at::Tensor slice = want.narrow(1, kFirst, kAdapted);
  slice.copy_(half(slice.to(at::kFloat).add(reduced.mm(b.t()).mul(2))));
  EXPECT_TRUE(at::equal(y, want));
  EXPECT_TRUE(at::equal(
      dx, half(half(dy.to(at::kFloat).mm(weight.to(at::kFloat))).to(at::kFloat).add(dreduced.mm(a)))));
  expect_near(da, dreduced.t().mm(wide).to(at::kDouble), "A");
  expect_near(db, up.t().mm(reduced).mul(2).to(at::kDouble), "B");
}

// IA3 on a fused projection with biases whose middle rows are scaled, and on its input.
TEST(Adapters, ScalesComputeWhatTorchDoes) {
  const Fixture f(false);
  const ArenaFrame frame(const_cast<Arena&>(f.arena));
  const auto view = [](const at::Tensor& t) {
    return View{t.data_ptr(), DType::kF32, t.size(0), t.size(1), t.size(1)};
  };
  constexpr int64_t kIn = 16, kOut = 48, kFirst = 16, kScaled = 24;
  const auto draw = [](int64_t rows, int64_t columns) { return at::randn({rows, columns}, at::kFloat); };
  const at::Tensor weight = draw(kOut, kIn), bias = draw(kOut, 1), x = draw(kRows, kIn),
                   dy = draw(kRows, kOut), residual = draw(kRows, kOut), output = draw(kScaled, 1),
                   input = draw(kIn, 1);
  const at::Tensor y = at::empty_like(dy), dx = at::empty_like(x), doutput = at::ones_like(output),
                   dinput = at::ones_like(input);
  Linear linear;
  linear.weight.weight = view(weight);
  linear.bias.weight = view(bias);
  linear.scales.push_back({kFirst, kScaled, {view(output), view(doutput)}});
  linear.input_scale = {view(input), view(dinput)};
  DeviceBatch batch;
  batch.tokens = batch.rows = kRows;
  LinearSaved saved = allocate_saved(f.context, linear, kRows);
  linear_forward(f.context, linear, batch, {view(x), view(y), view(residual)}, saved);
  linear_backward(f.context, linear, batch, {view(x), view(dy), view(dx)}, saved, true);

  const c10::InferenceMode with_autograd(false);
  const auto leaf = [](const at::Tensor& t) { return t.to(at::kDouble).requires_grad_(); };
  const at::Tensor in = leaf(x), scale = leaf(output), of_input = leaf(input);
  const at::Tensor product =
      at::mm(in.mul(of_input.t()), weight.to(at::kDouble).t()).add(bias.to(at::kDouble).t());
  const at::Tensor all = at::cat(
      {at::ones({kFirst, 1}, at::kDouble), scale, at::ones({kOut - kFirst - kScaled, 1}, at::kDouble)});
  const at::Tensor want = product.mul(all.t()).add(residual.to(at::kDouble));
  want.mul(dy.to(at::kDouble)).sum().backward();
  expect_near(y, want, "y");
  expect_near(dx, in.grad(), "dx");
  expect_near(doutput, scale.grad(), "factors of the output");
  expect_near(dinput, of_input.grad(), "factors of the input");
}

TEST(Adapters, MergedScalesAreOfRowsColumnsAndBiases) {
  ModelSpec spec = llama_spec({.ffn = 96, .layers = 1});
  add_biases(spec);
  AdapterSpec ia3;
  ia3.kind = AdapterKind::kIa3;
  ia3.targets = {"k_proj", "down_proj"};
  const ModelLayout layout = make_layout(spec, &ia3, DType::kF32);
  const BlockLayout& block = layout.blocks[1];
  std::vector<float> trained(static_cast<size_t>(block.flat_elements));
  for (size_t i = 0; i < trained.size(); ++i) trained[i] = 2 + static_cast<float>(i);
  const auto merged = [&](const TensorPlace& place) {
    std::vector<float> weight(static_cast<size_t>(place.parameter.elements()), 1.F);
    merge_adapters(block, place, ia3,
                   {reinterpret_cast<const std::byte*>(trained.data()),
                    reinterpret_cast<std::byte*>(weight.data()), 1, library_kernels(DeviceType::kCpu)});
    return weight;
  };
  const TensorPlace &qkv = *block.find("layers.0.attn.qkv"), &bias = *block.find("layers.0.attn.qkv_bias"),
                    &down = *block.find("layers.0.mlp.down");
  const float* const rows = trained.data() + block.beside(qkv, 1, TrainableRole::kOutputScale)->offset -
                            qkv.parameter.parts[1].first;
  const float* const columns = trained.data() + block.beside(down, 0, TrainableRole::kInputScale)->offset;
  const auto factor = [&](int64_t row) {
    const ParameterPart& key = qkv.parameter.parts[1];
    return row >= key.first && row < key.first + key.rows ? rows[row] : 1.F;
  };
  const std::vector<float> weight = merged(qkv), biases = merged(bias), last = merged(down);
  for (int64_t i = 0; i < qkv.parameter.elements(); ++i)
    ASSERT_EQ(weight[static_cast<size_t>(i)], factor(i / qkv.parameter.columns)) << i;
  for (int64_t i = 0; i < bias.parameter.rows; ++i) ASSERT_EQ(biases[static_cast<size_t>(i)], factor(i)) << i;
  for (int64_t i = 0; i < down.parameter.elements(); ++i)
    ASSERT_EQ(last[static_cast<size_t>(i)], columns[i % down.parameter.columns]) << i;
}

// PiSSA: A0 sees what A sees, with the same inputs dropped, so that A = A0 and B = B0 add nothing to an
// output, and nothing to a gradient of an input.
TEST(Adapters, PissaPairsChangeNothingAtTheStartWithDropout) {
  Fixture f(false, false, true);
  f.adapter.dropout = 0.4;
  for (const char* module : {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}) {
    const std::string name = module;
    f.find(f.frozen, name + ".start_A").copy_(f.find(f.trainable, name + ".lora_A"));
    f.find(f.frozen, name + ".start_B").copy_(f.find(f.trainable, name + ".lora_B").neg());
  }
  const TransformerBlock block = f.bind(2);
  for (const char* matrix : {"attn.qkv", "attn.out", "mlp.gate_up", "mlp.down"}) {
    const ArenaFrame frame(f.arena);
    const Linear& linear = Fixture::linear(block, matrix);
    ASSERT_TRUE(linear.adapters.front().dropout.on());
    Linear alone;
    alone.weight = linear.weight;
    const at::Tensor x = at::randn({kRows, linear.weight.weight.columns}, at::kFloat),
                     dy = at::randn({kRows, linear.weight.weight.rows}, at::kFloat);
    const auto view = [](const at::Tensor& t) {
      return View{t.data_ptr(), DType::kF32, t.size(0), t.size(1), t.size(1)};
    };
    std::vector<int32_t> position(kRows), sample(kRows, 3);
    std::iota(position.begin(), position.end(), 0);
    DeviceBatch batch;
    batch.tokens = batch.rows = kRows;
    batch.position = position.data();
    batch.sample = sample.data();
    std::vector<at::Tensor> out;
    for (const Linear* const one : {&linear, static_cast<const Linear*>(&alone)}) {
      const at::Tensor y = at::empty_like(dy), dx = at::empty_like(x);
      LinearSaved saved = allocate_saved(f.context, *one, kRows);
      linear_forward(f.context, *one, batch, {view(x), view(y)}, saved);
      linear_backward(f.context, *one, batch, {view(x), view(dy), view(dx)}, saved, true);
      out.push_back(y), out.push_back(dx);
    }
    EXPECT_TRUE(at::allclose(out[0], out[2], 1e-4, 1e-4)) << matrix;
    EXPECT_TRUE(at::allclose(out[1], out[3], 1e-4, 1e-4)) << matrix;
  }
}

// Dropout draws by layer and module; joined modules have keys of their own, too.
TEST(Adapters, DrawTheirDropoutByLayerAndModule) {
  for (const bool joined : {false, true}) {
    Fixture f(joined);
    f.adapter.dropout = 0.1;
    std::set<uint64_t> keys;
    for (const int64_t layer : {1, 2}) {
      const TransformerBlock block = f.bind(layer);
      for (const char* matrix : {"attn.qkv", "attn.out", "mlp.gate_up", "mlp.down"})
        for (const Adapter& adapter : Fixture::linear(block, matrix).adapters)
          keys.insert(adapter.dropout.key);
    }
    EXPECT_EQ(keys.size(), 2 * f.adapter.targets.size());
  }
}

}  // namespace
}  // namespace lm
