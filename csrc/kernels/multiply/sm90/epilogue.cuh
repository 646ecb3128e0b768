// The epilogue of the Hopper multiply: rounds alpha * sums + beta * input into shared memory, then
// stores it to C by TMA. A warpgroup stores its blocks one by one, and each warp its own rows.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/common/numeric.cuh"
#include "kernels/multiply/sm90/listed.cuh"
#include "kernels/multiply/sm90/params.h"
#include "kernels/multiply/sm90/pipeline.cuh"
#include "kernels/multiply/store_pair.cuh"

namespace spamm::kernels::multiply::sm90 {

constexpr int kWarpRows = kBlock / 4;  // rows of a block of C that belong to one warp

// A 64 x 64 block of C in shared memory, in TMA's 128-byte swizzle. Each warp owns 16 rows.
template <class Element>
struct StagedBlock {
  OperandBlock& memory;

  template <class T>
  __device__ T& at(int row, int column) const {
    const int chunk = column / 8 ^ row % 8;
    return *reinterpret_cast<T*>(memory.bytes + row * kLineBytes + chunk * 16 + column % 8 * 2);
  }
};

__device__ inline int warp_row() { return threadIdx.x % 128 / 32 * kWarpRows; }

// Calls visit(row, column) for the entries of the warp's rows that lie in C. The lanes visit 32
// neighbours at a time.
template <class Visit>
__device__ void for_own_entries(const MultiplyParams<float>& p, int64_t first_row,
                                int64_t first_column, const Visit& visit) {
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < kWarpRows * kBlock; i += 32) {
    const int row = warp_row() + i / kBlock, column = i % kBlock;
    if (first_row + row < p.m && first_column + column < p.n) visit(row, column);
  }
}

// values += beta * input. The input may have any strides, so the warp first copies its rows of it
// into the staging block, which is free until the result is staged there.
template <class Element>
__device__ void add_input(const MultiplyParams<float>& p, int batch, int64_t first_row,
                          int64_t first_column, const StagedBlock<Element>& staged,
                          float (&values)[kThreadValues]) {
  const auto* input = static_cast<const Element*>(p.input) + batch * p.input_strides[0];
  for_own_entries(p, first_row, first_column, [&](int row, int column) {
    staged.template at<Element>(row, column) = input[(first_row + row) * p.input_strides[1] +
                                                     (first_column + column) * p.input_strides[2]];
  });
  __syncwarp();
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kThreadValues; i += 2) {
    const int row = warp_row() + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2;
    const auto pair = staged.template at<EntryPair<Element>>(row, column);
    values[i] += p.beta * widen(pair.x);
    values[i + 1] += p.beta * widen(pair.y);
  }
  __syncwarp();
}

// Rounds the warp's values into the staging block, 16 rows x 16 columns with each instruction.
template <class Element>
__device__ void stage(const StagedBlock<Element>& staged, const float (&values)[kThreadValues]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kThreadValues; i += 8) {
    uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const EntryPair<Element> pair{narrow<Element>(values[i + 2 * j]),
                                    narrow<Element>(values[i + 2 * j + 1])};
      pairs[j] = reinterpret_cast<const uint32_t&>(pair);
    }
    cute::SM90_U32x4_STSM_N::copy(
        pairs[0], pairs[1], pairs[2], pairs[3],
        staged.template at<cute::uint128_t>(warp_row() + lane % 16, i * 2 + lane / 16 * 8));
  }
}

// Stores a warpgroup's blocks of C, from `first` on. Each warp stores only its own rows, so no warp
// waits for another.
template <class Config, bool kPlain, int kColumn = 0>
__device__ __forceinline__ void store_blocks(const Params& params, const OwnPart<Config>& first,
                                             OperandBlock& staging,
                                             const float (&acc)[Config::kOwn * kThreadValues]) {
  if constexpr (kColumn < Config::kOwn) {
    using Element = typename Config::Element;
    const MultiplyParams<float>& p = params.product;
    const bool leads = threadIdx.x % 32 == 0;
    const BlockPlace place = place_of(p, first, kColumn);
    if (!place.is_stored) {
      return store_blocks<Config, kPlain, kColumn + 1>(params, first, staging, acc);
    }
    const int batch = place.batch, row = place.row * kBlock, column = place.column * kBlock;
    const StagedBlock<Element> staged{staging};

    float values[kThreadValues];
#pragma unroll
    for (int i = 0; i < kThreadValues; ++i) values[i] = p.alpha * acc[kColumn * kThreadValues + i];
    if (leads) cute::tma_store_wait<0>();  // until the previous store has read shared memory
    __syncwarp();
    if (!kPlain && p.input != nullptr) add_input(p, batch, row, column, staged, values);
    stage(staged, values);
    if (kPlain || params.c_by_tma) {
      cute::tma_store_fence();
      __syncwarp();
      if (leads) {
        cute::SM90_TMA_STORE_3D::copy(&params.map_c, staging.bytes + warp_row() * kLineBytes,
                                      column, row + warp_row(), batch);
        cute::tma_store_arrive();
      }
    } else {
      __syncwarp();
      auto* c = static_cast<Element*>(p.c) + batch * p.c_batch_stride + row * p.c_leading + column;
      for_own_entries(p, row, column, [&](int i, int j) {
        c[i * p.c_leading + j] = staged.template at<Element>(i, j);
      });
    }
    store_blocks<Config, kPlain, kColumn + 1>(params, first, staging, acc);
  }
}

// The usual case is an instance of its own, without the registers and branches of the other one.
template <class Config>
__device__ __forceinline__ void store(const Params& params, const OwnPart<Config>& first,
                                      OperandBlock& staging,
                                      const float (&acc)[Config::kOwn * kThreadValues]) {
  if (params.product.input == nullptr && params.c_by_tma) {
    store_blocks<Config, true>(params, first, staging, acc);
  } else {
    store_blocks<Config, false>(params, first, staging, acc);
  }
}

}  // namespace spamm::kernels::multiply::sm90
