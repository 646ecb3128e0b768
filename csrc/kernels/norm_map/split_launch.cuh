// Starts the split.
#pragma once

#include <cuda_runtime.h>

#include "kernels/norm_map/split.cuh"

namespace spamm::kernels {

// Splits one matrix, or two, each of at most 2^31 - 1 blocks, into one or two split parts, and
// makes the norm maps of those whose matrix.norms is not null.
template <int kSplitParts>
cudaError_t launch_split(const SplitParams* params, int count, cudaStream_t stream) {
  const auto thread_blocks = [](const SplitParams& p) {
    const int64_t blocks = p.matrix.batch * p.split.extent * p.split.depth;
    return static_cast<unsigned>((blocks - 1) / kSplitGroups + 1);
  };
  MatrixPair<SplitParams> pair{};
  pair.matrices[0] = params[0];
  pair.second_begins = thread_blocks(params[0]);
  unsigned blocks = pair.second_begins;
  if (count == 2) {
    pair.matrices[1] = params[1];
    blocks += thread_blocks(params[1]);
  }
  split<kSplitParts><<<blocks, kNormThreads, 0, stream>>>(pair);
  return cudaGetLastError();
}

}  // namespace spamm::kernels
