// A block of any sublayers beside its formulas in LibTorch, in fp64: what the tests of blocks share.
#pragma once

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

namespace lm::block_case {

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
  bool joined = false;  // the last one beside the one before it, and a norm of the sum of theirs
  bool scalar = false;
  double dropout = 0;
};

inline MixerSpec mixer_of(const std::string& name, const LayerSpec& llama, bool biases) {
  AttentionSpec attention = llama.attention();
  GatedMlpSpec mlp = llama.mlp();
  attention.qkv_bias = attention.out_bias = mlp.bias = biases;
  if (name == "attention") return attention;
  if (name == "mlp") return mlp;
  if (name == "experts" || name == "raw experts")
    return ExpertsSpec{.experts = 5, .chosen = 2, .ffn = 12, .renormalise = name == "experts"};
  if (name == "experts of the stream")
    return ExpertsSpec{.experts = 5,
                       .chosen = 2,
                       .ffn = 12,
                       .renormalise = true,
                       .input_norm = NormSpec{.kind = NormKind::kRmsLate, .eps = 1e-2},
                       .router_norm = NormSpec{.kind = NormKind::kRms, .eps = 1e-4},
                       .factors = true};
  if (name == "shared" || name == "gated shared")
    return SharedExpertSpec{.ffn = 28, .gated = name == "gated shared"};
  if (name == "input") return LayerInputSpec{.activation = Activation::kGeluTanh, .width = kWidth};
  return PlainMlpSpec{.activation = Activation::kGeluTanh, .ffn = mlp.ffn, .bias = biases};
}

inline ModelSpec spec_of(const Shape& shape) {
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
    if (shape.sublayers[s] == std::string("experts of the stream")) sublayer.norm.reset();
  }
  if (shape.joined) {
    layer.sublayers.back().beside = true;
    (layer.sublayers.end() - 2)->norm_joined = NormSpec{.kind = shape.kind, .eps = 1e-4};
  }
  for (const char* name : {"attn.norm_after", "mlp.norm_after", "mlp.norm_joined", "attn.norm_joined",
                           "input.norm", "input.norm_after", "experts.input_norm", "experts.norm_after"})
    spec.names.norms.push_back({name, name});
  for (const char* name : {"scalar", "experts.router_norm", "experts.factors"})
    spec.names.vectors.push_back({name, name});
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

  // Whether sublayer `s` is of a group with a norm of its sum, of two.
  bool joined(size_t s) const {
    const std::vector<SublayerSpec>& all = spec.layers[0].sublayers;
    return all[all[s].beside ? s - 1 : s].norm_joined.has_value();
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
  at::Tensor run(const TransformerBlock& block, at::Tensor& dx, Recompute level = Recompute::kNone,
                 bool want_dx = true) {
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
    block_backward(context, block, batch, view(x), saved,
                   {.dx = view(dx), .first = true, .want_dx = want_dx});
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
    at::Tensor x = input, read, group, joined;
    for (size_t s = 0; s < layer.sublayers.size(); ++s) {
      const SublayerSpec& sublayer = layer.sublayers[s];
      if (!sublayer.beside) group = x;
      const bool of_sum = f_.joined(s);
      if (!sublayer.beside || of_sum)
        read = sublayer.norm ? norm(group, sublayer.norm_name(), *sublayer.norm) : group;
      at::Tensor output = std::visit([&](const auto& mixer) { return of(mixer, read); }, sublayer.mixer) *
                          mask(block_.sublayers[s].dropout);
      if (sublayer.norm_after) output = norm(output, sublayer.norm_after_name(), *sublayer.norm_after);
      if (of_sum) {
        joined = sublayer.beside ? joined + output : output;
        if (sublayer.beside) {
          const SublayerSpec& first = layer.sublayers[s - 1];
          x = x + norm(joined, first.norm_joined_name(), *first.norm_joined);
        }
        continue;
      }
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
  at::Tensor of(const ExpertsSpec& spec, const at::Tensor& stream) {
    at::Tensor x = stream, routed = stream;
    if (spec.reads_stream()) {
      x = norm(stream, "experts.input_norm", *spec.input_norm);
      routed = norm(stream, "experts.router_norm", *spec.router_norm) /
               std::sqrt(static_cast<double>(stream.size(1)));
    }
    const at::Tensor p = product(routed, "experts.router", false).softmax(-1);
    auto [weights, chosen] = p.topk(spec.chosen, -1);
    if (spec.renormalise) weights = weights / weights.sum(-1, true);
    if (spec.factors)
      weights = weights * leaf("experts.factors").view(-1).index_select(0, chosen.view(-1)).view_as(weights);
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

inline void expect_near(const at::Tensor& got, const at::Tensor& want, const std::string& what,
                        double bound = kBound) {
  const at::Tensor exact = want.detach();
  // Of an expert without rows both are zero.
  EXPECT_LE(got.to(at::kDouble).sub(exact).norm().item<double>(), bound * exact.norm().item<double>())
      << what;
}

inline void expect_as_autograd(const std::vector<Shape>& shapes, double bound = kBound) {
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

}  // namespace lm::block_case
