// Launches of the kernels beside a block-sparse product (kernels/sparse/), on the current stream.
#pragma once

#include <ATen/core/Tensor.h>

#include "cuda/device.h"
#include "kernels/common/tile.h"
#include "kernels/multiply/lists.h"

namespace spamm::cuda {

// Indices that kernels read, with the tensors that hold them.
kernels::Pattern pattern_of(const at::Tensor& crow, const at::Tensor& col);

// Lists the tiles of C for a kernel with this tile. `counts` are zeros.
void find_tiles(const kernels::ProductLists& lists, const kernels::TileConfig& tile, int granule,
                const OnDevice& device);

// The cell of each block of 32 of a matrix (kernels/sparse/blocks.cuh), int32.
at::Tensor find_cells(const kernels::Pattern& pattern, int64_t stored, const OnDevice& device);

// Blocks of a matrix in memory: (stored, edge, edge), or with `cells` a cell for each.
struct BlockTensor {
  at::Tensor values;
  at::Tensor cells;  // undefined: none
};

// Copies the blocks of a pattern. `source`, unless null, is the pattern of `from`.
void copy_blocks(const kernels::Pattern& pattern, const BlockTensor& from, const BlockTensor& to,
                 int64_t edge, const kernels::Pattern* source, const OnDevice& device);

// Makes the blocks (stored, edge, edge) of a square pattern symmetric, from those above.
void mirror_blocks(const kernels::Pattern& pattern, const at::Tensor& values,
                   const OnDevice& device);

}  // namespace spamm::cuda
