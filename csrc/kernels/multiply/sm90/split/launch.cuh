// Starts the multiply of split operands.
#pragma once

#include <cuda_runtime.h>

#include "kernels/multiply/sm90/launch.cuh"
#include "kernels/multiply/sm90/split/multiply.cuh"

namespace spamm::kernels::sm90 {

template <class Config>
cudaError_t launch_split_multiply(const MultiplyParams<float>& p, const SplitSource& a,
                                  const SplitSource& b, int multiprocessors, cudaStream_t stream) {
  SplitProduct params{};
  params.a = a;
  params.b = b;
  const int blocks = cut_into_tiles<Config>(params, p, multiprocessors);
  return start<Config>(multiply_split_sm90<Config>, params, blocks, stream);
}

enum class SplitTileSize { kSmall, kLarge };

// Tiles of so many split parts. Three products for each pair of bytes make up for smaller ones.
template <int kSplitParts, Major kMajorA, Major kMajorB>
struct SplitTiles;
template <Major kMajorA, Major kMajorB>
struct SplitTiles<2, kMajorA, kMajorB> {
  using Small = SplitConfig<2, kMajorA, kMajorB, 1, 2, 1, 4>;  // 64 x 128
  using Large = SplitConfig<2, kMajorA, kMajorB, 2, 2, 2, 3>;  // 128 x 128
};
template <Major kMajorA, Major kMajorB>
struct SplitTiles<1, kMajorA, kMajorB> {
  using Small = SplitConfig<1, kMajorA, kMajorB, 2, 1, 1, 6>;  // 128 x 64
  using Large = SplitConfig<1, kMajorA, kMajorB, 2, 4, 2, 4>;  // 128 x 256
};

using SplitLaunch = cudaError_t (*)(const MultiplyParams<float>& p, const SplitSource& a,
                                    const SplitSource& b, int multiprocessors, cudaStream_t stream);

template <int kSplitParts, Major kMajorA, Major kMajorB>
SplitLaunch choose_split_launch(SplitTileSize tile) {
  using Tiles = SplitTiles<kSplitParts, kMajorA, kMajorB>;
  return tile == SplitTileSize::kSmall ? launch_split_multiply<typename Tiles::Small>
                                       : launch_split_multiply<typename Tiles::Large>;
}

// Computes p of split operands on `stream`. Of p.a and p.b only k_major, the order of the split,
// and whether there is a batch stride are used.
template <int kSplitParts>
cudaError_t multiply_split(const MultiplyParams<float>& p, const SplitSource& a,
                           const SplitSource& b, SplitTileSize tile, int multiprocessors,
                           cudaStream_t stream) {
  constexpr auto kK = Major::K, kMN = Major::MN;
  const auto choose = p.a.k_major ? (p.b.k_major ? choose_split_launch<kSplitParts, kK, kK>
                                                 : choose_split_launch<kSplitParts, kK, kMN>)
                                  : (p.b.k_major ? choose_split_launch<kSplitParts, kMN, kK>
                                                 : choose_split_launch<kSplitParts, kMN, kMN>);
  return choose(tile)(p, a, b, multiprocessors, stream);
}

}  // namespace spamm::kernels::sm90
