// float64 on Hopper's tensor cores.
#include "cuda/multiply/launch_sm90.cuh"
#include "kernels/multiply/sm90/f64/launch.cuh"

namespace spamm::cuda {

void multiply_sm90_f64(const kernels::MultiplyParams<double>& params, Tile tile,
                       int multiprocessors, cudaStream_t stream) {
  using kernels::sm90::DoubleTile;
  const auto size = tile == Tile::kLarge ? DoubleTile::k128x128 : DoubleTile::k64x64;
  with_counter(params, [&](const auto& p) {
    return kernels::sm90::multiply_doubles(p, size, multiprocessors, stream);
  });
}

}  // namespace spamm::cuda
