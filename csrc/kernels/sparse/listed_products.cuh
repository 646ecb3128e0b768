// The products of stored blocks for select_tau.cuh, which finds the tau of a valid ratio.
#pragma once

#include <cstdint>

#include "kernels/sparse/csr.cuh"
#include "kernels/threshold/held_products.cuh"

namespace spamm::kernels {

// Thread blocks take stored blocks of A in turn.
template <class Index, class Norm>
struct ListedProducts {
  using Key = typename Bits<Norm>::Type;
  const CsrMaps<Index, Norm>& maps;

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
template <class Index, class Norm>
__global__ void __launch_bounds__(kSelectThreads<Norm>, 1)
    select_sparse_tau(const __grid_constant__ CsrMaps<Index, Norm> maps, double valid_ratio,
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
  const ListedProducts<Index, Norm> listed{maps};
  const auto interval =
      sample_interval<Norm>(listed.sample(), SampleRanks::of(share, kSelectThreads<Norm>), shared);
  meeting.wait();
  select_among<true>(listed, interval, global, rank, target, shared, tau);
}

}  // namespace spamm::kernels
