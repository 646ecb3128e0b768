// The launch that all instances/sm80_*.cu share: from tile to an instance.
#pragma once

#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "cuda/conv/launch_sm80.h"
#include "kernels/conv/sm80/conv.cuh"

namespace spamm::cuda {

template <class Config>
void launch_conv(const typename Config::Params& params, int multiprocessors, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(typename Config::Storage);
  const auto kernel = kernels::conv_sm80<Config>;
  C10_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const kernels::Im2colMatrix& m = params.pixels;
  const int64_t rows = int64_t{m.block_count()} << m.log2_block();
  const int64_t tiles = m.groups * ((rows - 1) / Config::kTileM + 1) *
                        ((params.out_channels - 1) / Config::kTileN + 1);
  const int64_t resident = int64_t{multiprocessors} * Config::kBlocksPerSm;
  kernel<<<std::min(tiles, resident), Config::kThreads, kSharedBytes, stream>>>(params);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// With the shape that `tile` stands for.
template <class Engine, class Large, class Small>
void launch_conv(const kernels::ConvSm80Params<typename Engine::Sum>& params, Tile tile,
                 int multiprocessors, cudaStream_t stream) {
  const auto launch = tile == Tile::kLarge ? launch_conv<kernels::ConvConfig<Engine, Large>>
                                           : launch_conv<kernels::ConvConfig<Engine, Small>>;
  launch(params, multiprocessors, stream);
}

}  // namespace spamm::cuda
