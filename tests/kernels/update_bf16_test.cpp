// Rules with state in bf16, on weights without a master: every instruction set and thread count gives the
// bits of the formula written plainly here. And an update in parts, as parameter groups cut it, gives the
// bits of an update of the whole.
#include "kernels/master_formula.h"

#include "base/philox.h"
#include "tests/kernels/support.h"

namespace lm {
namespace {

struct Tensors {
  Values weight, m, v, c;
};

Tensors random_tensors(DType state, DType weight, int64_t n) {
  Tensors out{Values::random(weight, n, 2), Values::random(state, n, 3, 0.1),
              Values::random(state, n, 4, 0.01), Values::random(DType::kBF16, n, 5, 0.001)};
  for (int64_t i = 0; i < n; ++i) out.v.set(i, std::abs(out.v[i]));
  return out;
}

RuleUpdate arguments(MasterForm form, const Values& gradient, Tensors& t, const RuleScalars& rule) {
  return {.rule = rule,
          .gradient = gradient.data(),
          .weight = t.weight.data(),
          .master = has_master(form) ? t.c.data() : nullptr,
          .state = {t.m.data(), t.v.data(), t.c.data()},
          .elements = gradient.size(),
          .gradient_dtype = gradient.dtype(),
          .weight_dtype = t.weight.dtype(),
          .form = form,
          .gradient_scale = 0.7F,
          .rounding_key = philox_key(3, Purpose::kRounding, 7, 9),
          .first_index = 4096 * 3};
}

float rounded(float x) {
  return to_float(to_bf16(x));
}

void plain(const AdamWBf16& c, float g, float* s, float& p) {
  const float m = std::fma(c.one_minus_beta1, g - s[0], s[0]);
  const float v = std::fma(c.one_minus_beta2 * g, g, c.beta2 * s[1]);
  p = p * c.decay + c.minus_step_size * m / (std::sqrt(v) / c.root_correction2 + c.eps);
  s[0] = m, s[1] = v;
}
void plain(const AdamWAnyPrecision& c, float g, float* s, float& p) {
  s[0] = rounded(std::fma(c.one_minus_beta1, g, rounded(c.beta1 * s[0])));
  s[1] = rounded(std::fma(c.one_minus_beta2 * g, g, rounded(c.beta2 * s[1])));
  const float root = rounded(rounded(std::sqrt(s[1])) / c.root_correction2);
  s[2] = rounded(s[2] + c.minus_step_size * s[0] / rounded(root + c.eps));
  const float before = rounded(p * c.decay);
  p = rounded(before + s[2]);
  s[2] = rounded(s[2] + rounded(before - p));
}

template <class R>
void plain_update(const RuleUpdate& a, const Values& gradient) {
  for (int64_t i = 0; i < a.elements; ++i) {
    auto* const weight = static_cast<Bf16*>(a.weight) + i;
    float state[3] = {}, p = to_float(*weight);
    for (int s = 0; s < kStateCount<R>; ++s) state[s] = to_float(static_cast<Bf16*>(a.state[s])[i]);
    plain(a.rule.as<R>(), static_cast<float>(gradient[i]) * a.gradient_scale, state, p);
    for (int s = 0; s < kStateCount<R>; ++s) static_cast<Bf16*>(a.state[s])[i] = to_bf16(state[s]);
    const uint32_t bits = bits_of(one_nan(p)),
                   random = philox_at(a.rounding_key, static_cast<uint64_t>(a.first_index + i), 0, 0);
    weight->bits = a.form == MasterForm::kNearest ? to_bf16(p).bits
                                                  : static_cast<uint16_t>((bits + (random & 0xFFFF)) >> 16);
  }
}

template <class R>
void every_instruction_set_gives_the_plain_bits() {
  const float specials[] = {NAN, INFINITY, -INFINITY, 0.F, -0.F, 1e-42F, 3.4e38F, 1e-30F, 1e20F};
  for (const MasterForm form : {MasterForm::kNearest, MasterForm::kStochastic}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const int64_t n : {1, 15, 64, 1000, 20003}) {
        SCOPED_TRACE(std::to_string(static_cast<int>(form)) + ", n " + std::to_string(n));
        Values gradient = Values::random(dtype, n, 1);
        for (int64_t i = 0; i < n; i += 37) gradient.set(i, specials[i % 9]);
        const auto at = [](int64_t t) { return R::at({}, {.lr = 1e-2, .weight_decay = 0.1, .t = t}); };
        Tensors want = random_tensors(DType::kBF16, DType::kBF16, n);
        for (int64_t t = 1; t <= 3; ++t) plain_update<R>(arguments(form, gradient, want, at(t)), gradient);
        const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
          Tensors own = random_tensors(DType::kBF16, DType::kBF16, n);
          for (int64_t t = 1; t <= 3; ++t) k.update(arguments(form, gradient, own, at(t)), stream);
          return Outputs{own.weight, own.m, own.v, own.c};
        });
        EXPECT_TRUE(got[0] == want.weight);
        EXPECT_TRUE(got[1] == want.m);
        EXPECT_TRUE(got[2] == want.v);
        EXPECT_TRUE(got[3] == want.c);
      }
    }
  }
}

TEST(Bf16State, AdamWHasThePlainBitsWithEveryInstructionSet) {
  every_instruction_set_gives_the_plain_bits<AdamWBf16>();
}
TEST(Bf16State, AnyPrecisionHasThePlainBitsWithEveryInstructionSet) {
  every_instruction_set_gives_the_plain_bits<AdamWAnyPrecision>();
}

// 1 + 2^-8 lies between the bf16 numbers 1 and 1 + 2^-7, of which 1 is even.
TEST(Bf16State, ATieIsRoundedToTheEvenNumber) {
  const int64_t n = 70;
  const Values gradient(DType::kF32, n);
  const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
    Tensors t{Values(DType::kBF16, n), Values(DType::kBF16, n), Values(DType::kBF16, n),
              Values(DType::kBF16, n)};
    for (int64_t i = 0; i < n; ++i) t.weight.set(i, 1);
    const AdamWBf16 rule{{.minus_step_size = -1, .eps = 1, .decay = 1 + 1.F / 256}};
    k.update(arguments(MasterForm::kNearest, gradient, t, rule), stream);
    return Outputs{t.weight};
  });
  for (int64_t i = 0; i < n; ++i) EXPECT_EQ(got[0][i], 1);
}

// A form of masters belongs to a rule.
TEST(Bf16State, ARuleTakesNoOtherFormOfMasters) {
  const Values gradient = Values::random(DType::kF32, 64, 1);
  Tensors t = random_tensors(DType::kBF16, DType::kBF16, 64);
  EXPECT_ANY_THROW(kernels(DeviceType::kCpu)
                       .update(arguments(MasterForm::kSplit, gradient, t, AdamWBf16::at({}, {})), {}));
  Tensors wide = random_tensors(DType::kF32, DType::kBF16, 64);
  EXPECT_ANY_THROW(kernels(DeviceType::kCpu)
                       .update(arguments(MasterForm::kNearest, gradient, wide, AdamW::at({}, {})), {}));
}

TEST(Update, InPartsThatBeginAnywhereHasTheBitsOfTheWhole) {
  const int64_t n = 1000;
  const Values gradient = Values::random(DType::kF32, n, 1);
  struct Case {
    RuleScalars rule;
    MasterForm form;
  };
  const RulePass pass{.lr = 1e-2, .weight_decay = 0.1, .t = 2};
  const Case cases[] = {{AdamW::at({}, pass), MasterForm::kWeight},
                        {AdamW::at({}, pass), MasterForm::kSplit},
                        {AdamW::at({}, pass), MasterForm::kStochastic},
                        {AdamWBf16::at({}, pass), MasterForm::kStochastic}};
  for (const Case& one : cases) {
    SCOPED_TRACE(static_cast<int>(one.form));
    const bool bf16 = takes_form(one.rule.id, MasterForm::kNearest);
    const DType state = bf16 ? DType::kBF16 : DType::kF32,
                weight = one.form == MasterForm::kWeight ? DType::kF32 : DType::kBF16;
    Tensors whole = random_tensors(state, weight, n);
    kernels(DeviceType::kCpu).update(arguments(one.form, gradient, whole, one.rule), {});
    same_everywhere([&](const Kernels& k, StreamView stream) {
      Tensors parts = random_tensors(state, weight, n);
      const auto behind = [](void* array, int64_t elements, DType type) {
        return static_cast<void*>(static_cast<std::byte*>(array) +
                                  elements * static_cast<int64_t>(dtype_size(type)));
      };
      int64_t from = 0;
      for (const int64_t to : {int64_t{37}, int64_t{64}, int64_t{501}, n}) {
        RuleUpdate part = arguments(one.form, gradient, parts, one.rule);
        part.gradient = static_cast<const float*>(part.gradient) + from;
        part.weight = behind(part.weight, from, weight);
        if (part.master != nullptr) part.master = behind(part.master, from, DType::kBF16);
        part.state[0] = behind(part.state[0], from, state);
        part.state[1] = behind(part.state[1], from, state);
        part.elements = to - from;
        part.first_index += from;
        k.update(part, stream);
        from = to;
      }
      EXPECT_TRUE(parts.weight == whole.weight);
      EXPECT_TRUE(parts.m == whole.m);
      EXPECT_TRUE(parts.v == whole.v);
      EXPECT_TRUE(parts.c == whole.c);
      return Outputs{parts.weight};
    });
  }
}

}  // namespace
}  // namespace lm
