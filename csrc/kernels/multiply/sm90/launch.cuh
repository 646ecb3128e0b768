// Starts the Hopper multiply: tensor maps, instance and grid from run-time pointers, sizes and
// memory orders.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/common/launch.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/common/tensor_map_sm90.h"
#include "kernels/multiply/sm90/multiply.cuh"

namespace spamm::kernels::sm90 {

// A batch of matrices, `lines` of `length` contiguous ones. Strides in elements.
struct MatrixLayout {
  const void* data;
  int64_t length, lines, line_stride, batch, batch_stride;
};

// Maps the matrices in boxes of so many lines of 128 bytes.
template <class Element>
cudaError_t encode(CUtensorMap& map, const MatrixLayout& x, uint32_t box_lines) {
  // Strides that nothing steps over may hold anything, but the encoder checks them.
  const auto bytes = [](int64_t size, int64_t stride) {
    return static_cast<uint64_t>(size > 1 ? stride * sizeof(Element) : 16);
  };
  return encode_tensor_map<Element, 3>(
      map, x.data,
      {static_cast<uint64_t>(x.length), static_cast<uint64_t>(x.lines),
       static_cast<uint64_t>(x.batch)},
      {bytes(x.lines, x.line_stride), bytes(x.batch, x.batch_stride)},
      {kLineBytes / sizeof(Element), box_lines, 1}, {1, 1, 1});
}

// `extent` is M for A and N for B.
inline MatrixLayout layout(const Operand& x, int64_t extent, int64_t k, int64_t batch) {
  const bool has_batch = x.batch_stride != 0;
  return {x.data,    x.k_major ? k : extent, x.k_major ? extent : k,
          x.leading, has_batch ? batch : 1,  x.batch_stride};
}

// Measured: with 16 tile columns or less, a group of 8 is about one tile for each multiprocessor
// and 6% faster; with more, 16 is up to 1% faster.
inline int group_rows(int tile_columns) { return tile_columns <= 16 ? 8 : 16; }

// Returns the number of thread blocks to start.
template <class Config, class Norm>
int cut_into_tiles(TiledProduct<Norm>& params, const MultiplyParams<Norm>& p, int multiprocessors) {
  const auto tiles_along = [](int64_t size, int blocks) {
    return static_cast<int>((size - 1) / (blocks * kBlock) + 1);
  };
  params.product = p;
  params.tile_rows = tiles_along(p.m, Config::kRows);
  params.tile_columns = tiles_along(p.n, Config::kColumns);
  params.tiles = static_cast<int>(params.tile_rows * params.tile_columns * p.batch);
  params.group_rows = group_rows(params.tile_columns);
  params.a_has_batch = p.a.batch_stride != 0;
  params.b_has_batch = p.b.batch_stride != 0;
  const int blocks = std::min(params.tiles, multiprocessors);
  params.claims_tiles = blocks < params.tiles;
  return blocks;
}

// A kernel, because a memset would wait for the kernel before and keep the next one waiting.
static __global__ void set_to_zero(int* number) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  *number = 0;
}

// Starts a kernel that has the pipeline's warps.
template <class Config, class Params>
cudaError_t start(void (*kernel)(Params), const Params& params, int blocks, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(Storage<Config>);
  static_assert(kSharedBytes <= 227 * 1024);
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error == cudaSuccess && params.claims_tiles && !params.product.next_tile_is_zero) {
    error = kernels::launch(set_to_zero, 1, 1, 0, true, stream, params.product.next_tile);
  }
  if (error != cudaSuccess) return error;
  return kernels::launch(kernel, blocks, Config::kThreads, kSharedBytes, true, stream, params);
}

template <class Config>
cudaError_t launch(const MultiplyParams<float>& p, int multiprocessors, cudaStream_t stream) {
  using Element = typename Config::Element;
  Params params{};
  const int blocks = cut_into_tiles<Config>(params, p, multiprocessors);
  params.c_by_tma = p.n * sizeof(Element) % 16 == 0;

  cudaError_t error = encode<Element>(params.map_a, layout(p.a, p.m, p.k, p.batch), kBlock);
  if (error == cudaSuccess) {
    error = encode<Element>(params.map_b, layout(p.b, p.n, p.k, p.batch), kBlock);
  }
  if (error == cudaSuccess && params.c_by_tma) {
    error = encode<Element>(params.map_c, {p.c, p.n, p.m, p.n, p.batch, p.m * p.n}, kWarpRows);
  }
  if (error != cudaSuccess) return error;
  return start<Config>(multiply_sm90<Config>, params, blocks, stream);
}

template <class Element, Major kMajorA, Major kMajorB, int kGranule>
using SmallTile = Config<Element, kMajorA, kMajorB, kGranule, 2, 1, 1, 6>;
template <class Element, Major kMajorA, Major kMajorB, int kGranule>
using LargeTile = Config<Element, kMajorA, kMajorB, kGranule, 2, 4, 2, 4>;

// Large tiles read the operands least often; small ones serve products that have too few of them.
enum class TileSize { k128x64, k128x256 };

using Launch = cudaError_t (*)(const MultiplyParams<float>& p, int multiprocessors,
                               cudaStream_t stream);

template <class Element, Major kMajorA, Major kMajorB, int kGranule>
Launch choose_launch(TileSize tile) {
  return tile == TileSize::k128x64 ? launch<SmallTile<Element, kMajorA, kMajorB, kGranule>>
                                   : launch<LargeTile<Element, kMajorA, kMajorB, kGranule>>;
}

template <class Element, Major kMajorA, Major kMajorB>
Launch choose_launch(const MultiplyParams<float>& p, TileSize tile) {
  const bool blocks_of_32 = std::min({p.log2_block_m, p.log2_block_k, p.log2_block_n}) == 5;
  return blocks_of_32 ? choose_launch<Element, kMajorA, kMajorB, 32>(tile)
                      : choose_launch<Element, kMajorA, kMajorB, 64>(tile);
}

// Computes p on `stream`. Returns what the driver or the launch says.
template <class Element>
cudaError_t multiply(const MultiplyParams<float>& p, TileSize tile, int multiprocessors,
                     cudaStream_t stream) {
  constexpr auto kK = Major::K, kMN = Major::MN;
  const auto choose =
      p.a.k_major
          ? (p.b.k_major ? choose_launch<Element, kK, kK> : choose_launch<Element, kK, kMN>)
          : (p.b.k_major ? choose_launch<Element, kMN, kK> : choose_launch<Element, kMN, kMN>);
  return choose(p, tile)(p, multiprocessors, stream);
}

}  // namespace spamm::kernels::sm90
