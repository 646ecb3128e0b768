// The launch that all multiply/instances/*.cu share: from run-time memory orders and tile to an
// instance.
#pragma once

#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "cuda/multiply/launch.h"
#include "kernels/multiply/sm80/multiply.cuh"

namespace spamm::cuda {

// The kernel of a MultiplyConfig.
template <class Config_>
struct PortableKernel {
  using Config = Config_;
  static constexpr auto kFunction = kernels::multiply_sm80<Config>;
};

template <class Kernel>
void launch_multiply(const typename Kernel::Config::Params& params, int multiprocessors,
                     cudaStream_t stream) {
  using Config = typename Kernel::Config;
  constexpr int kSharedBytes = sizeof(typename Config::Storage);
  const auto kernel = Kernel::kFunction;
  C10_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const int64_t tiles =
      params.batch * ((params.m - 1) / Config::kTileM + 1) * ((params.n - 1) / Config::kTileN + 1);
  const int64_t resident = static_cast<int64_t>(multiprocessors) * Config::kBlocksPerSm;
  kernel<<<std::min(tiles, resident), Config::kThreads, kSharedBytes, stream>>>(params);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <template <class> class Kernel, class Engine, class Shape>
void launch_multiply(const kernels::MultiplyParams<typename Engine::Sum>& params,
                     int multiprocessors, cudaStream_t stream) {
  using kernels::MultiplyConfig;
  const auto launch =
      params.a.k_major
          ? (params.b.k_major ? launch_multiply<Kernel<MultiplyConfig<Engine, Shape, 1, 1>>>
                              : launch_multiply<Kernel<MultiplyConfig<Engine, Shape, 1, 0>>>)
          : (params.b.k_major ? launch_multiply<Kernel<MultiplyConfig<Engine, Shape, 0, 1>>>
                              : launch_multiply<Kernel<MultiplyConfig<Engine, Shape, 0, 0>>>);
  launch(params, multiprocessors, stream);
}

// With the shape that `tile` stands for.
template <class Engine, class Large, class Small, template <class> class Kernel = PortableKernel>
void launch_multiply(const kernels::MultiplyParams<typename Engine::Sum>& params, Tile tile,
                     int multiprocessors, cudaStream_t stream) {
  if (tile == Tile::kLarge) {
    launch_multiply<Kernel, Engine, Large>(params, multiprocessors, stream);
  } else {
    launch_multiply<Kernel, Engine, Small>(params, multiprocessors, stream);
  }
}

}  // namespace spamm::cuda
