// Starts the float64 multiply of Hopper.
#pragma once

#include "kernels/multiply/sm90/f64/multiply.cuh"
#include "kernels/multiply/sm90/launch.cuh"

namespace spamm::kernels::sm90 {

// Maps an operand in the boxes that fetch() asks for.
template <Major kMajor>
cudaError_t encode_doubles(CUtensorMap& map, const MatrixLayout& x) {
  return encode<double>(map, x, kMajor == Major::K ? kBlock : kLineDepth);
}

template <class Config>
cudaError_t launch_doubles(const MultiplyParams<double>& p, int multiprocessors,
                           cudaStream_t stream) {
  DoubleProduct params{};
  const int blocks = cut_into_tiles<Config>(params, p, multiprocessors * Config::kBlocksPerSm);
  cudaError_t error = encode_doubles<Config::kMajorA>(params.map_a, layout(p.a, p.m, p.k, p.batch));
  if (error == cudaSuccess) {
    error = encode_doubles<Config::kMajorB>(params.map_b, layout(p.b, p.n, p.k, p.batch));
  }
  if (error != cudaSuccess) return error;
  return start<Config>(multiply_dmma_sm90<Config>, params, blocks, stream);
}

enum class DoubleTile { k64x64, k128x128 };
using DoubleLaunch = cudaError_t (*)(const MultiplyParams<double>& p, int multiprocessors,
                                     cudaStream_t stream);

template <Major kMajorA, Major kMajorB, int kGranule>
DoubleLaunch choose_double_launch(DoubleTile tile) {
  using Small = DoubleConfig<kMajorA, kMajorB, kGranule, 1>;
  using Large = DoubleConfig<kMajorA, kMajorB, kGranule, 2>;
  return tile == DoubleTile::k64x64 ? launch_doubles<Small> : launch_doubles<Large>;
}

template <Major kMajorA, Major kMajorB>
DoubleLaunch choose_double_launch(const MultiplyParams<double>& p, DoubleTile tile) {
  const bool blocks_of_32 = std::min({p.log2_block_m, p.log2_block_k, p.log2_block_n}) == 5;
  return blocks_of_32 ? choose_double_launch<kMajorA, kMajorB, 32>(tile)
                      : choose_double_launch<kMajorA, kMajorB, 64>(tile);
}

// Computes p on `stream`. Returns what the driver or the launch says.
inline cudaError_t multiply_doubles(const MultiplyParams<double>& p, DoubleTile tile,
                                    int multiprocessors, cudaStream_t stream) {
  constexpr auto kK = Major::K, kMN = Major::MN;
  const auto choose =
      p.a.k_major ? (p.b.k_major ? choose_double_launch<kK, kK> : choose_double_launch<kK, kMN>)
                  : (p.b.k_major ? choose_double_launch<kMN, kK> : choose_double_launch<kMN, kMN>);
  return choose(p, tile)(p, multiprocessors, stream);
}

}  // namespace spamm::kernels::sm90
