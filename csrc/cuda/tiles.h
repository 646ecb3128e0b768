// The table of all tiles of the multiply and convolution kernels. heuristics.h chooses a row at run
// time, and those of instances.in compile the rows. It includes no torch header, so that those
// files compile faster.
#pragma once

#include <span>

#include "kernels/common/tile.h"

namespace spamm::cuda {

using kernels::TileConfig;
using kernels::TileSize;
using kernels::UnskippedTile;

enum class Kernel {
  kSm90F16,
  kSm90Bf16,
  kSm90F32x1,
  kSm90F32x3,
  kSm90F64,
  kSm80F16,
  kSm80Bf16,
  kSm80Tf32,
  kSm80F32,
  kSm80F64
};

struct TileRow {
  Kernel kernel;
  TileSize size;
  TileConfig config;
  // Per multiprocessor; the choose_...tile() functions of heuristics.h say of what.
  double pays_from;
  // Times for product_time(), in us: of a step of 64, and of the end of a tile, which is the result
  // and what loads wait for.
  double step = 0, end = 0;
};

// The kernel whose tiles the table has for another, of entries as large.
constexpr Kernel with_tiles(Kernel kernel) {
  switch (kernel) {
    case Kernel::kSm90Bf16:
      return Kernel::kSm90F16;
    case Kernel::kSm80Bf16:
    case Kernel::kSm80Tf32:
      return Kernel::kSm80F16;
    default:
      return kernel;
  }
}

// A tile's rows and columns are those of C. `bench.py mm`, run once for each tile, says from where
// one pays. Narrow ones are of products whose K is short.
inline constexpr TileRow kTiles[] = {
    {Kernel::kSm90F16, TileSize::kSmall, {128, 64, 64, 64, 6, 2}, 0, 0.294, 0.9},
    {Kernel::kSm90F16, TileSize::kLarge, {128, 256, 64, 128, 4, 1}, 0.5, 0.658, 2.5},
    {Kernel::kSm90F16, TileSize::kMedium, {128, 128, 64, 128, 6, 1}, 0, 0.4, 1.3},
    {Kernel::kSm90F16, TileSize::kSquare, {192, 192, 64, 192, 4, 1}, 0, 0.74, 2.7},
    {Kernel::kSm90F32x1, TileSize::kSmall, {128, 64, 64, 64, 6, 1}, 0, 0.294, 0.9},
    {Kernel::kSm90F32x1, TileSize::kLarge, {128, 256, 64, 128, 4, 1}, 0.5, 0.658, 2.5},
    // Smaller tiles suffice, because each loaded operand block is used in three products. Below
    // 1.25, cublasSgemm may split K, and only the small tile is as accurate.
    {Kernel::kSm90F32x3, TileSize::kSmall, {64, 128, 64, 64, 4, 1}, 0, 1.06, 1.5},
    {Kernel::kSm90F32x3, TileSize::kLarge, {128, 128, 64, 128, 3, 1}, 1.25, 1.27, 1.5},
    // Between 1 and 1.5, most of a second wave of large tiles would be idle.
    {Kernel::kSm90F64, TileSize::kSmall, {64, 64, 64, 64, 3, 2}, 0, 1.2, 0},
    {Kernel::kSm90F64, TileSize::kLarge, {128, 128, 64, 128, 3, 1}, 1.5, 1.2, 0},
    {Kernel::kSm80F16, TileSize::kSmall, {64, 64, 32, 32, 4, 4}, 0},
    {Kernel::kSm80F16, TileSize::kLarge, {128, 128, 64, 64, 4, 2}, 1},
    {Kernel::kSm80F32, TileSize::kSmall, {64, 64, 32, 32, 4, 3}, 0},
    {Kernel::kSm80F32, TileSize::kLarge, {64, 128, 32, 64, 4, 2}, 1},
    {Kernel::kSm80F32, TileSize::kNarrow, {64, 64, 16, 64, 1, 6}, 0},
    {Kernel::kSm80F64, TileSize::kSmall, {64, 64, 32, 32, 4, 3}, 0},
    {Kernel::kSm80F64, TileSize::kLarge, {128, 64, 32, 32, 4, 2}, 1},
    {Kernel::kSm80F64, TileSize::kNarrow, {64, 64, 16, 64, 1, 4}, 0},
};

// A tile's rows x columns are output channels x pixels on sm_90, and pixels x output channels on
// sm_80. kSm90F32x1 stands for TF32's own instructions here. Its float32 output needs more shared
// memory, so it has one stage less. On sm_80 narrow and medium tiles are of packed rows alone; four
// slices of K share a medium one.
inline constexpr TileRow kConvTiles[] = {
    {Kernel::kSm90F16, TileSize::kSmall, {128, 128, 64, 128, 6, 1}, 0},
    {Kernel::kSm90F16, TileSize::kLarge, {128, 256, 64, 128, 4, 1}, 2},
    {Kernel::kSm90F16, TileSize::kNarrow, {64, 256, 64, 128, 4, 1}, 0},
    {Kernel::kSm90F16, TileSize::kMedium, {64, 128, 64, 128, 4, 2}, 0},
    {Kernel::kSm90F32x1, TileSize::kSmall, {128, 128, 64, 128, 5, 1}, 0},
    {Kernel::kSm90F32x1, TileSize::kLarge, {128, 256, 64, 128, 3, 1}, 2},
    {Kernel::kSm90F32x1, TileSize::kNarrow, {64, 256, 64, 128, 4, 1}, 0},
    {Kernel::kSm90F32x1, TileSize::kMedium, {64, 128, 64, 128, 3, 2}, 0},
    {Kernel::kSm90F32x3, TileSize::kSmall, {128, 128, 64, 128, 3, 1}, 0},
    {Kernel::kSm80F16, TileSize::kSmall, {64, 64, 32, 32, 4, 4}, 0},
    {Kernel::kSm80F16, TileSize::kLarge, {128, 128, 64, 64, 4, 2}, 1},
    {Kernel::kSm80F16, TileSize::kNarrow, {128, 32, 32, 32, 4, 4}, 0},
    {Kernel::kSm80F32, TileSize::kSmall, {64, 64, 32, 32, 4, 2}, 0},
    {Kernel::kSm80F32, TileSize::kLarge, {128, 64, 32, 32, 4, 1}, 1},
    {Kernel::kSm80F32, TileSize::kNarrow, {128, 32, 32, 32, 4, 3}, 0},
    {Kernel::kSm80F32, TileSize::kMedium, {32, 32, 32, 32, 4, 3}, 0},
    {Kernel::kSm80F64, TileSize::kSmall, {64, 64, 32, 32, 4, 3}, 0},
    {Kernel::kSm80F64, TileSize::kLarge, {128, 64, 32, 32, 4, 2}, 1},
    {Kernel::kSm80F64, TileSize::kNarrow, {128, 32, 32, 32, 4, 2}, 0},
};

// The tiles of Hopper's convolution of half types where nothing is skipped.
constexpr UnskippedTile kUnskippedTiles[] = {{128, 96},  {128, 128}, {128, 160}, {128, 192},
                                             {128, 208}, {128, 256}, {64, 192},  {64, 256},
                                             {64, 320},  {64, 384}};

// The row for a kernel and size, of products or of convolutions; null if there is none.
constexpr const TileRow* find_tile(Kernel kernel, TileSize size,
                                   std::span<const TileRow> rows = kTiles) {
  for (const TileRow& row : rows) {
    if (row.kernel == with_tiles(kernel) && row.size == size) return &row;
  }
  return nullptr;
}

// The tiles of one kernel, which its line in instances.in compiles.
template <Kernel kKernel, const auto& kRows = kTiles>
constexpr kernels::Tiles kTilesOf = [] {
  const auto config = [](TileSize size) {
    const TileRow* row = find_tile(kKernel, size, kRows);
    return row == nullptr ? TileConfig{} : row->config;
  };
  return kernels::Tiles{config(TileSize::kSmall), config(TileSize::kLarge),
                        config(TileSize::kNarrow), config(TileSize::kMedium),
                        config(TileSize::kSquare)};
}();

}  // namespace spamm::cuda
