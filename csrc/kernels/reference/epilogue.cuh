// The epilogue of deviations in one pass over an output that is complete: activation(output +
// residual + base) - activation(base), in float32, rounded once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/activation.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/common/numeric.cuh"
#include "kernels/norm_map/chunk.cuh"
#include "kernels/reference/params.h"

namespace spamm::kernels::reference {

constexpr int kEpilogueThreads = 256, kEpilogueBlocks = 8;  // of a multiprocessor

// Where output and residual are zero, so is the result, and the base is not read.
template <class Element>
__global__ void __launch_bounds__(kEpilogueThreads)
    deviation_epilogue(const DeviationEpilogueParams p) {
  using Entries = Chunk<Element>;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kEpilogueThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kEpilogueThreads + threadIdx.x; i < p.chunks;
       i += step) {
    Entries* const place = static_cast<Entries*>(p.output) + i;
    const Entries sums = *place;
    const Entries added =
        p.residual == nullptr ? Entries{} : static_cast<const Entries*>(p.residual)[i];
    AnyNonzero<Element> any;
    any.add(sums);
    any.add(added);
    if (!any.found()) continue;
    const Entries of_reference = static_cast<const Entries*>(p.base)[i % p.image_chunks];
    Entries result{};
    with_activation(p.activation, [&](auto function) {
#pragma unroll
      for (int e = 0; e < Entries::kEntries; ++e) {
        const float base = widen(of_reference.entry(e));
        const float x = widen(sums.entry(e)) + widen(added.entry(e)) + base;
        // Without a fused multiply-add, with which a sum of zero would not give zero.
        result.set(e, narrow<Element>(__fsub_rn(function(x), function(base))));
      }
    });
    *place = result;
  }
}

template <class Element>
cudaError_t launch_deviation_epilogue(DeviationEpilogueParams p, int multiprocessors,
                                      cudaStream_t stream) {
  const int64_t blocks =
      std::min((p.chunks - 1) / kEpilogueThreads + 1, int64_t{kEpilogueBlocks} * multiprocessors);
  return launch(deviation_epilogue<Element>, static_cast<unsigned>(blocks), kEpilogueThreads, 0,
                /*overlap_previous=*/false, stream, p);
}

}  // namespace spamm::kernels::reference
