#include "spec/encoding.h"

#include <gtest/gtest.h>

#include "spec/block_layout.h"
#include "tests/support/int8_rows.h"

namespace lm {
namespace {

ModelSpec small() {
  ModelSpec spec;
  spec.hidden = 64, spec.ffn = 96, spec.heads = 4, spec.kv_heads = 2, spec.head_dim = 16, spec.vocab = 9000;
  spec.layers.resize(2);
  return spec;
}

AdapterSpec adapter() {
  return {.r = 4, .alpha = 4, .targets = resolve_targets(llama_names(), {"all-linear"}, "test")};
}

TEST(Encoding, APlainTensorIsOnePieceThatIsUsedWhereItLies) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const Encoding& plain = plain_encoding(dtype);
    EXPECT_STREQ(plain.name, dtype_name(dtype));
    EXPECT_EQ(plain.materialise, nullptr);
    const AdapterSpec lora = adapter();
    const ModelLayout layout = make_layout(small(), &lora, dtype);
    for (const BlockLayout& block : layout.blocks) {
      for (const TensorPlace& place : block.tensors) {
        ASSERT_EQ(place.pieces.size(), place.frozen ? 1u : 0u);
        if (!place.frozen) continue;
        EXPECT_EQ(place.pieces[0].offset, place.offset);
        EXPECT_EQ(place.pieces[0].bytes,
                  place.parameter.elements() * static_cast<int64_t>(dtype_size(dtype)));
        EXPECT_EQ(place.pieces[0].encoding, &plain);
      }
    }
    EXPECT_EQ(layout.frozen_bytes_by_encoding(),
              (std::map<std::string, int64_t>{{dtype_name(dtype), layout.frozen_bytes}}));
  }
}

TEST(Encoding, ANewOneHasItsPiecesInTheBlocksAndItsBytesInTheSum) {
  const AdapterSpec lora = adapter();
  const ModelSpec spec = small();
  const ModelLayout layout = make_layout(spec, &lora, DType::kBF16, &test::kInt8Rows);
  for (size_t b = 0; b < layout.blocks.size(); ++b) {
    const BlockLayout& block = layout.blocks[b];
    int64_t end = 0;
    for (const TensorPlace& place : block.tensors) {
      if (!place.frozen) continue;
      const Parameter& p = place.parameter;
      const bool body = b > 0 && b + 1 < layout.blocks.size();
      const bool encoded = body && p.kind == ParameterKind::kMatrix;
      ASSERT_EQ(place.pieces.size(), encoded ? 2u : 1u) << p.name;
      EXPECT_EQ(place.offset, place.pieces[0].offset);
      if (encoded) {
        EXPECT_EQ(place.pieces[0].bytes, p.elements());
        EXPECT_EQ(place.pieces[1].bytes, p.rows * 4);
      }
      for (const FrozenPiece& piece : place.pieces) {
        EXPECT_EQ(piece.offset % 512, 0);
        EXPECT_GE(piece.offset, end);
        end = piece.offset + piece.bytes;
      }
    }
    EXPECT_LE(end, block.frozen_bytes);
  }
  const auto bytes = layout.frozen_bytes_by_encoding();
  ASSERT_EQ(bytes.size(), 2u);
  const int64_t matrices = 2 * ((64 + 2 * 32) * 64 + 64 * 64 + 3 * 96 * 64);
  const int64_t scales = 2 * ((64 + 2 * 32) + 64 + 2 * 96 + 64) * 4;
  EXPECT_GE(bytes.at("int8 rows"), matrices + scales);
  EXPECT_LT(bytes.at("int8 rows"), matrices + scales + 2 * 8 * 512);
  EXPECT_EQ(bytes.at("int8 rows") + bytes.at("bf16"), layout.frozen_bytes);
  // What is trained does not depend on it.
  EXPECT_EQ(layout.flat_elements, make_layout(spec, &lora, DType::kBF16).flat_elements);
  // A cut head stays as it was.
  const std::vector<Unit> plain = make_layout(spec, &lora, DType::kBF16).units(true);
  const std::vector<Unit> units = layout.units(true);
  ASSERT_EQ(units.size(), plain.size());
  EXPECT_EQ(units.back().frozen_bytes, plain.back().frozen_bytes);
}

TEST(Encoding, MaterialisesAMatrixInEitherType) {
  std::vector<float> values;
  for (int i = 0; i < 6 * 50; ++i) values.push_back(static_cast<float>((i * 37) % 101 - 50) * 0.01F);
  const test::Int8Rows rows = test::int8_rows(values, 50);
  const std::vector<const std::byte*> pieces = {reinterpret_cast<const std::byte*>(rows.codes.data()),
                                                reinterpret_cast<const std::byte*>(rows.scales.data())};
  std::vector<float> out(values.size());
  test::kInt8Rows.materialise(pieces, 6, 50, DType::kF32, reinterpret_cast<std::byte*>(out.data()));
  for (size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], values[i], 0.5 / 254 + 1e-6) << i;
  std::vector<uint16_t> half(values.size());
  test::kInt8Rows.materialise(pieces, 6, 50, DType::kBF16, reinterpret_cast<std::byte*>(half.data()));
  for (size_t i = 0; i < out.size(); ++i) {
    const uint32_t bits = static_cast<uint32_t>(half[i]) << 16;
    float value = 0;
    std::memcpy(&value, &bits, 4);
    EXPECT_NEAR(value, out[i], std::abs(out[i]) / 128) << i;
  }
}

}  // namespace
}  // namespace lm
