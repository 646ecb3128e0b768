// The product of float64 on Hopper, whose tiles may be cut into segments.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <cstddef>
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
  // `segments`: 1, 2 or 4. Tiles are square.
  ProductSegments(int segments, int64_t batch, int64_t m, int64_t n,
                  const kernels::TileConfig& tile) {
    const int64_t tiles = batch * blocks_of(m, tile.rows) * blocks_of(n, tile.columns);
    const int64_t pieces = segments == 1 ? 0 : tiles * kernels::pieces_of_tile(tile.rows);
    const int64_t numbers = (1 + pieces) * static_cast<int64_t>(sizeof(int));
    const int64_t first_sum = blocks_of(numbers, kAlignment) * kAlignment;
    const int64_t sums = segments == 1 ? 0 : tiles * tile.rows * tile.columns * segments;
    const int64_t bytes = first_sum + sums * static_cast<int64_t>(sizeof(double));
    memory_ = c10::cuda::CUDACachingAllocator::get()->allocate(static_cast<size_t>(bytes));
    auto* const start = static_cast<std::byte*>(memory_.get());
    params_ = {.log2_segments = static_cast<int>(log2_of(segments)),
               .pieces = static_cast<int>(pieces),
               .sums = reinterpret_cast<double*>(start + first_sum),
               .arrived = next_tile() + 1};
  }

  int* next_tile() const { return static_cast<int*>(memory_.get()); }
  const kernels::SegmentMemory& params() const { return params_; }

 private:
  static constexpr int64_t kAlignment = 256;  // bytes

  c10::DataPtr memory_;
  kernels::SegmentMemory params_{};
};

}  // namespace spamm::cuda
