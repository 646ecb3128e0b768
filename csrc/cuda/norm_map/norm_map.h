// Norm maps on CUDA.
#pragma once

#include <ATen/core/Tensor.h>

#include "cuda/device.h"
#include "cuda/norm_map/layout.h"

namespace spamm::cuda {

// A norm map to compute: of `matrices`, in blocks of block_rows x block_columns.
struct MapJob {
  Matrices matrices;
  int64_t block_rows, block_columns;
  MapMemory map = {};  // of the norms' type

  int64_t norms() const {
    return matrices.size(0) * blocks_of(matrices.size(1), block_rows) *
           blocks_of(matrices.size(2), block_columns);
  }
};

// The one that writes a contiguous map to `norms`.
inline MapJob job_for(const Matrices& x, int64_t block_rows, int64_t block_columns, void* norms) {
  const MapMemory map(norms, blocks_of(x.size(1), block_rows), blocks_of(x.size(2), block_columns));
  return {x, block_rows, block_columns, map};
}

// Refuses a map of more norms than the kernel counts; `name` is that of the matrix, of shape
// `shape`.
void check_blocks(int64_t norms, const char* name, at::IntArrayRef shape);

// Computes one or two maps of matrices of `dtype` in one launch; empty ones are left out. `zeroed`,
// if not null, is an int in device memory that the launch sets to 0. Returns whether there was one.
bool write_norm_maps(at::ArrayRef<MapJob> jobs, at::ScalarType dtype, int* zeroed,
                     const OnDevice& device);

// Computes the op norm_map of a matrix or a batch (3-d) into `map`, which is contiguous and has the
// map's shape and dtype.
void norm_map_into(const at::Tensor& a, int64_t rows, int64_t columns, const at::Tensor& map,
                   const OnDevice& device);

}  // namespace spamm::cuda
