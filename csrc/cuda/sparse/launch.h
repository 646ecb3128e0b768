// Launches of the kernels of block-sparse matrices (kernels/sparse/), without torch's headers:
// those take most of the time of a file that nvcc compiles.
#pragma once

#include <c10/core/ScalarType.h>
#include <cuda_runtime.h>

#include <cstddef>

#include "kernels/common/tile.h"
#include "kernels/multiply/params.h"
#include "kernels/sparse/params.h"

namespace spamm::cuda {

// The steps of a plan: what fills `totals`, and what fills the pattern and the lists. Mirror images
// are sorted into the pattern if params.mirrors is not null.
enum class PlanStep { kCount, kWrite };

// Checks up to three patterns and counts the products of the first two. `findings` are zeros.
void launch_check_patterns(const kernels::GivenPattern (&patterns)[3],
                           kernels::CsrFindings* findings, cudaStream_t stream);

template <class Norm>
struct CsrKernels {
  using Maps = kernels::CsrMaps<Norm>;

  static void plan(PlanStep step, kernels::PlanParams<Norm> params, const cudaDeviceProp& device,
                   cudaStream_t stream);
  // Searches for a valid ratio, or an error bound. These two need sparse_search_workspace() bytes.
  static void find_tau(const Maps& maps, bool of_ratio, double limit,
                       const kernels::CsrFindings* findings, void* workspace, Norm* tau,
                       const cudaDeviceProp& device, cudaStream_t stream);
  // `largest` and the two counts of `products` are zeros.
  static void error_bound(const Maps& maps, const kernels::Tau<Norm>& tau,
                          const kernels::CsrFindings* findings, void* workspace,
                          unsigned long long* largest, unsigned long long* products, Norm* bound,
                          const cudaDeviceProp& device, cudaStream_t stream);
  // params.work takes drop_workspace() bytes.
  static size_t drop_workspace();
  static void drop(const kernels::DropParams<Norm>& params, int multiprocessors,
                   cudaStream_t stream);
};
size_t sparse_search_workspace();

// Lists the tiles of C for a kernel with this tile. `counts` are zeros.
void launch_find_tiles(const kernels::ProductLists& lists, const kernels::TileConfig& tile,
                       int granule, cudaStream_t stream);
// The cell of each block of 32 of a matrix (kernels/sparse/blocks.cuh).
void launch_find_cells(const kernels::Pattern& pattern, int* cells, cudaStream_t stream);
void launch_copy_blocks(const kernels::BlockCopy& copy, cudaStream_t stream);
// Makes the blocks (stored, edge, edge) of a square pattern symmetric, from those above. Their
// norms, unless null, are computed on the way; not of blocks of 128.
void launch_mirror_blocks(const kernels::Pattern& pattern, void* values, c10::ScalarType dtype,
                          int edge, void* norms, cudaStream_t stream);

}  // namespace spamm::cuda
