// Starts the kernel that counts norm products by their keys.
#include <c10/cuda/CUDAException.h>

#include "cuda/threshold/launch.h"
#include "cuda/threshold/staircase_grid.cuh"
#include "kernels/threshold/product_histogram.cuh"

namespace spamm::cuda {

template <class Norm>
void launch_product_histogram(const kernels::NormMaps<Norm>& maps, const int64_t* low, int shift,
                              int bins, int64_t* counts, int multiprocessors, cudaStream_t stream) {
  constexpr int kLaneRows = 2;
  check_staircases<kLaneRows>(maps, multiprocessors, "product_histogram");
  const auto blocks =
      static_cast<unsigned>(blocks_for(kernels::staircases<kLaneRows>(maps), multiprocessors));
  const size_t bytes = (bins + 1) * sizeof(unsigned);
  kernels::product_histogram<Norm, kLaneRows>
      <<<blocks, kernels::kSelectThreads<Norm>, bytes, stream>>>(
          maps, low, shift, bins, reinterpret_cast<unsigned long long*>(counts));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template void launch_product_histogram(const kernels::NormMaps<float>&, const int64_t*, int, int,
                                       int64_t*, int, cudaStream_t);
template void launch_product_histogram(const kernels::NormMaps<double>&, const int64_t*, int, int,
                                       int64_t*, int, cudaStream_t);

}  // namespace spamm::cuda
