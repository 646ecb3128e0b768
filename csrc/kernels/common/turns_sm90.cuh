// Makes two warpgroups use the tensor cores alternately.
#pragma once

#include "cutlass/arch/barrier.h"

namespace spamm::kernels::sm90 {

// Without turns, both warpgroups of a thread block may promote their sums at the same time, and the
// tensor cores idle meanwhile. Each warpgroup calls wait() before its products of a stage, and
// pass() once it has issued them or has none.
class Turns {
  static constexpr int kFirstBarrier = 1;  // a named barrier for each warpgroup
  static constexpr int kThreads = 256;

 public:
  __device__ explicit Turns(int warpgroup)
      : own_(kFirstBarrier + warpgroup), other_(kFirstBarrier + 1 - warpgroup) {
    if (warpgroup == 1) pass();
  }

  __device__ void wait() const { cutlass::arch::NamedBarrier::sync(kThreads, own_); }
  __device__ void pass() const { cutlass::arch::NamedBarrier::arrive(kThreads, other_); }

  // After the last stage: consumes the pass() that the first warpgroup has not waited for.
  __device__ void end() const {
    if (own_ == kFirstBarrier) wait();
  }

 private:
  int own_, other_;
};

// For kernels without turns.
struct NoTurns {
  __device__ explicit NoTurns(int) {}
  __device__ void wait() const {}
  __device__ void pass() const {}
  __device__ void end() const {}
};

}  // namespace spamm::kernels::sm90
