// Scratch memory of gemm_cpu.cpp: a tile of the result, and packed panels of the operands, in fp32 and in the
// order of the register blocks. Allocated at the first product and cached. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/processor.h"

namespace lm {

// A tile's rows and columns; a panel's rows of the left matrix, and its depth in the summed index. Multiples
// of the register blocks of 3, 6 or 12 rows by 16 columns. A tile uses four left panels in turn for each
// right one, which costs more to convert. The operands of a register block, 12 rows and 32 columns, fit the
// L1 cache; everything, 440 KiB, an L2 cache of 512.
inline constexpr int kTileRows = 384, kTileColumns = 192, kPanelRows = 96, kPanelDepth = 128;
// Rows of the left panel are padded by 16 floats: a power of two would map all of them to a few sets of the
// L1 cache.
inline constexpr int kPanelGap = 16;

struct GemmPanels {
  alignas(64) float left[(kPanelRows + kPanelGap) * kPanelDepth];
  alignas(64) float right[kTileColumns * kPanelDepth];
  alignas(64) float sums[kTileRows * kTileColumns];
  int64_t next;  // of the thread's share of the tiles
};
static_assert(sizeof(GemmPanels::left) >= sizeof(float) * kPanelRows * (kPanelDepth + kPanelGap),
              "a panel of the left matrix fits in either layout");

// One per thread of this thread's products, owned by this thread for its lifetime. Throws std::bad_alloc
// here, because the parallel threads must not throw.
GemmPanels* gemm_panels(int threads);

// Whether LibTorch's bf16 products are used on a processor with these widest instructions: only if it has
// instructions for bf16. With AVX-512 alone LibTorch converts in every product and reaches a fifth of its
// fp32 rate; with AVX2 it has plain loops, twenty times slower than gemm_cpu.cpp.
bool library_multiplies_bf16(Instructions best);

}  // namespace lm
