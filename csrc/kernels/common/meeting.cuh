// A barrier of all thread blocks of a launch.
#pragma once

#include <cooperative_groups.h>

#include <utility>

namespace spamm::kernels {

// All threads arrive, then wait. kGrid: the launch is cooperative and may have several thread
// blocks; if not, it has one.
template <bool kGrid>
struct Meeting {
  __device__ void arrive() {}
  __device__ void wait() { __syncthreads(); }
};
template <>
struct Meeting<true> {
  cooperative_groups::grid_group::arrival_token token{};
  __device__ void arrive() { token = cooperative_groups::this_grid().barrier_arrive(); }
  __device__ void wait() { cooperative_groups::this_grid().barrier_wait(std::move(token)); }
};

__device__ inline void meet() {
  Meeting<true> meeting;
  meeting.arrive();
  meeting.wait();
}

}  // namespace spamm::kernels
