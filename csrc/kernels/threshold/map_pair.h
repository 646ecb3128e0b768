// The norm maps of a batch of products, as the threshold kernels take them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/tau.h"

namespace spamm::kernels {

// Contiguous maps: a (batch, mb, kb), b (batch, kb, nb). `skip_norm_b` decides what is skipped; it
// is b itself where there is nothing else.
template <class Norm>
struct NormMaps {
  const Norm *a, *b, *skip_norm_b;
  int64_t batch;
  int mb, kb, nb;
};

// C's blocks are cut into patches of kPatchRows x kPatchColumns.
constexpr int kPatchRows = 4, kPatchColumns = 32;

template <class Norm>
__host__ __device__ int64_t patches(const NormMaps<Norm>& maps) {
  return maps.batch * ((maps.mb - 1) / kPatchRows + 1) * ((maps.nb - 1) / kPatchColumns + 1);
}

}  // namespace spamm::kernels
