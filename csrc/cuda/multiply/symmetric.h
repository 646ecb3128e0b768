// The second half of a symmetric product on CUDA.
#pragma once

#include <ATen/core/Tensor.h>

#include "cuda/device.h"

namespace spamm::cuda {

// Whether complete_symmetric() computes the norms of blocks of this size, too.
inline bool has_norms_of(int64_t block) { return block <= 64; }

// Makes `c` (batch, N, N) symmetric: below the diagonal of each matrix goes the mirror image of
// what lies above it. Rows of c are contiguous, from any address on, with any other strides.
// Computes c's norm map in blocks of block x block into `norms`, (batch, blocks, blocks) and
// contiguous, unless that is undefined.
void complete_symmetric(const at::Tensor& c, int64_t block, const at::Tensor& norms,
                        const OnDevice& device);

}  // namespace spamm::cuda
