// Norm maps: Frobenius norms of all blocks of a matrix, in one pass at memory speed.
//
// Rows are read in strips of some blocks' width, a block row high; each group of 32 columns has
// eight sums of its own. Squares of float16, bfloat16 and float32 are exact in the sums' float64
// and can neither overflow nor vanish there; a float64 block whose sum leaves the safe range is
// summed again, scaled by a power of two.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "checks.h"
#include "cpu/clones.h"
#include "cpu/convert.h"
#include "cpu/scaled_norm.h"

namespace spamm::cpu {
namespace {

using at::Tensor;

constexpr int64_t kLanes = 8;                    // partial sums of a group of columns
constexpr int64_t kGroup = 4 * kLanes;           // divides every block edge
constexpr int64_t kStrip = 32 * kGroup;          // columns; a multiple of every block edge
constexpr int64_t kElementsPerTask = 32 * 1024;  // below that, threads cost more than they bring

// One block row of a matrix, or a strip of it; element (r, c) at data[r * row_stride + c].
template <class T>
struct Strip {
  const T* data;
  int64_t row_stride, rows, columns;
};

// sums[g][lane] += squares of lane's columns in group g of one row. The row is `groups` groups
// long.
template <class T>
SPAMM_INLINE void add_squares(const T* __restrict row, int64_t groups, double* __restrict sums) {
  for (int64_t g = 0; g < groups; ++g, row += kGroup, sums += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double x0 = row[lane], x1 = row[lane + kLanes];
      const double x2 = row[lane + 2 * kLanes], x3 = row[lane + 3 * kLanes];
      sums[lane] += (x0 * x0 + x1 * x1) + (x2 * x2 + x3 * x3);
    }
  }
}

template <class T>
SPAMM_INLINE void sum_squares_of(const Strip<T>& strip, double* sums) {
  using Wide = decltype(widen(T()));
  const int64_t groups = blocks_of(strip.columns, kGroup);
  const bool in_place = std::is_same_v<T, Wide> && strip.columns % kGroup == 0;
  alignas(64) Wide buffer[kStrip] = {};  // one row, widened and padded with zeros
  for (int64_t r = 0; r < strip.rows; ++r) {
    const T* row = strip.data + r * strip.row_stride;
    if constexpr (std::is_same_v<T, Wide>) {
      if (in_place) {
        add_squares(row, groups, sums);
        continue;
      }
    }
    for (int64_t c = 0; c < strip.columns; ++c) buffer[c] = widen(row[c]);
    add_squares(buffer, groups, sums);
  }
}

SPAMM_CPU_CLONES void sum_squares(const Strip<c10::Half>& strip, double* sums) {
  sum_squares_of(strip, sums);
}
SPAMM_CPU_CLONES void sum_squares(const Strip<c10::BFloat16>& strip, double* sums) {
  sum_squares_of(strip, sums);
}
SPAMM_CPU_CLONES void sum_squares(const Strip<float>& strip, double* sums) {
  sum_squares_of(strip, sums);
}
SPAMM_CPU_CLONES void sum_squares(const Strip<double>& strip, double* sums) {
  sum_squares_of(strip, sums);
}

double norm_of(double sum, const auto&) { return std::sqrt(sum); }

// A sum of float64 squares may have overflowed, or lost squares that fell below the normal range.
double norm_of(double sum, const Strip<double>& block) {
  constexpr double kSafe = 0x1p-900;
  if (sum >= kSafe && std::isfinite(sum)) return std::sqrt(sum);
  return scaled_norm([&](auto&& visit) {
    for (int64_t r = 0; r < block.rows; ++r)
      std::for_each_n(block.data + r * block.row_stride, block.columns, visit);
  });
}

// Norms of the blocks of one strip, `edge` columns wide each; norm b goes to norms[b *
// norm_stride].
template <class T, class N>
void strip_norms(const Strip<T>& strip, int64_t edge, N* norms, int64_t norm_stride) {
  alignas(64) double sums[kStrip / kGroup * kLanes] = {};
  sum_squares(strip, sums);
  constexpr int64_t kColumnsPerSum = kGroup / kLanes;
  for (int64_t first = 0; first < strip.columns; first += edge) {
    const double* own = sums + first / kColumnsPerSum;
    const double sum = std::accumulate(own, own + edge / kColumnsPerSum, 0.0);
    const int64_t columns = std::min(edge, strip.columns - first);
    const Strip<T> block{strip.data + first, strip.row_stride, strip.rows, columns};
    *norms = static_cast<N>(norm_of(sum, block));
    norms += norm_stride;
  }
}

// Blocks of a (batch, M, K) with unit stride along K; norms (batch, MB, KB) of any strides.
template <class T, class N>
void norms_along_rows(const Tensor& a, int64_t m, int64_t k, const Tensor& norms) {
  const int64_t rows = a.size(1), columns = a.size(2);
  const int64_t block_rows = norms.size(1), strips = blocks_of(columns, kStrip);
  const int64_t tasks = a.size(0) * block_rows * strips;
  if (tasks == 0) return;
  const int64_t elements = std::min(m, rows) * std::min(kStrip, columns);
  const T* first = a.const_data_ptr<T>();
  N* first_norm = norms.mutable_data_ptr<N>();
  const auto from_a = a.strides(), to_norms = norms.strides();
  at::parallel_for(0, tasks, blocks_of(kElementsPerTask, elements), [&](int64_t from, int64_t to) {
    for (int64_t task = from; task < to; ++task) {
      const int64_t column = task % strips * kStrip;
      const int64_t i = task / strips % block_rows;
      const int64_t batch = task / strips / block_rows;
      const Strip<T> strip{first + batch * from_a[0] + i * m * from_a[1] + column, from_a[1],
                           std::min(m, rows - i * m), std::min(kStrip, columns - column)};
      N* out = first_norm + batch * to_norms[0] + i * to_norms[1] + column / k * to_norms[2];
      strip_norms(strip, k, out, to_norms[2]);
    }
  });
}

bool has_unit_stride(const Tensor& a, int64_t dim) {
  return a.stride(dim) == 1 || a.size(dim) == 1;
}

Tensor norm_map(const Tensor& a, at::IntArrayRef block) {
  check_operand_dtype(a.scalar_type(), "a");
  TORCH_CHECK(a.dim() >= 2, "a must have at least 2 dimensions; got shape ", a.sizes());
  check_block_pair(block);
  auto shape = a.sizes().vec();
  shape[shape.size() - 2] = blocks_of(a.size(-2), block[0]);
  shape[shape.size() - 1] = blocks_of(a.size(-1), block[1]);
  const Tensor result = at::empty(shape, a.options().dtype(norm_dtype(a.scalar_type())));

  const auto as_batches = [](const Tensor& t) {
    return t.dim() == 2 ? t.unsqueeze(0) : t.flatten(0, -3);
  };
  Tensor matrices = as_batches(a), norms = as_batches(result);
  int64_t m = block[0], k = block[1];
  if (has_unit_stride(matrices, 1) && !has_unit_stride(matrices, 2)) {
    // The norms of the transpose are the transposed norms: rows are read as they lie in memory.
    matrices = matrices.mT();
    norms = norms.mT();
    std::swap(m, k);
  } else if (!has_unit_stride(matrices, 2)) {
    matrices = matrices.contiguous();
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, a.scalar_type(), "norm_map", [&] {
    using N = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    norms_along_rows<scalar_t, N>(matrices, m, k, norms);
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CPU, m) { m.impl("norm_map", &norm_map); }

}  // namespace spamm::cpu
