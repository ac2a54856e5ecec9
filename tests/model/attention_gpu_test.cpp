// Attention on a device against attention on the CPU, which attention_test.cpp holds against fp64: with
// another scale than 1 / sqrt(head_dim), with soft caps, and of heads that LibTorch's kernels do not compute.
#include "base/arena.h"
#include "kernels/library.h"
#include "kernels/runtime.h"
#include "tests/kernels/support.h"

namespace lm {
namespace {

struct Subject {
  int64_t heads = 4, kv_heads = 2, head_dim = 32, window = 0;
  float scale = 0.177F, softcap = 0;
  DType dtype = DType::kF32;
  std::vector<int32_t> start = {0, 9, 24};

  int64_t tokens() const { return start.back(); }
  int64_t width() const { return heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  std::string text() const {
    return std::string(dtype_name(dtype)) + ", head_dim " + std::to_string(head_dim) + ", window " +
           std::to_string(window) + ", scale " + std::to_string(scale) + ", soft cap " +
           std::to_string(softcap);
  }
};

// An array that lies on the stream's device, from the host and back.
class OnDevice {
 public:
  OnDevice(const Values& values, StreamView stream)
      : stream_(stream), shape_(values), memory_(stream.device, std::max<int64_t>(bytes(), 64)) {
    copy_bytes(memory_.data(), shape_.data(), bytes(), stream);  // which may happen later
  }
  std::byte* data(int64_t element = 0) const {
    return memory_.data() + element * static_cast<int64_t>(dtype_size(shape_.dtype()));
  }
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

OnDevice draw(const Subject& s, int64_t width, uint32_t seed, StreamView stream) {
  return {Values::random(s.dtype, s.tokens() * width, seed), stream};
}
OnDevice zeros(DType type, int64_t elements, StreamView stream) {
  return {Values(type, elements), stream};
}

// Numbers that say where documents begin, on the device.
class Starts {
 public:
  Starts(const std::vector<int32_t>& start, StreamView stream)
      : start_(start), memory_(stream.device, std::ssize(start) * 4) {
    copy_bytes(memory_.data(), start_.data(), std::ssize(start) * 4, stream);
  }
  const int32_t* data() const { return reinterpret_cast<const int32_t*>(memory_.data()); }

 private:
  std::vector<int32_t> start_;
  Memory memory_;
};

int64_t longest(const std::vector<int32_t>& start) {
  int32_t most = 0;
  for (size_t d = 0; d + 1 < start.size(); ++d) most = std::max(most, start[d + 1] - start[d]);
  return most;
}

// out, dq, dk and dv.
std::vector<Values> attention(const Subject& s, StreamView stream) {
  const Kernels& kernels = library_kernels(stream.device);
  const int64_t width = s.width(), kv_width = s.kv_width();
  const OnDevice q = draw(s, width, 1, stream), k = draw(s, kv_width, 2, stream),
                 v = draw(s, kv_width, 3, stream), dout = draw(s, width, 4, stream);
  const OnDevice out = zeros(s.dtype, s.tokens() * width, stream),
                 dq = zeros(s.dtype, s.tokens() * width, stream),
                 dk = zeros(s.dtype, s.tokens() * kv_width, stream),
                 dv = zeros(s.dtype, s.tokens() * kv_width, stream),
                 lse = zeros(DType::kF32, s.heads * s.tokens(), stream);
  const Starts starts(s.start, stream);
  const DocumentRun run{.first = 0,
                        .tokens = s.tokens(),
                        .count = std::ssize(s.start) - 1,
                        .longest = longest(s.start),
                        .start = starts.data()};
  const Documents documents{.start = s.start.data(), .count = run.count, .runs = &run, .run_count = 1};
  AttentionForward forward{.q = q.data(),
                           .k = k.data(),
                           .v = v.data(),
                           .out = out.data(),
                           .lse = reinterpret_cast<float*>(lse.data()),
                           .documents = documents,
                           .tokens = s.tokens(),
                           .heads = s.heads,
                           .kv_heads = s.kv_heads,
                           .head_dim = s.head_dim,
                           .q_stride = width,
                           .kv_stride = kv_width,
                           .window = s.window,
                           .scale = s.scale,
                           .softcap = s.softcap,
                           .dtype = s.dtype};
  AttentionBackward backward{.dout = dout.data(),
                             .q = q.data(),
                             .k = k.data(),
                             .v = v.data(),
                             .out = out.data(),
                             .lse = reinterpret_cast<float*>(lse.data()),
                             .dq = dq.data(),
                             .dk = dk.data(),
                             .dv = dv.data(),
                             .documents = documents,
                             .tokens = s.tokens(),
                             .heads = s.heads,
                             .kv_heads = s.kv_heads,
                             .head_dim = s.head_dim,
                             .q_stride = width,
                             .kv_stride = kv_width,
                             .dq_stride = width,
                             .dkv_stride = kv_width,
                             .window = s.window,
                             .scale = s.scale,
                             .softcap = s.softcap,
                             .dtype = s.dtype};
  const Memory scratch(stream.device,
                       std::max({kernels.attention_forward_scratch(forward, stream),
                                 kernels.attention_backward_scratch(backward, stream), int64_t{64}}));
  forward.scratch = backward.scratch = scratch.data();
  kernels.attention_forward(forward, stream);
  kernels.attention_backward(backward, stream);
  return {out.read(), dq.read(), dk.read(), dv.read()};
}

// out of the one document's tokens behind the first `past`.
Values going_on(const Subject& s, int64_t past, StreamView stream) {
  const Kernels& kernels = library_kernels(stream.device);
  const int64_t tokens = s.tokens() - past;
  const OnDevice q = draw(s, s.width(), 1, stream), k = draw(s, s.kv_width(), 2, stream),
                 v = draw(s, s.kv_width(), 3, stream), out = zeros(s.dtype, tokens * s.width(), stream),
                 lse = zeros(DType::kF32, s.heads * tokens, stream);
  const std::vector<int32_t> start{0, static_cast<int32_t>(tokens)};
  const Starts starts(start, stream), key_starts(s.start, stream);
  const DocumentRun run{.first = 0,
                        .tokens = tokens,
                        .count = 1,
                        .longest = tokens,
                        .start = starts.data(),
                        .key_start = key_starts.data()};
  AttentionForward forward{
      .q = q.data(past * s.width()),
      .k = k.data(),
      .v = v.data(),
      .out = out.data(),
      .lse = reinterpret_cast<float*>(lse.data()),
      .documents = {.start = start.data(), .count = 1, .runs = &run, .run_count = 1, .past = past},
      .tokens = tokens,
      .heads = s.heads,
      .kv_heads = s.kv_heads,
      .head_dim = s.head_dim,
      .q_stride = s.width(),
      .kv_stride = s.kv_width(),
      .window = s.window,
      .scale = s.scale,
      .softcap = s.softcap,
      .dtype = s.dtype};
  const Memory scratch(stream.device,
                       std::max(kernels.attention_forward_scratch(forward, stream), int64_t{64}));
  forward.scratch = scratch.data();
  kernels.attention_forward(forward, stream);
  return out.read();
}

class AttentionOnDevice : public testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    if (cuda_device_count(&reason) == 0) GTEST_SKIP() << "no CUDA device: " << reason;
    device_ = start_torch(DeviceType::kCuda, 2, true);
    cap_library_memory(int64_t{1} << 40);  // a training run before has left its own limit
  }
  void expect_cpus(const Subject& s) const {
    constexpr const char* kNames[] = {"out", "dq", "dk", "dv"};
    const std::vector<Values> got = attention(s, device_), want = attention(s, cpu_);
    for (size_t i = 0; i < got.size(); ++i) expect_alike(got[i], want[i], s, kNames[i]);
  }
  static void expect_alike(const Values& got, const Values& want, const Subject& s, const char* name) {
    double difference = 0, size = 0;
    for (int64_t j = 0; j < want.size(); ++j) {
      difference += std::pow(got[j] - want[j], 2);
      size += std::pow(want[j], 2);
    }
    EXPECT_LE(std::sqrt(difference / size), s.dtype == DType::kF32 ? 1e-5 : 2e-2) << name << ", " << s.text();
  }

  StreamView device_;
  const StreamView cpu_{DeviceType::kCpu, nullptr, 2};
};

TEST_F(AttentionOnDevice, HasTheScaleThatItIsAskedFor) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const float scale : {0.0625F, 0.4F})  // 1 / sqrt(head_dim) is 0.177
      expect_cpus({.scale = scale, .dtype = dtype});
  }
}

TEST_F(AttentionOnDevice, HasTheSoftCapThatItIsAskedFor) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t window : {0, 4}) {
      for (const float softcap : {0.5F, 3.F})
        expect_cpus({.window = window, .scale = 0.4F, .softcap = softcap, .dtype = dtype});
    }
  }
}

TEST_F(AttentionOnDevice, ComputesWideHeads) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t window : {0, 4})
      expect_cpus({.head_dim = 512, .window = window, .scale = 0.05F, .dtype = dtype});
  }
  expect_cpus({.heads = 3, .kv_heads = 1, .head_dim = 320, .scale = 0.05F, .softcap = 1});
}

// Sizes for which some cards have no backward pass of the library's.
TEST_F(AttentionOnDevice, ComputesHeadsThatWantSharedMemory) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t head_dim : {192, 208, 224, 256})
      expect_cpus({.head_dim = head_dim, .scale = 0.07F, .dtype = dtype});
  }
}

TEST_F(AttentionOnDevice, CappedAndWideDocumentsGoOn) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t window : {0, 4}) {
      for (const int64_t past : {1, 20, 23}) {
        const Subject capped{.window = window, .softcap = 1, .dtype = dtype, .start = {0, 24}};
        const Subject wide{
            .head_dim = 512, .window = window, .scale = 0.05F, .dtype = dtype, .start = {0, 24}};
        for (const Subject& s : {capped, wide})
          expect_alike(going_on(s, past, device_), going_on(s, past, cpu_), s, "out");
      }
    }
  }
}

}  // namespace
}  // namespace lm
