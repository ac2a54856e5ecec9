// A linear layer over a quantized frozen matrix computes what it computes over the materialised matrix, whose
// parts are materialised one by one; a plain one is borrowed where it lies.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "base/arena.h"
#include "kernels/library.h"
#include "kernels/runtime.h"
#include "model/bind.h"
#include "model/matrix_tiles.h"
#include "tests/support/llama_spec.h"
#include "weights/encode.h"

namespace lm {
namespace {

constexpr int64_t kRows = 9;

ModelSpec small() {
  return llama_spec({.ffn = 96});
}

// The frozen matrices of a block of a LoRA model, encoded, and a context to compute in.
struct Fixture {
  Fixture(DType type, EncodingKind kind, const ModelSpec& of = small())
      : dtype(type),
        spec(of),
        layout(make_layout(spec, &adapter, type, &encoding_of(kind))),
        stream(start_torch(DeviceType::kCpu, 1, true)),
        rope(spec, kRows, type, DeviceType::kCpu, stream),
        frozen(DeviceType::kCpu, layout.blocks[1].frozen_bytes) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0, 0.02F);
    for (const TensorPlace& place : layout.blocks[1].tensors) {
      if (!place.encoded()) continue;
      const auto draw = [&](int64_t, int64_t n, std::byte* to) {
        for (int64_t i = 0; i < n; ++i) reinterpret_cast<float*>(to)[i] = normal(random);
      };
      for (size_t part = 0; part < place.parameter.parts.size(); ++part)
        write_encoded(place, part, frozen.data() + place.offset, nullptr,
                      [&](const EncodedMatrix& matrix) { encode(matrix, DType::kF32, draw, 1); });
    }
    block = ModelBinding(spec, layout, nullptr).transformer(1, {.frozen = frozen.data()}, {.dtype = type});
  }

  // Part by part, where the layout has its pieces, in fp32 rounded to the model's type.
  View matrix(const char* name) {
    const TensorPlace& place = *layout.blocks[1].find(name);
    const View out = context.tensor(place.parameter.rows, place.parameter.columns);
    size_t piece = 0;
    auto* to = static_cast<std::byte*>(out.data);
    for (const ParameterPart& part : place.parameter.parts) {
      EncodedMatrix one{.encoding = &place.encoding(), .rows = part.rows, .columns = out.columns};
      for (size_t k = 0; k < place.encoding().piece_bytes(1, 1).size(); ++k)
        one.pieces[k] = frozen.data() + place.pieces[piece++].offset;
      std::vector<float> values(static_cast<size_t>(part.rows * out.columns));
      decode(one, values.data(), 1);
      for (const float value : values) write_element(value, to), to += dtype_size(dtype);
    }
    return out;
  }

  void write_element(float value, std::byte* to) const {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, 4);
    if (dtype == DType::kBF16) bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    std::memcpy(to, &bits, dtype_size(dtype));
  }

  View filled(int64_t rows, int64_t columns) {
    const View out = context.tensor(rows, columns);
    for (int64_t i = 0; i < out.elements(); ++i) {
      write_element(static_cast<float>((i * 29) % 61 - 30) * 0.03F,
                    static_cast<std::byte*>(out.data) + static_cast<size_t>(i) * dtype_size(dtype));
    }
    return out;
  }

  DType dtype;
  ModelSpec spec;
  AdapterSpec adapter{.r = 4, .alpha = 4, .targets = {"q_proj"}};
  ModelLayout layout;
  StreamView stream;
  Arena arena{DeviceType::kCpu, int64_t{64} << 20};
  RopeTable rope;
  Uploads uploads;
  Memory frozen;
  Context context{spec,  dtype, DeviceType::kCpu, library_kernels(DeviceType::kCpu), stream,
                  arena, rope,  uploads};
  TransformerBlock block;

  const Attention& attention() const { return std::get<Attention>(block.sublayers[0].mixer); }
  const GatedMlp& mlp() const { return std::get<GatedMlp>(block.sublayers[1].mixer); }
};

bool same(const View& a, const View& b) {
  return std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes())) == 0;
}

// The largest difference, as a share of the largest value of b.
double distance(const View& a, const View& b) {
  const auto value = [](const View& of, int64_t i) {
    return of.dtype == DType::kF32 ? double{static_cast<const float*>(of.data)[i]}
                                   : double{to_float(static_cast<const Bf16*>(of.data)[i])};
  };
  double most = 0, apart = 0;
  for (int64_t i = 0; i < b.elements(); ++i) {
    most = std::max(most, std::abs(value(b, i)));
    apart = std::max(apart, std::abs(value(a, i) - value(b, i)));
  }
  return apart / most;
}
// A library may sum products of other widths in another order: a rounding of the output.
double bound_of(DType dtype) {
  return dtype == DType::kF32 ? 1e-5 : 0x1p-7;
}

TEST(Encoded, ALinearLayerComputesWithTheMaterialisedMatrix) {
  for (int i = 0; i < 10; ++i) {
    const DType dtype = i % 2 == 0 ? DType::kBF16 : DType::kF32;
    const auto kind = static_cast<EncodingKind>(1 + i / 2);
    Fixture f(dtype, kind);
    const std::pair<const char*, const Linear*> layers[] = {{"layers.0.attn.qkv", &f.attention().qkv},
                                                            {"layers.0.attn.out", &f.attention().out},
                                                            {"layers.0.mlp.gate_up", &f.mlp().gate_up},
                                                            {"layers.0.mlp.down", &f.mlp().down}};
    for (const auto& [name, encoded] : layers) {
      const ArenaFrame frame(f.arena);
      ASSERT_EQ(encoded->weight.encoding, kind);
      Linear plain = *encoded;
      plain.weight = {f.matrix(name), {}};
      const int64_t out = plain.weight.weight.rows, in = plain.weight.weight.columns;
      const View x = f.filled(kRows, in), dy = f.filled(kRows, out);
      const View y = f.context.tensor(kRows, out), expected = f.context.tensor(kRows, out);
      const View dx = f.context.tensor(kRows, in), expected_dx = f.context.tensor(kRows, in);
      const int64_t before = f.arena.mark();
      LinearSaved none;
      linear_forward(f.context, plain, {}, {x, expected}, none);
      linear_input_gradient(f.context, plain, dy, expected_dx);
      linear_forward(f.context, *encoded, {}, {x, y}, none);
      linear_input_gradient(f.context, *encoded, dy, dx);
      EXPECT_EQ(f.arena.mark(), before);
      EXPECT_TRUE(same(y, expected));
      EXPECT_TRUE(same(dx, expected_dx));
    }
  }
}

TEST(Encoded, APlainMatrixIsUsedWhereItLies) {
  Fixture f(DType::kBF16, EncodingKind::kNf4);
  Linear plain;
  plain.weight = {f.filled(64, 64), {}};
  const View x = f.filled(kRows, 64), y = f.context.like(x);
  f.arena.restart_high_water();
  LinearSaved none;
  linear_forward(f.context, plain, {}, {x, y}, none);
  linear_input_gradient(f.context, plain, x, y);
  EXPECT_EQ(f.arena.high_water(), f.arena.mark());
}

// Matrices of several tiles, of rows forward and of columns backward; parts end inside of them.
TEST(Encoded, OneTileOfAMatrixExistsAtATime) {
  const ModelSpec large =
      llama_spec({.hidden = 832, .ffn = 2432, .heads = 13, .kv_heads = 13, .head_dim = 64});
  for (int i = 0; i < 5; ++i) {
    const DType dtype = i % 2 == 0 ? DType::kBF16 : DType::kF32;
    Fixture f(dtype, static_cast<EncodingKind>(1 + i), large);
    const int64_t tile = tile_elements(DeviceType::kCpu) * static_cast<int64_t>(dtype_size(dtype));
    const std::pair<const char*, const Linear*> layers[] = {{"layers.0.attn.qkv", &f.attention().qkv},
                                                            {"layers.0.mlp.gate_up", &f.mlp().gate_up},
                                                            {"layers.0.mlp.down", &f.mlp().down}};
    for (const auto& [name, encoded] : layers) {
      const ArenaFrame frame(f.arena);
      Linear plain = *encoded;
      plain.weight = {f.matrix(name), {}};
      const int64_t out = plain.weight.weight.rows, in = plain.weight.weight.columns;
      ASSERT_GT(out * in, 3 * tile_elements(DeviceType::kCpu) / 2);
      const View x = f.filled(kRows, in), dy = f.filled(kRows, out), residual = f.filled(kRows, out);
      const View y = f.context.tensor(kRows, out), expected = f.context.tensor(kRows, out);
      const View dx = f.context.tensor(kRows, in), expected_dx = f.context.tensor(kRows, in);
      LinearSaved none;
      linear_forward(f.context, plain, {}, {x, expected, residual}, none);
      linear_input_gradient(f.context, plain, dy, expected_dx);
      f.arena.restart_high_water();
      linear_forward(f.context, *encoded, {}, {x, y, residual}, none);
      EXPECT_LE(f.arena.high_water() - f.arena.mark(), tile) << name;
      EXPECT_GT(f.arena.high_water() - f.arena.mark(), tile / 2) << name;
      f.arena.restart_high_water();
      linear_input_gradient(f.context, *encoded, dy, dx);
      EXPECT_LE(f.arena.high_water() - f.arena.mark(), tile) << name;
      EXPECT_LE(distance(y, expected), bound_of(dtype)) << name;
      EXPECT_LE(distance(dx, expected_dx), bound_of(dtype)) << name;
    }
  }
}

}  // namespace
}  // namespace lm
