// Concatenates deviations along their channels and takes the norms of the pixels on the way: a
// thread copies one chunk of channels of a few rows, and its neighbours the next chunks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/reference/params.h"
#include "kernels/reference/sm90/pixel_norms.cuh"

namespace spamm::kernels::reference {

constexpr int kJoinThreads = 256, kJoinRows = 4;  // rows of a thread, whose loads are in flight

__device__ __forceinline__ JoinSource part_with(const JoinParams& p, int channel) {
  JoinSource found = p.parts[0];
#pragma unroll
  for (int i = 1; i < kMostJoined; ++i) {
    if (i < p.count && channel >= p.parts[i].first) found = p.parts[i];
  }
  return found;
}

// Where a part has an output's pixel and channel, in entries.
__device__ __forceinline__ int64_t place_in(const JoinSource& part, const JoinParams& p, int line,
                                            int column, int channel) {
  return (static_cast<int64_t>(line) * p.size.columns + column) * part.channels + channel -
         part.first;
}

template <class Element>
__global__ void __launch_bounds__(kJoinThreads, 4)
    join_deviations(const __grid_constant__ JoinParams p) {
  constexpr int kEntries = Chunk<Element>::kEntries, kLanes = 64 / kEntries;
  let_next_kernel_start();
  int column, chunk;
  p.by_lanes(column, chunk, static_cast<int>(blockIdx.x * kJoinThreads + threadIdx.x));
  const int channel = chunk * kEntries, lines = p.images * p.size.rows;
  const bool has_pixel = column < p.size.columns, exists = has_pixel && channel < p.channels;
  const JoinSource part = part_with(p, channel);
  wait_for_previous_kernel();
  for (int first = blockIdx.y * kJoinRows; first < lines; first += gridDim.y * kJoinRows) {
    uint4 words[kJoinRows];
#pragma unroll
    for (int i = 0; i < kJoinRows; ++i) {
      const auto* data = static_cast<const Element*>(part.data);
      words[i] = load_once(data + place_in(part, p, first + i, column, channel),
                           exists && first + i < lines);
    }
#pragma unroll
    for (int i = 0; i < kJoinRows; ++i) {
      const auto found = __builtin_bit_cast(Chunk<Element>, words[i]);
      const float norm = norm_of_lanes(found);
      if (first + i >= lines) continue;
      const int64_t pixel = static_cast<int64_t>(first + i) * p.size.columns + column;
      if (has_pixel && threadIdx.x % kLanes == 0) p.norms[pixel * p.groups + channel / 64] = norm;
      if (!exists) continue;
      *reinterpret_cast<Chunk<Element>*>(static_cast<Element*>(p.output) + pixel * p.channels +
                                         channel) = found;
    }
  }
}

template <class Element>
cudaError_t launch_join_deviations(JoinParams p, cudaStream_t stream) {
  constexpr int kMostBlocks = 65535;  // along the second dimension
  const int lanes = p.groups * (64 / Chunk<Element>::kEntries);
  p.by_lanes = Divisor(lanes);
  const auto blocks = static_cast<unsigned>((p.size.columns * lanes - 1) / kJoinThreads + 1);
  const int rows = (p.images * p.size.rows - 1) / kJoinRows + 1;
  return launch(join_deviations<Element>,
                dim3(blocks, static_cast<unsigned>(std::min(rows, kMostBlocks))), kJoinThreads, 0,
                /*overlap_previous=*/true, stream, p);
}

}  // namespace spamm::kernels::reference
