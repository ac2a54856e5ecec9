#include "spec/encoding.h"

#include <gtest/gtest.h>

#include "spec/block_layout.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

ModelSpec small() {
  return llama_spec({.ffn = 96, .layers = 2, .vocab = 9000});
}

AdapterSpec adapter() {
  return {.r = 4, .alpha = 4, .targets = resolve_targets(llama_names(), {"all-linear"}, "test")};
}

TEST(Encoding, APlainTensorIsOnePieceThatIsUsedWhereItLies) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const Encoding& plain = plain_encoding(dtype);
    EXPECT_STREQ(plain.name, dtype_name(dtype));
    EXPECT_TRUE(plain.plain());
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

// Of each kind: pieces of one matrix of the files, and their bytes.
std::vector<int64_t> expected_bytes(EncodingKind kind, int64_t n, int64_t rows) {
  const int64_t scales = (n + 63) / 64;
  if (kind == EncodingKind::kInt8) return {n, rows * 4};
  if (!has_double_scales(kind)) return {(n + 1) / 2, scales * 4};
  return {(n + 1) / 2, scales, 4 + (scales + 255) / 256 * 4};
}

class Quantized : public testing::TestWithParam<EncodingKind> {};

TEST_P(Quantized, EveryMatrixOfTheFilesHasItsOwnPiecesInTheBlocks) {
  const AdapterSpec lora = adapter();
  const ModelSpec spec = small();
  const Encoding& encoding = encoding_of(GetParam());
  const ModelLayout layout = make_layout(spec, &lora, DType::kBF16, &encoding);
  int64_t encoded_bytes = 0, pieces = 0;
  for (size_t b = 0; b < layout.blocks.size(); ++b) {
    const BlockLayout& block = layout.blocks[b];
    int64_t end = 0;
    for (const TensorPlace& place : block.tensors) {
      if (!place.frozen) continue;
      const Parameter& p = place.parameter;
      const bool body = b > 0 && b + 1 < layout.blocks.size();
      ASSERT_EQ(place.encoded(), body && p.kind == ParameterKind::kMatrix) << p.name;
      EXPECT_EQ(place.offset, place.pieces[0].offset);
      size_t piece = 0;
      for (const ParameterPart& part : p.parts) {
        if (!place.encoded()) break;
        for (const int64_t bytes : expected_bytes(encoding.kind, part.rows * p.columns, part.rows)) {
          EXPECT_EQ(place.pieces.at(piece++).bytes, bytes) << part.name;
          encoded_bytes += bytes, ++pieces;
        }
      }
      ASSERT_EQ(place.pieces.size(), place.encoded() ? piece : 1u) << p.name;
      for (const FrozenPiece& one : place.pieces) {
        EXPECT_EQ(one.offset % 512, 0);
        EXPECT_GE(one.offset, end);
        end = one.offset + one.bytes;
      }
    }
    EXPECT_LE(end, block.frozen_bytes);
  }
  const auto bytes = layout.frozen_bytes_by_encoding();
  ASSERT_EQ(bytes.size(), 2u);
  EXPECT_GE(bytes.at(encoding.name), encoded_bytes);
  EXPECT_LT(bytes.at(encoding.name), encoded_bytes + pieces * 512);
  EXPECT_EQ(bytes.at(encoding.name) + bytes.at("bf16"), layout.frozen_bytes);
  // What is trained does not depend on it.
  EXPECT_EQ(layout.flat_elements, make_layout(spec, &lora, DType::kBF16).flat_elements);
  // A chunked head stays as it was.
  const std::vector<Unit> plain = make_layout(spec, &lora, DType::kBF16).units(true);
  const std::vector<Unit> units = layout.units(true);
  ASSERT_EQ(units.size(), plain.size());
  EXPECT_EQ(units.back().frozen_bytes, plain.back().frozen_bytes);
}
INSTANTIATE_TEST_SUITE_P(Kinds, Quantized,
                         testing::Values(EncodingKind::kNf4, EncodingKind::kFp4, EncodingKind::kNf4Double,
                                         EncodingKind::kFp4Double, EncodingKind::kInt8));

}  // namespace
}  // namespace lm
