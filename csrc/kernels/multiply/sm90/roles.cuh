// Set-up, load and list roles (common/roles_sm90.cuh), shared by the Hopper multiplies.
#pragma once

#include "kernels/multiply/sm90/list.cuh"
#include "kernels/multiply/sm90/listed.cuh"
#include "kernels/multiply/sm90/load.cuh"

namespace spamm::kernels::multiply::sm90 {

template <class Config, class Params>
struct ListAndLoad {
  const Params& params;
  Storage<Config>& storage;

  __device__ __forceinline__ void set_up(int warp) const {
    if (warp == 0 && threadIdx.x % 32 == 0) storage.initialize();
    __syncthreads();
  }

  __device__ __forceinline__ void load_a() const { load_lists<Config, true>(params, storage); }
  __device__ __forceinline__ void load_b() const { load_lists<Config, false>(params, storage); }
  __device__ __forceinline__ void list(int number) const {
    if constexpr (Config::kListed) {
      list_products<Config>(params, number, storage);
    } else {
      list_steps<Config>(params, number, storage);
    }
  }
};

}  // namespace spamm::kernels::multiply::sm90
