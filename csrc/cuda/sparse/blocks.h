// Launches of the kernels beside a block-sparse product (kernels/sparse/), on the current stream.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>

#include "cuda/device.h"
#include "kernels/common/tile.h"
#include "kernels/multiply/lists.h"

namespace spamm::cuda {

// What a kernel finds for the host, in pinned memory, which it writes itself: a copy behind it
// would take longer.
template <class T>
class HostResult {
 public:
  T* on_device() const { return static_cast<T*>(memory_.mutable_data_ptr()); }

  // What the kernels of the stream have left. The host waits for them.
  T wait(cudaStream_t stream) const {
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    return *on_device();
  }

 private:
  at::Tensor memory_ = at::empty({static_cast<int64_t>(sizeof(T))},
                                 at::TensorOptions(at::kByte).pinned_memory(true));
};

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

// Copies the blocks of a pattern, or with `upper_only` those on and above the diagonal. `source`,
// unless null, is the pattern of `from`.
void copy_blocks(const kernels::Pattern& pattern, const BlockTensor& from, const BlockTensor& to,
                 int64_t edge, const kernels::Pattern* source, const OnDevice& device,
                 bool upper_only = false);

// Makes the blocks (stored, edge, edge) of a square pattern symmetric, from those above. Their
// norms, unless undefined, are computed on the way; not of blocks of 128.
void mirror_blocks(const kernels::Pattern& pattern, const at::Tensor& values,
                   const at::Tensor& norms, const OnDevice& device);

}  // namespace spamm::cuda
