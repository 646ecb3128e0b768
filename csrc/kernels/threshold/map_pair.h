// The norm maps of a batch of products, as parameters of the threshold kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/parameters.h"

namespace spamm::kernels {

// Contiguous maps: a (batch, mb, kb), b (batch, kb, nb). `skip_norm_b` has the skip norms of B. It
// is `b` unless B has partial pixel blocks.
template <class Norm>
struct NormMaps {
  const Norm *a, *b, *skip_norm_b;
  int64_t batch;
  int mb, kb, nb;
};

// A patch is kPatchRows x kPatchColumns blocks of C.
constexpr int kPatchRows = 4, kPatchColumns = 32;

template <class Norm>
__host__ __device__ int64_t patches(const NormMaps<Norm>& maps) {
  return maps.batch * ((maps.mb - 1) / kPatchRows + 1) * ((maps.nb - 1) / kPatchColumns + 1);
}

}  // namespace spamm::kernels
