// Gathering rows, and the gradient of that: sums per distinct row in a fixed order, then added once.
#include "tests/kernels/support.h"

namespace lm {
namespace {

// Documents of 5, 2, 0 and 4 rows behind a row that is nobody's, of which each gives its first three.
TEST(Rows, TheFirstRowsOfDocumentsAreSummedInOrderAndBecomeZero) {
  const std::vector<int32_t> start = {0, 5, 7, 7, 11};
  const int64_t first = 1, rows = 3, all = 12;
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (int64_t width : {1, 3, 64, 577}) {
      SCOPED_TRACE(dtype_text(dtype) + " width " + std::to_string(width));
      const int64_t stride = width + 5;
      const Values x = Values::random(dtype, all * stride, 31),
                   before = Values::random(DType::kF32, rows * width, 32);
      const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
        Values taken = x, sums = before;
        k.take_first_rows({.x = taken.data(),
                           .start = start.data(),
                           .sums = static_cast<float*>(sums.data()),
                           .first = first,
                           .documents = 4,
                           .rows = rows,
                           .width = width,
                           .stride = stride,
                           .dtype = dtype},
                          stream);
        return Outputs{taken, sums};
      });
      Values taken = x, sums = before;
      for (size_t d = 0; d + 1 < start.size(); ++d) {
        for (int64_t i = 0; i < std::min<int64_t>(rows, start[d + 1] - start[d]); ++i) {
          for (int64_t j = 0; j < width; ++j) {
            const int64_t at = (first + start[d] + i) * stride + j, to = i * width + j;
            sums.set(to, static_cast<float>(sums[to]) + static_cast<float>(x[at]));
            taken.set(at, 0);
          }
        }
      }
      EXPECT_TRUE(got[0] == taken);
      EXPECT_TRUE(got[1] == sums);
    }
  }
}

TEST(Rows, GatherSumAndAddAreExact) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (int64_t width : {1, 3, 64, 577}) {
      SCOPED_TRACE(dtype_text(dtype) + " width " + std::to_string(width));
      const int64_t vocabulary = 23, tokens = 140;
      const Values table = Values::random(dtype, vocabulary * width, 21),
                   dx = Values::random(dtype, tokens * width, 22);
      std::vector<int32_t> token, order, start, row;
      for (int32_t t = 0; t < tokens; ++t) token.push_back(t * t % 11);
      for (int32_t v = 0; v < vocabulary; ++v) {
        const size_t before = order.size();
        for (int32_t t = 0; t < tokens; ++t) {
          if (token[static_cast<size_t>(t)] == v) order.push_back(t);
        }
        if (order.size() == before) continue;
        row.push_back(v);
        start.push_back(static_cast<int32_t>(before));
      }
      start.push_back(static_cast<int32_t>(order.size()));
      const int64_t slots = static_cast<int64_t>(row.size());
      const Values before = Values::random(DType::kF32, slots * width, 23);
      const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
        Values out(dtype, tokens * width), sums = before, gradient = table;
        k.gather_rows({.table = table.data(),
                       .index = token.data(),
                       .out = out.data(),
                       .rows = tokens,
                       .width = width,
                       .dtype = dtype},
                      stream);
        k.sum_rows({.source = dx.data(),
                    .order = order.data(),
                    .start = start.data(),
                    .sums = static_cast<float*>(sums.data()),
                    .slots = slots,
                    .width = width,
                    .dtype = dtype},
                   stream);
        k.add_rows({.sums = static_cast<const float*>(sums.data()),
                    .row = row.data(),
                    .gradient = gradient.data(),
                    .slots = slots,
                    .width = width,
                    .gradient_dtype = dtype},
                   stream);
        return Outputs{out, sums, gradient};
      });
      Values out(dtype, tokens * width), sums = before, gradient = table;
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t j = 0; j < width; ++j)
          out.set(t * width + j, table[token[static_cast<size_t>(t)] * width + j]);
      }
      for (int64_t s = 0; s < slots; ++s) {
        for (int64_t j = 0; j < width; ++j) {
          for (int32_t t = 0; t < tokens; ++t) {  // position order
            if (token[static_cast<size_t>(t)] != row[static_cast<size_t>(s)]) continue;
            sums.set(s * width + j, static_cast<float>(sums[s * width + j] + dx[t * width + j]));
          }
          const int64_t g = row[static_cast<size_t>(s)] * width + j;
          gradient.set(g, static_cast<float>(table[g] + sums[s * width + j]));
        }
      }
      EXPECT_TRUE(got[0] == out);
      EXPECT_TRUE(got[1] == sums);
      EXPECT_TRUE(got[2] == gradient);
    }
  }
}

// Rounded to the type after the scale, and again after the sum.
TEST(Rows, AScaledGatherAndScaledSumsAreExact) {
  const std::vector<int32_t> index = {5, 0, 5, 8, 3}, row = {7, 1, 4};
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (int64_t width : {1, 3, 64, 5000}) {
      for (const auto& [scale, add] :
           {std::pair{1.F, true}, {0.125F, false}, {33.94F, false}, {33.94F, true}}) {
        SCOPED_TRACE(dtype_text(dtype) + " width " + std::to_string(width) + " scale " +
                     std::to_string(scale) + (add ? ", added" : ""));
        const auto rows = static_cast<int64_t>(index.size()), slots = static_cast<int64_t>(row.size());
        const Values table = Values::random(dtype, 9 * width, 24),
                     before = Values::random(dtype, rows * width, 25, 20),
                     sums = Values::random(DType::kF32, slots * width, 26);
        const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
          Values out = before, gradient = table;
          k.gather_rows({.table = table.data(),
                         .index = index.data(),
                         .out = out.data(),
                         .rows = rows,
                         .width = width,
                         .scale = scale,
                         .add = add,
                         .dtype = dtype},
                        stream);
          k.add_rows({.sums = static_cast<const float*>(sums.data()),
                      .row = row.data(),
                      .gradient = gradient.data(),
                      .slots = slots,
                      .width = width,
                      .scale = scale,
                      .gradient_dtype = dtype},
                     stream);
          return Outputs{out, gradient};
        });
        Values out = before, gradient = table;
        for (int64_t i = 0; i < rows * width; ++i) {
          const int64_t from = index[static_cast<size_t>(i / width)] * width + i % width;
          out.set(i, static_cast<float>(table[from] * scale));
          if (add) out.set(i, static_cast<float>(before[i] + out[i]));
        }
        for (int64_t i = 0; i < slots * width; ++i) {
          const int64_t to = row[static_cast<size_t>(i / width)] * width + i % width;
          gradient.set(to, static_cast<float>(table[to] + static_cast<float>(sums[i] * scale)));
        }
        EXPECT_TRUE(got[0] == out);
        EXPECT_TRUE(got[1] == gradient);
      }
    }
  }
}

TEST(Rows, ScatterPutsRowsInPlaceAndZeroesTheRest) {
  const std::vector<int32_t> index = {0, 2, 3, 90};
  constexpr int64_t kOut = 100;
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (int64_t width : {1, 3, 64, 577}) {
      const Values source = Values::random(dtype, static_cast<int64_t>(index.size()) * width, 5);
      const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
        Values out = Values::random(dtype, kOut * width, 6);
        k.scatter_rows({.source = source.data(),
                        .index = index.data(),
                        .out = out.data(),
                        .rows = static_cast<int64_t>(index.size()),
                        .out_rows = kOut,
                        .width = width,
                        .dtype = dtype},
                       stream);
        return Outputs{out};
      });
      for (int64_t r = 0, next = 0; r < kOut; ++r) {
        const bool listed = next < 4 && index[static_cast<size_t>(next)] == r;
        for (int64_t j = 0; j < width; ++j) {
          ASSERT_EQ(got[0][r * width + j], listed ? source[next * width + j] : 0.0) << r;
        }
        next += listed;
      }
    }
  }
}

}  // namespace
}  // namespace lm
