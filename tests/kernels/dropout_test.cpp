// Philox against the known answers of its authors' library (Random123, kat_vectors), and dropout's mask.
#include "base/philox.h"

#include "tests/kernels/support.h"

namespace lm {
namespace {

TEST(Philox, GivesThePublishedKnownAnswers) {
  struct Known {
    uint32_t counter[4], key[2], word[4];
  };
  const Known known[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
       {0xffffffff, 0xffffffff},
       {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       {0xa4093822, 0x299f31d0},
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const Known& k : known) {
    const uint64_t key = k.key[0] | static_cast<uint64_t>(k.key[1]) << 32;
    const auto got = philox<uint32_t>(key, k.counter[0], k.counter[1], k.counter[2], k.counter[3]);
    for (int w = 0; w < 4; ++w) EXPECT_EQ(got.word[w], k.word[w]);
  }
}

TEST(Philox, KeysDifferInEveryPart) {
  const uint64_t key = philox_key(42, Purpose::kDropout, 7, 3);
  EXPECT_NE(key, philox_key(43, Purpose::kDropout, 7, 3));
  EXPECT_NE(key, philox_key(42, Purpose::kRounding, 7, 3));
  EXPECT_NE(key, philox_key(42, Purpose::kDropout, 8, 3));
  EXPECT_NE(key, philox_key(42, Purpose::kDropout, 7, 4));
  EXPECT_NE(key, philox_key(42 | uint64_t{1} << 40, Purpose::kDropout, 7, 3));
  EXPECT_EQ(key, philox_key(42, Purpose::kDropout, 7, 3));
}

TEST(Philox, IndicesUseEachNumberOfTheSequenceOnce) {
  std::vector<uint32_t> numbers;
  for (uint64_t i = 0; i < 256; ++i) numbers.push_back(philox_at(5, i, 0, 0));
  std::vector<uint32_t> calls;
  for (uint32_t c = 0; c < 64; ++c) {
    for (uint32_t word : philox<uint32_t>(5, c, 0, 0, 0).word) calls.push_back(word);
  }
  std::sort(numbers.begin(), numbers.end());
  std::sort(calls.begin(), calls.end());
  EXPECT_EQ(numbers, calls);
}

TEST(Dropout, KeepsWhatItsNumberSaysInEveryShape) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (int64_t width : {1, 3, 64, 577}) {
      for (bool accumulate : {false, true}) {
        const int64_t rows = 70;
        const float p = 0.3f;
        const uint64_t key = philox_key(1, Purpose::kDropout, 2, 3);
        const Values x = Values::random(dtype, rows * width, 31),
                     before = Values::random(dtype, rows * width, 32);
        std::vector<int32_t> sample, position;
        for (int32_t r = 0; r < rows; ++r) sample.push_back(r / 9), position.push_back(r % 9);
        const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
          Values out = before;
          k.dropout({.x = x.data(),
                     .out = out.data(),
                     .sample = sample.data(),
                     .position = position.data(),
                     .rows = rows,
                     .width = width,
                     .key = key,
                     .p = p,
                     .accumulate = accumulate,
                     .dtype = dtype},
                    stream);
          return Outputs{out};
        });
        std::vector<double> want;
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t j = 0; j < width; ++j) {
            const uint32_t number = philox_at(key, static_cast<uint64_t>(j),
                                              static_cast<uint32_t>(position[static_cast<size_t>(r)]),
                                              static_cast<uint32_t>(sample[static_cast<size_t>(r)]));
            const bool keep = (number >> 8) / 16777216.0 >= static_cast<double>(p);
            const double v = keep ? x[r * width + j] / (1 - static_cast<double>(p)) : 0;
            want.push_back(accumulate ? before[r * width + j] + v : v);
          }
        }
        expect_near(got[0], want, relative_bound(dtype), absolute_bound(dtype), "out");
      }
    }
  }
}

TEST(Dropout, DropsTheAskedShareAndKeepsTheMean) {
  const int64_t rows = 64, width = 4096;
  Values ones(DType::kF32, rows * width);
  for (int64_t i = 0; i < ones.size(); ++i) ones.set(i, 1);
  std::vector<int32_t> sample(rows, 5), position;
  for (int32_t r = 0; r < rows; ++r) position.push_back(r);
  for (float p : {0.f, 0.05f, 0.5f}) {
    Values out = ones;
    kernels(DeviceType::kCpu)
        .dropout({.x = ones.data(),
                  .out = out.data(),
                  .sample = sample.data(),
                  .position = position.data(),
                  .rows = rows,
                  .width = width,
                  .key = 99,
                  .p = p},
                 {DeviceType::kCpu, nullptr, 1});
    double dropped = 0, sum = 0;
    for (int64_t i = 0; i < out.size(); ++i) dropped += out[i] == 0, sum += out[i];
    const double n = static_cast<double>(out.size());
    EXPECT_NEAR(dropped / n, p, 5 * std::sqrt(p * (1 - p) / n));  // five standard deviations
    EXPECT_NEAR(sum / n, 1, 5 * std::sqrt(p / (1 - p) / n) + 1e-6);
  }
}

}  // namespace
}  // namespace lm
