// The GPU launchers whose bits the contract fixes (sums, rows, dropout, norms, AdamW): the CPU's, over
// awkward shapes.
#include "tests/kernels/gpu_support.h"

namespace lm {
namespace {

using Master = MasterForm;

TEST_F(GpuKernels, Rows) {
  const std::vector<int32_t> token = {3, 1, 3, 0, 7, 3, 1}, order = {3, 1, 6, 0, 2, 5, 4},
                             start = {0, 1, 3, 3, 7}, row = {0, 1, 3, 7};
  for (DType t : kBoth) {
    for (int64_t width : {1, 3, 4, 7, 8, 64, 127, 128, 129, 577, 1032, 2048}) {
      for (int64_t shift : {0, 1, 4, 8}) {
        for (int64_t some : {0, 1, 4}) {
          SCOPED_TRACE(name("rows", t, {width, shift, some}));
          const float scale = some > 1 ? 1.7f : 1.f;
          const bool add = shift == 8;
          check(
              {noise(t, 8 * width, 1, 1, shift), noise(t, 8 * width, 2, 1, shift),
               noise(t, 7 * width, 4, 1, shift), noise(DType::kF32, 4 * width, 3, 1, shift), numbers(token),
               numbers(order), numbers(start), numbers(row)},
              [&](const Kernels& k, StreamView v, const Pointers& p) {
                k.gather_rows({.table = p[0],
                               .index = i32(p[4]),
                               .out = p[2],
                               .rows = some + (some > 1 ? 3 : 0),
                               .width = width,
                               .scale = scale,
                               .add = add,
                               .dtype = t},
                              v);
                k.sum_rows({.source = p[1],
                            .order = i32(p[5]),
                            .start = i32(p[6]),
                            .sums = f32(p[3]),
                            .slots = some,
                            .width = width,
                            .dtype = t},
                           v);
                k.add_rows({.sums = f32(p[3]),
                            .row = i32(p[7]),
                            .gradient = p[0],
                            .slots = some,
                            .width = width,
                            .scale = scale,
                            .gradient_dtype = t},
                           v);
                k.scatter_rows({.source = p[0],
                                .index = i32(p[7]),
                                .out = p[1],
                                .rows = some,
                                .out_rows = 8,
                                .width = width,
                                .dtype = t},
                               v);
              },
              Want::kBits);
        }
      }
    }
  }
}

TEST_F(GpuKernels, Materialise) {
  const std::pair<int64_t, int64_t> sizes[] = {{1, 1}, {1, 7}, {3, 43}, {40, 48}, {64, 64}, {33, 577}};
  for (const EncodingKind kind : {EncodingKind::kNf4, EncodingKind::kFp4, EncodingKind::kNf4Double,
                                  EncodingKind::kFp4Double, EncodingKind::kInt8}) {
    for (DType t : kBoth) {
      for (const auto& [rows, columns] : sizes) {
        for (int64_t shift : {0, 1, 8}) {
          SCOPED_TRACE(name("materialise", t, {static_cast<int64_t>(kind), rows, columns, shift}));
          const int64_t n = rows * columns, blocks = (n + kScaleBlock - 1) / kScaleBlock;
          // Codes may be any bytes; so may codes of scales, which `noise` has, too.
          check(
              {noise(DType::kF32, (n + 3) / 4, 1), noise(DType::kF32, std::max(blocks, rows), 2),
               noise(DType::kF32, 1 + (blocks + kNestedBlock - 1) / kNestedBlock, 3), zeros(t, n, shift)},
              [&](const Kernels& k, StreamView v, const Pointers& p) {
                Materialise m{.kind = kind, .out = view_of(p[3], t, rows, columns)};
                for (size_t i = 0; i < 3; ++i) m.pieces[i] = static_cast<const std::byte*>(p[i]);
                k.materialise(m, v);
              },
              Want::kBits);
        }
      }
    }
  }
}

// Some rows or columns of a matrix: element `first` of it on.
TEST_F(GpuKernels, MaterialiseATile) {
  struct Tile {
    int64_t rows, columns, first, width;
    bool eight_bits_only = false;
  };
  for (const Tile& tile : {Tile{5, 43, 64 * 43, 43}, Tile{70, 64, 128, 192}, Tile{3, 128, 192, 320},
                           Tile{4, 17, 5, 29, true}, Tile{3, 29, 2 * 29, 29, true}}) {
    for (const EncodingKind kind : {EncodingKind::kNf4, EncodingKind::kFp4, EncodingKind::kNf4Double,
                                    EncodingKind::kFp4Double, EncodingKind::kInt8}) {
      if (tile.eight_bits_only && kind != EncodingKind::kInt8) continue;
      for (DType t : kBoth) {
        SCOPED_TRACE(
            name("materialise", t, {static_cast<int64_t>(kind), tile.rows, tile.columns, tile.first}));
        const int64_t all = tile.first / tile.width + tile.rows, n = all * tile.width;
        const int64_t blocks = (n + kScaleBlock - 1) / kScaleBlock;
        check(
            {noise(DType::kF32, (n + 3) / 4, 1), noise(DType::kF32, std::max(blocks, all), 2),
             noise(DType::kF32, 1 + (blocks + kNestedBlock - 1) / kNestedBlock, 3),
             zeros(t, tile.rows * tile.columns)},
            [&](const Kernels& k, StreamView v, const Pointers& p) {
              Materialise m{.kind = kind,
                            .out = view_of(p[3], t, tile.rows, tile.columns),
                            .first = tile.first,
                            .columns = tile.width};
              for (size_t i = 0; i < 3; ++i) m.pieces[i] = static_cast<const std::byte*>(p[i]);
              k.materialise(m, v);
            },
            Want::kBits);
      }
    }
  }
}

TEST_F(GpuKernels, Accumulate) {
  const std::vector<int64_t> sizes = {0,
                                      1,
                                      3,
                                      4,
                                      5,
                                      8,
                                      1020,
                                      1023,
                                      1024,
                                      1025,
                                      4100,
                                      70001,
                                      16384 * 256 + 3,
                                      16384 * 256 * 4 + 8};  // the last two: the grid goes round
  for (DType t : kBoth) {
    for (DType from : kBoth) {
      for (int64_t n : sizes) {
        for (int64_t shift : {0, 1, 2, 4}) {
          for (bool overwrite : {false, true}) {
            if (n > 100000 && (shift != 0 || overwrite || t != from || t != DType::kBF16)) continue;
            SCOPED_TRACE(name("accumulate", t, {static_cast<int64_t>(from), n, shift, overwrite}));
            check(
                {with(noise(t, n, 1, 1, shift), {kInf, 3e38, 1e-42, -0., 0.}, 17),
                 with(noise(from, n, 2, 1, shift), {1., 3e38, -1e-42, -0., -0.}, 17)},
                [&](const Kernels& k, StreamView v, const Pointers& p) {
                  k.accumulate({.to = p[0],
                                .from = p[1],
                                .elements = n,
                                .to_dtype = t,
                                .from_dtype = from,
                                .overwrite = overwrite},
                               v);
                },
                Want::kBits);
          }
        }
      }
    }
  }
}

// Which NaN a sum is differs between processors: that it is one does not, and bf16 has one spelling of it.
TEST_F(GpuKernels, SumsThatAreNoNumberAreNoneOnBoth) {
  for (DType t : kBoth) {
    const Array to = with(noise(t, 64, 1), {kNotANumber, kInf, -kInf, kNotANumber}, 3);
    const Array from = with(noise(t, 64, 2), {1, -kInf, kInf, -kNotANumber}, 3);
    check(
        {to, from},
        [&](const Kernels& k, StreamView v, const Pointers& p) {
          k.accumulate({.to = p[0], .from = p[1], .elements = 64, .to_dtype = t, .from_dtype = t}, v);
        },
        t == DType::kBF16 ? Want::kBits : Want::kNear, 0);
  }
}

TEST_F(GpuKernels, SumColumnsAndBias) {
  for (DType t : kBoth) {
    for (int64_t rows : {0, 1, 2, 63, 64, 65, 128, 130}) {
      for (int64_t width : {1, 3, 77, 127, 128, 129, 300}) {
        for (int64_t pad : {0, 3}) {
          SCOPED_TRACE(name("columns", t, {rows, width, pad}));
          check(
              {noise(t, rows * (width + pad), 3, 1, pad), noise(DType::kF32, width, 1),
               noise(DType::kF32, (rows + 63) / 64 * width, 2), noise(t, width, 4)},
              [&](const Kernels& k, StreamView v, const Pointers& p) {
                k.sum_columns({.x = p[0],
                               .sums = f32(p[1]),
                               .partial = f32(p[2]),
                               .rows = rows,
                               .width = width,
                               .stride = width + pad,
                               .dtype = t},
                              v);
                k.add_bias({.x = p[0],
                            .bias = p[3],
                            .rows = rows,
                            .width = width,
                            .stride = width + pad,
                            .dtype = t},
                           v);
              },
              Want::kBits);
        }
      }
    }
  }
}

TEST_F(GpuKernels, Dropout) {
  for (DType t : kBoth) {
    for (int64_t width : {1, 3, 15, 16, 17, 48, 63, 64, 65, 100, 128, 264, 511, 512, 513, 577, 2048, 2049}) {
      for (float p : {0.f, 1e-8f, 0.3f, 0.999999f, 1.f}) {
        for (int variant = 0; variant < 6; ++variant) {  // 1, 4: accumulate, 2, 5: in place; from 3: shifted
          SCOPED_TRACE(name("dropout", t, {width, static_cast<int64_t>(p * 1000), variant}));
          const int64_t shift = variant < 3 ? 0 : variant - 2;
          const int64_t rows = 5;
          // bf16 has one NaN; which one an fp32 product is, is the device's own.
          const double odd = t == DType::kBF16 ? kNotANumber : 1e30;
          check(
              {with(noise(t, rows * width, 1, 1, shift), {kInf, -0., 1e-42, 0., odd}, 31),
               noise(t, rows * width, 2, 1, shift), numbers({0, 1, 2147483647, -1, 7}),
               numbers({5, 0, 131071, 3, 2147483647})},
              [&](const Kernels& k, StreamView v, const Pointers& q) {
                k.dropout({.x = q[0],
                           .out = variant % 3 == 2 ? q[0] : q[1],
                           .sample = i32(q[2]),
                           .position = i32(q[3]),
                           .rows = rows,
                           .width = width,
                           .key = 0xFEDCBA9876543210u,
                           .p = p,
                           .accumulate = variant % 3 == 1,
                           .dtype = t},
                          v);
              },
              Want::kBits);
        }
      }
    }
  }
}

TEST_F(GpuKernels, GranuleNorms) {
  for (DType t : kBoth) {
    for (int64_t granules : {0, 1, 5}) {
      for (double scale : {1., 1e-30, 1e30}) {
        for (int64_t shift : {0, 1}) {
          Array x = noise(t, granules * 4096, 1, scale, shift);
          if (granules > 1) {
            x.values.set(4096 + 17, kNotANumber), x.values.set(2 * 4096 + 4095, kInf),
                x.values.set(3 * 4096, 3.4e38);
          }
          check(
              {x, noise(DType::kF32, granules * 2, 9)},
              [&](const Kernels& k, StreamView v, const Pointers& p) {
                k.granule_norms(
                    {.x = p[0], .sums = static_cast<double*>(p[1]), .granules = granules, .dtype = t}, v);
              },
              Want::kBits);
        }
      }
    }
  }
}

void check_update(const char* rule_name, const RuleScalars& rule) {
  const std::vector<int64_t> sizes = {0, 1, 3, 4, 5, 63, 64, 65, 1000, 1024, 4099, 16384 * 256 + 5};
  for (Master mode : {Master::kWeight, Master::kSplit, Master::kF32, Master::kStochastic}) {
    const DType weight = mode == Master::kWeight ? DType::kF32 : DType::kBF16,
                master = mode == Master::kF32 ? DType::kF32 : DType::kBF16;
    for (DType gradient : kBoth) {
      for (int64_t n : sizes) {
        for (int64_t first :
             {int64_t{0}, int64_t{64}, (int64_t{1} << 34) - 64, (int64_t{1} << 40) + 64 * 7}) {
          for (int shifted = -1; shifted < 5; ++shifted) {  // which array is not aligned
            if ((shifted >= 0 && first != 64) ||
                (n > 100000 && (first != 0 || gradient != DType::kF32 || mode != Master::kSplit)))
              continue;
            if (first > 64 && mode != Master::kStochastic) continue;
            SCOPED_TRACE(name(rule_name, gradient, {static_cast<int64_t>(mode), n, first, shifted}));
            const auto at = [&](int i) { return int64_t{i == shifted ? 2 : 0}; };
            Array v = noise(DType::kF32, n, 3, 0.01, at(4));
            for (int64_t i = 0; i < n; ++i) v.values.set(i, std::abs(v.values[i]));
            check(
                {with(noise(gradient, n, 1, 1, at(0)),
                      {kNotANumber, kInf, -kInf, 0., -0., 1e-42, 3.4e38, 1e20}, 11),
                 noise(weight, n, 4, 1, at(1)), noise(master, n, 5, 1, at(2)),
                 noise(DType::kF32, n, 2, 0.1, at(3)), v},
                [&](const Kernels& k, StreamView s, const Pointers& p) {
                  for (int step = 0; step < 2; ++step) {
                    k.update({.rule = rule,
                              .gradient = p[0],
                              .weight = p[1],
                              .master = mode == Master::kSplit || mode == Master::kF32 ? p[2] : nullptr,
                              .state = {f32(p[3]), f32(p[4])},
                              .elements = n,
                              .gradient_dtype = gradient,
                              .weight_dtype = weight,
                              .form = mode,
                              .gradient_scale = 0.7f,
                              .rounding_key = 0xABCDEF0123456789u,
                              .first_index = first},
                             s);
                  }
                },
                Want::kBits);
          }
        }
      }
    }
  }
}

TEST_F(GpuKernels, AdamW) {
  check_update("adamw", AdamW{.one_minus_beta1 = 0.1f,
                              .beta2 = 0.999f,
                              .one_minus_beta2 = 0.001f,
                              .step_size = 1e-3f,
                              .rsqrt_correction2 = 1.5f,
                              .eps = 1e-8f,
                              .decay = 0.99999f});
}

TEST_F(GpuKernels, Lion) {
  check_update("lion",
               Lion{.one_minus_beta1 = 0.1f, .one_minus_beta2 = 0.01f, .lr = 1e-3f, .decay = 0.99999f});
}

// All that the scratch holds is compared too: every sum and factor.
void check_factored(const char* rule_name, const RuleScalars& rule, DType statistics) {
  const std::pair<int64_t, int64_t> shapes[] = {{0, 300}, {0, 1},    {1, 70},    {9, 4},
                                                {70, 3},  {130, 64}, {200, 1000}};
  for (Master mode : {Master::kWeight, Master::kSplit, Master::kF32, Master::kStochastic}) {
    const DType weight = mode == Master::kWeight ? DType::kF32 : DType::kBF16,
                master = mode == Master::kF32 ? DType::kF32 : DType::kBF16;
    for (DType gradient : kBoth) {
      for (const auto& [rows, columns] : shapes) {  // rows: 0 of a vector
        SCOPED_TRACE(name(rule_name, gradient, {static_cast<int64_t>(mode), rows, columns}));
        const bool vector = rows == 0;
        const int64_t lines = std::max<int64_t>(rows, 1), n = lines * columns;
        check(
            {noise(gradient, n, 1), noise(weight, n, 4), noise(master, n, 5), zeros(statistics, lines),
             zeros(statistics, columns), zeros(DType::kF32, factored_scratch(lines, columns))},
            [&, rows_ = lines, columns_ = columns](const Kernels& k, StreamView s, const Pointers& p) {
              for (int step = 0; step < 2; ++step) {
                k.update({.rule = rule,
                          .gradient = p[0],
                          .weight = p[1],
                          .master = mode == Master::kSplit || mode == Master::kF32 ? p[2] : nullptr,
                          .factored = {.rows = rows_,
                                       .columns = columns_,
                                       .row = vector ? nullptr : p[3],
                                       .column = vector ? nullptr : p[4],
                                       .vector = vector ? p[4] : nullptr,
                                       .scratch = f32(p[5]),
                                       .dtype = statistics},
                          .elements = rows_ * columns_,
                          .gradient_dtype = gradient,
                          .weight_dtype = weight,
                          .form = mode,
                          .gradient_scale = 0.7f,
                          .rounding_key = 0xABCDEF0123456789u,
                          .first_index = 4096 + 37},
                         s);
              }
            },
            Want::kBits);
      }
    }
  }
}

TEST_F(GpuKernels, FactoredState) {
  Adafactor::Settings scaled;
  scaled.scale_parameter = true;
  const RulePass pass{.lr = 1e-2, .weight_decay = 0.01, .t = 3};
  check_factored("adafactor", Adafactor::at({}, pass), DType::kF32);
  check_factored("adafactor, scaled", Adafactor::at(scaled, pass), DType::kF32);
  check_factored("adafactor_lowmem", AdafactorLowmem::at({}, pass), DType::kBF16);
}

// Both calls of an orthogonal step, and the division between them; the direction is filled up to a granule.
TEST_F(GpuKernels, MuonState) {
  const Muon rule = Muon::at({}, {.lr = 1e-2, .weight_decay = 0.01, .t = 3});
  const std::pair<int64_t, int64_t> shapes[] = {{1, 70}, {9, 4}, {70, 3}, {130, 64}, {200, 1000}};
  for (Master mode : {Master::kWeight, Master::kSplit, Master::kF32, Master::kStochastic}) {
    const DType weight = mode == Master::kWeight ? DType::kF32 : DType::kBF16,
                master = mode == Master::kF32 ? DType::kF32 : DType::kBF16;
    for (DType gradient : kBoth) {
      for (const auto& [rows, columns] : shapes) {
        SCOPED_TRACE(name("muon", gradient, {static_cast<int64_t>(mode), rows, columns}));
        const int64_t n = rows * columns, granules = (n + 4095) / 4096;
        check(
            {noise(gradient, n, 1), noise(weight, n, 4), noise(master, n, 5), zeros(DType::kF32, n),
             noise(DType::kBF16, granules * 4096, 6), zeros(DType::kF32, 2 * granules),
             zeros(DType::kF32, 1)},
            [&, rows_ = rows, columns_ = columns](const Kernels& k, StreamView s, const Pointers& p) {
              RuleUpdate update{.rule = rule,
                                .gradient = p[0],
                                .weight = p[1],
                                .master = mode == Master::kSplit || mode == Master::kF32 ? p[2] : nullptr,
                                .state = {f32(p[3])},
                                .muon = {.call = MuonState::Call::kDirection,
                                         .rows = rows_,
                                         .columns = columns_,
                                         .direction = p[4]},
                                .elements = n,
                                .gradient_dtype = gradient,
                                .weight_dtype = weight,
                                .form = mode,
                                .gradient_scale = 0.7f,
                                .rounding_key = 0xABCDEF0123456789u,
                                .first_index = 4096 * 3 + 5};
              auto* const sums = static_cast<double*>(p[5]);
              for (int step = 0; step < 2; ++step) {
                update.muon.call = MuonState::Call::kDirection;
                k.update(update, s);
                k.granule_norms({.x = p[4], .sums = sums, .granules = granules, .dtype = DType::kBF16}, s);
                k.normalise({.x = p[4],
                             .elements = n,
                             .sums = sums,
                             .granules = granules,
                             .norm = f32(p[6]),
                             .least = 1e-7f},
                            s);
                update.muon.call = MuonState::Call::kStep;
                k.update(update, s);
              }
            },
            Want::kBits);
      }
    }
  }
}

// Codes are n / 2 bf16 numbers to the test: any bytes.
void check_coded(const char* rule_name, const RuleScalars& rule, int64_t block = 256) {
  for (Master mode : {Master::kWeight, Master::kSplit, Master::kF32, Master::kStochastic}) {
    const DType weight = mode == Master::kWeight ? DType::kF32 : DType::kBF16,
                master = mode == Master::kF32 ? DType::kF32 : DType::kBF16;
    for (DType gradient : kBoth) {
      for (int64_t n : {0, 256, 512, 4096, 256 * 100}) {
        SCOPED_TRACE(name(rule_name, gradient, {static_cast<int64_t>(mode), n}));
        check(
            {with(noise(gradient, n, 1), {kNotANumber, kInf, -kInf, 0., -0., 1e-42, 3.4e38, 1e20}, 911),
             noise(weight, n, 4), noise(master, n, 5), noise(DType::kBF16, n / 2, 2),
             noise(DType::kF32, n / block, 6, 0.1), noise(DType::kBF16, n / 2, 3),
             noise(DType::kF32, n / block, 7, 0.01)},
            [&](const Kernels& k, StreamView s, const Pointers& p) {
              for (int step = 0; step < 2; ++step) {
                k.update({.rule = rule,
                          .gradient = p[0],
                          .weight = p[1],
                          .master = mode == Master::kSplit || mode == Master::kF32 ? p[2] : nullptr,
                          .state = {f32(p[4]), f32(p[6])},
                          .codes = {static_cast<uint8_t*>(p[3]), static_cast<uint8_t*>(p[5])},
                          .elements = n,
                          .gradient_dtype = gradient,
                          .weight_dtype = weight,
                          .form = mode,
                          .gradient_scale = 0.7f,
                          .rounding_key = 0xABCDEF0123456789u,
                          .first_index = 4096},
                         s);
              }
            },
            Want::kBits);
      }
    }
  }
}

TEST_F(GpuKernels, CodedState) {
  check_coded("adamw_8bit", AdamW8bit::at({}, {.lr = 1e-2, .weight_decay = 0.01, .t = 3}));
  // Of the codes of 4 bits the first half is used.
  check_coded("adamw_4bit", AdamW4bit::at({}, {.lr = 1e-2, .weight_decay = 0.01, .t = 3}), 128);
  check_coded("adamw_fp8", AdamWFp8::at({}, {.lr = 1e-2, .weight_decay = 0.01, .t = 3}));
  check_coded("lion_8bit", Lion8bit::at({}, {.lr = 1e-2, .weight_decay = 0.01, .t = 3}));
}

TEST_F(GpuKernels, Sgd) {
  check_update("sgd", Sgd{.lr = 1e-3f, .momentum = 0.9f, .weight_decay = 0.01f});
}

}  // namespace
}  // namespace lm
