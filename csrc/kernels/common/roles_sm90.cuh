// The roles of the warps of a persistent Hopper kernel.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "kernels/common/overlap.cuh"

namespace spamm::kernels::sm90 {

// When a kernel lets the next one on the stream start (overlap.cuh).
enum class NextKernel {
  kAtOnce,      // before anything else
  kWhenSetUp,   // once the barriers are initialised
  kAfterTheEnd  // only when this kernel has ended
};

enum class Role { kLoadA, kLoadB, kList, kMultiply, kNone };

constexpr int kFirstListWarp = 2, kFirstMultiplyWarp = 4;

// The first warpgroup loads and lists. All others multiply.
template <int kListWarps>
__device__ __forceinline__ Role role_of(int warp) {
  if (warp >= kFirstMultiplyWarp) return Role::kMultiply;
  if (warp >= kFirstListWarp) {
    return warp < kFirstListWarp + kListWarps ? Role::kList : Role::kNone;
  }
  return warp == 1 ? Role::kLoadB : Role::kLoadA;
}

// The index of a warp's warpgroup among those that multiply.
__device__ __forceinline__ int multiplying_warpgroup(int warp) { return warp / 4 - 1; }

// Runs the calling thread's part of `work`. All threads call set_up(warp). Then one thread calls
// load_a(), one load_b(), Config::kListWarps warps call list(number), and the warpgroups after the
// first call multiply(warp). If Config::kMultiplyRegisters is not 0, each multiplying thread gets
// that number of registers and every other thread keeps Config::kOtherRegisters.
template <class Config, class Work>
__device__ __forceinline__ void run_roles(const Work& work) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const bool elected = threadIdx.x % 32 == 0;
  if constexpr (Config::kNextKernel == NextKernel::kAtOnce) let_next_kernel_start();
  work.set_up(warp);
  if constexpr (Config::kNextKernel == NextKernel::kWhenSetUp) let_next_kernel_start();

  const Role role = role_of<Config::kListWarps>(warp);
  if (role == Role::kMultiply) {
    if constexpr (Config::kMultiplyRegisters != 0) {
      cutlass::arch::warpgroup_reg_alloc<Config::kMultiplyRegisters>();
    }
    work.multiply(warp);
  } else {
    if constexpr (Config::kMultiplyRegisters != 0) {
      cutlass::arch::warpgroup_reg_dealloc<Config::kOtherRegisters>();
    }
    if (role == Role::kList) {
      work.list(warp - kFirstListWarp);
    } else if (role == Role::kLoadB && elected) {
      work.load_b();
    } else if (role == Role::kLoadA && elected) {
      work.load_a();
    }
  }
}

}  // namespace spamm::kernels::sm90
