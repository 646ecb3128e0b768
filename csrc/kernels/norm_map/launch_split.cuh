// Starts the kernels that cut float32 matrices into split parts.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/norm_map/split.cuh"
#include "kernels/norm_map/split_granules.cuh"

namespace spamm::kernels {

// Cuts one or two matrices into granules of 32. Norms, if any, are of blocks of 32 x 32.
static __global__ void __launch_bounds__(kNormThreads, 2)
    split_granules(const __grid_constant__ MatrixPair<SplitParams> pair) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  let_next_kernel_start();
  const SplitParams& p = pair.own();
  if (p.zeroed != nullptr && pair.thread_block() == 0 && threadIdx.x == 0) *p.zeroed = 0;
  constexpr int kBlockThreads = 4 * kGranuleThreads;
  NormMapParams<float> blocks = p.matrix;
  blocks.log2_block_lines = blocks.log2_block_length = 6;
  const NormPlace place(blocks, NormGroup(kBlockThreads), pair.thread_block());
  const int number = threadIdx.x % kBlockThreads / kGranuleThreads;
  if (p.lines_along_k) {
    split_granule<true>(p, place, number);
  } else {
    split_granule<false>(p, place, number);
  }
#else
  __trap();  // compiled for another target: fail, do not leave the output unwritten
#endif
}

// Cuts one or two matrices of at most 2^31 - 1 blocks each into `split_parts` split parts (1 or 2),
// with `granules` along each edge of a block (1, or 2 if there are two split parts). Also computes
// the norm maps of those whose matrix.norms is not null. Two that share their split parts are one
// matrix in granules of 64, with lines along K in the first.
inline cudaError_t launch_split(const SplitParams* params, int count, int split_parts, int granules,
                                cudaStream_t stream) {
  const auto thread_blocks = [](const SplitParams& p) {
    const int64_t blocks = p.matrix.batch * p.split.extent * p.split.depth;
    return static_cast<unsigned>((blocks - 1) / kSplitGroups + 1);
  };
  MatrixPair<SplitParams> pair{};
  pair.matrices[0] = params[0];
  pair.second_begins = thread_blocks(params[0]);
  unsigned blocks = pair.second_begins;
  const bool turns = count == 2 && params[0].split.blocks == params[1].split.blocks;
  if (count == 2) pair.matrices[1] = params[1];
  if (count == 2 && !turns) blocks += thread_blocks(params[1]);
  const auto kernel = granules == 2      ? split_granules
                      : split_parts == 1 ? turns ? split<1, 2> : split<1, 1>
                      : turns ? split<2, 2>
                                         : split<2, 1>;
  return launch(kernel, blocks, kNormThreads, 0, /*overlap_previous=*/false, stream, pair);
}

}  // namespace spamm::kernels
