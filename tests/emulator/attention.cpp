// ATen's attention on GPUs, flash and memory-efficient, by plain loops in fp32; with the memory that the real
// ones take from LibTorch's allocator, so that what a plan sets aside for it is measured here.
#include <ATen/cuda/CUDAContextLight.h>
#include <torch/library.h>

#include <cmath>

#include "aten.h"

namespace {

using emulator::add_access;
using emulator::current;
using emulator::seen;

// q, k, v, out [tokens, heads, dim] with any strides, fp32 inside

struct View {
  at::Tensor t;  // CPU alias, fp32 copy
  explicit View(const at::Tensor& x) : t(x.to(at::kFloat).contiguous()) {}
  float* row(int64_t token, int64_t head) const {
    return t.data_ptr<float>() + (token * t.size(1) + head) * t.size(2);
  }
};

struct Rule {
  double scale = 1;
  bool causal = true;
  int64_t window = 0;  // visible keys, the query included; 0: all
  int64_t first(int64_t i) const { return window > 0 ? std::max<int64_t>(0, i - window + 1) : 0; }
  int64_t last(int64_t i, int64_t length) const { return causal ? i + 1 : length; }
};

// One query row: probabilities of keys [first, last) of its document.
float probabilities(const Rule& rule, const float* q, const View& k, int64_t begin, int64_t first,
                    int64_t last, int64_t kv, int64_t dim, std::vector<float>& p) {
  p.assign(static_cast<size_t>(last - first), 0);
  float most = -INFINITY, sum = 0;
  for (int64_t j = first; j < last; ++j) {
    const float* key = k.row(begin + j, kv);
    float dot = 0;
    for (int64_t d = 0; d < dim; ++d) dot += q[d] * key[d];
    most = std::max(most, p[static_cast<size_t>(j - first)] = dot * static_cast<float>(rule.scale));
  }
  for (float& x : p) sum += x = std::exp(x - most);
  for (float& x : p) x /= sum;
  return most + std::log(sum);
}

// The documents of the keys begin where those of the queries do, or earlier: then the last query sees all
// keys.
int64_t length_of(const at::Tensor& starts, int64_t document) {
  const int32_t* s = starts.data_ptr<int32_t>();
  return s[document + 1] - s[document];
}

template <class Body>  // body(document, begin, length)
void documents(const at::Tensor& starts, const Body& body) {
  const int32_t* s = starts.data_ptr<int32_t>();
  for (int64_t d = 0; d + 1 < starts.numel(); ++d) body(d, s[d], s[d + 1] - s[d]);
}

void forward(
    const Rule& rule, const at::Tensor& starts, const at::Tensor& k_starts, const at::Tensor& q_,
    const at::Tensor& k_, const at::Tensor& v_, const at::Tensor& out,
    const std::function<void(int64_t document, int64_t head, int64_t i, int64_t token, float lse)>& lse) {
  const View q(q_), k(k_), v(v_), o(at::empty(out.sizes(), at::kFloat));
  const int64_t heads = q.t.size(1), group = heads / k.t.size(1), dim = q.t.size(2);
  std::vector<float> p;
  documents(starts, [&](int64_t document, int64_t begin, int64_t length) {
    const int64_t k_begin = k_starts.data_ptr<int32_t>()[document], k_length = length_of(k_starts, document),
                  past = k_length - length;
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < length; ++i) {
        const int64_t first = rule.first(past + i), last = rule.last(past + i, k_length);
        const float l = probabilities(rule, q.row(begin + i, h), k, k_begin, first, last, h / group, dim, p);
        lse(document, h, i, begin + i, l);
        float* to = o.row(begin + i, h);
        std::fill(to, to + dim, 0.f);
        for (int64_t j = first; j < last; ++j) {
          const float* value = v.row(k_begin + j, h / group);
          for (int64_t d = 0; d < dim; ++d) to[d] += p[static_cast<size_t>(j - first)] * value[d];
        }
      }
    }
  });
  out.copy_(o.t);
}

// `lse`: what forward gave, which the real kernels take the probabilities from.
void backward(const Rule& rule, const at::Tensor& starts, const at::Tensor& dout_, const at::Tensor& q_,
              const at::Tensor& k_, const at::Tensor& v_, const at::Tensor& out_, const at::Tensor& dq_,
              const at::Tensor& dk_, const at::Tensor& dv_,
              const std::function<float(int64_t document, int64_t head, int64_t i, int64_t token)>& lse) {
  const View q(q_), k(k_), v(v_), o(out_), g(dout_), dq(at::zeros(q_.sizes(), at::kFloat)),
      dk(at::zeros(k_.sizes(), at::kFloat)), dv(at::zeros(v_.sizes(), at::kFloat));
  const int64_t heads = q.t.size(1), group = heads / k.t.size(1), dim = q.t.size(2);
  std::vector<float> p;
  documents(starts, [&](int64_t document, int64_t begin, int64_t length) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < length; ++i) {
        const int64_t first = rule.first(i), last = rule.last(i, length);
        const float* query = q.row(begin + i, h);
        const float true_lse = probabilities(rule, query, k, begin, first, last, h / group, dim, p);
        const float factor = std::exp(true_lse - lse(document, h, i, begin + i));
        for (float& x : p) x *= factor;
        const float *gradient = g.row(begin + i, h), *result = o.row(begin + i, h);
        float delta = 0;
        for (int64_t d = 0; d < dim; ++d) delta += gradient[d] * result[d];
        for (int64_t j = first; j < last; ++j) {
          const float *key = k.row(begin + j, h / group), *value = v.row(begin + j, h / group);
          float dot = 0;
          for (int64_t d = 0; d < dim; ++d) dot += gradient[d] * value[d];
          const float pij = p[static_cast<size_t>(j - first)],
                      ds = pij * (dot - delta) * static_cast<float>(rule.scale);
          float *gq = dq.row(begin + i, h), *gk = dk.row(begin + j, h / group),
                *gv = dv.row(begin + j, h / group);
          for (int64_t d = 0; d < dim; ++d)
            gq[d] += ds * key[d], gk[d] += ds * query[d], gv[d] += pij * gradient[d];
        }
      }
    }
  });
  dq_.copy_(dq.t), dk_.copy_(dk.t), dv_.copy_(dv.t);
}

// What the real kernels check, and what they would do wrong without a word.
void check_starts(const at::Tensor& starts) {
  TORCH_CHECK(
      starts.is_cuda() && starts.scalar_type() == at::kInt && starts.is_contiguous() && starts.dim() == 1,
      "cu_seqlens: contiguous int32 on the GPU");
}
void check_heads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t dim) {
  for (const at::Tensor* t : {&q, &k, &v}) {
    TORCH_CHECK(t->is_cuda() && t->dim() == dim && t->stride(dim - 1) == 1,
                "q, k, v: [..., heads, dim], the last contiguous");
    TORCH_CHECK(t->scalar_type() == q.scalar_type(), "q, k, v: one type");
    TORCH_CHECK(reinterpret_cast<uintptr_t>(t->data_ptr()) % 16 == 0, "q, k, v: aligned to 16 bytes");
    for (int64_t d = 0; d + 1 < dim; ++d)
      TORCH_CHECK(t->size(d) == 1 || t->stride(d) * static_cast<int64_t>(t->element_size()) % 16 == 0,
                  "q, k, v: strides of 16 bytes");
  }
  TORCH_CHECK(q.size(dim - 2) % k.size(dim - 2) == 0, "heads");
}
Rule flash_rule(const at::Tensor& q, bool causal, std::optional<double> scale,
                std::optional<c10::SymInt> left) {
  const int64_t l = left ? left->expect_int() : -1;
  return {scale.value_or(1 / std::sqrt(static_cast<double>(q.size(-1)))), true, causal || l < 0 ? 0 : l + 1};
}

using Tensors5 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
Tensors5 flash_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const std::optional<at::Tensor>& starts, const std::optional<at::Tensor>& k_starts,
                       c10::SymInt, c10::SymInt, double dropout, bool causal, bool,
                       std::optional<double> scale, std::optional<c10::SymInt> left,
                       std::optional<c10::SymInt> right, const std::optional<at::Tensor>&,
                       const std::optional<at::Tensor>&) {
  TORCH_CHECK(q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf,
              "FlashAttention only supports fp16 and bf16");
  check_heads(q, k, v, 3);
  TORCH_CHECK(starts && k_starts && dropout == 0, "emulator: flash over packed documents only");
  check_starts(*starts);
  check_starts(*k_starts);
  TORCH_CHECK(q.size(2) % 8 == 0 && q.size(2) <= 256, "head_size must be a multiple of 8, at most 256");
  TORCH_CHECK(causal || (left && right && right->expect_int() == 0), "emulator: flash, causal or a window");
  const at::Tensor out = at::empty(q.sizes(), q.options()),
                   lse = at::empty({q.size(1), q.size(0)}, q.options().dtype(at::kFloat));
  std::vector<emulator::Access> accesses;
  for (const at::Tensor& t : {q, k, v, *starts, *k_starts}) add_access(accesses, t, false);
  for (const at::Tensor& t : {out, lse}) add_access(accesses, t, true);
  emulator::enqueue(
      current(), emulator::Kind::kAten, "flash forward",
      [rule = flash_rule(q, causal, scale, left), s = seen(*starts), ks = seen(*k_starts), q = seen(q),
       k = seen(k), v = seen(v), out = seen(out), lse = seen(lse)] {
        const c10::InferenceMode guard;
        float* l = lse.data_ptr<float>();
        forward(rule, s, ks, q, k, v, out,
                [&](int64_t, int64_t h, int64_t, int64_t token, float x) { l[h * lse.size(1) + token] = x; });
      },
      std::move(accesses));
  return {out, lse, at::empty({2}, q.options().dtype(at::kUInt64)),
          at::empty({}, q.options().dtype(at::kUInt64)), at::empty({0}, q.options())};
}

// What the real backward pass (mha_varlen_bwd) takes until it returns: sums of dO * O, dQ in fp32 per split,
// whose number fills the GPU where the result must not vary, and dK and dV per query head.
std::vector<at::Tensor> workspace(const at::Tensor& q, const at::Tensor& k, int64_t documents) {
  const int64_t heads = q.size(1), width = q.size(2), rows = q.size(0) + 128 * documents;
  const int64_t multiple = width <= 128 ? 32 : 64, wide = (width + multiple - 1) / multiple * multiple;
  const int64_t processors = at::cuda::getCurrentDeviceProperties()->multiProcessorCount,
                each = documents * heads;
  const int64_t splits = at::globalContext().deterministicAlgorithms() ? (processors + each - 1) / each : 1;
  const at::TensorOptions fp32 = q.options().dtype(at::kFloat);
  std::vector<at::Tensor> out = {at::empty({heads, rows}, fp32),
                                 at::empty({splits, rows, heads, wide}, fp32)};
  if (k.size(1) != heads) {
    for (int i = 0; i < 2; ++i) out.push_back(at::empty({k.size(0), heads, width}, q.options()));
  }
  return out;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& lse, const at::Tensor& starts, const at::Tensor& k_starts,
    c10::SymInt, c10::SymInt, double, bool causal, const at::Tensor&, const at::Tensor&,
    std::optional<double> scale, std::optional<c10::SymInt> left, std::optional<c10::SymInt>) {
  check_heads(q, k, v, 3);
  check_heads(dout, out, out, 3);
  check_starts(starts);
  const cudaDeviceProp* const card = at::cuda::getCurrentDeviceProperties();
  const bool small = card->major == 12 || (card->major == 8 && card->minor > 0);
  TORCH_CHECK(!small || q.size(2) <= 192 || q.size(2) > 224,
              "FlashAttention backward for head dim > 192 and <= 224 wants more shared memory");
  TORCH_CHECK(starts.is_same(k_starts) || starts.data_ptr() == k_starts.data_ptr());
  TORCH_CHECK(lse.scalar_type() == at::kFloat && lse.dim() == 2 && lse.size(0) == q.size(1) &&
                  lse.size(1) == q.size(0),
              "softmax_lse: [heads, tokens] fp32");
  const at::Tensor dq = at::empty(q.sizes(), q.options()), dk = at::empty(k.sizes(), k.options()),
                   dv = at::empty(v.sizes(), v.options());
  const std::vector<at::Tensor> unused = workspace(q, k, starts.numel() - 1);
  std::vector<emulator::Access> accesses;
  for (const at::Tensor& t : {dout, q, k, v, out, lse, starts}) add_access(accesses, t, false);
  for (const at::Tensor& t : {dq, dk, dv}) add_access(accesses, t, true);
  emulator::enqueue(
      current(), emulator::Kind::kAten, "flash backward",
      [rule = flash_rule(q, causal, scale, left), s = seen(starts), g = seen(dout), q = seen(q), k = seen(k),
       v = seen(v), o = seen(out), l = seen(lse), dq = seen(dq), dk = seen(dk), dv = seen(dv)] {
        const c10::InferenceMode guard;
        backward(rule, s, g, q, k, v, o, dq, dk, dv, [&](int64_t, int64_t h, int64_t, int64_t token) {
          return l.data_ptr<float>()[h * l.size(1) + token];
        });
      },
      std::move(accesses));
  return {dq, dk, dv};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt> efficient_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& starts, const std::optional<at::Tensor>& k_starts,
    std::optional<c10::SymInt> longest, std::optional<c10::SymInt> longest_k, double dropout, int64_t mask,
    bool want_lse, std::optional<double> scale, const std::optional<at::Tensor>& seqlen_k,
    std::optional<int64_t> window) {
  check_heads(q, k, v, 4);
  TORCH_CHECK(!bias && starts && k_starts && !seqlen_k && dropout == 0 && q.size(0) == 1,
              "emulator: efficient attention over packed documents");
  // From the top left queries of a document that goes on would see too little.
  TORCH_CHECK(mask == (starts->is_same(*k_starts) ? 1 : 2), "emulator: the mask of documents ", mask);
  check_starts(*k_starts);
  TORCH_CHECK(q.size(2) == k.size(2), "efficient attention: as many key heads as query heads");
  check_starts(*starts);
  const int64_t rows = want_lse ? (longest->expect_int() + 31) / 32 * 32 : 0;
  const at::Tensor out = at::empty(q.sizes(), q.options()),
                   lse = at::empty({starts->numel() - 1, q.size(2), rows}, q.options().dtype(at::kFloat));
  std::vector<emulator::Access> accesses;
  for (const at::Tensor& t : {q, k, v, *starts, *k_starts}) add_access(accesses, t, false);
  for (const at::Tensor& t : {out, lse}) add_access(accesses, t, true);
  const Rule rule{scale.value_or(1 / std::sqrt(static_cast<double>(q.size(-1)))), true, window.value_or(0)};
  emulator::enqueue(
      current(), emulator::Kind::kAten, "efficient forward",
      [rule, rows, s = seen(*starts), ks = seen(*k_starts), q = seen(q)[0], k = seen(k)[0], v = seen(v)[0],
       out = seen(out)[0], lse = seen(lse)] {
        const c10::InferenceMode guard;
        forward(rule, s, ks, q, k, v, out, [&](int64_t document, int64_t h, int64_t i, int64_t, float x) {
          if (rows > 0) lse.data_ptr<float>()[(document * lse.size(1) + h) * rows + i] = x;
        });
      },
      std::move(accesses));
  const at::Tensor seed = at::empty({}, at::kLong);
  return {out, lse, seed, seed.clone(), *longest, *longest_k};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_backward(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& bias, const at::Tensor& out, const std::optional<at::Tensor>& starts,
    const std::optional<at::Tensor>&, c10::SymInt longest, c10::SymInt, const at::Tensor& lse, double,
    const at::Tensor&, const at::Tensor&, int64_t mask, bool, std::optional<double> scale,
    std::optional<int64_t>, std::optional<int64_t> window, bool) {
  check_heads(q, k, v, 4);
  check_heads(dout, out, out, 4);
  TORCH_CHECK(!bias && starts && mask == 1 && lse.size(2) >= longest.expect_int(),
              "emulator: efficient attention's logsumexp");
  const at::Tensor dq = at::empty(q.sizes(), q.options()), dk = at::empty(k.sizes(), k.options()),
                   dv = at::empty(v.sizes(), v.options());
  const at::Tensor delta =
      at::empty({q.size(1), q.size(0), q.size(2)}, q.options());  // of dO * O, before its sum
  std::vector<emulator::Access> accesses;
  for (const at::Tensor& t : {dout, q, k, v, out, lse, *starts}) add_access(accesses, t, false);
  for (const at::Tensor& t : {dq, dk, dv}) add_access(accesses, t, true);
  const Rule rule{scale.value_or(1 / std::sqrt(static_cast<double>(q.size(-1)))), true, window.value_or(0)};
  emulator::enqueue(
      current(), emulator::Kind::kAten, "efficient backward",
      [rule, s = seen(*starts), g = seen(dout)[0], q = seen(q)[0], k = seen(k)[0], v = seen(v)[0],
       o = seen(out)[0], l = seen(lse), dq = seen(dq)[0], dk = seen(dk)[0], dv = seen(dv)[0]] {
        const c10::InferenceMode guard;
        backward(rule, s, g, q, k, v, o, dq, dk, dv, [&](int64_t document, int64_t h, int64_t i, int64_t) {
          return l.data_ptr<float>()[(document * l.size(1) + h) * l.size(2) + i];
        });
      },
      std::move(accesses));
  return {dq, dk, dv, at::Tensor()};
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_flash_attention_forward", flash_forward);
  m.impl("_flash_attention_backward", flash_backward);
  m.impl("_efficient_attention_forward", efficient_forward);
  m.impl("_efficient_attention_backward", efficient_backward);
}

}  // namespace
