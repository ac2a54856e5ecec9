// What surrounds the products of an orthogonal step gives the same bits with every instruction set and number
// of threads, and rounds each weight with its own random number.
#include "base/philox.h"
#include "kernels/master_formula.h"
#include "kernels/norms_formula.h"

#include "tests/kernels/support.h"

namespace lm {
namespace {

struct Shape {
  int64_t rows, columns;
  int64_t elements() const { return rows * columns; }
};
const Shape kShapes[] = {{1, 70}, {9, 4}, {70, 3}, {130, 64}, {64, 128}, {200, 300}};
const Muon kRule = Muon::at({}, {.lr = 1e-2, .weight_decay = 0.1, .t = 5});

int64_t padded(const Shape& shape) {
  return (shape.elements() + kGranuleElements - 1) / kGranuleElements * kGranuleElements;
}

struct Tensors {
  Values weight, master, momentum, direction;
};
Tensors make_tensors(MasterForm form, const Shape& shape) {
  const int64_t n = shape.elements();
  return {Values::random(weight_type(form), n, 4, 0.05),
          Values::random(has_fp32_master(form) ? DType::kF32 : DType::kBF16, n, 5, 0.05),
          Values::random(DType::kF32, n, 6, 0.1), Values::random(DType::kBF16, padded(shape), 7)};
}

RuleUpdate arguments(MuonState::Call call, MasterForm form, const Shape& shape, const Values& gradient,
                     Tensors& t) {
  return {
      .rule = kRule,
      .gradient = gradient.data(),
      .weight = t.weight.data(),
      .master = has_master(form) ? t.master.data() : nullptr,
      .state = {static_cast<float*>(t.momentum.data())},
      .muon = {.call = call, .rows = shape.rows, .columns = shape.columns, .direction = t.direction.data()},
      .elements = shape.elements(),
      .gradient_dtype = gradient.dtype(),
      .weight_dtype = t.weight.dtype(),
      .form = form,
      .gradient_scale = 0.7F,
      .rounding_key = 0x123456789u,
      .first_index = 4096 * 5 + 37};
}

TEST(MuonUpdate, EveryInstructionSetAndThreadCountGivesTheSameBits) {
  for (const MasterForm form :
       {MasterForm::kWeight, MasterForm::kSplit, MasterForm::kF32, MasterForm::kStochastic,
        MasterForm::kF32OfFp16, MasterForm::kStochasticFp16}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      if (weight_type(form) == DType::kF16 && dtype == DType::kBF16) continue;  // fp32 gradients alone
      for (const Shape& shape : kShapes) {
        SCOPED_TRACE("form " + std::to_string(static_cast<int>(form)) + ", " + dtype_name(dtype) +
                     " gradient, " + std::to_string(shape.rows) + " x " + std::to_string(shape.columns));
        const Values gradient = Values::random(dtype, shape.elements(), 3);
        same_everywhere([&](const Kernels& k, StreamView stream) {
          Tensors t = make_tensors(form, shape);
          Values sums = Values(DType::kF32, 2 * padded(shape) / kGranuleElements), norm(DType::kF32, 1);
          k.update(arguments(MuonState::Call::kDirection, form, shape, gradient, t), stream);
          auto* const doubles = static_cast<double*>(sums.data());
          const int64_t granules = padded(shape) / kGranuleElements;
          k.granule_norms(
              {.x = t.direction.data(), .sums = doubles, .granules = granules, .dtype = DType::kBF16},
              stream);
          k.normalise({.x = t.direction.data(),
                       .elements = shape.elements(),
                       .sums = doubles,
                       .granules = granules,
                       .norm = static_cast<float*>(norm.data()),
                       .least = 1e-7F},
                      stream);
          k.update(arguments(MuonState::Call::kStep, form, shape, gradient, t), stream);
          return Outputs{t.weight, t.master, t.momentum, t.direction, norm};
        });
      }
    }
  }
}

TEST(MuonUpdate, TheDirectionIsFilledUpWithZeros) {
  for (const Shape& shape : kShapes) {
    Tensors t = make_tensors(MasterForm::kWeight, shape);
    const Values gradient = Values::random(DType::kF32, shape.elements(), 3);
    kernels(DeviceType::kCpu)
        .update(arguments(MuonState::Call::kDirection, MasterForm::kWeight, shape, gradient, t), {});
    for (int64_t i = shape.elements(); i < padded(shape); ++i) ASSERT_EQ(t.direction[i], 0) << i;
  }
}

TEST(MuonUpdate, StochasticRoundingHasTheNumbersOfItsElements) {
  for (const Shape& shape : kShapes) {
    const Values gradient(DType::kF32, shape.elements());
    Tensors rounded = make_tensors(MasterForm::kStochastic, shape),
            exact = make_tensors(MasterForm::kWeight, shape);
    for (int64_t i = 0; i < shape.elements(); ++i) exact.weight.set(i, rounded.weight[i]);
    const auto call = MuonState::Call::kStep;
    const RuleUpdate args = arguments(call, MasterForm::kStochastic, shape, gradient, rounded);
    const StreamView threads{DeviceType::kCpu, nullptr, 3};
    kernels(DeviceType::kCpu).update(args, threads);
    kernels(DeviceType::kCpu).update(arguments(call, MasterForm::kWeight, shape, gradient, exact), threads);
    for (int64_t i = 0; i < shape.elements(); ++i) {
      uint32_t bits = 0;
      std::memcpy(&bits, static_cast<const float*>(exact.weight.data()) + i, 4);
      const uint32_t number = philox_at(args.rounding_key, static_cast<uint64_t>(args.first_index + i), 0, 0);
      ASSERT_EQ(static_cast<const uint16_t*>(rounded.weight.data())[i], stochastic_weight(bits, number)) << i;
    }
  }
}

}  // namespace
}  // namespace lm
