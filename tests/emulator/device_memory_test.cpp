// What LibTorch takes from a GPU in a training step against what the plan sets aside for it: attention is
// the only large part, and what it takes depends on heads, documents, splits and types.
#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>

#include "base/bytes.h"
#include "kernels/runtime.h"
#include "tests/support/counts.h"
#include "tests/support/llama_spec.h"
#include "train/metrics.h"
#include "train/rank.h"
#include "weights/load_store.h"

namespace lm {
namespace {

constexpr int64_t kTokens = 2048;  // of a micro-batch

struct Subject {
  const char* name = "";
  int64_t heads = 1, kv_heads = 1, head_dim = 128;
  int64_t documents = 1;
  DType dtype = DType::kBF16;
  bool deterministic = true;
  double softcap = 0;
};

StreamView stream() {
  static const StreamView kStream = start_torch(DeviceType::kCuda, 2, true);
  return kStream;
}

// Two documents after each other are as long as any other two, and few have the same length.
int64_t length_of(int64_t document, int64_t documents) {
  const int64_t mean = kTokens / documents;
  if (documents == 1) return mean;
  return document % 2 == 0 ? mean + document % 14 : mean - (document - 1) % 14;
}

Batch batch_of(int64_t documents) {
  Batch batch;
  batch.document_start.push_back(0);
  for (int64_t d = 0; d < documents; ++d) {
    const int64_t length = length_of(d, documents);
    for (int64_t t = 0; t < length; ++t) {
      const auto token = [&](int64_t at) { return static_cast<int32_t>((at * 7 + d * d) % 97); };
      batch.token.push_back(token(t));
      batch.position.push_back(static_cast<int32_t>(t));
      batch.target.push_back(t + 1 < length ? token(t + 1) : -1);
      batch.sample.push_back(static_cast<int32_t>(d));
    }
    batch.document_start.push_back(static_cast<int32_t>(batch.token.size()));
  }
  return batch;
}

class Trainee {
 public:
  explicit Trainee(const Subject& subject) : documents_(subject.documents) {
    stream();  // starts LibTorch
    at::globalContext().setDeterministicAlgorithms(subject.deterministic, false);
    spec_ = llama_spec({.ffn = 64,
                        .heads = subject.heads,
                        .kv_heads = subject.kv_heads,
                        .head_dim = subject.head_dim,
                        .vocab = 97});
    for (LayerSpec& layer : spec_.layers) layer.attention().softcap = subject.softcap;
    spec_.max_positions = kTokens;
    config_.model.dtype = subject.dtype == DType::kBF16 ? ModelDType::kBF16 : ModelDType::kF32;
    config_.data.max_length = kTokens;
    config_.data.packing = true;
    config_.train.micro_batch = config_.train.global_batch = 1;
    config_.optimizer.threads = 2;
    config_.run.deterministic = subject.deterministic;
    layout_ = make_layout(spec_, nullptr, subject.dtype);
    Machine machine;
    machine.cores = 2;
    machine.gpus.push_back(built_in_gpu("H100"));
    plan = make_plan({config_, spec_, nullptr, layout_, DeviceType::kCuda}, machine);
  }

  // What LibTorch keeps from an earlier rank is given back first.
  void start() {
    at::cuda::clearCublasWorkspaces();
    c10::cuda::CUDACachingAllocator::emptyCache();
    c10::cuda::CUDACachingAllocator::resetPeakStats(0);
    rank_ = std::make_unique<Rank>(
        RankSetup{.spec = spec_,
                  .layout = layout_,
                  .adapter = nullptr,
                  .optimizer = config_.optimizer,
                  .plan = plan,
                  .seed = 1,
                  .max_length = kTokens,
                  .tokens_per_step = kTokens,
                  .max_grad_norm = 1,
                  .swap_paths = {{std::filesystem::temp_directory_path().string(), 1}}},
        stream());
    initialise_weights({spec_, layout_, plan.numerics.dtype, stream(), 1}, 1, rank_->weights());
    rank_->weights_ready();
  }

  StepResult step(int64_t number) {
    const Batch batch = batch_of(documents_);
    StepBatches batches;
    for (const int32_t target : batch.target) batches.target_tokens += target >= 0 ? 1 : 0;
    batches.micro.push_back(batch);
    return rank_->step().run(batches, number, 1e-3);
  }

  Plan plan;

 private:
  int64_t documents_;
  ModelSpec spec_;
  Config config_;
  ModelLayout layout_;
  std::unique_ptr<Rank> rank_;
};

int64_t peak_of_library() {
  return c10::cuda::CUDACachingAllocator::getDeviceStats(0).reserved_bytes[0].peak;
}

const Subject kManyHeads = {.name = "", .heads = 64, .kv_heads = 8, .head_dim = 128};

// Each large enough that a part of the formula that is missing is more than the reserve has to spare: one
// long document has the most splits of dQ, 16 documents the most rows, 64 are more than attention is given at
// once.
TEST(DeviceMemory, AStepTakesNoMoreOfTheLibrarysThanThePlanCounts) {
  const Subject subjects[] = {
      {"one document, two heads per key", 2, 1, 128, 1},
      {"one document, every head its own keys", 1, 1, 128, 1},
      {"16 documents, not deterministic", kManyHeads.heads, kManyHeads.kv_heads, 128, 16, DType::kBF16,
       false},
      {"64 documents, in parts", kManyHeads.heads, kManyHeads.kv_heads, 128, 64, DType::kBF16, false},
      {"fp32, 16 documents", 16, 4, 128, 16, DType::kF32},
      {"heads of 512, one document", 4, 1, 512, 1},
      {"heads of 512 in fp32, 3 documents", 2, 2, 512, 3, DType::kF32},
      {"soft caps, 2 documents", 8, 4, 256, 2, DType::kBF16, true, 50},
  };
  for (const Subject& subject : subjects) {
    Trainee trainee(subject);
    trainee.start();
    trainee.step(1);
    const int64_t planned = trainee.plan.library_device_bytes, taken = peak_of_library();
    std::printf("%-40s planned %s, taken %s\n", subject.name, format_bytes(planned).c_str(),
                format_bytes(taken).c_str());
    EXPECT_LE(taken, planned) << subject.name;
    EXPECT_GE(taken, planned / 3) << subject.name << ": the rest of the GPU could have been used";
  }
}

int64_t planned_for(const Plan& plan, const std::string& name) {
  int64_t bytes = 0;
  for (const ClassBytes& row : plan.classes) bytes += row.name == name ? row.bytes : 0;
  return bytes;
}

TEST(DeviceMemory, TheLibraryIsRefusedMoreThanThePlanGivesIt) {
  Trainee trainee({.name = "", .heads = 2});
  trainee.start();
  const int64_t bytes = trainee.plan.library_device_bytes;
  EXPECT_EQ(planned_for(trainee.plan, "LibTorch"), bytes);
  const auto take = [](int64_t size) { at::empty({size}, at::TensorOptions(at::kCUDA).dtype(at::kByte)); };
  EXPECT_NO_THROW(take(bytes / 2));
  c10::cuda::CUDACachingAllocator::emptyCache();
  EXPECT_THROW(take(bytes + 8 * kMiB), c10::OutOfMemoryError);
}

// Ours and LibTorch's, as CUDA sees them go; allocations begin at pages of their own.
TEST(DeviceMemory, MetricsCountAllThatIsTaken) {
  stream();
  c10::cuda::CUDACachingAllocator::emptyCache();
  const int64_t counted = device_bytes(), library = library_device_bytes();
  const int64_t free_bytes = cuda_device(0).free_bytes;
  Trainee trainee({.name = "", .heads = 4, .kv_heads = 2, .head_dim = 16, .documents = 64});
  trainee.start();
  trainee.step(1);
  const int64_t taken = free_bytes - cuda_device(0).free_bytes;
  EXPECT_GT(taken, trainee.plan.arena.bytes);
  EXPECT_GT(library_device_bytes(), library);
  EXPECT_NEAR(static_cast<double>(device_bytes() - counted), static_cast<double>(taken), 512.0 * kKiB);
}

// The emulator computes each document by itself, so that the cut must not change a bit.
TEST(DeviceMemory, DocumentsInPartsTrainAsTheyDoAtOnce) {
  constexpr int64_t kSteps = 2;
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    if (dtype == DType::kF32 && !test::full_counts()) break;
    Trainee parts({.name = "", .heads = 4, .kv_heads = 2, .head_dim = 16, .documents = 64, .dtype = dtype});
    ASSERT_LT(parts.plan.numerics.documents_at_once, 64);
    Trainee whole({.name = "", .heads = 4, .kv_heads = 2, .head_dim = 16, .documents = 64, .dtype = dtype});
    whole.plan.step.arithmetic.documents_at_once = 64;
    std::vector<StepResult> results[2];
    Trainee* const both[] = {&parts, &whole};
    for (int i : {0, 1}) {
      both[i]->start();
      for (int64_t step = 1; step <= kSteps; ++step) results[i].push_back(both[i]->step(step));
    }
    for (size_t step = 0; step < kSteps; ++step) {
      EXPECT_EQ(results[0][step].loss, results[1][step].loss);
      EXPECT_EQ(results[0][step].grad_norm, results[1][step].grad_norm);
    }
    EXPECT_LT(results[0].back().loss, results[0].front().loss);
  }
}

}  // namespace
}  // namespace lm
