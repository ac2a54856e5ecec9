// What PiSSA's adapters begin with, and what a run with them exports.
#include "weights/principal_pairs.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/host_device.h"
#include "export/plain_adapter.h"
#include "tests/support/llama_spec.h"
#include "weights/load_store.h"

namespace lm {
namespace {

constexpr int64_t kSeed = 7;

struct Started {
  explicit Started(DType model, DType trained, int threads = 2)
      : adapter{.r = 4,
                .alpha = 6,
                .rslora = model == DType::kBF16,
                .pissa = true,
                .targets = resolve_targets(spec.names, {"q_proj", "v_proj", "down_proj"}, "test"),
                .ranks = {{"v_proj", 6}}},
        layout(make_layout(spec, &adapter, model)),
        store(layout, trained, DeviceType::kCpu),
        pairs({.directory = "", .seed = kSeed, .dtype = model, .threads = threads}, adapter),
        load{spec, layout, model, {DeviceType::kCpu, nullptr, 1}, threads} {
    initialise_weights(load, kSeed, store);
    place_starts(load, pairs, true, store);
  }

  std::vector<float> values(size_t block, const TensorPlace& place) {
    const OpenUnit open = store.open(static_cast<int64_t>(block), false);
    const DType dtype = place.frozen ? load.dtype : store.dtype();
    const std::byte* const from = open.tensor(place);
    std::vector<float> out;
    for (int64_t i = 0; i < place.parameter.elements(); ++i)
      out.push_back(dtype == DType::kF32 ? reinterpret_cast<const float*>(from)[i]
                                         : to_float(reinterpret_cast<const Bf16*>(from)[i]));
    return out;
  }
  const TensorPlace& beside(size_t block, const Trainable& entry, TrainableRole role) const {
    return *layout.blocks[block].beside(layout.blocks[block].tensors[entry.owner], entry.part, role);
  }
  template <class Body>
  int each_module(const Body& body) const {
    int modules = 0;
    for (size_t b = 0; b < layout.blocks.size(); ++b) {
      for (const Trainable& entry : layout.blocks[b].trainables)
        if (entry.role == TrainableRole::kLoraA) body(b, entry), ++modules;
    }
    return modules;
  }

  ModelSpec spec = llama_spec({.ffn = 96, .layers = 2});
  AdapterSpec adapter;
  ModelLayout layout;
  WeightStore store;
  PrincipalPairs pairs;
  LoadSetup load;
};

std::vector<float> negated(std::vector<float> values) {
  for (float& value : values) value = -value;
  return values;
}

TEST(PrincipalPairs, AreWhatTrainingBeginsWithAndWhatIsSubtracted) {
  for (const DType model : {DType::kF32, DType::kBF16}) {
    for (const DType trained : {DType::kF32, model}) {
      Started run(model, trained);
      const int modules = run.each_module([&](size_t b, const Trainable& entry) {
        const auto of = [&](TrainableRole role) { return run.values(b, run.beside(b, entry, role)); };
        EXPECT_EQ(of(TrainableRole::kLoraA), of(TrainableRole::kStartA));
        EXPECT_EQ(of(TrainableRole::kLoraB), negated(of(TrainableRole::kStartB)));
      });
      EXPECT_EQ(modules, 6);
    }
  }
}

// The residual of a matrix that has been cut off its first singular vectors is orthogonal to them.
TEST(PrincipalPairs, LeaveARestThatIsOrthogonalToThem) {
  Started run(DType::kF32, DType::kF32);
  run.each_module([&](size_t b, const Trainable& entry) {
    const TensorPlace& weight = run.layout.blocks[b].tensors[entry.owner];
    const ParameterPart& part = weight.parameter.parts[entry.part];
    const int64_t columns = weight.parameter.columns;
    const std::vector<float> w = run.values(b, weight),
                             a = run.values(b, run.beside(b, entry, TrainableRole::kLoraA)),
                             bs = run.values(b, run.beside(b, entry, TrainableRole::kLoraB));
    const int64_t r = std::ssize(a) / columns;
    const double scale = run.adapter.scale_of(part.name.substr(0, part.name.rfind('.')));
    for (int64_t k = 0; k < r; ++k) {
      // (W - s B A) a_k, relative to W a_k = strength * a direction
      double rest = 0, whole = 0;
      for (int64_t i = 0; i < part.rows; ++i) {
        double of_w = 0, of_pair = 0;
        for (int64_t j = 0; j < columns; ++j)
          of_w += double{w[static_cast<size_t>((part.first + i) * columns + j)]} *
                  a[static_cast<size_t>(k * columns + j)];
        for (int64_t m = 0; m < r; ++m) {
          double inner = 0;
          for (int64_t j = 0; j < columns; ++j)
            inner +=
                double{a[static_cast<size_t>(m * columns + j)]} * a[static_cast<size_t>(k * columns + j)];
          of_pair += scale * bs[static_cast<size_t>(i * r + m)] * inner;
        }
        rest += std::pow(of_w - of_pair, 2);
        whole += of_w * of_w;
      }
      EXPECT_LT(std::sqrt(rest / whole), 0.1) << part.name << " " << k;
    }
  });
}

TEST(PrincipalPairs, AreTheSameOnAnotherRunWhateverItHasTrained) {
  Started first(DType::kBF16, DType::kF32, 1), again(DType::kBF16, DType::kF32, 3);
  place_starts(again.load, again.pairs, false, again.store);
  first.each_module([&](size_t b, const Trainable& entry) {
    for (const TrainableRole role : {TrainableRole::kStartA, TrainableRole::kStartB})
      EXPECT_EQ(first.values(b, first.beside(b, entry, role)), again.values(b, again.beside(b, entry, role)));
  });
}

// s' B' A' of the plain adapter is s (B A - B0 A0), whatever was trained since.
TEST(PlainAdapter, HasTheProductsOfBothPairs) {
  for (const DType model : {DType::kF32, DType::kBF16}) {
    Started run(model, DType::kF32);
    const WeightSource source = [&](size_t b, const TensorPlace& place, int64_t) {
      static thread_local std::vector<float> values;
      values = run.values(b, place);
      for (size_t i = 0; i < values.size(); ++i) values[i] += 0.01F * static_cast<float>(i % 7);
      return WeightView{reinterpret_cast<const std::byte*>(values.data()), DType::kF32};
    };
    const PlainAdapter plain(run.spec, run.adapter, run.layout, source, run.pairs);
    EXPECT_FALSE(plain.spec().pissa);
    run.each_module([&](size_t b, const Trainable& entry) {
      const ParameterPart& part = run.layout.blocks[b].tensors[entry.owner].parameter.parts[entry.part];
      const std::string module = part.name.substr(0, part.name.rfind('.'));
      EXPECT_EQ(plain.spec().rank_of(module), 2 * run.adapter.rank_of(module));
      EXPECT_NEAR(plain.spec().scale_of(module), run.adapter.scale_of(module), 1e-12);
      const auto values_of = [&](TrainableRole role) {
        const TensorPlace& place = run.beside(b, entry, role);
        const std::vector<float> own = run.values(b, place);
        std::vector<float> moved = own;
        for (size_t i = 0; i < moved.size(); ++i) moved[i] += 0.01F * static_cast<float>(i % 7);
        return std::pair{moved, own};
      };
      const auto [a, a0] = values_of(TrainableRole::kLoraA);
      const auto [bs, b0] = values_of(TrainableRole::kLoraB);
      const BlockLayout& block = plain.layout().blocks[b];
      const auto both = [&](TrainableRole role) {
        const TensorPlace& place = *block.find(run.beside(b, entry, role).parameter.name);
        const WeightView view = plain.source()(b, place, 0);
        const auto* const begin = reinterpret_cast<const float*>(view.memory);
        return std::vector<float>(begin, begin + place.parameter.elements());
      };
      const std::vector<float> joined_a = both(TrainableRole::kLoraA), joined_b = both(TrainableRole::kLoraB);
      const size_t r = bs.size() / static_cast<size_t>(part.rows), columns = a.size() / r;
      for (size_t k = 0; k < r; ++k) {
        for (size_t j = 0; j < columns; ++j) {
          ASSERT_EQ(joined_a[k * columns + j], a[k * columns + j]);
          ASSERT_EQ(joined_a[(r + k) * columns + j], a0[k * columns + j]);
        }
        for (size_t i = 0; i < static_cast<size_t>(part.rows); ++i) {
          ASSERT_EQ(joined_b[i * 2 * r + k], bs[i * r + k]);
          ASSERT_EQ(joined_b[i * 2 * r + r + k], -b0[i * r + k]);
        }
      }
    });
  }
}

}  // namespace
}  // namespace lm
