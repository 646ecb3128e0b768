// The product of float64 on Hopper, whose tiles may be cut into segments.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdint>

#include "block.h"
#include "cuda/multiply/launch.h"
#include "kernels/multiply/sm90/f64/segments.h"

namespace spamm::cuda {

using MultiplyInSegments = cudaError_t (*)(const kernels::MultiplyParams<double>& params,
                                           const kernels::Launch& how,
                                           const kernels::SegmentMemory& segments);

#ifdef SPAMM_WITH_SM90A
cudaError_t multiply_sm90_f64(const kernels::MultiplyParams<double>&, const kernels::Launch&,
                              const kernels::SegmentMemory&);
#else  // heuristics.h does not choose it
constexpr MultiplyInSegments multiply_sm90_f64 = nullptr;
#endif

// Device memory for the segments of a product, and its tile counter before them, allocated on the
// current stream. No launch on another stream or in another graph can use it at the same time.
class ProductSegments {
 public:
  // `segments`: 1 or 2. Tiles are square.
  ProductSegments(int segments, int64_t batch, int64_t m, int64_t n,
                  const kernels::TileConfig& tile) {
    const int64_t tiles = batch * blocks_of(m, tile.rows) * blocks_of(n, tile.columns);
    const int64_t pieces = segments == 1 ? 0 : tiles * kernels::pieces_of_tile(tile.rows);
    memory_ = c10::cuda::CUDACachingAllocator::get()->allocate(static_cast<size_t>(1 + pieces) *
                                                               sizeof(int));
    params_ = {.log2_segments = static_cast<int>(log2_of(segments)),
               .pieces = static_cast<int>(pieces),
               .meetings = reinterpret_cast<unsigned*>(next_tile() + 1)};
  }

  int* next_tile() const { return static_cast<int*>(memory_.get()); }
  const kernels::SegmentMemory& params() const { return params_; }

 private:
  c10::DataPtr memory_;
  kernels::SegmentMemory params_{};
};

}  // namespace spamm::cuda
