// What the tests of attention share: a problem with random inputs, the calls, and the plain fp64 reference
// written from the definition (a whole row of scores at a time).
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/attention_path.h"

namespace lm::attention {

inline constexpr const char* kPathNames[] = {"baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16"};

struct Shape {
  int64_t heads, kv_heads, head_dim, window;
  std::vector<int32_t> lengths;
  DType dtype = DType::kF32;
  int64_t gap = 6;  // unused elements after q | k | v in a token's row
  float softcap = 0;

  int64_t tokens() const {
    int64_t sum = 0;
    for (const int32_t n : lengths) sum += n;
    return sum;
  }
  int64_t q_elements() const { return heads * head_dim; }
  int64_t stride() const { return (heads + 2 * kv_heads) * head_dim + gap; }
  std::string text() const {
    return std::string(dtype_name(dtype)) + " heads " + std::to_string(heads) + "/" +
           std::to_string(kv_heads) + " head_dim " + std::to_string(head_dim) + " window " +
           std::to_string(window) + " softcap " + std::to_string(softcap) + " tokens " +
           std::to_string(tokens());
  }
};

inline float round_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

// An array of fp32 or bf16 elements, read and written as float, 64-byte aligned.
class Array {
 public:
  Array(DType dtype, int64_t size, float fill = 0)
      : dtype_(dtype), size_(size), bytes_(size * dtype_size(dtype) + 64) {
    for (int64_t i = 0; i < size; ++i) set(i, fill);
  }
  void* data() { return bytes_.data() + (64 - reinterpret_cast<uintptr_t>(bytes_.data()) % 64) % 64; }
  void* at(int64_t i) { return static_cast<std::byte*>(data()) + i * dtype_size(dtype_); }
  int64_t size() const { return size_; }
  void set(int64_t i, float x) {
    if (dtype_ == DType::kF32) {
      std::memcpy(at(i), &x, 4);
    } else {
      x = round_bf16(x);
      std::memcpy(at(i), reinterpret_cast<const char*>(&x) + 2, 2);
    }
  }
  float get(int64_t i) {
    float x = 0;
    if (dtype_ == DType::kF32)
      std::memcpy(&x, at(i), 4);
    else
      std::memcpy(reinterpret_cast<char*>(&x) + 2, at(i), 2);
    return x;
  }
  // Bytes, for comparisons of bits.
  std::string bits(int64_t begin, int64_t count) {
    return {static_cast<const char*>(at(begin)), static_cast<size_t>(count * dtype_size(dtype_))};
  }
  std::string bits() { return bits(0, size_); }

 private:
  DType dtype_;
  int64_t size_;
  std::vector<std::byte> bytes_;
};

// Scratch of exactly the promised size between guards.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : bytes_(bytes), memory_(bytes + 64 + 128, std::byte{0xA5}) {}
  ~Scratch() {
    for (int64_t i = 0; i < 64; ++i)
      EXPECT_EQ(data()[bytes_ + i], std::byte{0xA5}) << "scratch overrun at " << i;
  }
  std::byte* data() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (64 - address % 64) % 64;
  }

 private:
  int64_t bytes_;
  std::vector<std::byte> memory_;
};

inline constexpr float kUntouched = 77;

// One problem with random inputs, its results, and the calls.
struct Problem {
  Shape shape;
  float scale;
  std::vector<int32_t> start{0};
  Array qkv, dout, out, dqkv, lse;

  explicit Problem(const Shape& s, unsigned seed = 1)
      : shape(s),
        scale(1 / std::sqrt(static_cast<float>(s.head_dim))),
        qkv(s.dtype, s.tokens() * s.stride()),
        dout(s.dtype, s.tokens() * s.q_elements()),
        out(s.dtype, s.tokens() * s.q_elements(), kUntouched),
        dqkv(s.dtype, s.tokens() * s.stride(), kUntouched),
        lse(DType::kF32, s.tokens() * s.heads, kUntouched) {
    for (const int32_t n : s.lengths) start.push_back(start.back() + n);
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, 1.5f);
    for (int64_t i = 0; i < qkv.size(); ++i) qkv.set(i, normal(random));
    for (int64_t i = 0; i < dout.size(); ++i) dout.set(i, normal(random));
  }
  int64_t k_offset() const { return shape.q_elements(); }
  int64_t v_offset() const { return shape.q_elements() + shape.kv_heads * shape.head_dim; }

  // Calls launch(arguments) for the forward pass; with `past` that of the one document's tokens behind so
  // many, whose keys and values are there already.
  template <class Launch>
  void forward_by(const Launch& launch, int64_t past = 0) {
    const int64_t tokens = shape.tokens() - past;
    const std::vector<int32_t> rest{0, static_cast<int32_t>(tokens)};
    std::vector<float> own_lse(static_cast<size_t>(tokens * shape.heads));
    AttentionForward args{.q = qkv.at(past * shape.stride()),
                          .k = qkv.at(k_offset()),
                          .v = qkv.at(v_offset()),
                          .out = out.at(past * shape.q_elements()),
                          .lse = past > 0 ? own_lse.data() : static_cast<float*>(lse.data()),
                          .documents = {.start = past > 0 ? rest.data() : start.data(),
                                        .count = static_cast<int64_t>(shape.lengths.size()),
                                        .past = past},
                          .tokens = tokens,
                          .heads = shape.heads,
                          .kv_heads = shape.kv_heads,
                          .head_dim = shape.head_dim,
                          .q_stride = shape.stride(),
                          .kv_stride = shape.stride(),
                          .window = shape.window,
                          .scale = scale,
                          .softcap = shape.softcap,
                          .dtype = shape.dtype};
    launch(args);
    for (int64_t h = 0; past > 0 && h < shape.heads; ++h) {
      for (int64_t t = 0; t < tokens; ++t)
        lse.set(h * shape.tokens() + past + t, own_lse[static_cast<size_t>(h * tokens + t)]);
    }
  }
  template <class Launch>
  void backward_by(const Launch& launch) {
    AttentionBackward args{
        .dout = dout.data(),
        .q = qkv.data(),
        .k = qkv.at(k_offset()),
        .v = qkv.at(v_offset()),
        .out = out.data(),
        .lse = static_cast<float*>(lse.data()),
        .dq = dqkv.data(),
        .dk = dqkv.at(k_offset()),
        .dv = dqkv.at(v_offset()),
        .documents = {.start = start.data(), .count = static_cast<int64_t>(shape.lengths.size())},
        .tokens = shape.tokens(),
        .heads = shape.heads,
        .kv_heads = shape.kv_heads,
        .head_dim = shape.head_dim,
        .q_stride = shape.stride(),
        .kv_stride = shape.stride(),
        .dq_stride = shape.stride(),
        .dkv_stride = shape.stride(),
        .window = shape.window,
        .scale = scale,
        .softcap = shape.softcap,
        .dtype = shape.dtype};
    launch(args);
  }

  void forward(const Path& path, int threads = 1, int64_t past = 0) {
    const StreamView stream{.threads = threads};
    forward_by(
        [&](AttentionForward& args) {
          Scratch scratch(attention_forward_scratch_cpu(args, stream));
          args.scratch = scratch.data();
          attention::forward(path, args, stream);
        },
        past);
  }
  void backward(const Path& path, int threads = 1) {
    const StreamView stream{.threads = threads};
    backward_by([&](AttentionBackward& args) {
      Scratch scratch(attention_backward_scratch_cpu(args, stream));
      args.scratch = scratch.data();
      attention::backward(path, args, stream);
    });
  }
  void run(const Path& path, int threads = 1) {
    forward(path, threads);
    backward(path, threads);
  }
};

// The definition in fp64. All arrays dense: out, dq [tokens, heads, d], dk, dv [tokens, kv_heads, d].
struct Reference {
  std::vector<double> out, lse, dq, dk, dv;

  explicit Reference(Problem& p) {
    const Shape& s = p.shape;
    const int64_t d = s.head_dim, tokens = s.tokens();
    std::vector<double> qkv(p.qkv.size()), dout(p.dout.size());
    for (size_t i = 0; i < qkv.size(); ++i) qkv[i] = p.qkv.get(i);
    for (size_t i = 0; i < dout.size(); ++i) dout[i] = p.dout.get(i);
    out.assign(dout.size(), 0), dq = out, lse.assign(s.heads * tokens, 0);
    dk.assign(tokens * s.kv_heads * d, 0), dv = dk;
    for (size_t document = 0; document < s.lengths.size(); ++document) {
      for (int64_t h = 0; h < s.heads; ++h) {
        for (int64_t i = p.start[document]; i < p.start[document + 1]; ++i) {
          row(p, qkv, dout, h, i, p.start[document]);
        }
      }
    }
  }

  void row(const Problem& p, const std::vector<double>& qkv, const std::vector<double>& dout, int64_t h,
           int64_t i, int64_t first) {
    const Shape& s = p.shape;
    const int64_t d = s.head_dim, kv = h / (s.heads / s.kv_heads);
    if (s.window > 0) first = std::max(first, i - s.window + 1);
    const double* q = &qkv[i * s.stride() + h * d];
    const double* g = &dout[(i * s.heads + h) * d];
    double* o = &out[(i * s.heads + h) * d];
    std::vector<double> weight(i - first + 1), slope(weight);
    double top = -INFINITY, sum = 0;
    for (int64_t j = first; j <= i; ++j) {
      const double* k = &qkv[j * s.stride() + p.k_offset() + kv * d];
      double score = 0;
      for (int64_t x = 0; x < d; ++x) score += q[x] * k[x];
      score *= p.scale;
      if (s.softcap > 0) score = s.softcap * std::tanh(score / s.softcap);
      weight[j - first] = score;
      slope[j - first] = s.softcap > 0 ? 1 - std::pow(score / s.softcap, 2) : 1;
      top = std::max(top, score);
    }
    for (double& w : weight) sum += w = std::exp(w - top);
    lse[h * s.tokens() + i] = top + std::log(sum);
    double delta = 0;
    for (int64_t j = first; j <= i; ++j) {
      const double* v = &qkv[j * s.stride() + p.v_offset() + kv * d];
      for (int64_t x = 0; x < d; ++x) o[x] += weight[j - first] / sum * v[x];
    }
    for (int64_t x = 0; x < d; ++x) delta += g[x] * o[x];
    for (int64_t j = first; j <= i; ++j) {
      const double* k = &qkv[j * s.stride() + p.k_offset() + kv * d];
      const double* v = &qkv[j * s.stride() + p.v_offset() + kv * d];
      const double w = weight[j - first] / sum;
      double dp = 0;
      for (int64_t x = 0; x < d; ++x) dp += g[x] * v[x];
      const double ds = w * (dp - delta) * slope[j - first] * p.scale;
      for (int64_t x = 0; x < d; ++x) {
        dq[(i * s.heads + h) * d + x] += ds * k[x];
        dk[(j * s.kv_heads + kv) * d + x] += ds * q[x];
        dv[(j * s.kv_heads + kv) * d + x] += w * g[x];
      }
    }
  }
};

// Agreement of rows of `columns` elements at `stride` with a dense reference. `floor` is the norm below which
// the reference counts as zero: where a row sees one key, dS is a difference of equal numbers.
inline void expect_near(Array& values, int64_t offset, int64_t stride, int64_t columns,
                        const std::vector<double>& reference, DType dtype, const std::string& what) {
  double difference = 0, norm = 0, own = 0, dot = 0;
  const int64_t rows = static_cast<int64_t>(reference.size()) / columns;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      const double x = values.get(offset + r * stride + c), y = reference[r * columns + c];
      difference += (x - y) * (x - y), norm += y * y, own += x * x, dot += x * y;
    }
  }
  ASSERT_TRUE(std::isfinite(difference)) << what;
  const double floor = std::sqrt(static_cast<double>(reference.size())) * 0.2;
  const double bound = dtype == DType::kF32 ? 1e-5 : 1e-2;
  EXPECT_LE(std::sqrt(difference), bound * std::max(std::sqrt(norm), floor))
      << what << ", norm " << std::sqrt(norm);
  if (std::sqrt(norm) > floor) {
    EXPECT_GE(dot / std::sqrt(norm * own), 0.9995) << what;
  }
}

// All results of a problem; `name`: what has computed it.
inline void expect_reference(Problem& p, const Reference& reference, const std::string& name) {
  const Shape& shape = p.shape;
  const std::string what = name + " " + shape.text() + ": ";
  const int64_t q = shape.q_elements(), kv = shape.kv_heads * shape.head_dim;
  expect_near(p.out, 0, q, q, reference.out, shape.dtype, what + "out");
  expect_near(p.lse, 0, 1, 1, reference.lse, DType::kF32, what + "lse");
  expect_near(p.dqkv, 0, shape.stride(), q, reference.dq, shape.dtype, what + "dq");
  expect_near(p.dqkv, p.k_offset(), shape.stride(), kv, reference.dk, shape.dtype, what + "dk");
  expect_near(p.dqkv, p.v_offset(), shape.stride(), kv, reference.dv, shape.dtype, what + "dv");
  for (int64_t t = 0; t < shape.tokens(); ++t) {
    for (int64_t i = shape.stride() - shape.gap; i < shape.stride(); ++i) {
      ASSERT_EQ(p.dqkv.get(t * shape.stride() + i), kUntouched) << what << "wrote between the gradients";
    }
  }
}

// Calls body(path, reference) for those of this machine.
template <class Body>
void for_every_path(const Shape& shape, const Body& body) {
  Problem problem(shape);
  const Reference reference(problem);
  for (const char* name : kPathNames) {
    const Path* path = find_path(name, shape.dtype);
    if (path != nullptr) body(*path, reference);
  }
}

inline void expect_reference(const Shape& shape) {
  for_every_path(shape, [&](const Path& path, const Reference& reference) {
    Problem p(shape);
    p.run(path);
    expect_reference(p, reference, path.name);
  });
}

// One document whose tokens come in pieces: token by token, a few at once, and all but one. Each piece is
// computed by forward(problem, past).
template <class Forward>
void expect_going_on(const Shape& shape, const Reference& reference, const std::string& name,
                     const Forward& forward) {
  const auto last = static_cast<int32_t>(shape.tokens());
  std::vector<int32_t> one_by_one;
  for (int32_t end = 1; end <= 5; ++end) one_by_one.push_back(end);
  one_by_one.push_back(last);
  for (const std::vector<int32_t>& ends : std::vector<std::vector<int32_t>>{
           {1, last}, {64, 65, 66, 130, 131, last}, {last - 1, last}, one_by_one}) {
    Problem p(shape);
    for (int64_t past = 0; const int32_t end : ends) {
      // What comes later is not there yet.
      Shape so_far = shape;
      so_far.lengths = {end};
      Problem some(so_far);
      std::memcpy(some.qkv.data(), p.qkv.data(), some.qkv.bits().size());
      forward(some, past);
      for (int64_t i = past * shape.q_elements(); i < end * shape.q_elements(); ++i)
        p.out.set(i, some.out.get(i));
      for (int64_t h = 0; h < shape.heads; ++h) {
        for (int64_t t = past; t < end; ++t) p.lse.set(h * last + t, some.lse.get(h * end + t));
      }
      past = end;
    }
    const std::string what = name + " " + shape.text() + ": ";
    const int64_t q = shape.q_elements();
    expect_near(p.out, 0, q, q, reference.out, shape.dtype, what + "out");
    expect_near(p.lse, 0, 1, 1, reference.lse, DType::kF32, what + "lse");
  }
}

}  // namespace lm::attention
