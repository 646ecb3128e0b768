// The tau of a valid ratio from products one by one (select_tau.cuh). Where there are few, one
// thread block holds all of them in registers, which spares the sorting of staircases.
#pragma once

#include "kernels/threshold/select_tau.cuh"

namespace spamm::kernels {

// Counting and collecting products one by one, for select_among(). The products' each_key(visit)
// calls visit(key) for each of them that the thread has.
// count_bins() and collect() do as those for staircases.
template <class Products, class Norm>
__device__ void count_bins(const Products& products, const KeyInterval<Norm>& interval, int shift,
                           int bins, unsigned* counts) {
  for (int i = threadIdx.x; i <= bins; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  unsigned above = 0;
  products.each_key([&](auto key) {
    if (key > interval.high) ++above;
    if (interval.has(key)) atomicAdd(&counts[(key - interval.low) >> shift], 1u);
  });
  above = __reduce_add_sync(~0u, above);
  if (threadIdx.x % 32 == 0) atomicAdd(&counts[bins], above);
  __syncthreads();
}

template <class Products, class Norm>
__device__ void collect(const Products& products, const KeyInterval<Norm>& interval,
                        SelectShared<Norm>& shared) {
  start_collecting(shared);
  auto successor = Bits<Norm>::kInfinity;
  products.each_key([&](auto key) {
    if (key > interval.high) successor = min(successor, key);
    if (interval.low == interval.high || !interval.has(key)) return;
    shared.staged[atomicAdd(&shared.collected, 1u)] = key;
  });
  include_successor(successor, shared);
}

constexpr int kMostHeld = kCandidates;  // what a thread block can collect

// All products of two maps, of which each thread of a thread block has some.
template <class Norm>
class HeldProducts {
  using Key = typename Bits<Norm>::Type;
  static constexpr int kHeld = kMostHeld / kSelectThreads<Norm>;

 public:
  // Waits for the previous kernel once it has divided, which takes as long as reading norms.
  __device__ explicit HeldProducts(const NormMaps<Norm>& maps)
      : total_(static_cast<unsigned>(maps.batch) * maps.mb * maps.kb * maps.nb) {
    const unsigned depth = maps.kb, columns = maps.nb;
    unsigned of_a[kHeld], of_b[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const unsigned number = min(number_of(i), total_ - 1);
      of_a[i] = number / columns;
      const unsigned row = of_a[i] / depth, batch = row / maps.mb;
      of_b[i] = (batch * depth + of_a[i] - row * depth) * columns + number - of_a[i] * columns;
    }
    wait_for_previous_kernel();
#pragma unroll
    for (int i = 0; i < kHeld; ++i) keys_[i] = product_key(maps.a[of_a[i]], maps.b[of_b[i]]);
  }

  template <class Visit>
  __device__ void each_key(const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (number_of(i) < total_) visit(keys_[i]);
    }
  }

  // From the least key to the greatest.
  __device__ KeyInterval<Norm> range() const {
    __shared__ Key least, greatest;
    if (threadIdx.x == 0) least = Bits<Norm>::kInfinity, greatest = 0;
    Key low = Bits<Norm>::kInfinity, high = 0;
    each_key([&](Key key) { low = min(low, key), high = max(high, key); });
    low = least_in_warp(low), high = ~least_in_warp(~high);
    __syncthreads();
    if (threadIdx.x % 32 == 0) atomicMin(&least, low), atomicMax(&greatest, high);
    __syncthreads();
    return {least, greatest};
  }

 private:
  __device__ unsigned number_of(int i) const { return threadIdx.x + i * blockDim.x; }

  unsigned total_;
  Key keys_[kHeld];
};

// One thread block. See select_tau().
template <class Norm>
__global__ void __launch_bounds__(kSelectThreads<Norm>, 1)
    select_held_tau(const __grid_constant__ NormMaps<Norm> maps, unsigned rank, double target,
                    Norm* tau) {
  extern __shared__ __align__(16) unsigned char memory[];
  let_next_kernel_start();
  const HeldProducts<Norm> products(maps);
  select_among<false, HeldProducts<Norm>, Norm, unsigned>(
      products, products.range(), nullptr, rank, target,
      *reinterpret_cast<SelectShared<Norm>*>(memory), tau);
}

}  // namespace spamm::kernels
