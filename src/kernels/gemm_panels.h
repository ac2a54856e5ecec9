// The memory in which gemm_cpu.cpp multiplies: a tile of the result, and panels of what it is the product of,
// in fp32 and in the order in which the registers take them. Made at the first product and kept. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/processor.h"

namespace lm {

// Of a tile of the result: rows and columns; of a panel: rows of the left matrix, and how much of the summed
// index at once. Multiples of the 3, 6 or 12 rows of 16 columns that the registers hold. A tile has four left
// panels, one after the other, for each right one, which costs more to convert. What the registers take at
// once, 12 rows and 32 columns, fits the first cache; all of it, 440 KiB, a second one of 512.
inline constexpr int kTileRows = 384, kTileColumns = 192, kPanelRows = 96, kPanelDepth = 128;
// Between the rows of the left panel lie 16 floats more: a power of two would send all of them to a few sets
// of the first cache.
inline constexpr int kPanelGap = 16;

struct GemmPanels {
  alignas(64) float left[(kPanelRows + kPanelGap) * kPanelDepth];
  alignas(64) float right[kTileColumns * kPanelDepth];
  alignas(64) float sums[kTileRows * kTileColumns];
  int64_t next;  // of the thread's share of the tiles
};
static_assert(sizeof(GemmPanels::left) >= sizeof(float) * kPanelRows * (kPanelDepth + kPanelGap),
              "the left matrix lies either way");

// For so many threads that this one shares its products with: one each, which belong to it as long as it
// lives. Throws std::bad_alloc; here, as nothing may be thrown among the threads.
GemmPanels* gemm_panels(int threads);

// Whether LibTorch's products of bf16 serve a processor whose widest instructions are these: only where it
// has instructions for bf16. With AVX-512 alone LibTorch converts in every product and reaches a fifth of its
// fp32 rate; with AVX2 it has plain loops, twenty times slower than gemm_cpu.cpp.
bool library_multiplies_bf16(Instructions best);

}  // namespace lm
