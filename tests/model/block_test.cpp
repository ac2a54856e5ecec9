// A block is any list of sublayers: forward and backward of lists that no family has, against LibTorch's
// autograd in fp64.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/philox.h"
#include "config/config_names.h"
#include "kernels/library.h"
#include "kernels/runtime.h"
#include "model/bind.h"
#include "model/carried.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

constexpr int64_t kRows = 9;
constexpr int64_t kWidth = 12;  // of a layer's input

constexpr float kScalar = 0.7F;  // of a layer that has one

struct Shape {
  std::vector<const char*> sublayers;
  bool norm = true, norm_after = false;
  double residual_scale = 1;
  NormKind kind = NormKind::kRms;
  bool biases = false;  // of the matrices
  bool beside = false;  // all sublayers beside the first one
  bool scalar = false;
  double dropout = 0;
};

MixerSpec mixer_of(const std::string& name, const LayerSpec& llama, bool biases) {
  AttentionSpec attention = llama.attention();
  GatedMlpSpec mlp = llama.mlp();
  attention.qkv_bias = attention.out_bias = mlp.bias = biases;
  if (name == "attention") return attention;
  if (name == "mlp") return mlp;
  if (name == "experts" || name == "raw experts")
    return ExpertsSpec{.experts = 5, .chosen = 2, .ffn = 12, .renormalise = name == "experts"};
  if (name == "shared" || name == "gated shared")
    return SharedExpertSpec{.ffn = 28, .gated = name == "gated shared"};
  if (name == "input") return LayerInputSpec{.activation = Activation::kGeluTanh, .width = kWidth};
  return PlainMlpSpec{.activation = Activation::kGeluTanh, .ffn = mlp.ffn, .bias = biases};
}

ModelSpec spec_of(const Shape& shape) {
  ModelSpec spec = llama_spec({.hidden = 48, .ffn = 40, .heads = 4, .kv_heads = 2, .head_dim = 8});
  const LayerSpec llama = spec.layers[0];
  LayerSpec& layer = spec.layers[0];
  layer = {.sublayers = {}, .scalar = shape.scalar};
  for (size_t s = 0; s < shape.sublayers.size(); ++s) {
    SublayerSpec& sublayer = layer.sublayers.emplace_back(SublayerSpec{
        .norm = NormSpec{.kind = shape.kind}, .mixer = mixer_of(shape.sublayers[s], llama, shape.biases)});
    sublayer.beside = shape.beside && s > 0;
    if (!shape.norm || sublayer.beside) sublayer.norm.reset();
    if (shape.norm_after) sublayer.norm_after = NormSpec{.kind = shape.kind, .eps = 1e-3};
    sublayer.residual_scale = shape.residual_scale;
    sublayer.dropout = shape.dropout;
  }
  for (const char* name : {"attn.norm_after", "mlp.norm_after", "input.norm", "input.norm_after"})
    spec.names.norms.push_back({name, name});
  for (const char* name : {"input.gate", "input.out", "experts.router", "shared.gate", "shared.up",
                           "shared.down", "shared.weight"})
    spec.names.modules.push_back({name, name});
  for (const char* name : {"experts.gate", "experts.up", "experts.down"})
    spec.names.modules.push_back({"experts.*.one", name});
  return spec;
}

struct Fixture {
  explicit Fixture(const ModelSpec& of)
      : spec(of),
        layout(make_layout(spec, nullptr, DType::kF32)),
        stream(start_torch(DeviceType::kCpu, 1, true)),
        rope(spec, kRows, DType::kF32, DeviceType::kCpu, stream) {
    at::manual_seed(3);
    weights = at::randn({layout.blocks[1].flat_elements}, at::kFloat).mul_(0.3);
    gradients = at::full({layout.blocks[1].flat_elements}, 7, at::kFloat);
    frozen.resize(static_cast<size_t>(layout.blocks[1].frozen_bytes));
    if (const TensorPlace* const scalar = layout.blocks[1].find("layers.0.scalar"))
      std::memcpy(frozen.data() + scalar->offset, &kScalar, sizeof kScalar);
    x = at::randn({kRows, spec.hidden}, at::kFloat);
    dy = at::randn({kRows, spec.hidden}, at::kFloat);
    inputs = at::randn({kRows, 2 * kWidth}, at::kFloat);
    dinputs = at::full({kRows, 2 * kWidth}, 7, at::kFloat);
  }

  static View view(const at::Tensor& t) { return view_of(t.data_ptr(), DType::kF32, t.size(0), t.size(1)); }

  at::Tensor find(const at::Tensor& array, const std::string& name) const {
    const TensorPlace& place = *layout.blocks[1].find("layers.0." + name);
    return array.narrow(0, place.offset, place.parameter.elements())
        .view({place.parameter.rows, place.parameter.columns});
  }

  TransformerBlock bind(bool training = true) {
    const auto at = [](const at::Tensor& t) { return static_cast<std::byte*>(t.data_ptr()); };
    const BlockMemory memory{.trainable = at(weights), .frozen = frozen.data(), .gradients = at(gradients)};
    return ModelBinding(spec, layout, nullptr)
        .transformer(1, memory, {.dtype = DType::kF32, .training = training});
  }

  // x_out; `dx` and the block's gradients become those of sum(x_out * dy).
  at::Tensor run(const TransformerBlock& block, at::Tensor& dx, Recompute level = Recompute::kNone) {
    DeviceBatch batch;
    batch.tokens = batch.rows = kRows;
    batch.position = positions.data();
    batch.sample = samples.data();
    batch.document_start = starts.data();
    batch.document_count = 1;
    const Carried carried{.lent = {}, .inputs = view(inputs), .input_gradient = view(dinputs)};
    batch.carried = &carried;
    const ArenaFrame frame(arena);
    const at::Tensor out = at::empty_like(x);
    BlockSaved saved;
    allocate_block_saved(context, block, kRows, level, SavedPart::kKept, saved);
    saved_bytes = arena.mark();
    {
      const ArenaFrame forward(arena);
      allocate_block_saved(context, block, kRows, level, SavedPart::kRecomputed, saved);
      block_forward(context, block, batch, view(x), saved, view(out));
    }
    if (level != Recompute::kNone) {
      // What was there before backward is not there any more: NaN in its place.
      const ArenaFrame between(arena);
      constexpr int64_t kMost = int64_t{1} << 20;
      std::memset(arena.allocate(kMost), 0xff, kMost);
    }
    if (level != Recompute::kNone) {
      allocate_block_saved(context, block, kRows, level, SavedPart::kRecomputed, saved);
      block_recompute(context, block, batch, view(x), level, saved);
    }
    dx = dy.clone();
    block_backward(context, block, batch, view(x), saved, {.dx = view(dx), .first = true});
    return out;
  }

  ModelSpec spec;
  ModelLayout layout;
  StreamView stream;
  Arena arena{DeviceType::kCpu, int64_t{4} << 20};
  RopeTable rope;
  Uploads uploads;
  Context context{spec,  DType::kF32, DeviceType::kCpu, library_kernels(DeviceType::kCpu), stream,
                  arena, rope,        uploads};
  std::vector<int32_t> positions = {0, 1, 2, 3, 4, 5, 6, 7, 8}, starts = {0, kRows},
                       samples = std::vector<int32_t>(kRows, 5);
  at::Tensor weights, gradients, x, dy;
  at::Tensor inputs, dinputs;  // of two layers, this one's first
  std::vector<std::byte> frozen;
  int64_t saved_bytes = 0;  // what a forward pass keeps
};

// The same block by its formulas. `leaves`: each parameter's name and value.
class Reference {
 public:
  // `block`: of which the masks are.
  Reference(const Fixture& f, const TransformerBlock& block)
      : f_(f),
        block_(block),
        input(f.x.to(at::kDouble).requires_grad_()),
        layer_input(f.inputs.narrow(1, 0, kWidth).to(at::kDouble).requires_grad_()) {}

  at::Tensor run() {
    const LayerSpec& layer = f_.spec.layers[0];
    at::Tensor x = input, read;
    for (size_t s = 0; s < layer.sublayers.size(); ++s) {
      const SublayerSpec& sublayer = layer.sublayers[s];
      if (!sublayer.beside) read = sublayer.norm ? norm(x, sublayer.norm_name(), *sublayer.norm) : x;
      at::Tensor output = std::visit([&](const auto& mixer) { return of(mixer, read); }, sublayer.mixer) *
                          mask(block_.sublayers[s].dropout);
      if (sublayer.norm_after) output = norm(output, sublayer.norm_after_name(), *sublayer.norm_after);
      x = x + output * sublayer.residual_scale;
    }
    return layer.scalar ? x * static_cast<double>(kScalar) : x;
  }

  std::vector<std::pair<std::string, at::Tensor>> leaves;

 private:
  // 0, or 1 / (1 - p).
  at::Tensor mask(const DropoutMask& dropout) const {
    at::Tensor out = at::ones({kRows, f_.spec.hidden}, at::kDouble);
    if (!dropout.on()) return out;
    const double p = static_cast<double>(dropout.p);
    auto at = out.accessor<double, 2>();
    for (int64_t t = 0; t < kRows; ++t) {
      for (int64_t i = 0; i < f_.spec.hidden; ++i) {
        const uint32_t number = philox_at(dropout.key, static_cast<uint64_t>(i), static_cast<uint32_t>(t), 5);
        at[t][i] = (number >> 8) / 16777216.0 >= p ? 1 / (1 - p) : 0;
      }
    }
    return out;
  }
  at::Tensor leaf(const std::string& name) {
    leaves.emplace_back(name, f_.find(f_.weights, name).to(at::kDouble).requires_grad_());
    return leaves.back().second;
  }
  at::Tensor norm(const at::Tensor& x, const std::string& name, const NormSpec& spec) {
    const at::Tensor about = spec.centred() ? x - x.mean(-1, true) : x;
    at::Tensor out = about * (about.square().mean(-1, true) + spec.eps).rsqrt();
    if (spec.has_weight()) out = out * (leaf(name).view(-1) + (spec.offset() ? 1 : 0));
    return spec.has_bias() ? out + leaf(name + "_bias").view(-1) : out;
  }
  at::Tensor product(const at::Tensor& x, const std::string& name, bool bias) {
    const at::Tensor out = x.mm(leaf(name).t());
    return bias ? out + leaf(name + "_bias").view(-1) : out;
  }
  at::Tensor of(const GatedMlpSpec& mlp, const at::Tensor& x) {
    const at::Tensor both = product(x, "mlp.gate_up", mlp.bias);
    return product(at::silu(both.narrow(1, 0, mlp.ffn)) * both.narrow(1, mlp.ffn, mlp.ffn), "mlp.down",
                   mlp.bias);
  }
  at::Tensor of(const PlainMlpSpec& mlp, const at::Tensor& x) {
    return product(at::gelu(product(x, "mlp.up", mlp.bias), "tanh"), "mlp.down", mlp.bias);
  }
  at::Tensor of(const LayerInputSpec&, const at::Tensor& x) {
    return product(at::gelu(product(x, "input.gate", false), "tanh") * layer_input, "input.out", false);
  }
  at::Tensor of(const ExpertsSpec& spec, const at::Tensor& x) {
    const at::Tensor p = product(x, "experts.router", false).softmax(-1);
    auto [weights, chosen] = p.topk(spec.chosen, -1);
    if (spec.renormalise) weights = weights / weights.sum(-1, true);
    at::Tensor out = at::zeros_like(x);
    for (int64_t e = 0; e < spec.experts; ++e) {
      const auto number = static_cast<size_t>(e);
      const at::Tensor both = product(x, expert_name(number, "gate_up"), false),
                       h = at::silu(both.narrow(1, 0, spec.ffn)) * both.narrow(1, spec.ffn, spec.ffn);
      out = out + (weights * chosen.eq(e)).sum(-1, true) * product(h, expert_name(number, "down"), false);
    }
    return out;
  }
  at::Tensor of(const SharedExpertSpec& spec, const at::Tensor& x) {
    const at::Tensor both = product(x, "shared.gate_up", false),
                     h = at::silu(both.narrow(1, 0, spec.ffn)) * both.narrow(1, spec.ffn, spec.ffn),
                     out = product(h, "shared.down", false);
    return spec.gated ? product(x, "shared.weight", false).sigmoid() * out : out;
  }
  at::Tensor rotated(const at::Tensor& x) const {  // [heads, T, d]
    const std::vector<float> frequencies = rope_frequencies(f_.spec.ropes.front());
    const at::Tensor f = at::tensor(frequencies).to(at::kDouble);
    const at::Tensor angle = at::outer(at::arange(kRows, at::kDouble), f);
    const int64_t half = std::ssize(frequencies);
    const at::Tensor a = x.narrow(2, 0, half), b = x.narrow(2, half, half);
    return at::cat({a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()}, 2);
  }
  at::Tensor of(const AttentionSpec& a, const at::Tensor& x) {
    const at::Tensor qkv = product(x, "attn.qkv", a.qkv_bias);
    const auto heads = [&](int64_t first, int64_t count) {
      return qkv.narrow(1, first, count * a.head_dim).view({kRows, count, a.head_dim}).transpose(0, 1);
    };
    const int64_t each = a.heads / a.kv_heads;
    const at::Tensor q = rotated(heads(0, a.heads)),
                     k = rotated(heads(a.q_rows(), a.kv_heads)).repeat_interleave(each, 0),
                     v = heads(a.q_rows() + a.kv_rows(), a.kv_heads).repeat_interleave(each, 0);
    const at::Tensor later = at::ones({kRows, kRows}, at::kBool).triu(1);
    const at::Tensor scores = (q.matmul(k.transpose(1, 2)) / std::sqrt(static_cast<double>(a.head_dim)))
                                  .masked_fill(later, -INFINITY);
    return product(scores.softmax(-1).matmul(v).transpose(0, 1).reshape({kRows, a.q_rows()}), "attn.out",
                   a.out_bias);
  }

  const Fixture& f_;
  const TransformerBlock& block_;

 public:
  at::Tensor input, layer_input;
};

// fp32's rounding of Llama's shapes; offsets and biases of size 1 and blocks without a norm make larger
// numbers.
constexpr Recompute kLevels[] = {Recompute::kNone, Recompute::kAttention, Recompute::kBlock};
constexpr double kBound = 2e-6, kLargerBound = 1e-5;

void expect_near(const at::Tensor& got, const at::Tensor& want, const std::string& what,
                 double bound = kBound) {
  const at::Tensor exact = want.detach();
  // Of an expert without rows both are zero.
  EXPECT_LE(got.to(at::kDouble).sub(exact).norm().item<double>(), bound * exact.norm().item<double>())
      << what;
}

void expect_as_autograd(const std::vector<Shape>& shapes, double bound = kBound) {
  for (size_t i = 0; i < shapes.size(); ++i) {
    at::Tensor first_dx, first_gradients;
    for (const Recompute level : kLevels) {
      SCOPED_TRACE("shape " + std::to_string(i) + ", recompute " + std::string(name_of(level)));
      Fixture f(spec_of(shapes[i]));
      at::Tensor dx;
      const TransformerBlock block = f.bind();
      const at::Tensor out = f.run(block, dx, level);
      if (level == Recompute::kNone) first_dx = dx, first_gradients = f.gradients;
      EXPECT_TRUE(at::equal(dx, first_dx) && at::equal(f.gradients, first_gradients)) << "other bits";
      if (level != Recompute::kNone) continue;
      const c10::InferenceMode with_autograd(false);
      Reference reference(f, block);
      const at::Tensor want = reference.run();
      want.mul(f.dy.to(at::kDouble)).sum().backward();
      expect_near(out, want, "output", bound);
      expect_near(dx, reference.input.grad(), "dx", bound);
      if (const at::Tensor& want_inputs = reference.layer_input.grad(); want_inputs.defined()) {
        expect_near(f.dinputs.narrow(1, 0, kWidth), want_inputs, "the layer's input", bound);
        EXPECT_TRUE(f.dinputs.narrow(1, kWidth, kWidth).eq(7).all().item<bool>()) << "another layer's";
      }
      for (const auto& [name, leaf] : reference.leaves)
        expect_near(f.find(f.gradients, name).view(leaf.sizes()), leaf.grad(), name, bound);
    }
  }
}

TEST(Block, IsAnyListOfSublayers) {
  expect_as_autograd({
      {{"attention", "mlp"}},
      {{"mlp", "attention"}},
      {{"attention"}},
      {{"mlp"}},
      {.sublayers = {"attention", "mlp"}, .residual_scale = 0.25},
      {.sublayers = {"attention", "mlp"}, .norm_after = true},                 // Gemma's
      {.sublayers = {"attention", "mlp"}, .norm = false, .norm_after = true},  // OLMo-2's
      {.sublayers = {"attention", "mlp"}, .norm = false},
      {.sublayers = {"mlp", "attention"}, .norm = false, .norm_after = true, .residual_scale = 3},
  });
}

TEST(Block, HasNormsOfEveryKindBeforeAndBehindItsMixers) {
  for (const NormKind kind : {NormKind::kRmsLate, NormKind::kRmsOffset, NormKind::kRmsPlain, NormKind::kLayer,
                              NormKind::kLayerOffset, NormKind::kLayerNoBias}) {
    SCOPED_TRACE("kind " + std::to_string(static_cast<int>(kind)));
    expect_as_autograd(
        {
            {.sublayers = {"attention", "mlp"}, .kind = kind},
            {.sublayers = {"attention", "mlp"}, .norm_after = true, .kind = kind},
            {.sublayers = {"attention", "mlp"}, .norm = false, .norm_after = true, .kind = kind},
            {.sublayers = {"attention", "mlp"}, .norm_after = true, .residual_scale = 0.22, .kind = kind},
        },
        kLargerBound);
  }
}

TEST(Block, HasBiasesAndAnMlpWithoutAGate) {
  expect_as_autograd(
      {
          {.sublayers = {"attention", "plain"}, .kind = NormKind::kLayer, .biases = true},  // GPT-2's
          {.sublayers = {"attention", "mlp"}, .biases = true},
          {.sublayers = {"plain", "attention"}, .norm = false, .biases = true},
          {.sublayers = {"plain"}},
      },
      kLargerBound);
}

TEST(Block, HasExperts) {
  expect_as_autograd({
      {{"attention", "experts"}},
      {{"attention", "gated shared"}},
      {.sublayers = {"experts", "gated shared"}, .beside = true},
      {.sublayers = {"experts", "shared"}, .residual_scale = 0.25, .beside = true},
      {{"attention", "raw experts"}},
      {{"experts", "attention"}},
      {.sublayers = {"attention", "experts"}, .norm = false, .norm_after = true, .residual_scale = 0.25},
      {.sublayers = {"attention", "raw experts"}, .beside = true},
  });
}

TEST(Block, HasMixersBesideEachOther) {
  expect_as_autograd({
      {.sublayers = {"attention", "mlp"}, .kind = NormKind::kLayerNoBias, .beside = true},  // Cohere2's
      {.sublayers = {"mlp", "attention"}, .kind = NormKind::kLayer, .biases = true, .beside = true},
      {.sublayers = {"attention", "mlp"}, .norm = false, .beside = true},
      {.sublayers = {"attention", "mlp"}, .residual_scale = 0.25, .beside = true},
      {.sublayers = {"attention", "mlp"}, .norm_after = true, .beside = true},
      {.sublayers = {"attention", "mlp"}, .kind = NormKind::kRmsPlain, .beside = true, .scalar = true},
  });
}

// Behind other sublayers, and before them: as two blocks, one after the other.
TEST(Block, HasMixersBesideEachOtherAnywhereInItsList) {
  for (const bool group_first : {false, true}) {
    for (const Recompute level : kLevels) {
      SCOPED_TRACE((group_first ? "first, recompute " : "last, recompute ") + std::string(name_of(level)));
      Fixture group(spec_of({.sublayers = {"attention", "mlp"}, .beside = true})),
          alone(spec_of({.sublayers = {"plain"}}));
      Fixture &first = group_first ? group : alone, &second = group_first ? alone : group;
      TransformerBlock both = first.bind();
      for (const Sublayer& sublayer : second.bind().sublayers) both.sublayers.push_back(sublayer);
      at::Tensor dx, between, want_dx;
      const at::Tensor out = first.run(both, dx, level);
      const at::Tensor of_first = first.gradients.clone(), of_second = second.gradients.clone();

      second.x = first.run(first.bind(), between);
      second.dy = first.dy;
      expect_near(out, second.run(second.bind(), between), "output");
      first.dy = between;
      first.run(first.bind(), want_dx);
      expect_near(dx, want_dx, "dx");
      expect_near(of_first, first.gradients, "gradients of the first");
      expect_near(of_second, second.gradients, "gradients of the second");
    }
  }
}

// What a sublayer beside another one reads is kept once.
TEST(Block, KeepsWhatMixersBesideEachOtherReadOnce) {
  const auto kept = [](bool beside) {
    Fixture f(spec_of({.sublayers = {"attention", "mlp"}, .beside = beside}));
    at::Tensor dx;
    f.run(f.bind(), dx);
    return f.saved_bytes;
  };
  EXPECT_LE(kept(true) + kRows * 48 * 4, kept(false));
}

// All but what the MLP saves, and nothing.
TEST(Block, KeepsWhatItsLevelOfRecomputationSays) {
  const auto kept = [](Recompute level) {
    Fixture f(spec_of({.sublayers = {"attention", "mlp"}}));
    at::Tensor dx;
    f.run(f.bind(), dx, level);
    return f.saved_bytes;
  };
  const int64_t none = kept(Recompute::kNone), attention = kept(Recompute::kAttention);
  Fixture f(spec_of({.sublayers = {"attention", "mlp"}}));
  const TransformerBlock block = f.bind();
  const ArenaFrame frame(f.arena);
  const int64_t before = f.arena.mark();
  std::get<GatedMlp>(block.sublayers[1].mixer).allocate(f.context, kRows);
  EXPECT_EQ(attention, none - (f.arena.mark() - before));
  EXPECT_EQ(kept(Recompute::kBlock), 0);
}

TEST(Block, IsMultipliedByItsLayersScalar) {
  expect_as_autograd({
      {.sublayers = {"attention", "mlp"}, .scalar = true},
      {.sublayers = {"attention", "mlp"},
       .norm_after = true,
       .kind = NormKind::kRmsLate,
       .scalar = true},  // Gemma 4's
      {.sublayers = {"mlp"}, .residual_scale = 0.25, .scalar = true},
  });
}

TEST(Block, HasAnInputOfItsOwn) {
  expect_as_autograd(
      {
          {.sublayers = {"attention", "mlp", "input"}, .norm = false, .norm_after = true, .scalar = true},
          {.sublayers = {"input"}},
          {.sublayers = {"mlp", "input"}, .norm_after = true, .residual_scale = 0.5},
      },
      kLargerBound);
}

TEST(Block, DropsWhatItsMixersAdd) {
  expect_as_autograd(
      {
          {.sublayers = {"attention", "plain"}, .kind = NormKind::kLayer, .biases = true, .dropout = 0.4},
          {.sublayers = {"mlp"}, .dropout = 0.4},
          {.sublayers = {"attention", "mlp"}, .norm = false, .dropout = 0.4},
          {.sublayers = {"attention", "mlp"}, .residual_scale = 0.25, .dropout = 0.4},
          {.sublayers = {"attention", "mlp"}, .norm_after = true, .residual_scale = 3, .dropout = 0.4},
          {.sublayers = {"attention", "mlp"}, .beside = true, .scalar = true, .dropout = 0.4},
      },
      kLargerBound);
}

TEST(Block, DropsInTrainingAlone) {
  Fixture f(spec_of({.sublayers = {"attention", "mlp"}, .dropout = 0.4})),
      without(spec_of({.sublayers = {"attention", "mlp"}}));
  at::Tensor dx, want_dx;
  const at::Tensor out = f.run(f.bind(false), dx), want = without.run(without.bind(), want_dx);
  EXPECT_TRUE(out.equal(want));
  EXPECT_TRUE(dx.equal(want_dx));
  EXPECT_FALSE(f.run(f.bind(), dx).equal(want));
  const TransformerBlock block = f.bind();
  EXPECT_NE(block.sublayers[0].dropout.key, block.sublayers[1].dropout.key);
}

TEST(Rope, EveryTableIsThatOfItsSpec) {
  ModelSpec both = llama_spec({});
  both.ropes = {{.dim = 16}, {.dim = 8, .theta = 100}, {.dim = 24, .theta = 7}};
  const StreamView stream = start_torch(DeviceType::kCpu, 1, true);
  const RopeTable all(both, kRows, DType::kF32, DeviceType::kCpu, stream);
  for (int i = 0; i < 3; ++i) {
    ModelSpec alone = both;
    alone.ropes = {both.ropes[static_cast<size_t>(i)]};
    const RopeTable one(alone, kRows, DType::kF32, DeviceType::kCpu, stream);
    const int64_t elements = kRows * alone.ropes[0].dim / 2;
    EXPECT_TRUE(std::equal(one.cos(0), one.cos(0) + elements, all.cos(i))) << i;
    EXPECT_TRUE(std::equal(one.sin(0), one.sin(0) + elements, all.sin(i))) << i;
  }
}

}  // namespace
}  // namespace lm
