// Adds the sums of the segments of a product (list.cuh), in the order of the segments.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/common/numeric.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/multiply/params.h"

namespace spamm::kernels::multiply::sm90 {

// The sums of one segment lie `apart` from those of the next, in rows of `leading`.
template <class Norm>
struct SegmentSums {
  const Norm* values;
  int segments;
  int64_t apart, leading;
};

constexpr int kJoinColumns = 64, kJoinRows = 4;  // of a thread block, whose threads have one entry

template <class Element>
__global__ void __launch_bounds__(kJoinColumns* kJoinRows)
    join_segments(const __grid_constant__ MultiplyParams<NormOf<Element>> p,
                  const __grid_constant__ SegmentSums<NormOf<Element>> sums) {
  using Norm = NormOf<Element>;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int across = static_cast<int>((p.n - 1) / kJoinColumns) + 1;
  const int down = static_cast<int>((p.m - 1) / kJoinRows) + 1;
  const int batch = blockIdx.x / across / down, in_batch = blockIdx.x - batch * across * down;
  const int64_t row = in_batch / across * kJoinRows + threadIdx.x / kJoinColumns;
  const int64_t column = in_batch % across * kJoinColumns + threadIdx.x % kJoinColumns;
  const bool is_below = p.upper_only && row / 64 > column / 64;  // then there are no sums
  if (row >= p.m || column >= p.n || is_below) return;
  const Norm* from = sums.values + batch * sums.segments * sums.apart + row * sums.leading + column;
  double sum = 0;
#pragma unroll 8
  for (int i = 0; i < sums.segments; ++i) sum += from[i * sums.apart];
  Norm value = p.alpha * static_cast<Norm>(sum);
  if (p.input != nullptr) {
    const auto* input = static_cast<const Element*>(p.input) + batch * p.input_strides[0];
    value += p.beta * widen(input[row * p.input_strides[1] + column * p.input_strides[2]]);
  }
  auto* c = static_cast<Element*>(p.c) + batch * p.c_batch_stride;
  c[row * p.c_leading + column] = narrow<Element>(value);
}

template <class Element, class Norm>
cudaError_t launch_join(const MultiplyParams<Norm>& p, int segments,
                        const MultiplyParams<Norm>& sums, cudaStream_t stream) {
  const int64_t blocks = p.batch * ((p.m - 1) / kJoinRows + 1) * ((p.n - 1) / kJoinColumns + 1);
  return launch(join_segments<Element>, static_cast<unsigned>(blocks), kJoinColumns * kJoinRows, 0,
                /*overlap_previous=*/true, stream, p,
                {static_cast<const Norm*>(sums.c), segments, sums.c_batch_stride, sums.c_leading});
}

}  // namespace spamm::kernels::multiply::sm90
