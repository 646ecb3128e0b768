// The error bound of a block-sparse product, and the largest tau whose bound is within a limit: the
// search of threshold/error_search.cuh over products of stored blocks. And a valid ratio's tau.
//
// A thread block sums the losses of the blocks of a row of C. Where bins of all columns do not fit
// in shared memory, it first numbers the columns that lose anything. Losses are added as whole
// numbers of a small unit, rounded up: their sums are the same in every order.
#pragma once

#include <cstdint>
#include <cub/block/block_scan.cuh>

#include "kernels/sparse/plan.cuh"
#include "kernels/threshold/error_bound.cuh"
#include "kernels/threshold/error_search.cuh"
#include "kernels/threshold/select_tau.cuh"

namespace spamm::kernels {

using Units = unsigned long long;

// The dynamic shared memory of a sweep.
struct SweepRoom {
  int window, columns;  // block columns at a time; of those, the ones that have bins at a time

  __host__ __device__ bool has_all_bins() const { return columns == window; }
  template <class Norm>
  __host__ __device__ int64_t bytes() const {
    return sizeof(ErrorSearchShared<Norm>) + int64_t{columns} * kLossBins * sizeof(Units) +
           (int64_t{window} * sizeof(uint16_t) + 7) / 8 * 8;
  }
};

// The most that a product loses when it is skipped.
template <class Norm>
__device__ double loss_of(Norm a, Norm b) {
  return __dmul_ru(at_most(a), at_most(b));
}

// A sum of losses of a block of C fits 64 bits if each is at most 16 times 2^log2_units() units.
__device__ inline int log2_units(const CsrFindings& findings) {
  return 58 - (64 - __clzll(static_cast<long long>(findings.longest)));
}

// Two thread blocks a multiprocessor hide each other's waits. More leave threads few registers.
constexpr int kSweepThreads = 256, kSweepsTogether = 2;
static_assert(kSweepThreads <= kMostSearchThreads);

// Numbers the columns that are not 0, from 1 on. Returns how many there are.
__device__ inline int number_columns(uint16_t* columns, int width) {
  using Scan = cub::BlockScan<int, kSweepThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ Scan::TempStorage memory;
  // An odd number of words for each thread keeps threads on different banks.
  const int run = (((width - 1) / kSweepThreads / 2 + 1) | 1) * 2;
  const int from = min(static_cast<int>(threadIdx.x) * run, width), to = min(from + run, width);
  int number = 0, total;
  for (int c = from; c < to; ++c) number += columns[c];
  Scan(memory).ExclusiveSum(number, number, total);
  for (int c = from; c < to; ++c) {
    if (columns[c] != 0) columns[c] = static_cast<uint16_t>(++number);
  }
  __syncthreads();
  return total;
}

// One sweep over all products, see Sweep. `scale`: from losses to units. All warps get the result.
template <class Norm>
__device__ Sweep sweep_rows(const CsrMaps<Norm>& maps, const SearchInterval& interval, double scale,
                            double most_units, const SweepRoom& room, int half,
                            ErrorSearch<Norm>* global, unsigned char* memory) {
  auto& shared = *reinterpret_cast<ErrorSearchShared<Norm>*>(memory);
  auto* const bins = reinterpret_cast<Units*>(memory + sizeof(ErrorSearchShared<Norm>));
  auto* const columns = reinterpret_cast<uint16_t*>(bins + room.columns * kLossBins);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int threads = blockDim.x, shift = interval.shift();
  Sweep own{0, SearchKeys::none<Norm>()};
  // Tells whether a product with this key loses something before the interval's end.
  const auto lose = [&](SearchKey key) {
    if (key >= interval.end) own.keys.next = min(own.keys.next, key);
    if (key >= interval.end || key < interval.low) return key < interval.end;
    own.keys.least = min(own.keys.least, key), own.keys.most = max(own.keys.most, key);
    return true;
  };
  // The numbers, from 1 on, of the columns of a row that lose anything.
  const auto number_losing = [&](int64_t from, int64_t to, int64_t begin, int width) {
    for (int c = threadIdx.x; c < width; c += threads) columns[c] = 0;
    __syncthreads();
    each_product(maps, from, to, [&](int64_t, int64_t, int64_t column, Norm a, Norm b) {
      if (lose(product_key(a, b)) && column >= begin && column - begin < width)
        columns[column - begin] = 1;
    });
    __syncthreads();
    return number_columns(columns, width);
  };
  for (int64_t row = blockIdx.x; row < maps.a.rows; row += gridDim.x) {
    const int64_t from = maps.a.crow[row], to = maps.a.crow[row + 1];
    for (int64_t begin = 0; begin < maps.b.columns; begin += room.window) {
      const int width = static_cast<int>(min(int64_t{room.window}, maps.b.columns - begin));
      __syncthreads();
      const int count = room.has_all_bins() ? width : number_losing(from, to, begin, width);
      for (int first = 0; first < count; first += room.columns) {
        const int present = min(room.columns, count - first);
        for (int i = threadIdx.x; i < present * kLossBins; i += threads) bins[i] = 0;
        __syncthreads();
        each_product(maps, from, to, [&](int64_t, int64_t, int64_t column, Norm a, Norm b) {
          const SearchKey key = product_key(a, b);
          if (!lose(key) || column < begin || column - begin >= width) return;
          const auto in_window = static_cast<int>(column - begin);
          const int place = room.has_all_bins() ? in_window : columns[in_window] - 1 - first;
          if (place < 0 || place >= present) return;
          const auto bin = key < interval.low ? 0 : (key - interval.low) >> shift;
          const double units = __dmul_ru(loss_of(a, b), scale);
          atomicAdd(&bins[place * kLossBins + bin], __double2ull_ru(min(units, most_units)));
        });
        __syncthreads();
        for (int place = warp; place < present; place += warps) {
          const double rounded = __ull2double_ru(sum_through(bins[place * kLossBins + lane]));
          own.square = __fma_ru(rounded, rounded, own.square);
        }
        __syncthreads();
      }
    }
  }
  own.keys.include_lanes();
  return combine_blocks(combine_warps<Norm>(own, shared.of_block[half]), half, global, shared);
}

// Grids of both kernels are cooperative, of at most kMostSearchBlocks thread blocks.
template <class Norm>
__global__ void __launch_bounds__(kSweepThreads, kSweepsTogether)
    find_sparse_tau_for_error(const __grid_constant__ CsrMaps<Norm> maps, double max_error,
                              SweepRoom room, const CsrFindings* findings,
                              ErrorSearch<Norm>* global, Norm* tau) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<ErrorSearchShared<Norm>*>(memory);
  const bool writes = blockIdx.x == 0 && threadIdx.x == 0;
  if (findings->is_bad) {
    if (writes) *tau = NAN;
    return;
  }
  const int64_t sizes[2] = {maps.a.stored, maps.b.stored};
  double norms[2];
  sum_norms<true>({maps.norm_a, maps.norm_b}, sizes, global, shared, norms);
  const double limit = largest_bound<Norm>(max_error, norms[0], norms[1]);
  SearchKey found = 0;
  if (!isfinite(limit) || findings->products == 0) {
    const bool all = isfinite(limit) || may_skip_all(max_error, norms[0], norms[1]);
    found = all ? Bits<Norm>::kInfinity : 0;
  } else {
    const int log2_unit = log2_units(*findings);
    // The bound, if each product of stored blocks loses 1, is at most this.
    const double spread =
        sqrt(static_cast<double>(findings->products) * static_cast<double>(findings->longest));
    // Sums of losses and of squares are rounded up, here and in the bound itself.
    const double slack =
        scalbn(spread, 1 - log2_unit) + (static_cast<double>(findings->products) + 128) * 0x1p-53;
    const SearchLimit<Norm> start(limit, spread, slack, 2, log2_unit);
    found = search_keys(start, [&](const SearchInterval& interval, int half) {
      return sweep_rows(maps, interval, start.scale, scalbn(1.0, log2_unit + 4), room, half, global,
                        memory);
    });
  }
  if (writes) *tau = Bits<Norm>::to(static_cast<typename Bits<Norm>::Type>(found));
}

// `products`: how many are valid, and of stored blocks. `largest` is zero at first, as are they.
template <class Norm>
__global__ void __launch_bounds__(kSweepThreads, kSweepsTogether)
    sparse_error_bound(const __grid_constant__ CsrMaps<Norm> maps, Tau<Norm> threshold,
                       SweepRoom room, const CsrFindings* findings, ErrorSearch<Norm>* global,
                       unsigned long long* largest, unsigned long long* products, Norm* bound) {
  extern __shared__ __align__(16) unsigned char memory[];
  const bool writes = blockIdx.x == 0 && threadIdx.x == 0;
  if (findings->is_bad) {
    if (writes) *bound = NAN;
    return;
  }
  const Norm tau = threshold.value();
  double most = 0;
  unsigned valid = 0;
  for (int64_t row = blockIdx.x; row < maps.a.rows; row += gridDim.x) {
    each_product(maps, maps.a.crow[row], maps.a.crow[row + 1],
                 [&](int64_t, int64_t, int64_t, Norm a, Norm b) {
                   if (is_valid(norm_product(a, b), tau)) {
                     ++valid;
                   } else {
                     most = max(most, loss_of(a, b));
                   }
                 });
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    most = max(most, __shfl_xor_sync(~0u, most, distance));
  }
  valid = __reduce_add_sync(~0u, valid);
  if (threadIdx.x % 32 == 0) {
    atomicMax(largest, Bits<double>::of_magnitude(most));
    atomicAdd(&products[0], static_cast<unsigned long long>(valid));
  }
  if (writes) products[1] = findings->products;
  meet();
  most = Bits<double>::to(*static_cast<volatile unsigned long long*>(largest));
  double found = most;
  if (most > 0 && isfinite(most)) {
    const int exponent = log2_units(*findings) - max(ilogb(most), -940);
    const SearchKey key = tau > 0 ? Bits<Norm>::of_magnitude(tau) : 0;
    const Sweep total =
        sweep_rows(maps, {key, key}, scalbn(1.0, exponent), 0x1p63, room, 0, global, memory);
    const double root = scalbn(__dsqrt_ru(__shfl_sync(~0u, total.square, 0)), -exponent);
    found = __dmul_ru(root, 1 + kNormSlack<Norm>);
  }
  if (writes) *bound = round_up<Norm>(found);
}

// ---- A valid ratio ------------------------------------------------------------------------------

// For select_tau.cuh. Thread blocks take stored blocks of A in turn.
template <class Norm>
struct ListedProducts {
  using Key = typename Bits<Norm>::Type;
  const CsrMaps<Norm>& maps;

  // Calls visit(key) for this thread block's products.
  template <class Visit>
  __device__ void each_key(const Visit& visit) const {
    constexpr int64_t kRun = 4 * kSelectWarps<Norm>;
    for (int64_t slot = blockIdx.x * kRun; slot < maps.a.stored; slot += gridDim.x * kRun) {
      each_product(maps, slot, min(slot + kRun, maps.a.stored),
                   [&](int64_t, int64_t, int64_t, Norm a, Norm b) { visit(product_key(a, b)); });
    }
  }

  __device__ Key sample() const {
    const int64_t slot = pick(3679390609u, static_cast<int>(maps.a.stored));
    const int64_t k = maps.a.col[slot], first = maps.b.crow[k];
    const auto length = static_cast<int>(maps.b.crow[k + 1] - first);
    if (length == 0) return 0;
    return product_key(maps.norm_a[slot], maps.norm_b[first + pick(2700274806u, length)]);
  }
};

// Cooperative. See select_tau().
template <class Norm>
__global__ void __launch_bounds__(kSelectThreads<Norm>, 1)
    select_sparse_tau(const __grid_constant__ CsrMaps<Norm> maps, double valid_ratio,
                      const CsrFindings* findings, Selection<Norm, unsigned long long>* global,
                      Norm* tau) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<SelectShared<Norm>*>(memory);
  const auto products = static_cast<double>(findings->products);
  if (findings->is_bad || products == 0) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *tau = findings->is_bad ? Norm{NAN} : Norm{0};
    return;
  }
  const double target = valid_ratio * products;
  const auto rank = static_cast<unsigned long long>(fmax(1.0, floor(target + 0.5)));
  const double share = fmin(1.0, static_cast<double>(rank) / products);
  if (blockIdx.x == 0) global->clear();
  Meeting<true> meeting;
  meeting.arrive();
  const ListedProducts<Norm> listed{maps};
  const auto interval =
      sample_interval<Norm>(listed.sample(), SampleRanks::of(share, kSelectThreads<Norm>), shared);
  meeting.wait();
  select_among<true>(listed, interval, global, rank, target, shared, tau);
}

}  // namespace spamm::kernels
