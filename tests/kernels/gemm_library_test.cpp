// What the CPU's GEMM library keeps is bounded, whatever shapes come: that is, it makes again what it had to
// forget. Alone in its program, for the library reads its bounds once.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "kernels/gemm_panels.h"
#include "kernels/library.h"
#include "kernels/runtime.h"
#include "tests/support/sanitized.h"

namespace lm {
namespace {

// Before oneDNN is first used: it then prints a line for everything that it makes or finds again.
const int kTold = setenv("ONEDNN_VERBOSE", "profile_create", 1);

int64_t resident_bytes() {
  int64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * getpagesize();
}

class GemmLibrary {
 public:
  explicit GemmLibrary(int64_t kept) : stream_(start_torch(DeviceType::kCpu, 1, true, kept)) {}

  // Products of 2, 3, ... rows (one row is no product of matrices), `count` of them; for how many the library
  // has made code.
  int64_t made_by(int64_t count) {
    testing::internal::CaptureStdout();
    for (int64_t rows = 2; rows < count + 2; ++rows) {
      library_kernels(DeviceType::kCpu)
          .gemm({.a = view_of(left_.data(), DType::kBF16, rows, kSize),
                 .b = view_of(right_.data(), DType::kBF16, kSize, kSize),
                 .out = view_of(out_.data(), DType::kBF16, rows, kSize)},
                stream_);
    }
    const std::string printed = testing::internal::GetCapturedStdout();
    int64_t lines = 0;
    for (size_t at = 0; (at = printed.find("create:cache_miss,cpu,matmul", at)) != std::string::npos; ++at)
      ++lines;
    return lines;
  }

 private:
  static constexpr int64_t kSize = 64, kMostRows = 800;
  StreamView stream_;
  std::vector<uint16_t> left_ = std::vector<uint16_t>(kMostRows * kSize),
                        right_ = std::vector<uint16_t>(kSize * kSize), out_ = left_;
};

TEST(GemmLibrary, ForgetsWhatIsBeyondItsBound) {
  if (!library_multiplies_bf16(best_instructions())) GTEST_SKIP() << "the products of bf16 are ours here";
  ASSERT_EQ(kTold, 0);
  constexpr int64_t kKept = 8;
  GemmLibrary library(kKept);
  EXPECT_EQ(library.made_by(kKept), kKept);
  EXPECT_EQ(library.made_by(kKept), 0) << "as many as it may keep are kept";
  // In this order what comes next is always what was forgotten last.
  EXPECT_EQ(library.made_by(3 * kKept), 2 * kKept);
  for (int turn = 0; turn < 3; ++turn) EXPECT_EQ(library.made_by(3 * kKept), 3 * kKept);
  // The layer above oneDNN has a list of its own, with 0.3 MiB for each: it is as bounded, which only memory
  // shows.
  if (test::kSanitized) GTEST_SKIP() << "a sanitizer keeps freed memory for a while";
  library.made_by(100);
  const int64_t before = resident_bytes();
  library.made_by(700);
  EXPECT_LT(resident_bytes() - before, 16 << 20);
}

}  // namespace
}  // namespace lm
