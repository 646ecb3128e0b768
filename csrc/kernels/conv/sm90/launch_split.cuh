// Starts the Hopper convolution of split operands: instance and grid from run-time sizes.
#pragma once

#include "kernels/conv/sm90/launch.cuh"
#include "kernels/conv/sm90/split.cuh"

namespace spamm::kernels::conv {

template <class Config>
cudaError_t launch_split_conv(ConvParams p, int multiprocessors, cudaStream_t stream) {
  const auto kernel = conv_split_sm90<Config>;
  constexpr int kSharedBytes = sizeof(Storage<Config>);
  static_assert(kSharedBytes <= kMostSharedBytes);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const int blocks = cut_into_tiles<Config>(p, multiprocessors);
  if (blocks == p.tiles) p.next_tile = nullptr;
  return launch(kernel, blocks, Config::kThreads, kSharedBytes, true, stream, p);
}

// Computes p on `stream` while the kernel before it there ends: as conv2d(), but a and b are given,
// and pixel blocks hold images alone.
inline cudaError_t split_conv2d(ConvParams p, int multiprocessors, cudaStream_t stream) {
  complete(p);
  return with_last_width(p, [&]<int kWidth>(std::integral_constant<int, kWidth>) {
    return launch_split_conv<SplitConfig<2, 2, kWidth, 3>>(p, multiprocessors, stream);
  });
}

}  // namespace spamm::kernels::conv
