// Turns of two warpgroups at the tensor cores.
#pragma once

#include "cutlass/arch/barrier.h"

namespace spamm::kernels::sm90 {

// Left alone, both warpgroups of a thread block may get their products done at the same time, and
// the tensor cores wait while both promote their sums. So they give the tensor cores work by turns:
// each calls wait() before its products of a stage and pass() when they are begun, or if it has
// none.
class Turns {
  static constexpr int kFirstBarrier = 1;  // named
  static constexpr int kThreads = 256;

 public:
  __device__ explicit Turns(int warpgroup)
      : own_(kFirstBarrier + warpgroup), other_(kFirstBarrier + 1 - warpgroup) {
    if (warpgroup == 1) pass();
  }

  __device__ void wait() const { cutlass::arch::NamedBarrier::sync(kThreads, own_); }
  __device__ void pass() const { cutlass::arch::NamedBarrier::arrive(kThreads, other_); }

  // After the last stage: the first warpgroup still has a turn.
  __device__ void end() const {
    if (own_ == kFirstBarrier) wait();
  }

 private:
  int own_, other_;
};

// For warpgroups that need none.
struct NoTurns {
  __device__ explicit NoTurns(int) {}
  __device__ void wait() const {}
  __device__ void pass() const {}
  __device__ void end() const {}
};

}  // namespace spamm::kernels::sm90
