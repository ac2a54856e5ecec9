// State in codes: the nearest code is found, and an update of coded state is the update of the values that it
// stands for, coded again, with every instruction set and number of threads.
#include "kernels/code_formula.h"

#include "tests/kernels/support.h"

namespace lm {
namespace {

template <CodeMap map>
const auto& table() {
  static const auto made = make_table<map>();
  return made;
}
// Calls body(map) with the map as a constant.
template <class Body>
auto with_map(CodeMap map, const Body& body) {
  switch (map) {
    case CodeMap::kSigned8:
      return body(std::integral_constant<CodeMap, CodeMap::kSigned8>());
    case CodeMap::kUnsigned8:
      return body(std::integral_constant<CodeMap, CodeMap::kUnsigned8>());
    case CodeMap::kSigned4:
      return body(std::integral_constant<CodeMap, CodeMap::kSigned4>());
    case CodeMap::kUnsigned4:
      return body(std::integral_constant<CodeMap, CodeMap::kUnsigned4>());
    default:
      return body(std::integral_constant<CodeMap, CodeMap::kFloat8>());
  }
}

// Of all codes the one whose value is nearest.
template <class Table>
uint8_t nearest_of_all(const Table& codes, float x) {
  int best = 0;
  for (int c = 1; c < static_cast<int>(std::size(codes.value)); ++c) {
    const double now = std::abs(double{x} - codes.value[c]), before = std::abs(double{x} - codes.value[best]);
    if (now < before) best = c;
  }
  return static_cast<uint8_t>(best);
}

template <CodeMap map>
void expect_nearest(float x) {
  const auto& codes = table<map>();
  const uint32_t code = nearest_code<map>(codes, x);
  ASSERT_LT(code, std::size(codes.value));
  const double got = std::abs(double{x} - codes.value[code]),
               least = std::abs(double{x} - codes.value[nearest_of_all(codes, x)]);
  ASSERT_LE(got, 1.0001 * least) << x << ", code " << code;  // in the middle of two it may be either
}

TEST(Codes, TheNearestIsFound) {
  std::mt19937 engine(1);
  std::uniform_real_distribution<double> exponent(-8, 0);
  for (int i = 0; i < 100'000; ++i) {
    const auto x = static_cast<float>(std::pow(10.0, exponent(engine)));
    expect_nearest<CodeMap::kUnsigned8>(x);
    expect_nearest<CodeMap::kSigned8>(i % 2 == 0 ? x : -x);
    expect_nearest<CodeMap::kUnsigned4>(x);
    expect_nearest<CodeMap::kSigned4>(i % 2 == 0 ? x : -x);
    expect_nearest<CodeMap::kFloat8>(448 * (i % 2 == 0 ? x : -x));
  }
  // Around every middle of two values, and where tables end.
  for (int c = 0; c < 255; ++c) {
    const auto around = [&]<CodeMap map>(std::integral_constant<CodeMap, map>) {
      if (c + 1 >= static_cast<int>(std::size(table<map>().value))) return;
      const float* const value = table<map>().value;
      float x = static_cast<float>((double{value[c]} + double{value[c + 1]}) / 2);
      for (int step = 0; step < 2; ++step) x = std::nextafter(x, -2.F);
      for (int step = 0; step < 5; ++step, x = std::nextafter(x, 2.F)) expect_nearest<map>(x);
    };
    around(std::integral_constant<CodeMap, CodeMap::kSigned8>());
    around(std::integral_constant<CodeMap, CodeMap::kUnsigned8>());
    around(std::integral_constant<CodeMap, CodeMap::kSigned4>());
    around(std::integral_constant<CodeMap, CodeMap::kUnsigned4>());
    if (c < 126) around(std::integral_constant<CodeMap, CodeMap::kFloat8>());  // 0 to the largest
  }
  for (const float x : {0.F, 1e-45F, 1e-30F, 1.F}) {
    expect_nearest<CodeMap::kUnsigned8>(x);
    expect_nearest<CodeMap::kSigned8>(x);
    expect_nearest<CodeMap::kSigned8>(-x);
  }
  EXPECT_EQ(nearest_code<CodeMap::kUnsigned8>(table<CodeMap::kUnsigned8>(), 1.0000001F), 255U);
}

TEST(Codes, TheMapsAreBitsandbytess) {
  // Ends and neighbours of 0 from its documentation; every entry is compared in tests/parity.
  const float* const with_sign = table<CodeMap::kSigned8>().value;
  EXPECT_EQ(with_sign[0], -0.99296875F);
  EXPECT_EQ(with_sign[127], 0.F);
  EXPECT_FLOAT_EQ(with_sign[128], 5.5e-7F);
  EXPECT_EQ(with_sign[254], 0.99296875F);
  EXPECT_EQ(with_sign[255], 1.F);
  const float* const without = table<CodeMap::kUnsigned8>().value;
  EXPECT_EQ(without[0], 0.F);
  EXPECT_FLOAT_EQ(without[1], 3.25e-7F);
  EXPECT_EQ(without[254], 0.996484375F);
  EXPECT_EQ(without[255], 1.F);
}

// Codes and scales of one state, and what they stand for.
struct Coded {
  CodeMap map;
  std::vector<uint8_t> codes;
  std::vector<float> scales;

  int64_t block() const { return code_block(map); }
  int64_t elements() const { return std::ssize(scales) * block(); }
  uint8_t number(int64_t i) const {
    const auto byte = codes[static_cast<size_t>(i * code_bits(map) / 8)];
    return code_bits(map) == 8 ? byte : static_cast<uint8_t>(i % 2 == 0 ? byte >> 4 : byte & 15);
  }
  void put(int64_t i, uint32_t number) {
    uint8_t& byte = codes[static_cast<size_t>(i * code_bits(map) / 8)];
    if (code_bits(map) == 8) {
      byte = static_cast<uint8_t>(number);
    } else {
      byte = static_cast<uint8_t>(i % 2 == 0 ? (byte & 15) | number << 4 : (byte & 0xF0) | number);
    }
  }
  Values values() const {
    Values out(DType::kF32, elements());
    with_map(map, [&](auto of) {
      for (int64_t i = 0; i < out.size(); ++i)
        out.set(i, table<decltype(of)::value>().value[number(i)] * scales[static_cast<size_t>(i / block())]);
    });
    return out;
  }
  void code(const Values& values) {
    for (int64_t b = 0; b < std::ssize(scales); ++b) {
      const auto at = [&](int64_t i) {
        const auto x = static_cast<float>(values[b * block() + i]);
        return std::isfinite(x) ? x : 0.F;
      };
      float largest = 0;
      for (int64_t i = 0; i < block(); ++i) largest = std::max(largest, std::abs(at(i)));
      with_map(map, [&](auto of) {
        constexpr CodeMap kMap = decltype(of)::value;
        const bool dynamic = kMap == CodeMap::kSigned8 || kMap == CodeMap::kUnsigned8;
        const bool none = dynamic && largest < std::numeric_limits<float>::min();
        float scale = none ? 0.F : largest;
        if (!dynamic) scale = std::max(largest, 1e-12F) / (kMap == CodeMap::kFloat8 ? 448.F : 1.F);
        scales[static_cast<size_t>(b)] = scale;
        for (int64_t i = 0; i < block(); ++i) {
          const float x = none ? 0.F : dynamic ? at(i) * (1.F / largest) : at(i) / scale;
          put(b * block() + i, nearest_code<kMap>(table<kMap>(), x));
        }
      });
    }
  }
};

template <class R>
std::vector<Coded> random_state(int64_t n) {
  std::vector<Coded> out;
  std::mt19937 engine(7);
  for (const CodeMap map : R::kCodes) {
    Coded& state = out.emplace_back(Coded{map, {}, {}});
    for (int64_t i = 0; i < n * code_bits(map) / 8; ++i) {
      const auto code = static_cast<uint8_t>(engine());
      state.codes.push_back(map == CodeMap::kFloat8 && (code & 127) == 127 ? 0 : code);  // NaN is never made
    }
    for (int64_t b = 0; b < n / code_block(map); ++b)
      state.scales.push_back(b % 5 == 0 ? 0.F
                                        : static_cast<float>(std::exp2(-static_cast<double>(engine() % 40))));
  }
  return out;
}

struct Weights {
  Values weight, master;
};

template <class R>
RuleUpdate arguments(MasterForm form, const R& rule, const Values& gradient, Weights& weights, int64_t t) {
  return {.rule = rule,
          .gradient = gradient.data(),
          .weight = weights.weight.data(),
          .master = has_master(form) ? weights.master.data() : nullptr,
          .elements = gradient.size(),
          .gradient_dtype = gradient.dtype(),
          .weight_dtype = weights.weight.dtype(),
          .form = form,
          .gradient_scale = 0.7F,
          .rounding_key = 0x123456789u + static_cast<uint64_t>(t),
          .first_index = 4096 * 5};
}

// R codes the state of its formula.
template <class R>
void expect_the_formulas_update(const R& rule) {
  using Plain = RuleFormula<R>;
  const int64_t n = 256 * 77;  // more than one thread's least
  for (const MasterForm form :
       {MasterForm::kWeight, MasterForm::kSplit, MasterForm::kF32, MasterForm::kStochastic,
        MasterForm::kF32OfFp16, MasterForm::kStochasticFp16}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      if (weight_type(form) == DType::kF16 && dtype == DType::kBF16) continue;  // fp32 gradients alone
      SCOPED_TRACE(std::string(dtype_name(dtype)) + " gradient, form " +
                   std::to_string(static_cast<int>(form)));
      const DType weight_dtype = weight_type(form);
      Values gradient = Values::random(dtype, n, 3);
      const float specials[] = {NAN, INFINITY, -INFINITY, 0.F, -0.F, 1e-42F, 3.4e38F, 1e-30F, 1e20F};
      for (int64_t i = 0; i < n / 4; i += 37) gradient.set(i, specials[i % 9]);
      for (int64_t i = n / 2; i < n / 2 + 512; ++i) gradient.set(i, 0);
      const Weights start{Values::random(weight_dtype, n, 4, 0.05),
                          Values::random(has_fp32_master(form) ? DType::kF32 : DType::kBF16, n, 5, 0.05)};
      std::vector<Coded> want = random_state<R>(n);
      Weights weights = start;
      for (int64_t t = 1; t <= 3; ++t) {
        RuleUpdate args = arguments<Plain>(form, rule, gradient, weights, t);
        std::vector<Values> values;
        for (const Coded& state : want) values.push_back(state.values());
        for (size_t s = 0; s < values.size(); ++s) args.state[s] = static_cast<float*>(values[s].data());
        kernels(DeviceType::kCpu).update(args, {});
        for (size_t s = 0; s < values.size(); ++s) want[s].code(values[s]);
      }
      const auto outputs = [](const Weights& w, const std::vector<Coded>& state) {
        Outputs out{w.weight, w.master};
        for (const Coded& one : state) {
          Values& bytes = out.emplace_back(DType::kBF16, std::ssize(one.codes) / 2);
          std::memcpy(bytes.data(), one.codes.data(), one.codes.size());
          Values& scales = out.emplace_back(DType::kF32, std::ssize(one.scales));
          std::memcpy(scales.data(), one.scales.data(), one.scales.size() * 4);
        }
        return out;
      };
      const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
        std::vector<Coded> state = random_state<R>(n);
        Weights w = start;
        for (int64_t t = 1; t <= 3; ++t) {
          RuleUpdate args = arguments<R>(form, rule, gradient, w, t);
          for (size_t s = 0; s < state.size(); ++s) {
            args.codes[s] = state[s].codes.data();
            args.state[s] = state[s].scales.data();
          }
          k.update(args, stream);
        }
        return outputs(w, state);
      });
      const Outputs wanted = outputs(weights, want);
      for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(got[i] == wanted[i]) << "output " << i;
    }
  }
}

TEST(AdamW8bit, IsTheUpdateOfTheValuesThatItsCodesStandFor) {
  expect_the_formulas_update(AdamW8bit::at({}, {.lr = 1e-2, .weight_decay = 0.01, .t = 5}));
}
TEST(Lion8bit, IsTheUpdateOfTheValuesThatItsCodesStandFor) {
  expect_the_formulas_update(Lion8bit::at({}, {.lr = 1e-2, .weight_decay = 0.01, .t = 5}));
}

TEST(AdamW4bit, IsTheUpdateOfTheValuesThatItsCodesStandFor) {
  expect_the_formulas_update(AdamW4bit::at({}, {.lr = 1e-2, .weight_decay = 0.01, .t = 5}));
}
TEST(AdamWFp8, IsTheUpdateOfTheValuesThatItsCodesStandFor) {
  expect_the_formulas_update(AdamWFp8::at({}, {.lr = 1e-2, .weight_decay = 0.01, .t = 5}));
}

// Numbers below the least normal one have no scale: they are coded as zeros, on every processor alike.
TEST(Codes, ABlockOfDenormalsIsABlockOfZeros) {
  const auto expect_zeros = []<CodeMap map>(std::integral_constant<CodeMap, map>) {
    const auto& codes = table<map>();
    const uint32_t zero = nearest_code<map>(codes, over_scale<map>(0.F, code_factor<map>(0.F)));
    for (const float largest : {1e-45F, 2e-39F, 1.1754942e-38F}) {
      EXPECT_EQ(code_scale<map>(largest), 0.F) << largest;
      EXPECT_EQ(code_factor<map>(largest), 0.F) << largest;
      EXPECT_EQ(nearest_code<map>(codes, over_scale<map>(largest, code_factor<map>(largest))), zero)
          << largest;
    }
    EXPECT_EQ(code_scale<map>(1.17549435e-38F), 1.17549435e-38F);
  };
  expect_zeros(std::integral_constant<CodeMap, CodeMap::kSigned8>());
  expect_zeros(std::integral_constant<CodeMap, CodeMap::kUnsigned8>());
}

// As state is before the first update: zero bytes stand for zeros, whatever the value of the code 0.
TEST(AdamW8bit, BeginsWithZeros) {
  const int64_t n = 512;
  const Values gradient = Values::random(DType::kF32, n, 3);
  Weights plain{Values::random(DType::kF32, n, 4), Values(DType::kF32, 0)}, coded = plain;
  Values m(DType::kF32, n), v(DType::kF32, n);
  std::vector<uint8_t> codes(2 * n, 0);
  std::vector<float> scales(4, 0.F);
  const AdamW8bit rule = AdamW8bit::at({}, {.lr = 1e-3});
  RuleUpdate of_plain = arguments<AdamW>(MasterForm::kWeight, rule, gradient, plain, 1);
  of_plain.state[0] = static_cast<float*>(m.data()), of_plain.state[1] = static_cast<float*>(v.data());
  RuleUpdate of_coded = arguments(MasterForm::kWeight, rule, gradient, coded, 1);
  for (int s = 0; s < 2; ++s)
    of_coded.codes[s] = &codes[static_cast<size_t>(s * n)],
    of_coded.state[s] = &scales[static_cast<size_t>(2 * s)];
  kernels(DeviceType::kCpu).update(of_plain, {});
  kernels(DeviceType::kCpu).update(of_coded, {});
  EXPECT_TRUE(plain.weight == coded.weight);
}

}  // namespace
}  // namespace lm
