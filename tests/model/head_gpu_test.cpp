// The gradient of the head's input on a GPU: products of the vocabulary's segments add to one fp32 sum, so no
// segment's part is rounded to the model's type, which cost half of a bf16's last digit for each.
#include "model/head_loss.h"

#include <cmath>

#include "base/arena.h"
#include "kernels/library.h"
#include "kernels/runtime.h"
#include "tests/kernels/support.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

constexpr int64_t kVocab = 3 * kVocabularySegment - 1000, kHidden = 64, kRows = 8;

// Row r of x has one 1, so its logits are the bits of a column of W, in every order of sums.
class HeadGradient {
 public:
  explicit HeadGradient(DType dtype)
      : dtype_(dtype),
        weights_(Values::random(dtype, kVocab * kHidden, 3, 0.5)),
        x_(dtype, kRows * kHidden),
        spec_(llama_spec({kHidden, 128, 1, 4, 2, 16, kVocab})) {
    for (int64_t r = 0; r < kRows; ++r) x_.set(r * kHidden + 3 * r, 1);
    for (int64_t r = 0; r < kRows; ++r) {
      double sum = 0;
      for (int64_t v = 0; v < kVocab; ++v) sum += std::exp(logit(r, v));
      sums_.push_back(static_cast<float>(sum));
    }
  }

  // dx_sum, fp32.
  Values computed(StreamView stream) const {
    Arena arena(stream.device, int64_t{64} << 20);
    RopeTable rope(spec_, 8, dtype_, stream.device, stream);
    Uploads uploads;
    const Context context{spec_,  dtype_, stream.device, library_kernels(stream.device),
                          stream, arena,  rope,          uploads};
    const Memory weights = sent(weights_, stream), x = sent(x_, stream);
    const Memory sums = sent(sums_.data(), kRows * 4, stream), target = sent(targets(), kRows * 4, stream);
    const std::vector<float> zeros(kRows * kHidden, 0);
    const Memory none = sent(zeros.data(), kRows * 4, stream);
    // What lies there before must not matter.
    const std::vector<float> sevens(kRows * kHidden, 7);
    const Memory dx = sent(sevens.data(), kRows * kHidden * 4, stream);
    const auto column = [](const Memory& memory) { return View{memory.data(), DType::kF32, kRows, 1, 1}; };
    HeadRows rows;
    rows.targets = {
        .count = kRows, .row = nullptr, .target = reinterpret_cast<const int32_t*>(target.data())};
    rows.normed = {x.data(), dtype_, kRows, kHidden, kHidden};
    rows.max = column(none), rows.sum = column(sums), rows.nll = column(none);
    rows.dx_sum = {dx.data(), DType::kF32, kRows, kHidden, kHidden};
    Head head;
    head.weight.weight = {weights.data(), dtype_, kVocab, kHidden, kHidden};
    head_matrix_backward(context, head, rows, {.row_chunk = kRows, .scale = 1});
    Values out(DType::kF32, kRows * kHidden);
    copy_bytes(out.data(), dx.data(), kRows * kHidden * 4, stream);
    synchronize(stream);
    return out;
  }

  // The largest distance from the sum in fp64 of the same gradients of logits, of the largest element.
  double error(const Values& dx) const {
    double most = 0, largest = 0;
    for (int64_t r = 0; r < kRows; ++r) {
      std::vector<double> want(kHidden, 0);
      for (int64_t v = 0; v < kVocab; ++v) {
        const double p = std::exp(logit(r, v)) / static_cast<double>(sums_[static_cast<size_t>(r)]);
        const double d = weights_.rounded(p - (v == targets()[r] ? 1 : 0));
        for (int64_t h = 0; h < kHidden; ++h) want[static_cast<size_t>(h)] += d * weights_[v * kHidden + h];
      }
      for (int64_t h = 0; h < kHidden; ++h) {
        largest = std::max(largest, std::abs(want[static_cast<size_t>(h)]));
        most = std::max(most, std::abs(dx[r * kHidden + h] - want[static_cast<size_t>(h)]));
      }
    }
    return most / largest;
  }

 private:
  double logit(int64_t row, int64_t v) const { return weights_[v * kHidden + 3 * row]; }
  // In each segment.
  static const int32_t* targets() {
    static constexpr int32_t kTargets[kRows] = {5, 8191, 8192, 9000, 16383, 16384, 20000, kVocab - 1};
    return kTargets;
  }
  static Memory sent(const void* from, int64_t bytes, StreamView stream) {
    Memory out(stream.device, bytes);
    copy_bytes(out.data(), from, bytes, stream);
    synchronize(stream);
    return out;
  }
  Memory sent(const Values& values, StreamView stream) const {
    return sent(values.data(), values.size() * static_cast<int64_t>(dtype_size(dtype_)), stream);
  }

  DType dtype_;
  Values weights_, x_;
  ModelSpec spec_;
  std::vector<float> sums_;
};

TEST(HeadGradient, IsSummedInFp32FromTheProductsOn) {
  std::string reason;
  if (cuda_device_count(&reason) == 0) GTEST_SKIP() << "no CUDA device: " << reason;
  const StreamView gpu = start_torch(DeviceType::kCuda, 2, true);
  const StreamView cpu{.device = DeviceType::kCpu, .handle = nullptr, .threads = 2};
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    SCOPED_TRACE(dtype_name(dtype));
    const HeadGradient head(dtype);
    const double on_gpu = head.error(head.computed(gpu)), on_cpu = head.error(head.computed(cpu));
    // A few of 23,576 gradients of logits may round the other way, which is less than this.
    EXPECT_LT(on_gpu, 1e-4);
    EXPECT_GT(on_cpu, on_gpu);
  }
}

}  // namespace
}  // namespace lm
