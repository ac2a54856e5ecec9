// Plans for a frozen base whose matrices are codes.
#include <gtest/gtest.h>

#include <algorithm>

#include "base/bytes.h"
#include "shapes.h"

namespace lm {
namespace {

TEST(QuantizedPlan, SumsFrozenBytesByEncoding) {
  Case c{.spec = llama_1b(), .machine = cpu_machine(64)};
  c.config.train.method = Method::kLora;
  const AdapterSpec lora = adapter_r16();
  const ModelLayout layout = make_layout(c.spec, &lora, DType::kBF16, &encoding_of(EncodingKind::kInt8));
  const Plan bf16 = c.plan();
  const Plan int8 = make_plan({c.config, c.spec, &lora, layout, c.device}, c.machine);
  const auto row = [](const Plan& plan) {
    return *std::find_if(plan.classes.begin(), plan.classes.end(),
                         [](const ClassBytes& r) { return r.name == "frozen weights"; });
  };
  EXPECT_EQ(row(bf16).note, "bf16");
  EXPECT_EQ(row(int8).bytes, layout.frozen_bytes);
  const auto bytes = layout.frozen_bytes_by_encoding();
  EXPECT_EQ(row(int8).note,
            "bf16 " + format_bytes(bytes.at("bf16")) + ", int8 " + format_bytes(bytes.at("int8")));
  EXPECT_LT(int8.peak.host, bf16.peak.host - (int64_t{900} << 20));
}

// Of the published model: REFERENCE has its sizes; alignment costs 512 bytes a piece at most.
TEST(QuantizedPlan, HasRoomFor8BInNf4WhereBf16IsThreeTimesAsLarge) {
  Case c{.spec = llama_8b(), .machine = cpu_machine(64)};
  c.config.train.method = Method::kLora;
  c.config.train.micro_batch = 1;
  c.config.train.recompute = Recompute::kBlock;
  c.config.data.max_length = 512;
  const Plan bf16 = c.plan();
  c.config.model.quantize = Quantize::kNf4;
  const Plan nf4 = c.plan();
  const auto frozen = static_cast<double>(class_bytes(nf4, "frozen weights"));
  const double codes = 6'979'321'856, others = 2.0 * (2.0 * 128256 * 4096 + 65 * 4096);
  EXPECT_NEAR(frozen / (codes * (0.5 + 1.0 / 64 + 4.0 / (64 * 256)) + others), 1, 1e-4);
  EXPECT_LT(nf4.peak.host, bf16.peak.host - (int64_t{9} << 30));
  // Dequantizing costs a step something, and not much.
  EXPECT_GT(nf4.step_seconds, bf16.step_seconds);
  EXPECT_LT(nf4.step_seconds, bf16.step_seconds * 1.3);
}

// Where cores share no cache it takes several times as long as where they do.
TEST(QuantizedPlan, TimesDecodingAsItWasMeasured) {
  Case c{.spec = llama_1b(), .machine = cpu_machine(64)};
  c.config.train.method = Method::kLora;
  c.config.train.micro_batch = 1;
  c.config.train.global_batch = 2;
  c.config.train.recompute = Recompute::kBlock;
  c.config.model.quantize = Quantize::kNf4;
  const auto plan_at = [&](double bytes_per_s) {
    c.machine.decode_bandwidth = bytes_per_s;
    return c.plan();
  };
  const Plan slow = plan_at(1e9), quick = plan_at(4e9);
  const double decoded = slow.estimate.cost.decoded_bytes;
  // 973 million weights in bf16: forward, forward again and for the inputs' gradients, of two micro-batches.
  EXPECT_NEAR(decoded, 2.0 * 973e6 * 3 * 2, 0.2 * decoded);
  EXPECT_NEAR(slow.estimate.seconds - quick.estimate.seconds, decoded * (1 / 1e9 - 1 / 4e9),
              1e-6 * slow.estimate.seconds);
  EXPECT_EQ(compute_rates(cpu_machine(64), DeviceType::kCpu, DType::kBF16).decode_bandwidth,
            compute_rates(cpu_machine(64), DeviceType::kCpu, DType::kBF16).pass_bandwidth);
}

}  // namespace
}  // namespace lm
