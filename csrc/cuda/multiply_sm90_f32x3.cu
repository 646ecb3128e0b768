// float32 at full accuracy on Hopper's tensor cores: the split into halves, and the product of
// these.
#include "kernels/multiply_split_sm90_launch.cuh"
#include "multiply_sm90.cuh"

namespace spamm::cuda {

void launch_split(const kernels::SplitParams* params, int count, cudaStream_t stream) {
  C10_CUDA_CHECK(kernels::launch_split(params, count, stream));
}

void multiply_sm90_f32x3(const kernels::MultiplyParams<float>& params,
                         const kernels::SplitSource& a, const kernels::SplitSource& b, Tile tile,
                         int multiprocessors, cudaStream_t stream) {
  using kernels::sm90::SplitTileSize;
  const TileCounter next_tile;
  const auto size = tile == Tile::kLarge ? SplitTileSize::k128x128 : SplitTileSize::k64x128;
  C10_CUDA_CHECK(
      kernels::sm90::multiply_split(params, a, b, size, multiprocessors, next_tile.get(), stream));
}

}  // namespace spamm::cuda
