// What loading onto a GPU takes of host memory, and that nothing is lost on the way. Skips without a GPU.
#include <gtest/gtest.h>

#include <fstream>

#include "base/staging.h"
#include "tests/weights/support.h"
#include "weights/load_store.h"

namespace lm {
namespace {

// 164 MB of files: what a GPU's load takes of host memory does not grow with them.
TEST(LoadOnAGpu, TakesNoMoreHostMemoryThanItsBuffer) {
  std::string reason;
  if (cuda_device_count(&reason) == 0) GTEST_SKIP() << "no CUDA device: " << reason;
  const test::TemporaryDirectory directory;
  nlohmann::json config = test::tiny_config("llama", true);
  config["hidden_size"] = 1024, config["vocab_size"] = 40000;
  const ModelSpec spec = test::write_tiny_model(directory.path(), config, DType::kF32);
  const ModelLayout layout = make_layout(spec, nullptr, DType::kF32);
  const Stream stream(DeviceType::kCuda);
  WeightStore store(layout, DType::kF32, DeviceType::kCuda);
  // The emulator's device memory is this process's: it is all there already, as it comes with values in it.
  std::ofstream("/proc/self/clear_refs") << "5";
  const int64_t before = test::status_bytes("VmRSS:");
  load_weights({spec, layout, DType::kF32, stream.view(), 2}, directory.path(), store);
  const int64_t taken = test::status_bytes("VmHWM:") - before;
  EXPECT_LE(taken, kStagingBytes + 32 * kMiB);
  Staging staging(stream.view(), 1 * kMiB);
  for (int64_t b = 0; b < std::ssize(layout.blocks); ++b) {
    for (const TensorPlace& place : layout.blocks[static_cast<size_t>(b)].tensors) {
      std::vector<float> values(static_cast<size_t>(place.parameter.elements()));
      staging.read_into(values.data(), store.open(b, false).tensor(place), std::ssize(values) * 4);
      for (const ParameterPart& part : place.parameter.parts) {
        for (int64_t i = 0; i < part.rows * place.parameter.columns; i += 97) {
          ASSERT_EQ(values[static_cast<size_t>(part.first * place.parameter.columns + i)],
                    test::tiny_value(part.name, i))
              << part.name << " " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace lm
