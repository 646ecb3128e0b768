// Launches the threshold kernels. Maps have at least one product and at most 2^31 - 1 patches. All
// work is asynchronous.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/threshold/map_pair.h"

namespace spamm::cuda {

// `counts` is (batch, mb, nb).
template <class Norm>
void launch_valid_counts(const kernels::NormMaps<Norm>& maps, const kernels::Tau<Norm>& tau,
                         int32_t* counts, cudaStream_t stream);

// `workspace` has find_tau_workspace<Norm>() bytes.
template <class Norm>
size_t find_tau_workspace();
template <class Norm>
void launch_find_tau(const kernels::NormMaps<Norm>& maps, double valid_ratio, void* workspace,
                     Norm* tau, const cudaDeviceProp& device, cudaStream_t stream);

// `low` and `counts`, of bins + 1 zeros, are on the device. See kernels::product_histogram.
template <class Norm>
void launch_product_histogram(const kernels::NormMaps<Norm>& maps, const int64_t* low, int shift,
                              int bins, int64_t* counts, int multiprocessors, cudaStream_t stream);

// `workspace` has error_bound_workspace(maps) bytes. The first kErrorStateBytes must be zero.
constexpr size_t kErrorStateBytes = 64;
template <class Norm>
size_t error_bound_workspace(const kernels::NormMaps<Norm>& maps);
template <class Norm>
void launch_error_bound(const kernels::NormMaps<Norm>& maps, const kernels::Tau<Norm>& tau,
                        void* workspace, Norm* bound, cudaStream_t stream);

// `workspace` has find_tau_for_error_workspace<Norm>() bytes.
template <class Norm>
size_t find_tau_for_error_workspace();
template <class Norm>
void launch_find_tau_for_error(const kernels::NormMaps<Norm>& maps, double max_error,
                               void* workspace, Norm* tau, const cudaDeviceProp& device,
                               cudaStream_t stream);

}  // namespace spamm::cuda
