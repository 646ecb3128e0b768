// Launches the threshold kernels. Maps have at least one product and at most 2^31 - 1 patches. All
// work is asynchronous.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/threshold/map_pair.h"

namespace spamm::cuda {

constexpr size_t kErrorStateBytes = 64;

template <class Norm>
struct ThresholdKernels {
  using Maps = kernels::NormMaps<Norm>;
  using Tau = kernels::Tau<Norm>;

  // `counts` is (batch, mb, nb).
  static void valid_counts(const Maps& maps, const Tau& tau, int32_t* counts, cudaStream_t stream);

  // `workspace` of both has find_tau_workspace() bytes.
  static size_t find_tau_workspace();
  static void find_tau(const Maps& maps, double valid_ratio, void* workspace, Norm* tau,
                       const cudaDeviceProp& device, cudaStream_t stream);
  static void find_tau_for_error(const Maps& maps, double max_error, void* workspace, Norm* tau,
                                 const cudaDeviceProp& device, cudaStream_t stream);

  // `workspace` has error_bound_workspace(maps) bytes. The first kErrorStateBytes must be zero.
  static size_t error_bound_workspace(const Maps& maps);
  static void error_bound(const Maps& maps, const Tau& tau, void* workspace, Norm* bound,
                          cudaStream_t stream);
};

}  // namespace spamm::cuda
