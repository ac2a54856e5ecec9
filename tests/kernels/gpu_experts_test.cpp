// The kernels of mixtures of experts on the GPU: routing, weights and sums against the CPU's, and products of
// sorted rows, which the CPU leaves to its library, against plain loops. Experts have no rows, one, all.
#include <numeric>

#include "tests/kernels/gpu_support.h"
#include "tests/support/counts.h"

namespace lm {
namespace {

struct Case {
  int64_t tokens = 0, experts = 0, chosen = 0;
  bool renormalise = false;
  // Of sigmoid scores; 0: a softmax.
  int64_t groups = 0, kept = 1;
  float scale = 1;
  int64_t slots() const { return tokens * chosen; }
};
const Case kCases[] = {{1, 4, 2, true},     {70, 8, 3, false}, {33, 60, 4, true},
                       {301, 128, 8, true}, {9, 5, 5, false},  {3, 1024, 8, true},
                       {3, 33, 2, false},   {17, 1, 1, true},  {300, 6, 2, false}};
const Case kSigmoidCases[] = {
    {1, 4, 2, true, 1},       {70, 9, 3, false, 1, 1, 2.5F},   {33, 60, 4, true, 6, 2, 1.5F},
    {70, 8, 3, true, 4, 2},   {301, 256, 8, true, 8, 4, 2.5F}, {9, 5, 5, true, 1},
    {17, 80, 8, true, 40, 5},  // more groups than lanes
    {5, 6, 4, false, 3, 1}};   // more are chosen than a group has
constexpr int64_t kSurplus = 3;

// Arrays of a routing behind `first` others.
void add_routing(Arrays& arrays, const Case& c) {
  for (int i = 0; i < 5; ++i) arrays.push_back(zeros(DType::kF32, c.slots()));
  arrays.push_back(zeros(DType::kF32, c.experts + 1));
}
Routing routing_at(const Pointers& p, size_t first) {
  const auto at = [&](size_t i) { return static_cast<int32_t*>(p[first + i]); };
  return {at(0), f32(p[first + 1]), at(2), at(3), at(4), at(5)};
}

// `correction`: of each expert.
RouteScores scores_of(const Case& c, const void* correction) {
  if (c.groups == 0) return {};
  return {.sigmoid = true,
          .correction = static_cast<const float*>(correction),
          .groups = c.groups,
          .kept_groups = c.kept,
          .scale = c.scale};
}
// Corrections that change choices, some of them below 0.
Array corrections(const Case& c) {
  return noise(DType::kF32, c.experts, 12, 0.3);
}

// What of a routing is looked at. Behind it is the correction, of sigmoid scores.
enum class Of { kNumbers, kWeights, kRoundedWeights };
Body route(const Case& c, DType t, Of what) {
  return [=](const Kernels& k, StreamView s, const Pointers& p) {
    const Routing routing = routing_at(p, 2);
    k.route_tokens({.logits = view_of(p[0], t, c.tokens + kSurplus, c.experts),
                    .probability = f32(p[1]),
                    .routing = routing,
                    .tokens = c.tokens,
                    .chosen = c.chosen,
                    .renormalise = c.renormalise,
                    .round = what == Of::kRoundedWeights,
                    .scores = scores_of(c, c.groups > 0 ? p[8] : nullptr)},
                   s);
    if (what != Of::kNumbers) return;
    zero_bytes(p[1], c.tokens * c.experts * 4, s);
    zero_bytes(routing.weight, c.slots() * 4, s);
  };
}

TEST_F(GpuKernels, ExpertsAreChosenAndTheirRowsListed) {
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Case& c : kCases) {
      for (const bool special : {false, true}) {
        const auto turn = static_cast<int64_t>(t) + (&c - kCases);
        if (!test::full_counts() && special != (turn % 2 == 0)) continue;
        SCOPED_TRACE(name("route", t, {c.tokens, c.experts, c.chosen, special}));
        // Of few numbers many are equal.
        Array logits = noise(t, (c.tokens + kSurplus) * c.experts, 3, 2);
        if (special) logits = with(logits, {1, 1, kNotANumber, 0.5, -kInf, 1, 2, kInf, 2, 2}, 3);
        Arrays arrays = {logits, zeros(DType::kF32, c.tokens * c.experts)};
        add_routing(arrays, c);
        check(arrays, route(c, t, Of::kNumbers), Want::kBits);
        check(arrays, route(c, t, Of::kWeights), Want::kNear);
      }
    }
  }
}

TEST_F(GpuKernels, ExpertsAreChosenByCorrectedScores) {
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Case& c : kSigmoidCases) {
      SCOPED_TRACE(name("sigmoid route", t, {c.tokens, c.experts, c.chosen, c.groups}));
      Arrays arrays = {noise(t, (c.tokens + kSurplus) * c.experts, 3, 2),
                       zeros(DType::kF32, c.tokens * c.experts)};
      add_routing(arrays, c);
      arrays.push_back(corrections(c));
      check(arrays, route(c, t, Of::kNumbers), Want::kBits);
      check(arrays, route(c, t, Of::kWeights), Want::kNear);
    }
  }
}

// A score of an infinite logit is 0 or 1, and of no number none. Nothing is chosen twice.
TEST_F(GpuKernels, ExpertsAreChosenByScoresThatAreNoNumbers) {
  const Case c{24, 12, 5, true, 3, 2};
  Arrays arrays = {with(noise(DType::kF32, (c.tokens + kSurplus) * c.experts, 3, 2),
                        {kInf, 1, kNotANumber, 0.5, -kInf, 2, -1e4}, 3),
                   zeros(DType::kF32, c.tokens * c.experts)};
  add_routing(arrays, c);
  arrays.push_back(corrections(c));
  check(arrays, route(c, DType::kF32, Of::kNumbers), Want::kBits);
  arrays[0] = with(arrays[0], {kNotANumber}, 1);
  check(arrays, route(c, DType::kF32, Of::kNumbers), Want::kBits);
  // All of them 0: no weight.
  arrays[0] = with(arrays[0], {-1e4}, 1);
  arrays[8] = zeros(DType::kF32, c.experts);
  check(arrays, route(c, DType::kF32, Of::kWeights), Want::kNear);
}

TEST_F(GpuKernels, WeightsOfExpertsAreRoundedToTheModelsType) {
  const Case c = kCases[1];
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
    SCOPED_TRACE(dtype_name(t));
    Arrays arrays = {noise(t, (c.tokens + kSurplus) * c.experts, 3, 2),
                     zeros(DType::kF32, c.tokens * c.experts)};
    add_routing(arrays, c);
    const Values exact = on_device(arrays, route(c, t, Of::kWeights), 0)[3];
    const Values rounded = on_device(arrays, route(c, t, Of::kRoundedWeights), 0)[3];
    for (int64_t i = 0; i < c.slots(); ++i) EXPECT_EQ(rounded[i], nearest_of(t, exact[i])) << i;
  }
}

// What the CPU makes of logits, as arrays.
Arrays routed(const Case& c, uint32_t seed) {
  Arrays arrays = {noise(DType::kF32, (c.tokens + kSurplus) * c.experts, seed, 2),
                   zeros(DType::kF32, c.tokens * c.experts)};
  add_routing(arrays, c);
  arrays.push_back(corrections(c));
  Pointers pointers;
  for (Array& a : arrays) pointers.push_back(a.values.data());
  route(c, DType::kF32, Of::kWeights)(kernels(DeviceType::kCpu), {DeviceType::kCpu, nullptr, 1}, pointers);
  arrays.pop_back();
  return arrays;
}

void check_router_gradient(const Case& c, DType t) {
  SCOPED_TRACE(name("route backward", t, {c.tokens, c.experts, c.chosen, c.groups}));
  Arrays arrays = routed(c, 4);
  arrays[0] = noise(t, (c.tokens + kSurplus) * c.experts, 5);
  arrays.push_back(noise(DType::kF32, c.slots(), 6));
  check(
      arrays,
      [&](const Kernels& k, StreamView s, const Pointers& p) {
        k.route_backward({.probability = f32(p[1]),
                          .routing = routing_at(p, 2),
                          .dweight = f32(p[8]),
                          .dlogits = view_of(p[0], t, c.tokens + kSurplus, c.experts),
                          .tokens = c.tokens,
                          .chosen = c.chosen,
                          .renormalise = c.renormalise,
                          .scores = scores_of(c, nullptr)},
                         s);
      },
      Want::kBits);
}

TEST_F(GpuKernels, TheRoutersGradientHasTheCpusBits) {
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Case& c : kCases) check_router_gradient(c, t);
    for (const Case& c : kSigmoidCases) check_router_gradient(c, t);
  }
}

// Factors of the router's weights, and their gradient: sums in fp64, in another order than the CPU's.
TEST_F(GpuKernels, FactorsOfExpertsAreTheCpus) {
  std::vector<Case> cases(std::begin(kCases), std::end(kCases));
  cases.push_back({700, 2, 1, false});  // more rows of an expert than a block has threads
  for (const Case& c : cases) {
    SCOPED_TRACE(name("route factors", DType::kF32, {c.tokens, c.experts, c.chosen}));
    Arrays arrays = routed(c, 4);
    arrays.push_back(noise(DType::kF32, c.experts, 5));
    arrays.push_back(noise(DType::kF32, c.slots(), 6));
    arrays.push_back(zeros(DType::kF32, c.experts));
    for (const bool frozen : {false, true}) {
      check(
          arrays,
          [&](const Kernels& k, StreamView s, const Pointers& p) {
            k.route_tokens({.logits = view_of(p[0], DType::kF32, c.tokens + kSurplus, c.experts),
                            .probability = f32(p[1]),
                            .routing = routing_at(p, 2),
                            .tokens = c.tokens,
                            .chosen = c.chosen,
                            .renormalise = c.renormalise,
                            .factors = f32(p[8])},
                           s);
            k.route_factors({.probability = f32(p[1]),
                             .routing = routing_at(p, 2),
                             .dweight = f32(p[9]),
                             .factors = f32(p[8]),
                             .gradient = frozen ? nullptr : f32(p[10]),
                             .tokens = c.tokens,
                             .chosen = c.chosen,
                             .experts = c.experts,
                             .renormalise = c.renormalise},
                            s);
          },
          Want::kNear);
    }
  }
}

TEST_F(GpuKernels, RowsOfExpertsAreWeighedAndCombinedWithTheCpusBits) {
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Case& c : kCases) {
      for (const int64_t width : {1, 24, 77, 1032}) {
        if (width > 100 && c.tokens > 100) continue;
        for (const int64_t shift : {0, 1}) {
          const auto turn = static_cast<int64_t>(t) + (&c - kCases) + width + shift;
          if (!test::full_counts() && turn % 3 != 0) continue;
          SCOPED_TRACE(name("weigh", t, {c.tokens, c.experts, width, shift}));
          const int64_t rows = c.slots(), out = c.tokens + kSurplus;
          Arrays arrays = routed(c, 7);
          for (uint32_t i = 0; i < 2; ++i) arrays.push_back(noise(t, rows * width, 8 + i, 1, shift));
          for (uint32_t i = 0; i < 3; ++i) arrays.push_back(noise(t, out * width, 10 + i, 1, shift));
          arrays.push_back(zeros(DType::kF32, rows));
          check(
              arrays,
              [&](const Kernels& k, StreamView s, const Pointers& p) {
                const Routing routing = routing_at(p, 2);
                const View x = view_of(p[8], t, rows, width), other = view_of(p[9], t, rows, width);
                k.combine_rows({.x = x,
                                .addend = view_of(p[10], t, out, width),
                                .out = view_of(p[11], t, out, width),
                                .routing = routing,
                                .weighted = true,
                                .tokens = c.tokens,
                                .chosen = c.chosen},
                               s);
                k.combine_rows({.x = other,
                                .out = view_of(p[12], t, out, width),
                                .routing = routing,
                                .tokens = c.tokens,
                                .chosen = c.chosen},
                               s);
                k.weigh_rows({.x = x, .other = other, .dot = f32(p[13]), .routing = routing}, s);
                k.weigh_rows({.x = other, .routing = routing}, s);
              },
              Want::kBits);
        }
      }
    }
  }
}

// Where the rows of some experts begin: of all in the middle of an array.
struct Spread {
  std::vector<int32_t> start;
  int64_t rows = 0;  // of the array
  int64_t experts() const { return std::ssize(start) - 1; }
};
const Spread kSpreads[] = {{{0, 5}, 5},
                           {{0, 0, 64, 64, 129, 130, 130}, 130},
                           {{70, 83, 83, 160, 225}, 233},
                           {{0, 0, 0, 200, 200}, 200},
                           {{3, 3, 3}, 9}};
struct Sizes {
  int64_t in, out;
};
const Sizes kSizes[] = {{8, 8}, {64, 48}, {40, 136}, {33, 65}, {1, 3}, {200, 72}};

// Eighths of at most 4: all their products, and sums of 200 of these, are numbers of fp32, so that no order
// of additions has another sum, and results are equal to the bit.
Array eighths(DType t, int64_t n, uint32_t seed, int64_t shift = 0) {
  Array out = noise(t, n, seed, 1, shift);
  for (int64_t i = 0; i < n; ++i) out.values.set(i, std::clamp(std::round(8 * out.values[i]) / 8, -4.0, 4.0));
  return out;
}

// Elements of a matrix, each by its type.
double at(const View& x, int64_t row, int64_t column) {
  const int64_t i = row * x.stride + column;
  if (x.dtype == DType::kF32) return double{static_cast<const float*>(x.data)[i]};
  if (x.dtype == DType::kBF16) return double{to_float(static_cast<const Bf16*>(x.data)[i])};
  return double{to_float(static_cast<const Fp16*>(x.data)[i])};
}
void set(const View& x, int64_t row, int64_t column, double value) {
  const int64_t i = row * x.stride + column;
  const auto number = static_cast<float>(value);
  if (x.dtype == DType::kF32)
    static_cast<float*>(x.data)[i] = number;
  else if (x.dtype == DType::kBF16)
    static_cast<Bf16*>(x.data)[i] = to_bf16(number);
  else
    static_cast<Fp16*>(x.data)[i] = to_fp16(number);
}

void multiply_in_loops(const MultiplyExperts& a) {
  for (int64_t e = 0; e < a.count; ++e) {
    View w = view_of(const_cast<void*>(a.weight[e]), a.x.dtype, a.out.columns, a.x.columns);
    if (a.columns) w = view_of(w.data, w.dtype, a.x.columns, a.out.columns);
    for (int64_t r = a.start[e]; r < a.start[e + 1]; ++r) {
      for (int64_t j = 0; j < a.out.columns; ++j) {
        double sum = 0;
        for (int64_t i = 0; i < a.x.columns; ++i)
          sum += at(a.x, r, i) * (a.columns ? at(w, i, j) : at(w, j, i));
        set(a.out, r, j, double{a.scale} * sum + (a.add ? at(a.out, r, j) : 0));
      }
    }
  }
}
void gradients_in_loops(const ExpertGradients& a) {
  for (int64_t e = 0; e < a.count; ++e) {
    if (a.gradient[e] == nullptr) continue;
    const View g = view_of(a.gradient[e], a.gradient_dtype, a.dy.columns, a.x.columns);
    for (int64_t i = 0; i < g.rows; ++i) {
      for (int64_t j = 0; j < g.columns; ++j) {
        double sum = 0;
        for (int64_t r = a.start[e]; r < a.start[e + 1]; ++r) sum += at(a.dy, r, i) * at(a.x, r, j);
        if (a.overwrite || a.start[e] < a.start[e + 1]) set(g, i, j, sum + (a.overwrite ? 0 : at(g, i, j)));
      }
    }
  }
}

// Calls body(type, spread, sizes, shifted) for enough of them; `shifted`: of the two factors none, the first
// or the second is at an address that is no multiple of 16.
template <class Body>
void each_product(const Body& body) {
  int turn = 0;
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Spread& spread : kSpreads) {
      for (const Sizes& sizes : kSizes) {
        // The short tier has each size with each spread, in one type.
        if (!test::full_counts() && ++turn % 3 != 0) continue;
        for (const int64_t shifted : {0, 1, 2}) {
          SCOPED_TRACE(name("experts", t, {spread.rows, spread.experts(), sizes.in, sizes.out, shifted}));
          body(t, spread, sizes, shifted);
        }
      }
    }
  }
}

TEST_F(GpuKernels, ProductsOfExpertsRows) {
  each_product([](DType t, const Spread& spread, const Sizes& sizes, int64_t shifted) {
    const auto& [in, out] = sizes;
    for (const bool columns : {false, true}) {
      const int64_t read = columns ? out : in, written = columns ? in : out;
      check(
          {eighths(t, spread.rows * read, 1, shifted == 1),
           eighths(t, spread.experts() * out * in, 2, shifted == 2), eighths(t, spread.rows * written, 3),
           numbers(spread.start)},
          [&, in = in, out = out](const Kernels& k, StreamView s, const Pointers& p) {
            MultiplyExperts a{.x = view_of(p[0], t, spread.rows, read),
                              .out = view_of(p[2], t, spread.rows, written),
                              .start = i32(p[3]),
                              .count = spread.experts(),
                              .scale = shifted == 1 ? 0.5F : 1.0F,
                              .columns = columns,
                              .add = shifted > 0};
            const auto bytes = out * in * static_cast<int64_t>(dtype_size(t));
            for (int64_t e = 0; e < a.count; ++e) a.weight[e] = static_cast<std::byte*>(p[1]) + e * bytes;
            k.multiply_experts == nullptr ? multiply_in_loops(a) : k.multiply_experts(a, s);
          },
          Want::kBits);
    }
  });
}

TEST_F(GpuKernels, GradientsOfExperts) {
  int turn = 0;
  each_product([&](DType t, const Spread& spread, const Sizes& sizes, int64_t shifted) {
    const auto& [in, out] = sizes;
    const DType gradient = ++turn % 3 == 0 ? DType::kBF16 : DType::kF32;
    for (const bool overwrite : {false, true}) {
      check(
          {eighths(t, spread.rows * out, 1, shifted == 1), eighths(t, spread.rows * in, 2, shifted == 2),
           eighths(gradient, spread.experts() * out * in, 3), numbers(spread.start)},
          [&, in = in, out = out](const Kernels& k, StreamView s, const Pointers& p) {
            ExpertGradients a{.dy = view_of(p[0], t, spread.rows, out),
                              .x = view_of(p[1], t, spread.rows, in),
                              .start = i32(p[3]),
                              .count = spread.experts(),
                              .overwrite = overwrite,
                              .gradient_dtype = gradient};
            const auto bytes = out * in * static_cast<int64_t>(dtype_size(gradient));
            for (int64_t e = 0; e < a.count; ++e) {
              if (e != 4) a.gradient[e] = static_cast<std::byte*>(p[2]) + e * bytes;  // that one is frozen
            }
            k.expert_gradients == nullptr ? gradients_in_loops(a) : k.expert_gradients(a, s);
          },
          Want::kBits);
    }
  });
}

void add_biases_in_loops(const AddExpertBiases& a) {
  for (int64_t e = 0; e < a.count; ++e) {
    if (a.bias[e] == nullptr) continue;
    const View bias = view_of(const_cast<void*>(a.bias[e]), a.x.dtype, 1, a.x.columns);
    for (int64_t r = a.start[e]; r < a.start[e + 1]; ++r)
      for (int64_t j = 0; j < a.x.columns; ++j) set(a.x, r, j, at(a.x, r, j) + at(bias, 0, j));
  }
}
void bias_gradients_in_loops(const ExpertBiasGradients& a) {
  for (int64_t e = 0; e < a.count; ++e) {
    if (a.gradient[e] == nullptr) continue;
    const View g = view_of(a.gradient[e], a.gradient_dtype, 1, a.dy.columns);
    for (int64_t j = 0; j < a.dy.columns; ++j) {
      double sum = 0;
      for (int64_t r = a.start[e]; r < a.start[e + 1]; ++r) sum += at(a.dy, r, j);
      if (a.overwrite || a.start[e] < a.start[e + 1]) set(g, 0, j, sum + (a.overwrite ? 0 : at(g, 0, j)));
    }
  }
}

TEST_F(GpuKernels, BiasesOfExpertsRows) {
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Spread& spread : kSpreads) {
      for (const int64_t width : {1, 130, 300}) {
        SCOPED_TRACE(name("biases", t, {spread.rows, spread.experts(), width}));
        check(
            {eighths(t, spread.rows * width, 1, 1), eighths(t, spread.experts() * width, 2, 1),
             numbers(spread.start)},
            [&](const Kernels& k, StreamView s, const Pointers& p) {
              AddExpertBiases a{
                  .x = view_of(p[0], t, spread.rows, width), .start = i32(p[2]), .count = spread.experts()};
              const auto bytes = width * static_cast<int64_t>(dtype_size(t));
              for (int64_t e = 0; e < a.count; ++e) {
                if (e != 4) a.bias[e] = static_cast<std::byte*>(p[1]) + e * bytes;  // that one has none
              }
              k.add_expert_biases == nullptr ? add_biases_in_loops(a) : k.add_expert_biases(a, s);
            },
            Want::kBits);
      }
    }
  }
}

TEST_F(GpuKernels, GradientsOfExpertsBiases) {
  int turn = 0;
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Spread& spread : kSpreads) {
      for (const int64_t width : {1, 130}) {
        const DType gradient = ++turn % 3 == 0 ? DType::kBF16 : DType::kF32;
        for (const bool overwrite : {false, true}) {
          SCOPED_TRACE(name("bias gradients", t, {spread.rows, spread.experts(), width, overwrite}));
          check(
              {eighths(t, spread.rows * width, 1), eighths(gradient, spread.experts() * width, 2),
               numbers(spread.start)},
              [&](const Kernels& k, StreamView s, const Pointers& p) {
                ExpertBiasGradients a{.dy = view_of(p[0], t, spread.rows, width),
                                      .start = i32(p[2]),
                                      .count = spread.experts(),
                                      .overwrite = overwrite,
                                      .gradient_dtype = gradient};
                const auto bytes = width * static_cast<int64_t>(dtype_size(gradient));
                for (int64_t e = 0; e < a.count; ++e) {
                  if (e != 4) a.gradient[e] = static_cast<std::byte*>(p[1]) + e * bytes;  // it is frozen
                }
                k.expert_bias_gradients == nullptr ? bias_gradients_in_loops(a)
                                                   : k.expert_bias_gradients(a, s);
              },
              Want::kBits);
        }
      }
    }
  }
}

}  // namespace
}  // namespace lm
