// What loading and quantizing a model takes of host memory: the quantized model, and a tensor for each
// thread.
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <fstream>

#include "base/bytes.h"
#include "tests/support/sanitized.h"
#include "tests/weights/support.h"
#include "weights/load_store.h"

namespace lm {
namespace {

TEST(QuantizedLoad, TakesTheQuantizedModelAndATensorForEachThread) {
  constexpr int kThreads = 2;
  const test::TemporaryDirectory directory;
  nlohmann::json config = test::tiny_config("llama", true);
  config["hidden_size"] = 1024, config["intermediate_size"] = 4096, config["num_hidden_layers"] = 4;
  config["num_attention_heads"] = 16, config["num_key_value_heads"] = 16, config.erase("head_dim");
  const ModelSpec spec = test::write_tiny_model(directory.path(), config, DType::kF32);
  const AdapterSpec adapter{.r = 4, .alpha = 4, .targets = {"q_proj"}};
  for (const EncodingKind kind : {EncodingKind::kNf4Double, EncodingKind::kInt8}) {
    const ModelLayout layout = make_layout(spec, &adapter, DType::kBF16, &encoding_of(kind));
    ::malloc_trim(0);  // memory that was freed and kept would not count again
    std::ofstream("/proc/self/clear_refs") << "5";
    const int64_t before = test::status_bytes("VmRSS:");
    WeightStore store(layout, DType::kBF16, DeviceType::kCpu);
    int64_t model = 0, plain = 0, largest = 0;
    for (const BlockLayout& block : layout.blocks) {
      model += block.frozen_bytes + block.flat_elements * 2;
      for (const TensorPlace& place : block.tensors) {
        for (const ParameterPart& part : place.parameter.parts) {
          const int64_t bytes = part.rows * place.parameter.columns * 4;  // as the files have it
          plain += bytes, largest = std::max(largest, bytes);
        }
      }
    }
    load_weights({spec, layout, DType::kBF16, StreamView{DeviceType::kCpu, nullptr, kThreads}, kThreads},
                 directory.path(), store);
    const int64_t taken = test::status_bytes("VmHWM:") - before;
    if (test::kSanitized) GTEST_SKIP() << "memory is mostly the sanitizer's";
    constexpr int64_t kRest = 8 * kMiB;  // headers, stacks of threads
    EXPECT_LE(taken, model + kThreads * largest + kRest) << format_bytes(taken);
    EXPECT_GE(taken, model * 9 / 10) << "the quantized model was not written";
    EXPECT_GT(plain, 2 * (model + kThreads * largest + kRest)) << "the model is too small to show it";
  }
}

}  // namespace
}  // namespace lm
