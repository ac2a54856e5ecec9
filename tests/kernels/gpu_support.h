// What the tests of GPU kernels share: arrays with a place, a runner that holds a launcher against its CPU
// emulator, and canaries beside each array. On the emulator and on a GPU.
#pragma once

#include <algorithm>
#include <limits>

#include "base/bytes.h"
#include "base/cuda.h"
#include "tests/kernels/gpu_variants.h"
#include "tests/kernels/support.h"

namespace lm {

inline constexpr DType kBoth[] = {DType::kF32, DType::kBF16};
inline constexpr double kInf = std::numeric_limits<double>::infinity();
inline constexpr double kNotANumber = std::numeric_limits<double>::quiet_NaN();

class GpuKernels : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    if (cuda_device_count(&reason) == 0) GTEST_SKIP() << "no CUDA device: " << reason;
  }
};

// An array that starts `shift` elements behind an aligned address.
struct Array {
  Values values;
  int64_t shift = 0;
};
using Arrays = std::vector<Array>;
using Pointers = std::vector<void*>;
using Body = std::function<void(const Kernels&, StreamView, const Pointers&)>;

inline Array zeros(DType t, int64_t n, int64_t shift = 0) {
  return {Values(t, n), shift};
}
inline Array noise(DType t, int64_t n, uint32_t seed, double scale = 1, int64_t shift = 0) {
  return {Values::random(t, n, seed, scale), shift};
}
// Every `every`-th element is the next of `specials`.
inline Array with(Array a, const std::vector<double>& specials, int64_t every) {
  for (int64_t i = 0, k = 0; i < a.values.size(); i += every, ++k) {
    a.values.set(i, specials[static_cast<size_t>(k) % specials.size()]);
  }
  return a;
}
// Indices travel in fp32 arrays as bit patterns.
inline Array numbers(const std::vector<int32_t>& list) {
  Array a = zeros(DType::kF32, static_cast<int64_t>(list.size()));
  if (!list.empty()) std::memcpy(a.values.data(), list.data(), list.size() * 4);
  return a;
}
inline float* f32(void* p) {
  return static_cast<float*>(p);
}
inline const int32_t* i32(const void* p) {
  return static_cast<const int32_t*>(p);
}
inline std::string name(const char* what, DType t, std::initializer_list<int64_t> sizes) {
  std::string s = std::string(what) + " " + dtype_name(t);
  for (int64_t n : sizes) s += " " + std::to_string(n);
  return s;
}

// Runs `body` on the device. Half of the variants, and arrays that are shifted, have canaries before and
// behind; else an array is all of its allocation, so that the emulator sees the first byte beyond it.
inline Outputs on_device(const Arrays& arrays, const Body& body, int variant) {
  constexpr int64_t kMargin = 64;
  constexpr uint8_t kCanary = 0x5A;
  static const auto& stream = *new Stream(DeviceType::kCuda);  // one for all: the emulator remembers each
  struct Placed {
    std::vector<uint8_t> image;  // what is in its allocation
    char* memory;
    int64_t first;
  };
  std::vector<Placed> placed;
  Pointers pointers;
  for (const Array& a : arrays) {
    const int64_t size = static_cast<int64_t>(dtype_size(a.values.dtype()));
    const int64_t bytes = a.values.size() * size;
    const bool guarded = a.shift != 0 || variant % 2 == 1;
    const int64_t first = guarded ? kMargin + a.shift * size : 0;
    Placed p{std::vector<uint8_t>(static_cast<size_t>(bytes + first + (guarded ? kMargin : 0)), kCanary),
             nullptr, first};
    if (bytes > 0) std::memcpy(p.image.data() + first, a.values.data(), static_cast<size_t>(bytes));
    p.memory = static_cast<char*>(cuda_allocate(std::max<int64_t>(1, std::ssize(p.image))));
    placed.push_back(std::move(p));
    copy_bytes(placed.back().memory, placed.back().image.data(), std::ssize(placed.back().image),
               stream.view());
    pointers.push_back(placed.back().memory + first);
  }
  body(kernels(DeviceType::kCuda), stream.view(), pointers);
  stream.synchronize();  // the images are sources until here
  for (Placed& p : placed) copy_bytes(p.image.data(), p.memory, std::ssize(p.image), stream.view());
  stream.synchronize();
  Outputs results;
  for (size_t i = 0; i < arrays.size(); ++i) {
    Placed& p = placed[i];
    Values v(arrays[i].values.dtype(), arrays[i].values.size());
    const auto bytes = v.size() * static_cast<int64_t>(dtype_size(v.dtype()));
    if (bytes > 0) std::memcpy(v.data(), p.image.data() + p.first, static_cast<size_t>(bytes));
    const auto written = [&](int64_t from, int64_t to) {
      return std::any_of(p.image.begin() + from, p.image.begin() + to,
                         [](uint8_t byte) { return byte != kCanary; });
    };
    EXPECT_FALSE(written(0, p.first)) << "bytes before array " << i << " were written";
    EXPECT_FALSE(written(p.first + bytes, std::ssize(p.image)))
        << "bytes behind array " << i << " were written";
    results.push_back(std::move(v));
    cuda_free(p.memory);
  }
  return results;
}

// The bits of the CPU, or near to them: a NaN wants a NaN, an infinity itself. kNearFused: any of the three
// will do for another, for sums of products that nvcc fuses. -inf + 1e30 * 1e30 is -inf when fused, and no
// number on the CPU, where the product is infinite before it is added.
enum class Want { kBits, kNear, kNearFused };
inline void compare(const Values& got, const Values& want, Want how, double absolute, size_t array) {
  const double relative = 2 * relative_bound(want.dtype()) + 1e-5;
  const auto size = static_cast<int64_t>(dtype_size(want.dtype()));
  int shown = 0;
  for (int64_t k = 0; k < want.size() && shown < 3; ++k) {
    const double g = got[k], w = want[k];
    bool fine =
        std::abs(g - w) <= relative * std::abs(w) + absolute || (std::isnan(g) && std::isnan(w)) || g == w;
    if (how == Want::kNearFused) fine = fine || (!std::isfinite(g) && !std::isfinite(w));
    if (how == Want::kBits) {
      fine = std::memcmp(static_cast<const char*>(got.data()) + k * size,
                         static_cast<const char*>(want.data()) + k * size, static_cast<size_t>(size)) == 0;
    }
    if (fine) continue;
    ADD_FAILURE() << "array " << array << "[" << k << "]: device " << g << ", CPU " << w;
    ++shown;
  }
}

// `body` on copies of `arrays` on the CPU and, in every variant, on the device.
inline void check(const Arrays& arrays, const Body& body, Want how, double absolute = 1e-5) {
  Arrays host = arrays;
  Pointers pointers;
  for (Array& a : host) pointers.push_back(a.values.data());
  body(kernels(DeviceType::kCpu), {DeviceType::kCpu, nullptr, 1}, pointers);
  const int variants = std::min(gpu_variants(), arrays[0].values.size() > 100000 ? 2 : gpu_variants());
  Outputs first;
  for (int variant = 0; variant < variants; ++variant) {
    use_gpu_variant(variant);
    Outputs results = on_device(arrays, body, variant);
    for (size_t i = 0; i < results.size(); ++i) {
      if (variant == 0) {
        compare(results[i], host[i].values, how, absolute, i);
      } else {
        EXPECT_TRUE(results[i] == first[i]) << "array " << i << " varies: variant " << variant;
      }
    }
    if (variant == 0) first = std::move(results);
  }
  use_gpu_variant(0);
}

}  // namespace lm
