// A linear layer over a frozen matrix in an encoding that no source knows computes what it computes over the
// materialised matrix; a plain one is borrowed where it lies.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "base/arena.h"
#include "kernels/library.h"
#include "kernels/runtime.h"
#include "model/bind.h"
#include "tests/support/int8_rows.h"

namespace lm {
namespace {

constexpr int64_t kRows = 9;

ModelSpec small() {
  ModelSpec spec;
  spec.hidden = 64, spec.ffn = 96, spec.heads = 4, spec.kv_heads = 2, spec.head_dim = 16, spec.vocab = 300;
  spec.layers.resize(1);
  return spec;
}

// The frozen matrices of a block of a LoRA model, encoded, and a context to compute in.
struct Fixture {
  explicit Fixture(DType type)
      : dtype(type),
        layout(make_layout(spec, &adapter, type, &test::kInt8Rows)),
        stream(start_torch(DeviceType::kCpu, 1, true)),
        rope(spec, kRows, type, DeviceType::kCpu, stream),
        frozen(DeviceType::kCpu, layout.blocks[1].frozen_bytes) {
    std::mt19937 random(7);
    for (const TensorPlace& place : layout.blocks[1].tensors) {
      if (place.pieces.size() != 2) continue;
      const Parameter& p = place.parameter;
      std::vector<float> values(static_cast<size_t>(p.elements()));
      for (float& v : values) v = static_cast<float>(static_cast<int>(random() % 2001) - 1000) * 1e-4F;
      const test::Int8Rows rows = test::int8_rows(values, p.columns);
      std::memcpy(frozen.data() + place.pieces[0].offset, rows.codes.data(), rows.codes.size());
      std::memcpy(frozen.data() + place.pieces[1].offset, rows.scales.data(), rows.scales.size() * 4);
    }
    block = ModelBinding(spec, layout, nullptr).transformer(1, {.frozen = frozen.data()}, {.dtype = type});
  }

  // Where the layout has its pieces.
  View matrix(const char* name) {
    const TensorPlace& place = *layout.blocks[1].find(name);
    const std::vector<const std::byte*> pieces = {frozen.data() + place.pieces[0].offset,
                                                  frozen.data() + place.pieces[1].offset};
    const View out = context.tensor(place.parameter.rows, place.parameter.columns);
    test::int8_rows_materialise(pieces, out.rows, out.columns, dtype, static_cast<std::byte*>(out.data));
    return out;
  }

  View filled(int64_t rows, int64_t columns) {
    const View out = context.tensor(rows, columns);
    for (int64_t i = 0; i < out.elements(); ++i) {
      test::write_element(static_cast<float>((i * 29) % 61 - 30) * 0.03F, dtype,
                          static_cast<std::byte*>(out.data) + static_cast<size_t>(i) * dtype_size(dtype));
    }
    return out;
  }

  DType dtype;
  ModelSpec spec = small();
  AdapterSpec adapter{.r = 4, .alpha = 4, .targets = {"q_proj"}};
  ModelLayout layout;
  StreamView stream;
  Arena arena{DeviceType::kCpu, int64_t{4} << 20};
  RopeTable rope;
  Uploads uploads;
  Memory frozen;
  Context context{spec,  dtype, DeviceType::kCpu, library_kernels(DeviceType::kCpu), stream,
                  arena, rope,  uploads};
  TransformerBlock block;
};

bool same(const View& a, const View& b) {
  return std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes())) == 0;
}

TEST(Encoded, ALinearLayerComputesWithTheMaterialisedMatrix) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    Fixture f(dtype);
    const std::pair<const char*, const Linear*> layers[] = {{"layers.0.attn.qkv", &f.block.qkv},
                                                            {"layers.0.attn.out", &f.block.out},
                                                            {"layers.0.mlp.gate_up", &f.block.gate_up},
                                                            {"layers.0.mlp.down", &f.block.down}};
    for (const auto& [name, encoded] : layers) {
      const ArenaFrame frame(f.arena);
      ASSERT_EQ(encoded->weight.encoding, &test::kInt8Rows);
      Linear plain = *encoded;
      plain.weight = {borrow(f.context, encoded->weight), {}};
      EXPECT_TRUE(same(plain.weight.weight, f.matrix(name))) << name;
      const int64_t out = plain.weight.weight.rows, in = plain.weight.weight.columns;
      const View x = f.filled(kRows, in), dy = f.filled(kRows, out);
      const View y = f.context.tensor(kRows, out), expected = f.context.tensor(kRows, out);
      const View dx = f.context.tensor(kRows, in), expected_dx = f.context.tensor(kRows, in);
      const int64_t before = f.arena.mark();
      LinearSaved none;
      linear_forward(f.context, plain, {}, x, expected, none);
      linear_input_gradient(f.context, plain, dy, expected_dx);
      linear_forward(f.context, *encoded, {}, x, y, none);
      linear_input_gradient(f.context, *encoded, dy, dx);
      EXPECT_EQ(f.arena.mark(), before);
      EXPECT_TRUE(same(y, expected));
      EXPECT_TRUE(same(dx, expected_dx));
    }
  }
}

TEST(Encoded, APlainMatrixIsBorrowedWhereItLies) {
  Fixture f(DType::kBF16);
  std::vector<std::byte> memory(64 * 64 * 2);
  const Param plain{view_of(memory.data(), DType::kBF16, 64, 64), {}};
  const int64_t before = f.arena.mark();
  EXPECT_EQ(borrow(f.context, plain).data, memory.data());
  EXPECT_EQ(f.arena.mark(), before);
  EXPECT_EQ(f.arena.high_water(), before);
}

}  // namespace
}  // namespace lm
