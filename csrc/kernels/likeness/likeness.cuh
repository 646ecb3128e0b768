// Orders images by their centres of mass, and copies them in that order: one launch, whose thread
// blocks meet. The arithmetic is that of spamm_torch/likeness.py.
//
// A thread block has an image at a time: it finds its centre, compares this with all others, and
// copies the image to its place.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/common/meeting.cuh"
#include "kernels/common/numeric.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/likeness/params.h"

namespace spamm::kernels::likeness {

// Of a thread block, and thread blocks that a multiprocessor can hold at a time.
constexpr int kThreads = 256, kBlocksAMultiprocessor = 4;

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

// A pixel, or a distance in pixels. Stepping needs no division. A few steps beyond the last of 2^31
// rows do not overflow.
struct Pixel {
  unsigned row, column;

  __device__ Pixel after(const Pixel& step, unsigned columns) const {
    const unsigned right = column + step.column;
    const bool wraps = right >= columns;
    return {row + step.row + wraps, wraps ? right - columns : right};
  }
};

__device__ inline Pixel pixel_at(const OrderParams& p, unsigned number) {
  return {number / p.columns, number % p.columns};
}

// Numbers of all images, in the workspace. `keys`: places in bands of rows, see find_key().
__device__ inline double* centre_columns(const OrderParams& p) { return p.numbers; }
__device__ inline double* centre_rows(const OrderParams& p) { return p.numbers + p.images; }
__device__ inline double* keys(const OrderParams& p) {
  return p.bands == 1 ? centre_columns(p) : p.numbers + 2 * p.images;
}

// What a thread's pixels of an image add up to.
template <class T>
__device__ Sums sums_of_pixels(const OrderParams& p, const T* image) {
  constexpr int kInFlight = 4;
  const auto rows = static_cast<unsigned>(p.rows);
  const Pixel step = pixel_at(p, kThreads);
  Sums sums;
  for (Pixel at = pixel_at(p, threadIdx.x); at.row < rows;) {
    T found[kInFlight] = {};
    Pixel next = at;
#pragma unroll
    for (T& x : found) {
      if (next.row < rows) x = image[next.row * p.row_stride + next.column * p.column_stride];
      next = next.after(step, p.columns);
    }
#pragma unroll
    for (const T& entry : found) {
      if (at.row < rows) {
        const double x = as_double(entry);
        sums.add(
            {x, x * (2.0 * at.row - (p.rows - 1)), x * (2.0 * at.column - (p.columns - 1)), x, x});
      }
      at = at.after(step, p.columns);
    }
  }
  return sums;
}

// Stores an image's centre: 0 is the middle, and its sides are at -1/2 and 1/2. One without a
// centre, a constant one or one with NaN or infinity, is centred. Weights are whole numbers, so
// that the sums of bytes and half types are exact.
template <class T>
__device__ void find_centre(const OrderParams& p, int image) {
  __shared__ Sums of_warps[kThreads / 32];
  Sums sums = sums_of_pixels(p, static_cast<const T*>(p.data) + image * p.image_stride);
  for (int distance = 16; distance > 0; distance /= 2) sums.add(sums.of_lane(distance));
  __syncthreads();  // of_warps may still be read, for the image before
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sums;
  __syncthreads();
  if (threadIdx.x >= 2) return;
  sums = of_warps[0];
#pragma unroll 1
  for (int warp = 1; warp < kThreads / 32; ++warp) sums.add(of_warps[warp]);
  const double mass = sums.mass - sums.least * p.rows * p.columns;
  const bool by_row = threadIdx.x == 0;
  const double at =
      (by_row ? sums.by_row : sums.by_column) / (2.0 * (by_row ? p.rows : p.columns)) / mass;
  (by_row ? centre_rows(p) : centre_columns(p))[image] =
      sums.least < sums.most && isfinite(at) ? at : 0;
}

// How many images come before this one by `keys`; equal ones by the rows of their centres, then by
// number. The thread block shares the comparisons, and all its threads get the result.
__device__ inline int place_by(const double* keys, const OrderParams& p, int image) {
  const double* const rows = centre_rows(p);
  const double own_key = keys[image], own_row = rows[image];
  int place = 0;
  for (int first = 0; first < p.images; first += kThreads) {
    const int other = first + threadIdx.x;
    bool before = false;
    if (other < p.images) {
      const double key = keys[other], row = rows[other];
      before =
          key < own_key || (key == own_key && (row < own_row || (row == own_row && other < image)));
    }
    place += __syncthreads_count(before);
  }
  return place;
}

// Stores what puts the image into its band of rows, and there into its place.
__device__ inline void find_key(const OrderParams& p, int image) {
  const int band = place_by(centre_rows(p), p, image) * p.bands / p.images;
  const double column = centre_columns(p)[image];  // within 1/2
  if (threadIdx.x == 0) keys(p)[image] = band + (band % 2 == 0 ? column : -column);
}

__device__ inline const uint8_t* bytes_of(const OrderParams& p, int image) {
  return static_cast<const uint8_t*>(p.data) + image * p.image_bytes;
}

// Brings an image into the L2 cache.
__device__ inline void prefetch(const OrderParams& p, int image) {
  constexpr int kLine = 128;
  for (int64_t at = threadIdx.x * kLine; at < p.image_bytes; at += kThreads * kLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(bytes_of(p, image) + at));
  }
}

// Copies an image to its place, a Chunk at a time.
template <class Chunk>
__device__ void copy(const OrderParams& p, int image, int place) {
  constexpr int kInFlight = 4;
  const auto* from = reinterpret_cast<const Chunk*>(bytes_of(p, image));
  auto* to = reinterpret_cast<Chunk*>(static_cast<uint8_t*>(p.ordered) + place * p.image_bytes);
  const auto count = p.image_bytes / static_cast<int64_t>(sizeof(Chunk));
  for (int64_t first = threadIdx.x; first < count; first += kInFlight * kThreads) {
    Chunk chunks[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * kThreads < count) chunks[i] = from[first + i * kThreads];
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * kThreads < count) to[first + i * kThreads] = chunks[i];
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocksAMultiprocessor)
    order_images(const __grid_constant__ OrderParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const auto for_own_images = [&](const auto& visit) {
    for (int image = blockIdx.x; image < p.images; image += gridDim.x) visit(image);
  };
  Meeting<true> meeting;
  for_own_images([&](int image) { find_centre<T>(p, image); });
  meeting.arrive();
  if (p.ordered != nullptr) for_own_images([&](int image) { prefetch(p, image); });
  meeting.wait();
  if (p.bands > 1) {
    for_own_images([&](int image) { find_key(p, image); });
    meeting.arrive();
    meeting.wait();
  }
  for_own_images([&](int image) {
    const int place = place_by(keys(p), p, image);
    if (threadIdx.x == 0) {
      p.order[place] = image;
      p.places[image] = place;
    }
    if (p.ordered == nullptr) return;
    if (p.whole_chunks) {
      copy<uint4>(p, image, place);
    } else {
      copy<T>(p, image, place);
    }
  });
}

template <class T>
cudaError_t launch_order(const OrderParams& p, int multiprocessors, cudaStream_t stream) {
  const int blocks = std::min(p.images, kBlocksAMultiprocessor * multiprocessors);
  return launch_meeting(order_images<T>, blocks, kThreads, 0, /*meets=*/true, stream, p);
}

}  // namespace spamm::kernels::likeness
