// Orders images by their centres of mass: one kernel finds the centres, one thread block orders
// them. The arithmetic is that of spamm_torch/likeness.py.
#pragma once

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/common/numeric.cuh"
#include "kernels/likeness/params.h"

namespace spamm::kernels::likeness {

constexpr int kCentreThreads = 256;

template <class T>
__device__ double as_double(T x) {
  if constexpr (std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>) {
    return widen(x);
  } else {
    return static_cast<double>(x);
  }
}

// What the pixels of an image add up to.
struct Sums {
  double mass = 0, by_row = 0, by_column = 0, least = INFINITY, most = -INFINITY;

  __device__ void add(const Sums& other) {
    mass += other.mass;
    by_row += other.by_row;
    by_column += other.by_column;
    least = fmin(least, other.least);
    most = fmax(most, other.most);
  }

  __device__ Sums of_lane(int distance) const {
    const auto get = [&](double x) { return __shfl_xor_sync(~0u, x, distance); };
    return {get(mass), get(by_row), get(by_column), get(least), get(most)};
  }
};

// An image's centre: 0 is the middle, and its sides are at -1/2 and 1/2. One without a centre, a
// constant one or one with NaN or infinity, is centred. Weights are whole numbers, so that the sums
// of bytes and half types are exact.
template <class T>
__global__ void __launch_bounds__(kCentreThreads) image_centres(const CentreParams p) {
  const T* image = static_cast<const T*>(p.data) + blockIdx.x * p.image_stride;
  Sums sums;
  for (int64_t i = threadIdx.x; i < static_cast<int64_t>(p.rows) * p.columns; i += kCentreThreads) {
    const int row = static_cast<int>(i / p.columns), column = static_cast<int>(i % p.columns);
    const double x = as_double(image[row * p.row_stride + column * p.column_stride]);
    sums.add({x, x * (2.0 * row - (p.rows - 1)), x * (2.0 * column - (p.columns - 1)), x, x});
  }
  __shared__ Sums of_warps[kCentreThreads / 32];
  for (int distance = 16; distance > 0; distance /= 2) sums.add(sums.of_lane(distance));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sums;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kCentreThreads / 32; ++warp) sums.add(of_warps[warp]);
  const double mass = sums.mass - sums.least * p.rows * p.columns;
  const auto centre = [&](double moment, int size) {
    const double at = moment / (2.0 * size) / mass;
    return sums.least < sums.most && isfinite(at) ? at : 0;
  };
  p.centres[blockIdx.x] = centre(sums.by_row, p.rows);
  p.centres[p.images + blockIdx.x] = centre(sums.by_column, p.columns);
}

// The number of keys that come before the thread's own; equal ones by `before`, a number each.
__device__ inline int rank_of(const double* keys, const int* before, int count) {
  const double own = keys[threadIdx.x];
  int rank = 0;
  for (int i = 0; i < count; ++i) {
    rank += keys[i] < own || (keys[i] == own && before[i] < before[threadIdx.x]);
  }
  return rank;
}

// A thread for each image. Numbers that are few are ranked faster than sorted.
__global__ void __launch_bounds__(kMostImages) order_images(const OrderParams p) {
  __shared__ double keys[kMostImages];
  __shared__ int before[kMostImages];
  const int image = threadIdx.x;
  const bool exists = image < p.images;
  if (exists) keys[image] = p.centres[image];
  before[image] = image;
  __syncthreads();
  const int by_row = exists ? rank_of(keys, before, p.images) : 0;
  __syncthreads();
  if (exists) {
    const int band = by_row * p.bands / p.images;
    const double column = p.centres[p.images + image];
    keys[image] = band + (band % 2 == 0 ? column : -column);  // columns are within 1/2
    before[image] = by_row;
  }
  __syncthreads();
  if (!exists) return;
  const int place = rank_of(keys, before, p.images);
  p.order[place] = image;
  p.places[image] = place;
}

template <class T>
cudaError_t launch_centres(const CentreParams& p, cudaStream_t stream) {
  return launch(image_centres<T>, p.images, kCentreThreads, 0, /*overlap_previous=*/false, stream,
                p);
}

inline cudaError_t launch_order(const OrderParams& p, cudaStream_t stream) {
  const int threads = (p.images + 31) / 32 * 32;
  return launch(order_images, 1, threads, 0, /*overlap_previous=*/false, stream, p);
}

}  // namespace spamm::kernels::likeness
