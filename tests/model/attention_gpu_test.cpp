// Attention on a device against attention on the CPU, which attention_test.cpp holds against fp64: with
// another scale than 1 / sqrt(head_dim), which no model of model_gpu_test.cpp asks for.
#include "base/arena.h"
#include "kernels/library.h"
#include "kernels/runtime.h"
#include "tests/kernels/support.h"

namespace lm {
namespace {

constexpr int64_t kHeads = 4, kKvHeads = 2, kHeadDim = 32, kWidth = kHeads * kHeadDim,
                  kKvWidth = kKvHeads * kHeadDim;
constexpr int32_t kStart[] = {0, 9, 24};
constexpr int64_t kTokens = 24;

// An array that lies on the stream's device, from the host and back.
class OnDevice {
 public:
  OnDevice(const Values& values, StreamView stream)
      : stream_(stream), shape_(values), memory_(stream.device, std::max<int64_t>(bytes(), 64)) {
    copy_bytes(memory_.data(), shape_.data(), bytes(), stream);  // which may happen later
  }
  void* data() const { return memory_.data(); }
  Values read() const {
    Values out = shape_;
    copy_bytes(out.data(), memory_.data(), bytes(), stream_);
    synchronize(stream_);
    return out;
  }

 private:
  int64_t bytes() const { return shape_.size() * static_cast<int64_t>(dtype_size(shape_.dtype())); }
  StreamView stream_;
  Values shape_;
  Memory memory_;
};

// out, dq, dk and dv.
std::vector<Values> attention(DType dtype, float scale, StreamView stream) {
  const Kernels& kernels = library_kernels(stream.device);
  const auto draw = [&](int64_t width, uint32_t seed) {
    return OnDevice(Values::random(dtype, kTokens * width, seed), stream);
  };
  const auto zeros = [&](DType type, int64_t elements) { return OnDevice(Values(type, elements), stream); };
  const OnDevice q = draw(kWidth, 1), k = draw(kKvWidth, 2), v = draw(kKvWidth, 3), dout = draw(kWidth, 4);
  const OnDevice out = zeros(dtype, kTokens * kWidth), dq = zeros(dtype, kTokens * kWidth),
                 dk = zeros(dtype, kTokens * kKvWidth), dv = zeros(dtype, kTokens * kKvWidth),
                 lse = zeros(DType::kF32, kHeads * kTokens);
  const Memory starts(stream.device, sizeof kStart);
  copy_bytes(starts.data(), kStart, sizeof kStart, stream);
  const DocumentRun run{.first = 0,
                        .tokens = kTokens,
                        .count = 2,
                        .longest = 15,
                        .start = reinterpret_cast<const int32_t*>(starts.data())};
  const Documents documents{.start = kStart, .count = 2, .runs = &run, .run_count = 1};
  AttentionForward forward{.q = q.data(),
                           .k = k.data(),
                           .v = v.data(),
                           .out = out.data(),
                           .lse = static_cast<float*>(lse.data()),
                           .documents = documents,
                           .tokens = kTokens,
                           .heads = kHeads,
                           .kv_heads = kKvHeads,
                           .head_dim = kHeadDim,
                           .q_stride = kWidth,
                           .kv_stride = kKvWidth,
                           .scale = scale,
                           .dtype = dtype};
  AttentionBackward backward{.dout = dout.data(),
                             .q = q.data(),
                             .k = k.data(),
                             .v = v.data(),
                             .out = out.data(),
                             .lse = static_cast<float*>(lse.data()),
                             .dq = dq.data(),
                             .dk = dk.data(),
                             .dv = dv.data(),
                             .documents = documents,
                             .tokens = kTokens,
                             .heads = kHeads,
                             .kv_heads = kKvHeads,
                             .head_dim = kHeadDim,
                             .q_stride = kWidth,
                             .kv_stride = kKvWidth,
                             .dq_stride = kWidth,
                             .dkv_stride = kKvWidth,
                             .scale = scale,
                             .dtype = dtype};
  const Memory scratch(stream.device,
                       std::max({kernels.attention_forward_scratch(forward, stream),
                                 kernels.attention_backward_scratch(backward, stream), int64_t{64}}));
  forward.scratch = backward.scratch = scratch.data();
  kernels.attention_forward(forward, stream);
  kernels.attention_backward(backward, stream);
  return {out.read(), dq.read(), dk.read(), dv.read()};
}

TEST(AttentionOnDevice, HasTheScaleThatItIsAskedFor) {
  std::string reason;
  if (cuda_device_count(&reason) == 0) GTEST_SKIP() << "no CUDA device: " << reason;
  const StreamView device = start_torch(DeviceType::kCuda, 2, true);
  const StreamView cpu{DeviceType::kCpu, nullptr, 2};
  constexpr const char* kNames[] = {"out", "dq", "dk", "dv"};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const double bound = dtype == DType::kF32 ? 1e-5 : 2e-2;
    for (const float scale : {0.0625F, 0.4F}) {  // 1 / sqrt(head_dim) is 0.177
      const std::vector<Values> got = attention(dtype, scale, device), want = attention(dtype, scale, cpu);
      for (size_t i = 0; i < got.size(); ++i) {
        double difference = 0, size = 0;
        for (int64_t j = 0; j < want[i].size(); ++j) {
          difference += std::pow(got[i][j] - want[i][j], 2);
          size += std::pow(want[i][j], 2);
        }
        EXPECT_LE(std::sqrt(difference / size), bound)
            << kNames[i] << ", " << dtype_name(dtype) << ", scale " << scale;
      }
    }
  }
}

}  // namespace
}  // namespace lm
