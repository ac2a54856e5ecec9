// The model on a device against the model on the CPU: the same weights, batches and seeds give the same
// logits, losses, gradients (every tensor by itself) and the same change of weights over some steps, within
// what each type's rounding allows. Where state lives is offload_run_gpu_test's matter; here each tier is
// seen once.
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdio>

#include "base/bytes.h"
#include "gpu_compare.h"
#include "kernels/runtime.h"
#include "tests/support/counts.h"

namespace lm {
namespace {

// What may lie between two correct runs: three times (bf16) to ten times (fp32) the worst of all cases on the
// emulator, which the line below each row says; a device's own attention and GEMMs round in other places yet.
struct Bounds {
  double logits, loss, norm, gradient, direction, length, change, change_of_one, whole_turn, turn;
};
// Sums of up to 9000 terms in another order, each 6e-8 of its partial sum. TF32 would be 5e-4 of every
// product.
constexpr Bounds kF32Bounds = {5e-6, 2e-6, 2e-6, 2e-5, 1e-9, 5e-6, 6e-5, 3e-4, 2e-9, 5e-8};
//                             6e-7, 2e-7, 2e-7, 2e-6, 4e-12, 6e-7, 6e-6, 3e-5, 2e-11, 4e-10
// 4e-3 of every activation and gradient on its way, lost in other places on either side.
constexpr Bounds kBF16Bounds = {4e-2, 8e-3, 1e-2, 0.15, 2e-3, 3e-2, 0.15, 0.6, 4e-3, 0.06};
//                              1.3e-2, 2.8e-3, 3.3e-3, 0.05, 7e-4, 1e-2, 0.05, 0.2, 1.3e-3, 0.02

class ModelOnDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    if (cuda_device_count(&reason) == 0) GTEST_SKIP() << "no CUDA device: " << reason;
    static const StreamView stream = start_torch(DeviceType::kCuda, 2, true);
    device_ = stream;
  }

  static Outcome on_cpu(const Training& training) { return train(training, {DeviceType::kCpu, nullptr, 2}); }
  Outcome on_device(const Training& training) const { return train(training, device_); }

  // A text that goes on, token by token, has the logits that it has as a whole.
  static void expect_continuation(const Training& training, const Outcome& one, double bound) {
    const auto vocab = static_cast<size_t>(training.spec.vocab);
    for (const auto& [end, logits] : one.continued) {
      const float* whole = one.logits.data() + static_cast<size_t>(end - 1) * vocab;
      double difference = 0, size = 0;
      for (size_t i = 0; i < vocab; ++i) {
        difference += std::pow(double{logits[i]} - double{whole[i]}, 2);
        size += std::pow(double{whole[i]}, 2);
      }
      EXPECT_LE(std::sqrt(difference / size), bound) << "after " << end << " tokens";
    }
  }

  void expect_agreement(const Training& training) const {
    SCOPED_TRACE(training.name);
    const Outcome cpu = on_cpu(training), device = on_device(training);
    EXPECT_TRUE(device.initialised == cpu.initialised) << "fresh weights differ";
    EXPECT_LE(device.arena_bytes, device.arena_planned);
    ASSERT_EQ(device.figures.size(), cpu.figures.size());
    for (size_t i = 0; i < cpu.figures.size(); ++i)
      EXPECT_NEAR(device.figures[i], cpu.figures[i],
                  (training.dtype == DType::kF32 ? 1e-5 : 3e-2) * std::abs(cpu.figures[i]))
          << "figure " << i;
    const Differences d = compare(device, cpu);
    std::printf("%-44s %s\n", training.name.c_str(), text(d).c_str());
    const Bounds& bounds = training.dtype == DType::kF32 ? kF32Bounds : kBF16Bounds;
    EXPECT_LE(d.logits, bounds.logits);
    expect_continuation(training, cpu, bounds.logits);
    expect_continuation(training, device, bounds.logits);
    EXPECT_LE(d.loss, bounds.loss);
    EXPECT_LE(d.norm, bounds.norm);
    EXPECT_LE(d.gradient.value, bounds.gradient) << d.gradient.where;
    EXPECT_LE(d.direction.value, bounds.direction) << d.direction.where;
    EXPECT_LE(d.length.value, bounds.length) << d.length.where;
    EXPECT_LE(d.change, bounds.change);
    EXPECT_LE(d.change_of_one.value, bounds.change_of_one) << d.change_of_one.where;
    EXPECT_LE(d.whole_turn, bounds.whole_turn);
    EXPECT_LE(d.turn.value, bounds.turn) << d.turn.where;
  }

  StreamView device_;
};

std::string describe(const std::string& family, DType dtype, bool lora) {
  return family + (lora ? " LoRA" : " full") + " " + dtype_name(dtype);
}

Training make(const std::string& family, DType dtype, bool lora, const std::string& what = "") {
  Training training{.name = describe(family, dtype, lora) + (what.empty() ? "" : ", " + what),
                    .spec = small_model(family),
                    .dtype = dtype};
  training.lora = lora;
  training.dropout = lora ? 0.1 : 0;
  return training;
}

TEST_F(ModelOnDevice, EveryFamilyAgreesInFp32) {
  for (const std::string& family : families()) {
    for (const bool lora : {false, true}) expect_agreement(make(family, DType::kF32, lora));
  }
}

TEST_F(ModelOnDevice, EveryFamilyAgreesInBf16) {
  for (const std::string& family : families()) {
    for (const bool lora : {false, true}) expect_agreement(make(family, DType::kBF16, lora));
  }
}

TEST_F(ModelOnDevice, EveryShapeOfALayerAgrees) {
  for (const std::string& shape : shapes()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const bool lora : {false, true}) {
        if (!test::full_counts() && lora != (dtype == DType::kBF16)) continue;
        Training training = make(shape, dtype, lora);
        training.documents = {{20, 9, 17}, {31}};
        expect_agreement(training);
      }
    }
  }
}

TEST_F(ModelOnDevice, DocumentsOfAnyLengthAgree) {
  const std::vector<std::pair<std::string, DocumentLengths>> shapes = {
      {"one document", {{48}}},
      {"documents of three tokens",
       {DocumentLengths::value_type(16, 3)}},  // of two, q and k have no gradient
      {"micro-batches", {{30, 11}, {48}, {2, 5, 21, 3}}},
  };
  for (const auto& [what, documents] : shapes) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const bool lora : {false, true}) {
        if (!test::full_counts() && lora != (dtype == DType::kBF16)) continue;
        Training training = make("qwen2", dtype, lora, what);
        training.documents = documents;
        expect_agreement(training);
      }
    }
  }
}

// As many documents as a plan can meet. (Of two tokens the first has one key, and q and k no gradient: whole
// gradients are not compared.)
TEST_F(ModelOnDevice, TheMostDocumentsFit) {
  for (const bool lora : {false, true}) {
    Training training = make("llama", DType::kF32, lora, "24 documents");
    training.documents = {std::vector<int64_t>(24, 2), std::vector<int64_t>(24, 2)};
    training.row_chunk = 0;
    const Outcome device = on_device(training);
    EXPECT_LE(compare(device, on_cpu(training)).loss, kF32Bounds.loss);
    EXPECT_GE(device.arena_bytes, device.arena_planned * 4 / 5);
    std::printf("%s arena %ld of %ld\n", training.name.c_str(), device.arena_bytes, device.arena_planned);
  }
}

TEST_F(ModelOnDevice, RecomputationAgrees) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool lora : {false, true}) {
      Training training = make("biases", dtype, lora, "recomputed");
      training.recompute = true;
      training.documents = {{20, 9, 17}, {31}};
      expect_agreement(training);
    }
  }
}

// A's of one matrix are then one product, and their gradients go through a scratch.
TEST_F(ModelOnDevice, LoraWithoutDropoutAgrees) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const char* family : {"llama", "biases"}) {
      Training training = make(family, dtype, true, "no dropout");
      training.dropout = 0;
      training.documents = {{20, 9, 17}, {31}};
      expect_agreement(training);
      training.name += ", bf16 gradients, recomputed";
      training.recompute = true;
      if (dtype == DType::kBF16) training.gradients = DType::kBF16;
      expect_agreement(training);
    }
  }
}

// Of two tokens some experts have no rows, in the step's first micro-batch, whose gradients are written, and
// in a later one, whose are added. In bf16 each token goes through all experts: what either side rounds would
// choose others now and then.
TEST_F(ModelOnDevice, MixturesOfExpertsAgree) {
  for (const bool lora : {false, true}) {
    for (const bool recompute : {false, true}) {
      Training training = make("experts", DType::kF32, lora, recompute ? "recomputed" : "");
      training.documents = {{20, 9, 17}, {2}, {31}};
      training.recompute = recompute;
      expect_agreement(training);
    }
    Training training = make("experts", DType::kF32, lora, "two tokens first");
    training.documents = {{2}, {31}};
    expect_agreement(training);
    training = make("all experts", DType::kBF16, lora);
    training.documents = {{20, 9, 17}, {31}};
    expect_agreement(training);
    training.name += ", bf16 gradients";
    training.gradients = DType::kBF16;
    expect_agreement(training);
  }
  expect_agreement(make("many experts", DType::kF32, false, "two launches"));
}

// Some experts have no rows, whose pairs have no gradient, and their ranks are whole packs or less than one.
TEST_F(ModelOnDevice, AdaptersOfExpertsAgree) {
  const auto adapted = [](const std::string& family, DType dtype, const std::string& what) {
    Training training = make(family, dtype, true, what);
    training.adapted_experts = true;
    training.dropout = 0;
    training.documents = {{20, 9, 17}, {2}, {31}};
    return training;
  };
  Training training = adapted("experts", DType::kF32, "adapted experts");
  expect_agreement(training);
  training.recompute = true;
  training.documents = {{2}, {31}};
  training.name += ", recomputed, two tokens first";
  expect_agreement(training);
  training = adapted("all experts", DType::kBF16, "adapted experts");
  expect_agreement(training);
  training.name += ", bf16 gradients";
  training.gradients = DType::kBF16;
  expect_agreement(training);
  training = adapted("all experts", DType::kBF16, "adapted experts, fp32 pairs");
  training.fp32_adapters = true;
  expect_agreement(training);
  expect_agreement(adapted("many experts", DType::kF32, "adapted experts, two launches"));
  // Beside biases and a clamped GLU.
  expect_agreement(adapted("gpt-oss, many experts", DType::kF32, "adapted experts, two launches"));
  expect_agreement(adapted("gpt-oss, all experts", DType::kBF16, "adapted experts"));
}

// Several micro-batches, which do not pass the blocks together, have to be counted before the first goes
// back.
TEST_F(ModelOnDevice, BalancedRoutersAgree) {
  for (const bool recompute : {false, true}) {
    Training training = make("experts", DType::kF32, false, recompute ? "balanced, recomputed" : "balanced");
    training.router_aux_loss = 0.5;
    training.recompute = recompute;
    training.documents = {{20, 9, 17}, {2}, {31}};
    expect_agreement(training);
    training.documents = {{31}};
    training.name += ", one micro-batch";
    expect_agreement(training);
  }
  // The pass that counts drops what the step drops.
  Training training = make("experts", DType::kF32, true, "balanced");
  training.router_aux_loss = 0.5;
  training.documents = {{20, 9, 17}, {31}};
  expect_agreement(training);
}

// A correction is fp32 whatever the model is: its fresh values are drawn as fp32. Experts beside an MLP have
// norms of their own, of the sum, and factors of the router's weights.
TEST_F(ModelOnDevice, SharedExpertsAndOtherRoutersAgree) {
  for (const char* const family : {"shared expert", "sigmoid router", "experts beside"}) {
    for (const bool lora : {false, true}) {
      Training training = make(family, DType::kF32, lora);
      training.documents = {{20, 9, 17}, {2}, {31}};
      training.recompute = lora;
      expect_agreement(training);
    }
  }
}

// In fp32 attention goes in chunks, in bf16 it is flash attention: its lse lies by runs of documents, of
// which 16 are several.
TEST_F(ModelOnDevice, SinksClampedGlusAndBiasesOfExpertsAgree) {
  for (const bool lora : {false, true}) {
    Training training = make("gpt-oss", DType::kF32, lora);
    training.documents = {{20, 9, 17}, {2}, {31}};
    training.recompute = lora;
    expect_agreement(training);
    training = make("gpt-oss, all experts", DType::kBF16, lora);
    training.documents = {std::vector<int64_t>(16, 3), {31}};
    expect_agreement(training);
  }
  expect_agreement(make("gpt-oss, many experts", DType::kF32, false, "two launches"));
}

TEST_F(ModelOnDevice, ALargeVocabularyAgrees) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool lora : {false, true}) expect_agreement(make("large vocabulary", dtype, lora));
  }
}

TEST_F(ModelOnDevice, AChunkedHeadAgrees) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool lora : {false, true}) {
      if (!test::full_counts() && lora != (dtype == DType::kBF16)) continue;
      Training training = make("large vocabulary", dtype, lora, "cut head");
      training.weights = OffloadTier::kHost;
      training.documents = {{20, 9, 17}, {31}};
      expect_agreement(training);
    }
  }
}

TEST_F(ModelOnDevice, AWeightPerTargetAgrees) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool cut : {false, true}) {
      if (!test::full_counts() && cut != (dtype == DType::kF32)) continue;
      Training training =
          make("large vocabulary", dtype, !cut, cut ? "weighted targets, cut head" : "weighted targets");
      training.weighted = true;
      if (cut) training.weights = OffloadTier::kHost;
      training.documents = {{20, 9, 17}, {31}};
      expect_agreement(training);
    }
  }
}

TEST_F(ModelOnDevice, MastersGradientTypesAndClippingAgree) {
  Training training = make("llama", DType::kBF16, false, "fp32 master");
  training.master = Master::kF32;
  training.clip = Clip::kBlock;
  expect_agreement(training);
  training.name = "llama full bf16, no master, bf16 gradients";
  training.master = Master::kNone;
  training.gradients = DType::kBF16;
  training.documents = {{30, 11}, {48}};
  expect_agreement(training);
  training = make("llama", DType::kF32, false, "no clipping");
  training.clip = Clip::kNone;
  expect_agreement(training);
}

// Of a card of 7.5 it is the only half type (tests/emulator/CMakeLists.txt).
TEST_F(ModelOnDevice, Fp16Agrees) {
  for (const bool lora : {false, true}) {
    Training training = make("llama", DType::kF16, lora, "fp16");
    training.master = Master::kF32;
    expect_agreement(training);
  }
}

TEST_F(ModelOnDevice, EveryTierAgrees) {
  constexpr OffloadTier kHost = OffloadTier::kHost, kDisk = OffloadTier::kNvme, kNear = OffloadTier::kNone;
  struct Tiers {
    const char* what;
    OffloadTier optimizer, gradients, weights, activations;
    std::optional<bool> update_on_host;
  };
  const Tiers all[] = {{"optimizer on host, updated there", kHost, kNear, kNear, kNear, true},
                       {"optimizer on disk, updated on the device", kDisk, kNear, kNear, kNear, false},
                       {"gradients on host", kNear, kHost, kNear, kNear, {}},
                       {"weights on host", kNear, kNear, kHost, kNear, {}},
                       {"block inputs on host", kNear, kNear, kNear, kHost, {}},
                       {"everything on host", kHost, kHost, kHost, kHost, {}},
                       {"everything on disk", kDisk, kDisk, kDisk, kDisk, {}}};
  for (const Tiers& tiers : all) {
    for (const bool lora : {false, true}) {
      if (!test::full_counts() && lora != ((&tiers - all) % 2 == 1)) continue;
      Training training = make("smollm2", lora ? DType::kBF16 : DType::kF32, lora, tiers.what);
      training.optimizer = tiers.optimizer, training.gradients_tier = lora ? kNear : tiers.gradients;
      training.weights = tiers.weights, training.activations = tiers.activations;
      training.recompute = tiers.activations != kNear;
      training.update_on_host = tiers.update_on_host;
      training.documents = {{30, 11}, {48}};
      expect_agreement(training);
    }
  }
}

// What CUDA rounds an allocation up to: 2 MiB on a GPU. Several, and not small ones, which fit into what is
// left of earlier ones.
int64_t allocation_granularity() {
  constexpr int64_t kBytes = 4 * kMiB + 1;
  const int64_t before = cuda_device(0).free_bytes;
  std::array<void*, 16> probes{};
  for (void*& probe : probes) probe = cuda_allocate(kBytes);
  const int64_t taken = before - cuda_device(0).free_bytes;
  for (void* const probe : probes) cuda_free(probe);
  return taken / std::ssize(probes) - kBytes + 1;
}

TEST_F(ModelOnDevice, ARankTakesTheDeviceMemoryThatThePlanCounts) {
  const int64_t granularity = allocation_granularity();
  for (const char* what :
       {"full", "full, fp32", "LoRA", "recomputed", "optimizer on host", "everything on host"}) {
    const std::string text = what;
    const bool all = text == "everything on host";
    Training training =
        make("large heads", text == "full, fp32" ? DType::kF32 : DType::kBF16, text == "LoRA");
    training.row_chunk = 0;
    training.recompute = all || text == "recomputed";
    training.documents = {{48}, {48}, {48}, {48}};
    if (all || text == "optimizer on host") training.optimizer = OffloadTier::kHost;
    if (all) training.gradients_tier = training.weights = training.activations = OffloadTier::kHost;
    const DeviceMemory memory = device_memory(training, device_);
    const int64_t rounding = granularity * 48;  // blocks x classes
    std::printf("%-24s planned %ld taken %ld\n", what, memory.planned, memory.taken);
    EXPECT_LE(memory.taken, memory.planned + rounding) << what;
    EXPECT_GE(memory.taken, memory.planned - 64 * 1024 - rounding) << what;
  }
}

// TF32 would round both factors to 10 bits, and 1 + 2^-12 to 1.
TEST_F(ModelOnDevice, Fp32ProductsKeepTheirBits) {
  EXPECT_FALSE(at::globalContext().allowTF32CuBLAS());
  const at::Tensor x = at::full({64, 64}, 1 + 0x1p-12f, at::kFloat), one = at::eye(64, at::kFloat);
  const at::Tensor product = at::mm(x.to(at::kCUDA), one.to(at::kCUDA)).cpu();
  EXPECT_TRUE(at::equal(product, x));
}

// model.products = "tf32" reaches cuBLAS's calls, and only from then on.
TEST_F(ModelOnDevice, Fp32ProductsRoundTheirFactorsWhereTf32IsAllowed) {
  const at::Tensor x = at::full({64, 64}, 1 + 0x1p-12f, at::kFloat), one = at::eye(64, at::kFloat);
  const auto product = [&] { return at::mm(x.to(at::kCUDA), one.to(at::kCUDA)).cpu(); };
  allow_tf32(true);
  const at::Tensor rounded = product();
  allow_tf32(false);
  EXPECT_TRUE(at::equal(rounded, at::ones_like(x)));
  EXPECT_TRUE(at::equal(product(), x));
}

}  // namespace
}  // namespace lm
