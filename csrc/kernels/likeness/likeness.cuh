// Orders images by their centres of mass: one kernel finds the centres, one thread block orders
// them. The arithmetic is that of spamm_torch/likeness.py.
#pragma once

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/common/numeric.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/likeness/params.h"

namespace spamm::kernels::likeness {

constexpr int kCentreThreads = 256, kOrderThreads = 1024;

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

// A pixel, or a distance in pixels. Stepping needs no division.
struct Pixel {
  int64_t row;
  int column;

  __device__ Pixel after(const Pixel& step, int columns) const {
    const int64_t right = int64_t{column} + step.column;
    const bool wraps = right >= columns;
    return {row + step.row + wraps, static_cast<int>(wraps ? right - columns : right)};
  }
};

__device__ inline Pixel pixel_at(const CentreParams& p, int number) {
  return {number / p.columns, number % p.columns};
}

// An image's centre: 0 is the middle, and its sides are at -1/2 and 1/2. One without a centre, a
// constant one or one with NaN or infinity, is centred. Weights are whole numbers, so that the sums
// of bytes and half types are exact.
template <class T>
__global__ void __launch_bounds__(kCentreThreads) image_centres(const CentreParams p) {
  const T* image = static_cast<const T*>(p.data) + blockIdx.x * p.image_stride;
  Sums sums;
  wait_for_previous_kernel();
  const Pixel step = pixel_at(p, kCentreThreads);
  for (Pixel at = pixel_at(p, threadIdx.x); at.row < p.rows; at = at.after(step, p.columns)) {
    const double x = as_double(image[at.row * p.row_stride + at.column * p.column_stride]);
    sums.add({x, x * (2.0 * at.row - (p.rows - 1)), x * (2.0 * at.column - (p.columns - 1)), x, x});
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

// How many of `count` keys come before key `own`; equal ones by `before`, a number each. The warp
// shares the comparisons, and all its lanes get the result.
__device__ inline int rank_of(const double* keys, const int* before, int count, int own) {
  const double key = keys[own];
  const int number = before[own];
  int rank = 0;
  for (int i = threadIdx.x % 32; i < count; i += 32) {
    rank += keys[i] < key || (keys[i] == key && before[i] < number);
  }
  return __reduce_add_sync(~0u, rank);
}

// Numbers that are few are ranked faster than sorted. A warp ranks one image at a time.
__global__ void __launch_bounds__(kOrderThreads) order_images(const OrderParams p) {
  constexpr int kWarps = kOrderThreads / 32;
  __shared__ double by_row[kMostImages], by_column[kMostImages];
  __shared__ int numbers[kMostImages], rows[kMostImages];  // the images', and their ranks by row
  const int warp = threadIdx.x / 32;
  const bool leads = threadIdx.x % 32 == 0;
  wait_for_previous_kernel();
  for (int image = threadIdx.x; image < p.images; image += kOrderThreads) {
    by_row[image] = p.centres[image];
    numbers[image] = image;
  }
  __syncthreads();
  for (int image = warp; image < p.images; image += kWarps) {
    const int row = rank_of(by_row, numbers, p.images, image);
    const int band = row * p.bands / p.images;
    const double column = p.centres[p.images + image];
    if (leads) {
      by_column[image] = band + (band % 2 == 0 ? column : -column);  // columns are within 1/2
      rows[image] = row;
    }
  }
  __syncthreads();
  for (int image = warp; image < p.images; image += kWarps) {
    const int place = rank_of(by_column, rows, p.images, image);
    if (leads) {
      p.order[place] = image;
      p.places[image] = place;
    }
  }
}

template <class T>
cudaError_t launch_centres(const CentreParams& p, cudaStream_t stream) {
  return launch(image_centres<T>, p.images, kCentreThreads, 0, /*overlap_previous=*/true, stream,
                p);
}

inline cudaError_t launch_order(const OrderParams& p, cudaStream_t stream) {
  return launch(order_images, 1, kOrderThreads, 0, /*overlap_previous=*/true, stream, p);
}

}  // namespace spamm::kernels::likeness
