// Norms of neighbouring blocks of a row-major matrix, in one pass.
//
// A strip is one block row high and several blocks wide. Each group of 32 columns has eight float64
// sums. Squares of float32 are exact in float64 and neither overflow nor underflow. Squares of the
// half types are exact in float32, so those of a few rows are first added in float32. If the sum of
// a block leaves the safe range, scaled_norm computes the norm again.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cpu/common/convert.h"
#include "cpu/common/machine.h"

namespace spamm::cpu {

// The root of a sum of squares, without overflow and without loss of small terms. each(visit) calls
// visit(x) for every number x. `largest` is their largest magnitude; if it is zero, infinite or
// NaN, it is the result. The numbers are scaled by a power of two, which is exact.
template <class Each>
double scaled_norm(double largest, const Each& each) {
  if (largest == 0 || !std::isfinite(largest)) return largest;
  // Scaled by 2^1000, even the smallest subnormal, 2^-1074, has a normal square.
  const int exponent = std::max(std::ilogb(largest), -1000);
  const double scale = std::ldexp(1.0, -exponent);
  // Compensated summation. In a plain sum, equal squares are all rounded the same way, and a long
  // sum would be less accurate than the error bound assumes.
  double sum = 0, excess = 0;
  each([&](double x) {
    const double square = (x * scale) * (x * scale) - excess;
    const double next = sum + square;
    excess = (next - sum) - square;
    sum = next;
  });
  return std::ldexp(std::sqrt(sum), exponent);
}

constexpr int64_t kLanes = 8;            // sums of a group of columns
constexpr int64_t kGroup = 4 * kLanes;   // divides every block edge
constexpr int64_t kStrip = 64 * kGroup;  // columns; a multiple of every block edge

// One block row of a matrix, or a part of it; element (r, c) at data[r * row_stride + c].
template <class T>
struct Strip {
  const T* data;
  int64_t row_stride, rows, columns;
};

// The squares of this many rows are added in type Square, in which they are exact. The result is
// then added to the group's float64 sums.
constexpr int64_t kRowsAtOnce = 4;
template <class T>
using Square = std::conditional_t<sizeof(T) == 2, float, double>;

// Eight neighbouring elements as numbers of this type.
template <class N>
using LanesOf [[gnu::vector_size(kLanes * sizeof(N))]] = N;
using WideLanes = LanesOf<double>;
template <class T>
using SquareLanes = LanesOf<Square<T>>;

template <class T>
SPAMM_INLINE void load_lanes(const T* data, SquareLanes<T>& lanes) {
  Square<T> wide[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) wide[lane] = widen(data[lane]);
  std::memcpy(&lanes, wide, sizeof(lanes));
}

// sums[lane] += the squares of the lane's columns in a group of `columns`, over `rows` rows.
// load(r, c, x): eight neighbouring elements.
template <class T, int64_t rows, class Load>
SPAMM_INLINE void add_squares(const Load& load, int64_t columns, double* sums) {
  SquareLanes<T> squares = {};
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; c += kLanes) {
      SquareLanes<T> x;
      load(r, c, x);
      squares += x * x;
    }
  }
  WideLanes before;
  std::memcpy(&before, sums, sizeof(before));
  before += __builtin_convertvector(squares, WideLanes);
  std::memcpy(sums, &before, sizeof(before));
}

template <class T, int64_t rows>
SPAMM_INLINE void add_squares_of_rows(const Strip<T>& strip, int64_t first, double* sums) {
  const T* data = strip.data + first * strip.row_stride;
  int64_t column = 0;
  for (; column + kGroup <= strip.columns; column += kGroup, sums += kLanes) {
    add_squares<T, rows>(
        [&](int64_t r, int64_t c, SquareLanes<T>& x) {
          load_lanes(data + r * strip.row_stride + column + c, x);
        },
        kGroup, sums);
  }
  if (column == strip.columns) return;
  const int64_t rest = strip.columns - column;
  add_squares<T, rows>(
      [&](int64_t r, int64_t c, SquareLanes<T>& x) {
        const T* from = data + r * strip.row_stride + column + c;
        if (c + kLanes <= rest) return load_lanes(from, x);
        T padded[kLanes];
#pragma GCC unroll 1  // unrolled, it would be eight branches
        for (int64_t lane = 0; lane < kLanes; ++lane)
          padded[lane] = lane < rest - c ? from[lane] : T(0);  // a masked load
        load_lanes(padded, x);
      },
      rest, sums);
}

template <class T>
SPAMM_INLINE void sum_squares(const Strip<T>& strip, double* sums) {
  int64_t r = 0;
  for (; r + kRowsAtOnce <= strip.rows; r += kRowsAtOnce)
    add_squares_of_rows<T, kRowsAtOnce>(strip, r, sums);
  for (; r < strip.rows; ++r) add_squares_of_rows<T, 1>(strip, r, sums);
}

// A finite sum of at least this is accurate: squares that underflowed are too small to matter.
template <class T>
constexpr double kSafe = std::is_same_v<T, double>          ? 0x1p-900
                         : std::is_same_v<T, c10::BFloat16> ? 0x1p-80
                                                            : 0;

// The largest magnitude in a block. Magnitudes have the order of their bit patterns: infinity is
// above all numbers, and NaN above infinity.
template <class T>
SPAMM_CPU_CLONES static T largest_magnitude(const Strip<T>& block) {
  using Bits = UnsignedOf<T>;
  Bits largest = 0;
  for (int64_t r = 0; r < block.rows; ++r) {
    for (int64_t c = 0; c < block.columns; ++c) {
      Bits bits;
      std::memcpy(&bits, block.data + r * block.row_stride + c, sizeof(T));
      largest =
          std::max<Bits>(largest, bits & std::numeric_limits<std::make_signed_t<Bits>>::max());
    }
  }
  T result;
  std::memcpy(&result, &largest, sizeof(T));
  return result;
}

template <class T>
double norm_of(double sum, const Strip<T>& block) {
  if (sum >= kSafe<T> && std::isfinite(sum)) return std::sqrt(sum);
  return scaled_norm(widen(largest_magnitude(block)), [&](const auto& visit) {
    for (int64_t r = 0; r < block.rows; ++r)
      for (int64_t c = 0; c < block.columns; ++c)
        visit(widen(block.data[r * block.row_stride + c]));
  });
}

// The norms of a strip's blocks, each `edge` columns wide. Writes norm b to norms[b * norm_stride].
template <class T, class N>
SPAMM_CPU_CLONES static void strip_norms(const Strip<T>& strip, int64_t edge, N* norms,
                                         int64_t norm_stride) {
  alignas(64) double sums[kStrip / kGroup * kLanes];
  std::fill_n(sums, blocks_of(strip.columns, edge) * edge / kGroup * kLanes, 0.0);
  sum_squares(strip, sums);
  constexpr int64_t kColumnsPerSum = kGroup / kLanes;
  for (int64_t first = 0; first < strip.columns; first += edge) {
    const double* own = sums + first / kColumnsPerSum;
    double lanes[kLanes] = {};
    for (int64_t g = 0; g < edge / kColumnsPerSum; g += kLanes)
      for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += own[g + lane];
    const double sum = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
                       ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
    const int64_t columns = std::min(edge, strip.columns - first);
    const Strip<T> block{strip.data + first, strip.row_stride, strip.rows, columns};
    *norms = static_cast<N>(norm_of(sum, block));
    norms += norm_stride;
  }
}

}  // namespace spamm::cpu
