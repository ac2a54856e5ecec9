// A block is any list of sublayers: forward and backward of lists that no family has, against LibTorch's
// autograd in fp64.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/library.h"
#include "kernels/runtime.h"
#include "model/bind.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

constexpr int64_t kRows = 9;

struct Shape {
  std::vector<const char*> sublayers;
  bool norm = true, norm_after = false;
  double residual_scale = 1;
};

ModelSpec spec_of(const Shape& shape) {
  ModelSpec spec = llama_spec({.hidden = 48, .ffn = 40, .heads = 4, .kv_heads = 2, .head_dim = 8});
  const LayerSpec llama = spec.layers[0];
  spec.layers[0].sublayers.clear();
  for (const std::string name : shape.sublayers) {
    SublayerSpec& sublayer =
        spec.layers[0].sublayers.emplace_back(llama.sublayers[name == "attention" ? 0 : 1]);
    if (!shape.norm) sublayer.norm.reset();
    if (shape.norm_after) sublayer.norm_after = NormSpec{.eps = 1e-3};
    sublayer.residual_scale = shape.residual_scale;
  }
  for (const char* name : {"attn.norm_after", "mlp.norm_after"}) spec.names.norms.push_back({name, name});
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
    x = at::randn({kRows, spec.hidden}, at::kFloat);
    dy = at::randn({kRows, spec.hidden}, at::kFloat);
  }

  static View view(const at::Tensor& t) { return view_of(t.data_ptr(), DType::kF32, t.size(0), t.size(1)); }

  at::Tensor find(const at::Tensor& array, const std::string& name) const {
    const TensorPlace& place = *layout.blocks[1].find("layers.0." + name);
    return array.narrow(0, place.offset, place.parameter.elements())
        .view({place.parameter.rows, place.parameter.columns});
  }

  // x_out; `dx` and `gradients` become their gradients of sum(x_out * dy).
  at::Tensor run(at::Tensor& dx, bool recomputed) {
    const auto at = [](const at::Tensor& t) { return static_cast<std::byte*>(t.data_ptr()); };
    const BlockMemory memory{.trainable = at(weights), .gradients = at(gradients)};
    const TransformerBlock block =
        ModelBinding(spec, layout, nullptr).transformer(1, memory, {.dtype = DType::kF32, .training = true});
    DeviceBatch batch;
    batch.tokens = batch.rows = kRows;
    batch.position = positions.data();
    batch.document_start = starts.data();
    batch.document_count = 1;
    const ArenaFrame frame(arena);
    const at::Tensor out = at::empty_like(x);
    BlockSaved saved = allocate_block_saved(context, block, kRows);
    block_forward(context, block, batch, view(x), saved, view(out));
    if (recomputed) {
      saved = allocate_block_saved(context, block, kRows);
      block_forward(context, block, batch, view(x), saved, {});
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
  std::vector<int32_t> positions = {0, 1, 2, 3, 4, 5, 6, 7, 8}, starts = {0, kRows};
  at::Tensor weights, gradients, x, dy;
};

// The same block by its formulas. `leaves`: each parameter's name and value.
class Reference {
 public:
  explicit Reference(const Fixture& f) : f_(f), input(f.x.to(at::kDouble).requires_grad_()) {}

  at::Tensor run() {
    at::Tensor x = input;
    for (const SublayerSpec& sublayer : f_.spec.layers[0].sublayers) {
      const at::Tensor input = sublayer.norm ? norm(x, sublayer.norm_name(), 1e-6) : x;
      at::Tensor output = std::visit([&](const auto& mixer) { return of(mixer, input); }, sublayer.mixer);
      if (sublayer.norm_after) output = norm(output, sublayer.norm_after_name(), 1e-3);
      x = x + output * sublayer.residual_scale;
    }
    return x;
  }

  std::vector<std::pair<std::string, at::Tensor>> leaves;

 private:
  at::Tensor leaf(const std::string& name) {
    leaves.emplace_back(name, f_.find(f_.weights, name).to(at::kDouble).requires_grad_());
    return leaves.back().second;
  }
  at::Tensor norm(const at::Tensor& x, const std::string& name, double eps) {
    return x * (x.square().mean(-1, true) + eps).rsqrt() * leaf(name).view(-1);
  }
  at::Tensor of(const GatedMlpSpec& mlp, const at::Tensor& x) {
    const at::Tensor both = x.mm(leaf("mlp.gate_up").t());
    return at::mm(at::silu(both.narrow(1, 0, mlp.ffn)) * both.narrow(1, mlp.ffn, mlp.ffn),
                  leaf("mlp.down").t());
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
    const at::Tensor qkv = x.mm(leaf("attn.qkv").t());
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
    return scores.softmax(-1).matmul(v).transpose(0, 1).reshape({kRows, a.q_rows()}).mm(leaf("attn.out").t());
  }

  const Fixture& f_;

 public:
  at::Tensor input;
};

void expect_near(const at::Tensor& got, const at::Tensor& want, const std::string& what) {
  const at::Tensor exact = want.detach();
  EXPECT_LE(got.to(at::kDouble).sub(exact).norm().item<double>() / exact.norm().item<double>(), 2e-6) << what;
}

TEST(Block, IsAnyListOfSublayers) {
  const std::vector<Shape> shapes = {
      {{"attention", "mlp"}},
      {{"mlp", "attention"}},
      {{"attention"}},
      {{"mlp"}},
      {.sublayers = {"attention", "mlp"}, .residual_scale = 0.25},
      {.sublayers = {"attention", "mlp"}, .norm_after = true},                 // Gemma's
      {.sublayers = {"attention", "mlp"}, .norm = false, .norm_after = true},  // OLMo-2's
      {.sublayers = {"attention", "mlp"}, .norm = false},
      {.sublayers = {"mlp", "attention"}, .norm = false, .norm_after = true, .residual_scale = 3}};
  for (size_t i = 0; i < shapes.size(); ++i) {
    for (const bool recomputed : {false, true}) {
      SCOPED_TRACE("shape " + std::to_string(i));
      Fixture f(spec_of(shapes[i]));
      at::Tensor dx;
      const at::Tensor out = f.run(dx, recomputed);
      const c10::InferenceMode with_autograd(false);
      Reference reference(f);
      const at::Tensor want = reference.run();
      want.mul(f.dy.to(at::kDouble)).sum().backward();
      expect_near(out, want, "output");
      expect_near(dx, reference.input.grad(), "dx");
      for (const auto& [name, leaf] : reference.leaves)
        expect_near(f.find(f.gradients, name).view(leaf.sizes()), leaf.grad(), name);
    }
  }
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
