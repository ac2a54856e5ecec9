// Offsets beyond 2^31 and 2^32 elements: three rows that lie 8 GiB apart, of which nothing else is touched.
#include <sys/mman.h>

#include <algorithm>

#include "tests/kernels/gpu_support.h"

namespace lm {
namespace {

constexpr int64_t kStride = (int64_t{1} << 32) + 64, kRows = 3, kMost = 64;
constexpr int64_t kBytes = ((kRows - 1) * kStride + kMost) * 2;
constexpr DType kType = DType::kBF16;

// The other arrays, in one block of floats; `out` is compared.
constexpr int64_t kOut = 4096, kSmall = 8192;
struct Small {
  float* base;
  float* ones() const { return base; }
  int32_t* index() const { return reinterpret_cast<int32_t*>(base + 1024); }
  float* cos() const { return base + 1280; }
  float* sin() const { return base + 1536; }
  void* weight() const { return base + 1792; }
  float* scratch() const { return base + 2048; }
  float* out(int64_t i = 0) const { return base + kOut + i; }
};
using Step = std::function<void(const Kernels&, StreamView, void* x, const Small&)>;

class GpuOffsets : public GpuKernels {
 protected:
  void SetUp() override {
    GpuKernels::SetUp();
    if (IsSkipped()) return;
    if (cuda_device(0).free_bytes < kBytes + (int64_t{1} << 30))
      GTEST_SKIP() << "the device has no " << kBytes << " bytes";
    void* const p =
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(p, MAP_FAILED);
    host_ = static_cast<uint16_t*>(p);
    device_ = static_cast<uint16_t*>(cuda_allocate(kBytes));
    device_small_ = {static_cast<float*>(cuda_allocate(kSmall * 4))};
  }
  void TearDown() override {
    if (host_ == nullptr) return;
    munmap(host_, kBytes);
    cuda_free(device_);
    cuda_free(device_small_.base);
  }

  // Runs `step` on both and compares the rows and `out`.
  void both(int64_t width, const Step& step, const std::vector<int32_t>& index = {0, 1, 2}) {
    std::vector<float> small(kSmall, 0.25f);
    const Small host{small.data()};
    std::fill_n(host.ones(), 1024, 1.f);
    std::copy(index.begin(), index.end(), host.index());
    const Stream stream(DeviceType::kCuda);
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t j = 0; j < width; ++j) {
        host_[r * kStride + j] = static_cast<uint16_t>(0x3F00 + r * 16 + j % 64);
      }
      copy_bytes(device_ + r * kStride, host_ + r * kStride, width * 2, stream.view());
    }
    copy_bytes(device_small_.base, small.data(), kSmall * 4, stream.view());
    stream.synchronize();
    step(kernels(DeviceType::kCuda), stream.view(), device_, device_small_);
    step(kernels(DeviceType::kCpu), {DeviceType::kCpu, nullptr, 1}, host_, host);
    Values got(kType, width), want(kType, width), got_out(DType::kF32, kSmall - kOut),
        want_out(DType::kF32, kSmall - kOut);
    for (int64_t r = 0; r < kRows; ++r) {
      copy_bytes(got.data(), device_ + r * kStride, width * 2, stream.view());
      stream.synchronize();
      std::memcpy(want.data(), host_ + r * kStride, static_cast<size_t>(width) * 2);
      compare(got, want, Want::kNear, 1e-5, static_cast<size_t>(r));
    }
    copy_bytes(got_out.data(), device_small_.out(), got_out.size() * 4, stream.view());
    stream.synchronize();
    std::memcpy(want_out.data(), host.out(), static_cast<size_t>(want_out.size()) * 4);
    compare(got_out, want_out, Want::kNear, 1e-4, kRows);
  }

 private:
  uint16_t* host_ = nullptr;
  uint16_t* device_ = nullptr;
  Small device_small_{};
};

TEST_F(GpuOffsets, Rope) {
  both(64, [&](const Kernels& k, StreamView v, void* x, const Small& s) {
    k.rope({.x = x,
            .cos = s.cos(),
            .sin = s.sin(),
            .position = s.index(),
            .rows = kRows,
            .heads = 1,
            .head_dim = 64,
            .x_stride = kStride,
            .dtype = kType},
           v);
  });
}

TEST_F(GpuOffsets, NeighboursPositionsAndCaps) {
  for (int64_t width : {64, 63}) {
    both(width, [&](const Kernels& k, StreamView v, void* x, const Small& s) {
      k.rope({.x = x,
              .cos = s.cos(),
              .sin = s.sin(),
              .position = s.index(),
              .rows = kRows,
              .heads = 1,
              .head_dim = width,
              .x_stride = kStride,
              .dim = width / 4 * 4,
              .neighbours = true,
              .dtype = kType},
             v);
      k.scale_by_position({.x = x,
                           .position = s.index(),
                           .rows = kRows,
                           .width = width,
                           .stride = kStride,
                           .slope = 0.5f,
                           .dtype = kType},
                          v);
      k.cap_logits({.logits = x,
                    .rows = kRows,
                    .columns = width,
                    .stride = kStride,
                    .scale = 2,
                    .cap = 3,
                    .dtype = kType},
                   v);
    });
  }
}

TEST_F(GpuOffsets, RmsNorm) {
  for (int64_t width : {64, 63}) {
    both(width, [&](const Kernels& k, StreamView v, void* x, const Small& s) {
      k.rms_norm_forward({.x = x,
                          .weight = s.weight(),
                          .out = x,
                          .rows = kRows,
                          .width = width,
                          .x_stride = kStride,
                          .out_stride = kStride,
                          .eps = 1e-6f,
                          .dtype = kType},
                         v);
    });
    both(width, [&](const Kernels& k, StreamView v, void* x, const Small& s) {
      k.rms_norm_backward({.dy = x,
                           .x = x,
                           .weight = s.weight(),
                           .rstd = s.ones(),
                           .dx = x,
                           .dweight = s.out(),
                           .partial = s.scratch(),
                           .rows = kRows,
                           .width = width,
                           .dy_stride = kStride,
                           .x_stride = kStride,
                           .dx_stride = kStride,
                           .dtype = kType},
                          v);
    });
  }
}

TEST_F(GpuOffsets, LayerNorm) {
  for (int64_t width : {64, 63}) {
    both(width, [&](const Kernels& k, StreamView v, void* x, const Small& s) {
      k.layer_norm_forward({.x = x,
                            .weight = s.weight(),
                            .bias = s.weight(),
                            .out = x,
                            .rows = kRows,
                            .width = width,
                            .x_stride = kStride,
                            .out_stride = kStride,
                            .eps = 1e-6f,
                            .dtype = kType},
                           v);
    });
    both(width, [&](const Kernels& k, StreamView v, void* x, const Small& s) {
      k.layer_norm_backward({.dy = x,
                             .x = x,
                             .weight = s.weight(),
                             .rstd = s.ones(),
                             .dx = x,
                             .dweight = s.out(),
                             .dbias = s.out(64),
                             .partial = s.scratch(),
                             .rows = kRows,
                             .width = width,
                             .dy_stride = kStride,
                             .x_stride = kStride,
                             .dx_stride = kStride,
                             .dtype = kType},
                            v);
    });
  }
}

TEST_F(GpuOffsets, Softmax) {
  for (int64_t width : {64, 63}) {
    both(width, [&](const Kernels& k, StreamView v, void* x, const Small& s) {
      k.softmax_statistics({.logits = x,
                            .target = s.index(),
                            .max = s.out(),
                            .sum = s.out(64),
                            .target_logit = s.out(128),
                            .rows = kRows,
                            .columns = width,
                            .stride = kStride,
                            .first_segment = true,
                            .dtype = kType},
                           v);
      k.softmax_gradient({.logits = x,
                          .target = s.index(),
                          .max = s.out(),
                          .sum = s.out(64),
                          .rows = kRows,
                          .columns = width,
                          .stride = kStride,
                          .scale = 1,
                          .dtype = kType},
                         v);
    });
  }
}

TEST_F(GpuOffsets, SumsAndBias) {
  both(64, [&](const Kernels& k, StreamView v, void* x, const Small& s) {
    k.add_bias({.x = x, .bias = s.weight(), .rows = kRows, .width = 64, .stride = kStride, .dtype = kType},
               v);
    k.sum_columns({.x = x,
                   .sums = s.out(),
                   .partial = s.scratch(),
                   .rows = kRows,
                   .width = 64,
                   .stride = kStride,
                   .dtype = kType},
                  v);
  });
}

// A table of rows of 64: their numbers are beyond 2^26.
TEST_F(GpuOffsets, Rows) {
  constexpr auto kRow = static_cast<int32_t>(kStride / 64);
  const std::vector<int32_t> rows{0, kRow, 2 * kRow};
  std::vector<int32_t> and_starts = rows;
  and_starts.insert(and_starts.end(), {0, 3});
  both(
      64,
      [&](const Kernels& k, StreamView v, void* x, const Small& s) {
        k.add_rows({.sums = s.scratch(),
                    .row = s.index(),
                    .gradient = x,
                    .slots = 3,
                    .width = 64,
                    .gradient_dtype = kType},
                   v);
      },
      rows);
  both(
      64,
      [&](const Kernels& k, StreamView v, void* x, const Small& s) {
        for (float* out : {s.out(), s.out(129)}) {  // in packs, and by itself
          k.gather_rows({.table = x, .index = s.index(), .out = out, .rows = 3, .width = 64, .dtype = kType},
                        v);
          k.gather_rows({.table = x,
                         .index = s.index(),
                         .out = out,
                         .rows = 3,
                         .width = 64,
                         .scale = 0.75f,
                         .add = true,
                         .dtype = kType},
                        v);
        }
        k.sum_rows({.source = x,
                    .order = s.index(),
                    .start = s.index() + 3,
                    .sums = s.out(512),
                    .slots = 1,
                    .width = 64,
                    .dtype = kType},
                   v);
      },
      and_starts);
}

}  // namespace
}  // namespace lm
