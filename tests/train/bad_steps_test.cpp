// A gradient that is no number: the step is skipped before anything changes, or the run ends, and the tensor
// is named wherever its gradient lives.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "kernels/library.h"
#include "offloaded_run.h"

namespace lm {
namespace {

using namespace offloaded_run;

// A number that a kernel leaves in a gradient: the n-th addition to one, or, of gradients on the device, the
// n-th unit's when all is added up.
struct Plant {
  enum class Where { kNowhere, kAddition, kNorms } where = Where::kNowhere;
  int64_t call = -1;
  int64_t element = 0;  // of the unit, with kNorms
  float value = 0;
};
Plant plant;
int64_t calls = 0;
Training* planted_in = nullptr;
std::string planted;  // name of the tensor; "" while nothing was planted

void put(void* gradient, DType dtype, int64_t element) {
  const auto bits = std::bit_cast<uint32_t>(plant.value);
  const auto high = static_cast<uint16_t>(bits >> 16);
  const auto size = static_cast<int64_t>(dtype_size(dtype));
  std::memcpy(static_cast<std::byte*>(gradient) + element * size,
              dtype == DType::kF32 ? static_cast<const void*>(&bits) : &high, static_cast<size_t>(size));
}

void plant_and_norm(const GranuleNorms& args, StreamView stream) {
  if (plant.where == Plant::Where::kNorms && calls++ == plant.call)
    put(const_cast<void*>(static_cast<const void*>(args.x)), args.dtype, plant.element);
  library_kernels(DeviceType::kCpu).granule_norms(args, stream);
}

// The trained tensor whose gradient begins there; "" if none does.
std::string tensor_at(const void* gradient) {
  const ModelLayout& layout = planted_in->layout();
  const Gradients& gradients = planted_in->gradients();
  const std::vector<Unit> units = layout.units(planted_in->head_segments() > 0);
  for (const int64_t u : planted_in->reduced_units()) {
    const Unit& unit = units[static_cast<size_t>(u)];
    const std::byte* base = nullptr;
    try {
      base = gradients.unit(u);
    } catch (const Error&) {
      continue;  // in no slot
    }
    const int64_t offset = (static_cast<const std::byte*>(gradient) - base) /
                           static_cast<int64_t>(dtype_size(gradients.dtype()));
    for (const TensorPlace& place : layout.blocks[static_cast<size_t>(unit.block)].tensors) {
      const int64_t first = std::max(place.offset, unit.first);
      const int64_t end = std::min(place.offset + place.parameter.elements(), unit.first + unit.elements);
      if (!place.frozen && first < end && unit.first + offset == first) return place.parameter.name;
    }
  }
  return "";
}

void accumulate_and_plant(const Accumulate& args, StreamView stream) {
  library_kernels(DeviceType::kCpu).accumulate(args, stream);
  if (plant.where != Plant::Where::kAddition || !planted.empty()) return;
  const std::string tensor = tensor_at(args.to);
  if (tensor.empty() || calls++ != plant.call) return;
  put(args.to, args.to_dtype, args.elements - 1);
  planted = tensor;
}

const Kernels& planting_kernels() {
  static const Kernels kernels = [] {
    Kernels out = library_kernels(DeviceType::kCpu);
    out.granule_norms = plant_and_norm;
    out.accumulate = accumulate_and_plant;
    return out;
  }();
  return kernels;
}

struct TierRun {
  const char* name;
  Variant run;
};

// One of each tier that gradients have.
std::vector<TierRun> tiers() {
  Variant run;
  run.kernels = &planting_kernels();
  run.recompute = true;
  std::vector<TierRun> out;
  const auto add = [&](const char* name, auto&& change) {
    out.push_back({name, run});
    change(out.back().run);
  };
  const auto on_disk = [](Variant& r) { r.optimizer = r.gradients = r.weights = r.activations = true; };
  add("device", [](Variant&) {});
  add("device, bf16, LoRA", [](Variant& r) { r.lora = true; });
  add("disk", on_disk);
  add("disk, bf16", [&](Variant& r) { on_disk(r), r.gradient_dtype = DType::kBF16; });
  add("disk, half of it", [&](Variant& r) { on_disk(r), r.mixed = true; });
  add("disk beside a device", [&](Variant& r) { on_disk(r), r.slots_on_device = true; });
  add("host memory beside a device", [&](Variant& r) { on_disk(r), r.slots_on_device = true, r.host = 1; });
  add("disk, cut head", [&](Variant& r) { on_disk(r), r.tied = false, r.vocab = 9000, r.layers = 1; });
  return out;
}

class BadSteps : public ::testing::Test {
 protected:
  ~BadSteps() override { plant = {}; }

  static const char* plant_next(Plant::Where where, int64_t call, int64_t element = 0) {
    const bool nan = call % 3 == 1;
    const float inf = call % 2 == 0 ? HUGE_VALF : -HUGE_VALF;
    plant = {where, call, element, nan ? std::numeric_limits<float>::quiet_NaN() : inf};
    calls = 0;
    planted = "";
    return nan ? "nan" : "inf";
  }
};

TEST_F(BadSteps, AreSkippedAndNameTheTensorInEveryTier) {
  for (const TierRun& tier : tiers()) {
    SCOPED_TRACE(tier.name);
    plant = {};
    Training training(tier.run);
    planted_in = &training;
    int64_t step = 1;
    training.step(step);
    const State before = training.state();
    for (int64_t call = 0;; ++call) {
      const std::string kind = plant_next(Plant::Where::kAddition, call);
      if (call == 9) plant.where = Plant::Where::kNowhere;
      const StepResult result = training.step(++step);
      if (planted.empty()) {
        EXPECT_GE(call, 6);
        EXPECT_FALSE(result.skipped);
        EXPECT_EQ(result.fault, "");
        break;
      }
      EXPECT_TRUE(result.skipped);
      EXPECT_EQ(result.fault, "the gradient of tensor " + planted + " is " + kind + " (rank 0)");
      // What is skipped changes nothing; looked at once, as it takes time.
      if (call == 3) {
        EXPECT_TRUE(training.state() == before) << "a skipped step has changed something";
      }
    }
    EXPECT_FALSE(training.state() == before);
  }
}

// Every tensor, at its first or its last element, among its neighbours in a granule.
TEST_F(BadSteps, NameEveryTensor) {
  Training training(tiers()[0].run);
  const ModelLayout& layout = training.layout();
  const std::vector<int64_t> order = training.reduced_units();
  int64_t count = 0, step = 0;
  for (size_t call = 0; call < order.size(); ++call) {
    for (const TensorPlace& place : layout.blocks[static_cast<size_t>(order[call])].tensors) {
      const int64_t element = place.offset + (++count % 2 == 0 ? 0 : place.parameter.elements() - 1);
      const char* kind = plant_next(Plant::Where::kNorms, static_cast<int64_t>(call), element);
      const StepResult result = training.step(++step);
      EXPECT_EQ(result.fault, "the gradient of tensor " + place.parameter.name + " is " + kind + " (rank 0)");
    }
  }
  EXPECT_GT(count, 15);
}

// Of several the one that backward met first is named: the others follow from it.
TEST_F(BadSteps, NameTheBlockThatBackwardReachedFirst) {
  Training training(tiers()[2].run);
  training.step(1);
  training.replace_norm_weight(std::numeric_limits<float>::infinity());
  const StepResult result = training.step(2);
  EXPECT_TRUE(result.skipped);
  EXPECT_EQ(result.fault, "the gradient of tensor norm is nan (rank 0)");
}

TEST_F(BadSteps, WithoutGlobalClippingEndTheRunAtOnceAndNameTheTensor) {
  for (const Clip clip : {Clip::kBlock, Clip::kNone}) {
    for (const size_t tier : {0, 2, 5, 6, 7}) {
      Variant run = tiers()[tier].run;
      run.clip = clip;
      SCOPED_TRACE(tiers()[tier].name);
      for (const int64_t call : {0, 3, 4}) {
        plant = {};
        Training training(run);
        planted_in = &training;
        const std::string kind = plant_next(Plant::Where::kAddition, call);
        try {
          training.step(7);
          ADD_FAILURE() << "the run goes on";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), Exit::kNumerics);
          EXPECT_EQ(error.text().area, "NUM-12");
          EXPECT_TRUE(
              error.text().what.starts_with("step 7: the gradient of tensor " + planted + " is " + kind))
              << error.report();
        }
      }
    }
  }
}

}  // namespace
}  // namespace lm
