// Optimizer updates: every instruction set and thread count gives the bits of the rule's formula written
// plainly here; the split master is a separate fp32 master bit for bit; each formula is what its name says
// (against fp64); rounding is unbiased.
#include "base/philox.h"
#include "kernels/master_formula.h"

#include "tests/kernels/support.h"

namespace lm {
namespace {

using Master = MasterForm;

struct Mode {
  Master master;
  DType gradient;
  const char* name;
};
const Mode kModes[] = {{Master::kWeight, DType::kF32, "weight, fp32 gradient"},
                       {Master::kWeight, DType::kBF16, "weight, bf16 gradient"},
                       {Master::kSplit, DType::kF32, "split, fp32 gradient"},
                       {Master::kSplit, DType::kBF16, "split, bf16 gradient"},
                       {Master::kF32, DType::kF32, "fp32 master, fp32 gradient"},
                       {Master::kF32, DType::kBF16, "fp32 master, bf16 gradient"},
                       {Master::kStochastic, DType::kF32, "stochastic, fp32 gradient"},
                       {Master::kStochastic, DType::kBF16, "stochastic, bf16 gradient"}};

DType weight_dtype(Master m) {
  return m == Master::kWeight ? DType::kF32 : DType::kBF16;
}

uint32_t float_bits(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, 4);
  return bits;
}
float bits_float(uint32_t bits) {
  float x = 0;
  std::memcpy(&x, &bits, 4);
  return x;
}

struct State {
  Values weight, master, m, v;  // a split master's halves are kept as bf16 bits
};

// fp32 weights p in the form of a mode.
State make_state(Master mode, const Values& p, const Values& m, const Values& v) {
  const int64_t n = p.size();
  State s{Values(weight_dtype(mode), n), Values(mode == Master::kF32 ? DType::kF32 : DType::kBF16, n), m, v};
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = float_bits(static_cast<float>(p[i]));
    const uint16_t high = static_cast<uint16_t>((bits + 0x8000) >> 16), low = static_cast<uint16_t>(bits);
    if (mode == Master::kWeight) {
      s.weight.set(i, p[i]);
    } else {
      std::memcpy(static_cast<uint16_t*>(s.weight.data()) + i, &high, 2);
    }
    if (mode == Master::kSplit) std::memcpy(static_cast<uint16_t*>(s.master.data()) + i, &low, 2);
    if (mode == Master::kF32) s.master.set(i, p[i]);
  }
  return s;
}

constexpr double kLr = 1e-3, kDecay = 0.01;

// Scalars as they are at update t, from settings and rate in fp64.
AdamW adamw_at(int64_t t) {
  const double beta1 = 0.9, beta2 = 0.999, steps = static_cast<double>(t);
  return {.one_minus_beta1 = static_cast<float>(1 - beta1),
          .beta2 = static_cast<float>(beta2),
          .one_minus_beta2 = static_cast<float>(1 - beta2),
          .step_size = static_cast<float>(kLr / (1 - std::pow(beta1, steps))),
          .rsqrt_correction2 = static_cast<float>(1 / std::sqrt(1 - std::pow(beta2, steps))),
          .eps = 1e-8f,
          .decay = static_cast<float>(1 - kLr * kDecay)};
}
Sgd sgd_at(int64_t) {
  return {.lr = static_cast<float>(kLr), .momentum = 0.9f, .weight_decay = static_cast<float>(kDecay)};
}

Lion lion_at(int64_t) {
  return {.one_minus_beta1 = 0.1f,
          .one_minus_beta2 = 0.01f,
          .lr = static_cast<float>(kLr),
          .decay = static_cast<float>(1 - kLr * kDecay)};
}

RuleUpdate arguments(Master mode, const Values& gradient, State& s, int64_t t, const RuleScalars& rule) {
  return {.rule = rule,
          .gradient = gradient.data(),
          .weight = s.weight.data(),
          .master = mode == Master::kSplit || mode == Master::kF32 ? s.master.data() : nullptr,
          .state = {static_cast<float*>(s.m.data()), static_cast<float*>(s.v.data())},
          .elements = gradient.size(),
          .gradient_dtype = gradient.dtype(),
          .weight_dtype = weight_dtype(mode),
          .form = mode,
          .gradient_scale = 0.7f,
          .rounding_key = philox_key(3, Purpose::kRounding, static_cast<uint64_t>(t), 9),
          .first_index = 4096 * 3};
}
RuleUpdate arguments(Master mode, const Values& gradient, State& s, int64_t t) {
  return arguments(mode, gradient, s, t, adamw_at(t));
}

// The formulas of optim/rules, one element at a time, through <cmath>.
void plain(const AdamW& c, float g, float& m, float& v, float& p) {
  m = std::fma(c.one_minus_beta1, g - m, m);
  v = std::fma(c.beta2, v, c.one_minus_beta2 * g * g);
  p = p * c.decay;
  p = p - c.step_size * m / (std::sqrt(v) * c.rsqrt_correction2 + c.eps);
}
void plain(const Sgd& c, float g, float& m, float&, float& p) {
  const float d = std::fma(c.weight_decay, p, g);
  m = std::fma(c.momentum, m, d);
  p = std::fma(-c.lr, m, p);
}

void plain(const Lion& c, float g, float& m, float&, float& p) {
  const float direction = std::fma(c.one_minus_beta1, g - m, m);
  p = p * c.decay;
  p = p - (direction > 0 ? c.lr : direction < 0 ? -c.lr : 0);
  m = std::fma(c.one_minus_beta2, g - m, m);
}

template <class R>
void plain_update(const RuleUpdate& a, const Values& gradient) {
  const auto clean = [](float x) { return std::isnan(x) ? bits_float(0x7FC00000) : x; };
  for (int64_t i = 0; i < a.elements; ++i) {
    uint16_t* half = static_cast<uint16_t*>(a.weight) + i;
    uint16_t* low = static_cast<uint16_t*>(a.master) + i;
    float p = 0;
    switch (a.form) {
      case Master::kWeight:
        p = static_cast<float*>(a.weight)[i];
        break;
      case Master::kF32:
        p = static_cast<float*>(a.master)[i];
        break;
      case Master::kStochastic:
      case Master::kNearest:
        p = bits_float(static_cast<uint32_t>(*half) << 16);
        break;
      case Master::kSplit:
        p = bits_float(static_cast<uint32_t>(*half - (*low >= 0x8000 ? 1 : 0)) << 16 | *low);
        break;
      case Master::kF32OfFp16:
      case Master::kStochasticFp16:
        FAIL() << "fp16_test.cpp has these";
    }
    float &m = static_cast<float*>(a.state[0])[i], &v = static_cast<float*>(a.state[1])[i];
    plain(a.rule.as<R>(), static_cast<float>(gradient[i]) * a.gradient_scale, m, v, p);
    m = clean(m);
    if (kStateCount < R >> 1) v = clean(v);
    p = clean(p);
    const uint32_t bits = float_bits(p);
    const uint32_t random = philox_at(a.rounding_key, static_cast<uint64_t>(a.first_index + i), 0, 0);
    switch (a.form) {
      case Master::kWeight:
        static_cast<float*>(a.weight)[i] = p;
        break;
      case Master::kStochastic:
        *half = static_cast<uint16_t>((bits + (random & 0xFFFF)) >> 16);
        break;
      case Master::kNearest:
        *half = to_bf16(p).bits;
        break;
      case Master::kF32:
        static_cast<float*>(a.master)[i] = p;
        [[fallthrough]];
      case Master::kSplit:
        *half = static_cast<uint16_t>((bits + 0x8000) >> 16);
        break;
      case Master::kF32OfFp16:
      case Master::kStochasticFp16:
        break;
    }
    if (a.form == Master::kSplit) *low = static_cast<uint16_t>(bits);
  }
}

// Ordinary numbers, with every kind of special value strewn in.
Values with_specials(Values x) {
  const float specials[] = {NAN,
                            -NAN,
                            INFINITY,
                            -INFINITY,
                            0.f,
                            -0.f,
                            1e-42f,
                            -1e-45f,
                            3.4028235e38f,
                            1.17549435e-38f,
                            bits_float(0x7F800001),
                            bits_float(0xFFFFFFFF),
                            -3.39e38f,
                            1e-20f};
  for (int64_t i = 0; i < x.size(); i += 7) x.set(i, specials[i / 7 % std::size(specials)]);
  return x;
}
Values absolute(Values x) {
  for (int64_t i = 0; i < x.size(); ++i) x.set(i, std::abs(x[i]));
  return x;
}

template <class R>
void every_instruction_set_gives_the_plain_bits(R (*at)(int64_t)) {
  for (const Mode& mode : kModes) {
    for (int64_t n : {1, 15, 64, 1000, 40003}) {
      for (bool special : {false, true}) {
        SCOPED_TRACE(std::string(mode.name) + ", n " + std::to_string(n));
        Values gradient = Values::random(mode.gradient, n, 51), p = Values::random(DType::kF32, n, 52);
        Values m = Values::random(DType::kF32, n, 53, 0.1),
               v = absolute(Values::random(DType::kF32, n, 54, 0.01));
        if (special) {
          gradient = with_specials(gradient);
          // Rotated, so that each special meets ordinary numbers and other specials.
          Values mixed = with_specials(Values::random(DType::kF32, n + 3, 55));
          for (int64_t i = 0; i < n; ++i) m.set(i, mixed[i + 3]);
          for (int64_t i = 1; i < n; i += 5) v.set(i, static_cast<double>(i % 2 ? 1e-42f : INFINITY));
        }
        State plain = make_state(mode.master, p, m, v);
        for (int64_t t = 1; t <= 3; ++t)
          plain_update<R>(arguments(mode.master, gradient, plain, t, at(t)), gradient);
        const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
          State s = make_state(mode.master, p, m, v);
          for (int64_t t = 1; t <= 3; ++t) k.update(arguments(mode.master, gradient, s, t, at(t)), stream);
          return Outputs{s.weight, s.master, s.m, s.v};
        });
        EXPECT_TRUE(got[0] == plain.weight);
        EXPECT_TRUE(got[1] == plain.master);
        EXPECT_TRUE(got[2] == plain.m);
        EXPECT_TRUE(got[3] == plain.v);
      }
    }
  }
}

TEST(AdamW, EveryInstructionSetGivesTheBitsOfThePlainFormula) {
  every_instruction_set_gives_the_plain_bits(adamw_at);
}
TEST(Sgd, EveryInstructionSetGivesTheBitsOfThePlainFormula) {
  every_instruction_set_gives_the_plain_bits(sgd_at);
}

TEST(Sgd, WithoutMomentumNeedsNoState) {
  const int64_t n = 1003;
  const Values gradient = Values::random(DType::kF32, n, 51), p = Values::random(DType::kF32, n, 52),
               zero(DType::kF32, n);
  Sgd rule = sgd_at(1);
  rule.momentum = 0;
  for (const Mode& mode : kModes) {
    if (mode.gradient != DType::kF32) continue;
    State with = make_state(mode.master, p, zero, zero);
    for (int64_t t = 1; t <= 3; ++t)
      kernels(DeviceType::kCpu).update(arguments(mode.master, gradient, with, t, rule), {});
    const Outputs without = same_everywhere([&](const Kernels& k, StreamView stream) {
      State s = make_state(mode.master, p, zero, zero);
      for (int64_t t = 1; t <= 3; ++t) {
        RuleUpdate update = arguments(mode.master, gradient, s, t, rule);
        update.state[0] = nullptr;
        k.update(update, stream);
      }
      return Outputs{s.weight, s.master};
    });
    EXPECT_TRUE(without[0] == with.weight) << mode.name;
    EXPECT_TRUE(without[1] == with.master) << mode.name;
  }
}

TEST(Lion, EveryInstructionSetGivesTheBitsOfThePlainFormula) {
  every_instruction_set_gives_the_plain_bits(lion_at);
}

TEST(AdamW, SplitMasterEqualsASeparateFp32MasterOverFiftySteps) {
  const int64_t n = 5000;
  const Values p = Values::random(DType::kF32, n, 61, 0.02), zero(DType::kF32, n);
  State split = make_state(Master::kSplit, p, zero, zero), whole = make_state(Master::kF32, p, zero, zero);
  const Kernels& k = kernels(DeviceType::kCpu);
  for (int64_t t = 1; t <= 50; ++t) {
    const Values gradient = Values::random(DType::kBF16, n, static_cast<uint32_t>(100 + t));
    k.update(arguments(Master::kSplit, gradient, split, t), {});
    k.update(arguments(Master::kF32, gradient, whole, t), {});
    ASSERT_TRUE(split.weight == whole.weight) << "step " << t;
    for (int64_t i = 0; i < n; ++i) {
      uint16_t high = 0, low = 0;
      std::memcpy(&high, static_cast<uint16_t*>(split.weight.data()) + i, 2);
      std::memcpy(&low, static_cast<uint16_t*>(split.master.data()) + i, 2);
      const uint32_t joined = split_join<uint32_t>(high, low);
      ASSERT_EQ(joined, float_bits(static_cast<float>(whole.master[i]))) << "step " << t << ", element " << i;
    }
  }
}

TEST(AdamW, SplitMasterRoundTripsEveryHighHalf) {
  for (uint32_t high = 0; high <= 0xFFFF; ++high) {
    for (uint32_t low : {0x0000u, 0x0001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu, 0x1234u, 0xABCDu}) {
      uint32_t bits = high << 16 | low;
      if (std::isnan(bits_float(bits))) bits = float_bits(one_nan(bits_float(bits)));
      const uint32_t weight = split_weight(bits);
      ASSERT_LE(weight, 0xFFFFu);
      ASSERT_EQ(split_join(weight, split_low(bits)), bits) << std::hex << bits;
      if (std::isnan(bits_float(bits))) {
        ASSERT_EQ(bits, 0x7FC00000u);
      } else {  // the weight is a nearest bf16 number
        const double exact = bits_float(bits), given = bits_float(weight << 16);
        if (std::isfinite(exact) && std::isfinite(given)) {
          ASSERT_LE(std::abs(given - exact), std::abs(nearest_bf16(exact) - exact)) << std::hex << bits;
        }
      }
    }
  }
}

TEST(AdamW, FollowsAdamWInFp64OverFiftySteps) {
  const int64_t n = 400;
  const Values start = Values::random(DType::kF32, n, 71), zero(DType::kF32, n);
  State s = make_state(Master::kWeight, start, zero, zero);
  std::vector<double> p, m(n), v(n);
  for (int64_t i = 0; i < n; ++i) p.push_back(start[i]);
  for (int t = 1; t <= 50; ++t) {
    const Values gradient = Values::random(DType::kF32, n, static_cast<uint32_t>(200 + t));
    kernels(DeviceType::kCpu).update(arguments(Master::kWeight, gradient, s, t), {});
    for (size_t i = 0; i < p.size(); ++i) {
      const double g = gradient[static_cast<int64_t>(i)] * 0.7;
      m[i] = 0.9 * m[i] + 0.1 * g;
      v[i] = 0.999 * v[i] + 0.001 * g * g;
      p[i] = p[i] * (1 - 1e-3 * 0.01) -
             1e-3 * (m[i] / (1 - std::pow(0.9, t))) / (std::sqrt(v[i] / (1 - std::pow(0.999, t))) + 1e-8);
    }
  }
  expect_near(s.weight, p, 2e-6, 2e-6, "weight");
  expect_near(s.m, m, 1e-5, 1e-6, "m");
  expect_near(s.v, v, 2e-5, 1e-8, "v");
}

// torch.optim.SGD, written out in its order of operations.
TEST(Sgd, FollowsTorchsSgdInFp64OverFiftySteps) {
  const int64_t n = 400;
  const Values start = Values::random(DType::kF32, n, 71), zero(DType::kF32, n);
  for (const double decay : {0.0, 0.01}) {
    State s = make_state(Master::kWeight, start, zero, zero);
    std::vector<double> p, buffer(n);
    for (int64_t i = 0; i < n; ++i) p.push_back(start[i]);
    for (int t = 1; t <= 50; ++t) {
      const Values gradient = Values::random(DType::kF32, n, static_cast<uint32_t>(200 + t));
      const Sgd rule = Sgd::at({.momentum = 0.8}, {.lr = 0.01, .weight_decay = decay, .t = t});
      kernels(DeviceType::kCpu).update(arguments(Master::kWeight, gradient, s, t, rule), {});
      for (size_t i = 0; i < p.size(); ++i) {
        const double g = gradient[static_cast<int64_t>(i)] * 0.7 + decay * p[i];
        buffer[i] = t == 1 ? g : 0.8 * buffer[i] + g;
        p[i] -= 0.01 * buffer[i];
      }
    }
    expect_near(s.weight, p, 2e-6, 2e-6, "weight");
    expect_near(s.m, buffer, 1e-5, 1e-6, "momentum");
    EXPECT_TRUE(s.v == zero);
  }
}

TEST(AdamW, StochasticRoundingIsUnbiased) {
  // A weight far below the next bf16 number moves up with the probability of its distance.
  const int64_t n = 1 << 18;
  Values p(DType::kF32, n), zero(DType::kF32, n), gradient(DType::kF32, n);
  for (int64_t i = 0; i < n; ++i) p.set(i, 1), gradient.set(i, -1);
  State s = make_state(Master::kStochastic, p, zero, zero);
  RuleUpdate a = arguments(Master::kStochastic, gradient, s, 1);
  AdamW rule = a.rule.as<AdamW>();
  rule.decay = 1;
  a.rule = rule;
  a.gradient_scale = 1;
  kernels(DeviceType::kCpu).update(a, {});
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += s.weight[i];
  // m / sqrt(v) is 1 at the first step: p = 1 + 1e-3, between 1 and 1 + 2^-7.
  const double unit = 1.0 / 128, chance = 1e-3 / unit;
  const double deviation = unit * std::sqrt(chance * (1 - chance) / static_cast<double>(n));
  EXPECT_NEAR(sum / static_cast<double>(n), 1 + 1e-3, 5 * deviation);
  EXPECT_GT(sum, static_cast<double>(n)) << "rounding to nearest would have lost every update";
}

// The paper's Algorithm 2 in fp64.
TEST(Lion, FollowsThePaperInFp64OverFiftySteps) {
  const int64_t n = 400;
  const Values start = Values::random(DType::kF32, n, 71), zero(DType::kF32, n);
  State s = make_state(Master::kWeight, start, zero, zero);
  std::vector<double> p, m(n);
  for (int64_t i = 0; i < n; ++i) p.push_back(start[i]);
  for (int t = 1; t <= 50; ++t) {
    const Values gradient = Values::random(DType::kF32, n, static_cast<uint32_t>(200 + t));
    const Lion rule = Lion::at({.betas = {0.9, 0.98}}, {.lr = 0.01, .weight_decay = 0.1, .t = t});
    kernels(DeviceType::kCpu).update(arguments(Master::kWeight, gradient, s, t, rule), {});
    for (size_t i = 0; i < p.size(); ++i) {
      const double g = gradient[static_cast<int64_t>(i)] * 0.7, c = 0.9 * m[i] + 0.1 * g;
      p[i] -= 0.01 * ((c > 0 ? 1 : -1) + 0.1 * p[i]);
      m[i] = 0.98 * m[i] + 0.02 * g;
    }
  }
  expect_near(s.weight, p, 2e-6, 2e-6, "weight");
  expect_near(s.m, m, 1e-5, 1e-6, "momentum");
  EXPECT_TRUE(s.v == zero);
}

}  // namespace
}  // namespace lm
