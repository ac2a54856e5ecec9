// Attention in every form that a family gives it (spec/mixers/attention.h), forward and backward, against its
// formulas in LibTorch's autograd in fp64. A text that goes on from its cache, recomputation and adapters
// give the same.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "kernels/library.h"
#include "kernels/runtime.h"
#include "model/bind.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

// Tokens of three documents; the rows behind them are surplus.
constexpr int64_t kTokens = 24, kSurplus = 3, kRows = kTokens + kSurplus, kHidden = 48;

constexpr NormSpec kRms{NormKind::kRms, 1e-6}, kLate{NormKind::kRmsLate, 1e-5},
    kOffset{NormKind::kRmsOffset, 1e-3}, kPlain{NormKind::kRmsPlain, 1e-2},
    kCentred{NormKind::kLayerNoBias, 1e-3};

// A model whose layers are attention alone, and one of these layers.
struct Form {
  std::string name;
  ModelSpec spec;
  int64_t layer = 0;
};

Form form(const std::string& name, const RopeSpec& rope, const AttentionSpec& attention) {
  ModelSpec spec = llama_spec({.hidden = kHidden});
  spec.ropes = {rope};
  spec.layers[0].sublayers = {{.norm = std::nullopt, .mixer = attention}};
  return {name, spec};
}

constexpr AttentionSpec kHeads{.heads = 4, .kv_heads = 2, .head_dim = 16};

// kHeads with what `change` makes of it.
template <class Change>
AttentionSpec heads(const Change& change) {
  AttentionSpec out = kHeads;
  change(out);
  return out;
}

// Layers with heads of 16 features and a window beside layers with heads of 32, which have one key head for
// all and no projection of values.
ModelSpec gemma4() {
  ModelSpec spec = form("", {.dim = 16}, heads([](AttentionSpec& a) {
                          a.window = 7, a.head_norm = kLate, a.value_norm = kPlain, a.softmax_scale = 1;
                        }))
                       .spec;
  spec.ropes.push_back({.dim = 32, .theta = 1e6, .scaling = RopeSpec::Scaling::kProportional, .turned = 4});
  AttentionSpec full{.heads = 4, .kv_heads = 1, .head_dim = 32, .rope = 1};
  full.head_norm = kLate, full.value_norm = kPlain, full.values_are_keys = true, full.softmax_scale = 1;
  spec.layers.push_back({{{.norm = std::nullopt, .mixer = full}}});
  return spec;
}

std::vector<Form> families() {
  const RopeSpec whole{.dim = 16};
  std::vector<Form> out = {{"Gemma 4, sliding", gemma4(), 0}, {"Gemma 4, full", gemma4(), 1}};
  const auto add = [&](const char* name, const RopeSpec& rope, const auto& change) {
    out.push_back(form(name, rope, heads(change)));
  };
  const auto joint = [](AttentionSpec& a) { a.head_norm = kLate, a.joint_norm = true; };
  add("OLMo-2", whole, joint);
  add("OLMo-3, sliding", whole, [&](AttentionSpec& a) { joint(a), a.window = 7; });
  add("Gemma 2", whole, [](AttentionSpec& a) { a.softcap = 2, a.softmax_scale = 0.1; });
  add("Gemma 2, sliding", whole,
      [](AttentionSpec& a) { a.softcap = 2, a.softmax_scale = 0.1, a.window = 7; });
  add("Gemma 3", {.dim = 16, .theta = 1e6, .scaling = RopeSpec::Scaling::kLinear, .factor = 8},
      [](AttentionSpec& a) { a.head_norm = kOffset, a.softmax_scale = 0.3; });
  add("Gemma 3, sliding", whole,
      [](AttentionSpec& a) { a.head_norm = kOffset, a.softmax_scale = 0.3, a.window = 7; });
  add("Ministral 3",
      {.dim = 16,
       .scaling = RopeSpec::Scaling::kYarn,
       .factor = 4,
       .attention_factor = 1.2,
       .original_max_position = 16},
      [](AttentionSpec& a) { a.position_slope = 0.5, a.position_period = 4; });
  add("Phi-4-mini", {.dim = 12}, [](AttentionSpec&) {});
  add("GLM", {.dim = 8, .neighbours = true}, [](AttentionSpec& a) { a.qkv_bias = true; });
  add("Cohere2", {.dim = 16, .neighbours = true}, [](AttentionSpec& a) { a.window = 7; });
  add("Command R+", {.dim = 16, .neighbours = true},
      [](AttentionSpec& a) { a.head_norm = kCentred, a.own_norms = true; });
  add("norms without weights", whole, [](AttentionSpec& a) { a.head_norm = kPlain; });
  add("NoPE", whole,
      [](AttentionSpec& a) { a.rope = AttentionSpec::kNoRope, a.head_norm = kRms, a.softmax_scale = 0.3; });
  return out;
}

// Every kind of head norm with and without the value norm, values of their own or the keys, and every way to
// rotate; of the rest each has some.
std::vector<Form> combinations() {
  struct HeadNorm {
    const char* name;
    std::optional<NormSpec> norm;
    bool joint, own = false;
  };
  const std::vector<HeadNorm> norms = {{"no norm", std::nullopt, false},
                                       {"head norm", kRms, false},
                                       {"joint norm", kOffset, true},
                                       {"own norms", kCentred, false, true},
                                       {"own RMSNorms", kOffset, false, true}};
  const std::vector<RopeSpec> ropes = {
      {.dim = 16}, {.dim = 12}, {.dim = 8, .neighbours = true}, {.dim = 16, .neighbours = true}, {}};
  std::vector<Form> out;
  int number = 0;
  for (const HeadNorm& norm : norms)
    for (const bool value_norm : {false, true})
      for (const bool keys : {false, true})
        for (const RopeSpec& rope : ropes) {
          ++number;
          out.push_back(form(std::string(norm.name) + (value_norm ? ", value norm" : "") +
                                 (keys ? ", values are keys" : "") + ", RoPE of " + std::to_string(rope.dim),
                             rope.dim > 0 ? rope : ropes.front(), heads([&](AttentionSpec& a) {
                               a.head_norm = norm.norm, a.joint_norm = norm.joint;
                               a.own_norms = norm.own;
                               if (value_norm) a.value_norm = kPlain;
                               a.values_are_keys = keys;
                               if (rope.dim == 0) a.rope = AttentionSpec::kNoRope;
                               if (number % 2 == 0) a.softcap = 3;
                               if (number % 3 == 0) a.window = 7;
                               if (number % 4 < 2) a.qkv_bias = a.out_bias = true;
                               if (number % 7 < 3) a.position_slope = 0.5, a.position_period = 3;
                             })));
        }
  return out;
}

View view(const at::Tensor& t) {
  return view_of(t.data_ptr(), DType::kF32, t.size(0), t.size(1));
}

struct Fixture {
  explicit Fixture(const Form& form, const AdapterSpec* with = nullptr)
      : spec(form.spec),
        layer(form.layer),
        attention(spec.layer(layer).attention()),
        adapter(with),
        layout(make_layout(spec, adapter, DType::kF32)),
        stream(start_torch(DeviceType::kCpu, 1, true)),
        rope(spec, kTokens, DType::kF32, DeviceType::kCpu, stream) {
    at::manual_seed(3);
    trainable = at::randn({block().flat_elements}, at::kFloat).mul_(0.3);
    frozen = at::randn({block().frozen_bytes / 4}, at::kFloat).mul_(0.3);
    gradients = at::empty({block().flat_elements}, at::kFloat);
    x = at::randn({kRows, kHidden}, at::kFloat);
    dy = at::randn({kRows, kHidden}, at::kFloat);
    dy.narrow(0, kTokens, kSurplus).zero_();
    const std::optional<NormSpec>& norm = attention.head_norm;
    if (!norm || !norm->has_weight() || norm->offset()) return;
    for (const char* name : {"attn.q_norm", "attn.k_norm"}) weight(name).add_(1);
  }

  const BlockLayout& block() const { return layout.blocks[static_cast<size_t>(layer) + 1]; }
  const TensorPlace& place(const std::string& name) const {
    return *block().find("layers." + std::to_string(layer) + "." + name);
  }
  at::Tensor weight(const std::string& name) const {
    const TensorPlace& found = place(name);
    return found.frozen ? part(frozen, found, found.offset / 4) : part(trainable, found, found.offset);
  }
  at::Tensor gradient(const std::string& name) const {
    return part(gradients, place(name), place(name).offset);
  }
  static at::Tensor part(const at::Tensor& array, const TensorPlace& place, int64_t offset) {
    const Parameter& p = place.parameter;
    return array.narrow(0, offset, p.elements()).view({p.rows, p.columns});
  }

  TransformerBlock bound() const {
    const auto at = [](const at::Tensor& t) { return static_cast<std::byte*>(t.data_ptr()); };
    const BlockMemory memory{.trainable = at(trainable), .frozen = at(frozen), .gradients = at(gradients)};
    return ModelBinding(spec, layout, adapter)
        .transformer(layer + 1, memory, {.dtype = DType::kF32, .training = true});
  }

  // x_out of the packed documents; `dx` and `gradients` become those of sum(x_out * dy).
  at::Tensor run(at::Tensor& dx, bool recomputed) {
    const TransformerBlock of = bound();
    DeviceBatch batch;
    batch.tokens = kTokens, batch.rows = kRows;
    batch.position = positions.data();
    batch.document_start = starts.data();
    batch.document_count = std::ssize(starts) - 1;
    poison();
    gradients.fill_(7);
    const ArenaFrame frame(arena);
    const at::Tensor out = at::empty_like(x);
    BlockSaved saved = allocate_block_saved(context, of, kRows);
    block_forward(context, of, batch, view(x), saved, view(out));
    if (recomputed) {
      poison();
      saved = allocate_block_saved(context, of, kRows);
      block_forward(context, of, batch, view(x), saved, {});
    }
    dx = dy.clone();
    block_backward(context, of, batch, view(x), saved, {.dx = view(dx), .first = true});
    return out;
  }

  // x_out of tokens [first, first + count) of one text, which goes on from what the cache holds.
  at::Tensor goes_on(int64_t first, int64_t count, const KeyValueCache* cache) {
    const TransformerBlock of = bound();
    std::vector<int32_t> position, start = {0, static_cast<int32_t>(count)};
    for (int64_t i = 0; i < count; ++i) position.push_back(static_cast<int32_t>(first + i));
    DeviceBatch batch;
    batch.tokens = batch.rows = count;
    batch.position = position.data();
    batch.document_start = start.data();
    batch.document_count = 1;
    if (cache != nullptr) batch.caches = {cache};
    const ArenaFrame frame(arena);
    const at::Tensor input = x.narrow(0, first, count), out = at::empty_like(input);
    BlockSaved saved = allocate_block_saved(context, of, count);
    block_forward(context, of, batch, view(input), saved, view(out));
    return out;
  }

  // What the arena has left becomes NaN, so that it shows where something is read that nobody wrote.
  void poison() {
    const ArenaFrame frame(arena);
    const int64_t bytes = arena.capacity() - arena.mark();
    std::memset(arena.allocate(bytes), 0xFF, static_cast<size_t>(bytes));
  }

  ModelSpec spec;
  int64_t layer;
  const AttentionSpec& attention;
  const AdapterSpec* adapter;
  ModelLayout layout;
  StreamView stream;
  Arena arena{DeviceType::kCpu, int64_t{4} << 20};
  RopeTable rope;
  Uploads uploads;
  Context context{spec,  DType::kF32, DeviceType::kCpu, library_kernels(DeviceType::kCpu), stream,
                  arena, rope,        uploads};
  std::vector<int32_t> positions = {0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10},
                       starts = {0, 5, 13, kTokens};
  at::Tensor trainable, frozen, gradients, x, dy;
};

// The same layer by its formulas. `leaves`: what is trained, by name.
class Reference {
 public:
  explicit Reference(const Fixture& f)
      : f_(f),
        a_(f.attention),
        position_(at::tensor(f.positions)),
        input(f.x.narrow(0, 0, kTokens).to(at::kDouble).requires_grad_()) {}

  at::Tensor run() {
    at::Tensor made = linear("attn.qkv", input, a_.qkv_bias);
    if (f_.adapter != nullptr) {
      made = a_.values_are_keys ? made + adapted(input, {"q_proj", "k_proj"})
                                : made + adapted(input, {"q_proj", "k_proj", "v_proj"});
    }
    const auto columns = [&](int64_t first, int64_t count) {
      return made.narrow(1, first, count * a_.head_dim).reshape({kTokens, count, a_.head_dim});
    };
    at::Tensor q = columns(0, a_.heads), k = columns(a_.q_rows(), a_.kv_heads);
    at::Tensor v = a_.values_are_keys ? k : columns(a_.q_rows() + a_.kv_rows(), a_.kv_heads);
    if (a_.head_norm) q = head_normed(q, "attn.q_norm"), k = head_normed(k, "attn.k_norm");
    if (a_.value_norm) v = normed(v, a_.value_norm->eps);
    q = rotated(q), k = rotated(k);
    if (a_.position_period > 0) q = q * position_scale().view({kTokens, 1, 1});
    const at::Tensor out = attend(q, k, v).reshape({kTokens, a_.q_rows()});
    const at::Tensor last = linear("attn.out", out, a_.out_bias);
    return input + (f_.adapter == nullptr ? last : last + adapted(out, {"o_proj"}));
  }

  std::vector<std::pair<std::string, at::Tensor>> leaves;

 private:
  at::Tensor leaf(const std::string& name) {
    const at::Tensor value = f_.weight(name).to(at::kDouble);
    if (!f_.place(name).frozen) leaves.emplace_back(name, value.requires_grad_());
    return value;
  }
  at::Tensor linear(const std::string& name, const at::Tensor& x, bool bias) {
    const at::Tensor y = x.mm(leaf(name).t());
    return bias ? y + leaf(name + "_bias").view(-1) : y;
  }
  at::Tensor adapted(const at::Tensor& x, const std::vector<std::string>& modules) {
    std::vector<at::Tensor> parts;
    for (const std::string& module : modules) {
      const at::Tensor reduced = x.mm(leaf(module + ".lora_A").t());
      parts.push_back(reduced.mm(leaf(module + ".lora_B").t()) * f_.adapter->scale());
    }
    return at::cat(parts, 1);
  }
  static at::Tensor normed(const at::Tensor& x, double eps) {
    return x * (x.square().mean(-1, true) + eps).rsqrt();
  }
  at::Tensor head_normed(const at::Tensor& x, const std::string& name) {  // [T, heads, d]
    const at::Tensor about = a_.head_norm->centred() ? x - x.mean(-1, true) : x;
    const at::Tensor n = normed(a_.joint_norm ? about.reshape({kTokens, -1}) : about, a_.head_norm->eps);
    if (!a_.head_norm->has_weight()) return n.reshape(x.sizes());
    const at::Tensor all = leaf(name), w = a_.own_norms ? all.view({-1, a_.head_dim}) : all.view(-1);
    return (n * (a_.head_norm->offset() ? w + 1 : w)).reshape(x.sizes());
  }
  at::Tensor rotated(const at::Tensor& x) const {
    if (!a_.rotates()) return x;
    const RopeSpec& rope = f_.spec.ropes[static_cast<size_t>(a_.rope)];
    const std::vector<float> frequencies = rope_frequencies(rope);
    const int64_t half = std::ssize(frequencies);
    // Angles are rounded as the table's are.
    const at::Tensor angle =
        at::outer(position_.to(at::kFloat), at::tensor(frequencies)).to(at::kDouble).view({kTokens, 1, half});
    const at::Tensor cos = angle.cos() * rope.attention_factor, sin = angle.sin() * rope.attention_factor;
    const auto turn = [&](const at::Tensor& a, const at::Tensor& b) {
      return std::pair(a * cos - b * sin, b * cos + a * sin);
    };
    const at::Tensor head = x.narrow(2, 0, 2 * half), rest = x.narrow(2, 2 * half, a_.head_dim - 2 * half);
    if (rope.neighbours) {
      const at::Tensor pairs = head.reshape({kTokens, -1, half, 2});
      const auto [a, b] = turn(pairs.select(3, 0), pairs.select(3, 1));
      return at::cat({at::stack({a, b}, 3).reshape(head.sizes()), rest}, 2);
    }
    const auto [a, b] = turn(head.narrow(2, 0, half), head.narrow(2, half, half));
    return at::cat({a, b, rest}, 2);
  }
  at::Tensor position_scale() const {
    std::vector<double> out;
    for (const int32_t position : f_.positions) {
      const auto turns = static_cast<double>(position / a_.position_period);
      out.push_back(1 + a_.position_slope * std::log(1 + turns));
    }
    return at::tensor(out);
  }
  // [T, heads, d] of q, k and v [T, heads, d].
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const {
    const auto widened = [&](const at::Tensor& x) {
      return x.transpose(0, 1).repeat_interleave(a_.heads / a_.kv_heads, 0);
    };
    const double scale =
        a_.softmax_scale > 0 ? a_.softmax_scale : 1 / std::sqrt(static_cast<double>(a_.head_dim));
    at::Tensor scores = q.transpose(0, 1).matmul(widened(k).transpose(1, 2)) * scale;
    if (a_.softcap > 0) scores = (scores / a_.softcap).tanh() * a_.softcap;
    return scores.masked_fill(hidden(), -INFINITY).softmax(-1).matmul(widened(v)).transpose(0, 1);
  }
  // [T, T]: what a token does not see.
  at::Tensor hidden() const {
    std::vector<int64_t> document;
    for (size_t d = 0; d + 1 < f_.starts.size(); ++d)
      document.insert(document.end(), static_cast<size_t>(f_.starts[d + 1] - f_.starts[d]),
                      static_cast<int64_t>(d));
    const at::Tensor number = at::tensor(document), token = at::arange(kTokens);
    const at::Tensor before = token.unsqueeze(1) - token.unsqueeze(0);
    const at::Tensor other = number.unsqueeze(1).ne(number.unsqueeze(0)).logical_or(before.lt(0));
    return a_.window > 0 ? other.logical_or(before.ge(a_.window)) : other;
  }

  const Fixture& f_;
  const AttentionSpec& a_;
  const at::Tensor position_;

 public:
  const at::Tensor input;
};

void expect_near(const at::Tensor& got, const at::Tensor& want, const std::string& what) {
  const at::Tensor exact = want.detach().to(at::kDouble);
  EXPECT_LE(got.to(at::kDouble).sub(exact).norm().item<double>() / exact.norm().item<double>(), 1e-5) << what;
}

void expect_as_torch(const Form& form, const AdapterSpec* adapter = nullptr) {
  SCOPED_TRACE(form.name);
  Fixture f(form, adapter);
  at::Tensor dx, again;
  const at::Tensor out = f.run(dx, false).narrow(0, 0, kTokens), gradients = f.gradients.clone();
  f.run(again, true);
  EXPECT_TRUE(at::equal(again, dx) && at::equal(f.gradients, gradients)) << "recomputed";

  const c10::InferenceMode with_autograd(false);
  Reference reference(f);
  const at::Tensor want = reference.run();
  want.mul(f.dy.narrow(0, 0, kTokens).to(at::kDouble)).sum().backward();
  expect_near(out, want, "output");
  expect_near(dx.narrow(0, 0, kTokens), reference.input.grad(), "dx");
  for (const auto& [name, leaf] : reference.leaves) {
    const at::Tensor got = f.gradient(name), exact = leaf.grad();
    const Parameter& parameter = f.place(name).parameter;
    // A bias of k moves all scores of a row alike where nothing rotates it: its gradient may be 0.
    if (parameter.kind == ParameterKind::kBias) expect_near(got, exact, name);
    // Each projection by itself: the gradients of q's and k's are the smaller ones.
    if (parameter.kind != ParameterKind::kBias)
      for (const ParameterPart& part : parameter.parts)
        expect_near(got.narrow(0, part.first, part.rows), exact.narrow(0, part.first, part.rows), part.name);
  }
}

TEST(AttentionMixer, HasTheFormOfEveryFamily) {
  for (const Form& one : families()) expect_as_torch(one);
}

TEST(AttentionMixer, HasEveryCombinationOfForms) {
  for (const Form& one : combinations()) expect_as_torch(one);
}

AdapterSpec lora() {
  return {.r = 4, .alpha = 6, .targets = {"q_proj", "k_proj", "v_proj", "o_proj"}};
}

TEST(AttentionMixer, AdaptsProjectionsWhetherOrNotValuesAreKeys) {
  const AdapterSpec adapter = lora();
  for (const Form& one : families()) expect_as_torch(one, &adapter);
  for (const Form& one : combinations())
    if (one.spec.layer(0).attention().values_are_keys) expect_as_torch(one, &adapter);
}

// Several tokens of a prompt, then one at a time, and several again, as turns of a chat have it.
void expect_continues(const Form& form, const AdapterSpec* adapter = nullptr) {
  SCOPED_TRACE(form.name);
  Fixture f(form, adapter);
  const at::Tensor whole = f.goes_on(0, kTokens, nullptr);
  KeyValueCache cache(f.spec, kTokens, DType::kF32, DeviceType::kCpu);
  for (const int64_t count : {6, 1, 1, 5, 1, 10}) {
    const int64_t first = cache.tokens();
    const at::Tensor out = f.goes_on(first, count, &cache);
    expect_near(out, whole.narrow(0, first, count), "from token " + std::to_string(first));
    cache.set_tokens(first + count);
  }
  EXPECT_EQ(cache.tokens(), kTokens);
}

TEST(AttentionMixer, ContinuesATextFromFinishedKeysAndValues) {
  for (const Form& one : families()) expect_continues(one);
  for (const Form& one : combinations()) expect_continues(one);
  const AdapterSpec adapter = lora();
  expect_continues({"Gemma 4, adapted", gemma4(), 1}, &adapter);
}

}  // namespace
}  // namespace lm
