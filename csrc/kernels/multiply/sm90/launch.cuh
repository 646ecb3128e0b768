// Starts the Hopper multiply, of dense and of block-sparse matrices: encodes the tensor maps, picks
// the instance and sets the grid. The kernel hands out the roles that multiply.cuh lists.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/common/launch.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/common/roles_sm90.cuh"
#include "kernels/common/tensor_map_sm90.h"
#include "kernels/common/tile.h"
#include "kernels/multiply/sm90/listed.cuh"
#include "kernels/multiply/sm90/multiply.cuh"

namespace spamm::kernels::multiply::sm90 {

// A batch of matrices, each of `lines` lines of `length` contiguous entries. Strides in elements.
struct MatrixLayout {
  const void* data;
  int64_t length, lines, line_stride, batch, batch_stride;
};

// Encodes a map with boxes of `box_lines` lines of 128 bytes.
template <class Element>
cudaError_t encode(CUtensorMap& map, const MatrixLayout& x, uint32_t box_lines) {
  // The stride of a dimension of size 1 may be anything, but the encoder checks it.
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

// Fills in the tiles of C, each with 2^log2_segments segments. Returns the number of thread blocks
// to start, at most `most_blocks`.
template <class Config, class Norm>
int cut_into_tiles(TiledProduct<Norm>& params, const MultiplyParams<Norm>& p, int group_rows,
                   int most_blocks, int log2_segments = 0) {
  const auto tiles_along = [](int64_t size, int blocks) {
    return static_cast<int>((size - 1) / (blocks * kBlock) + 1);
  };
  params.product = p;
  params.tile_rows = tiles_along(p.m, Config::kRows);
  params.tile_columns = tiles_along(p.n, Config::kColumns);
  if (p.upper_only && Config::kRows == Config::kColumns) {
    const int edge = params.folded_edge = params.tile_rows;
    params.tile_rows = folded_rows(edge);
    params.tile_columns = folded_columns(edge);
  }
  params.log2_segments = log2_segments;
  params.tiles = static_cast<int>(params.tile_rows * params.tile_columns * p.batch)
                 << log2_segments;
  params.group_rows = group_rows;
  params.a_has_batch = p.a.batch_stride != 0;
  params.b_has_batch = p.b.batch_stride != 0;
  const int blocks = std::min(params.tiles, most_blocks);
  params.claims_tiles = blocks < params.tiles;
  // Of a thread block that drifts little, and of one of its tiles: with a long K few tiles suffice.
  constexpr int64_t kMostSteps = 1 << 15, kMostOfTile = 383;
  const int64_t of_tile = ((p.k - 1) / kBlock + 1) >> log2_segments;
  const bool drifts = of_tile > kMostOfTile || of_tile * (params.tiles / blocks) > kMostSteps;
  params.turn = params.claims_tiles && drifts ? blocks : 0;
  return blocks;
}

// A kernel instead of a memset, because a memset does not overlap the kernels before and after it.
static __global__ void set_to_zero(int* numbers, int count) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  for (int i = threadIdx.x; i < count; i += blockDim.x) numbers[i] = 0;
}

// Starts a kernel with the shared memory and threads of Config, after the counter is zero, and with
// it `others` numbers that follow it in memory.
template <class Config, class Params>
cudaError_t start(void (*kernel)(Params), const Params& params, int blocks, cudaStream_t stream,
                  int others = 0) {
  constexpr int kSharedBytes = sizeof(Storage<Config>);
  static_assert(kSharedBytes <= 227 * 1024);
  cudaError_t error = allow_shared_memory(reinterpret_cast<const void*>(kernel), kSharedBytes);
  const bool counter = params.claims_tiles && !params.product.next_tile_is_zero;
  if (error == cudaSuccess && (counter || others > 0)) {
    constexpr int kMostThreads = 1024;
    error = kernels::launch(set_to_zero, 1, std::min(1 + others, kMostThreads), 0, true, stream,
                            params.product.next_tile, 1 + others);
  }
  if (error != cudaSuccess) return error;
  return kernels::launch(kernel, blocks, Config::kThreads, kSharedBytes, true, stream, params);
}

template <class Config>
struct MultiplyRoles : ListAndLoad<Config, ParamsOf<Config, Params>> {
  __device__ __forceinline__ void set_up(int warp) const {
    const Params& params = this->params;
    if (warp == 1 && threadIdx.x % 32 == 0) {
      cute::prefetch_tma_descriptor(&params.map_a);
      cute::prefetch_tma_descriptor(&params.map_b);
      if (params.c_by_tma) cute::prefetch_tma_descriptor(&params.map_c);
    }
    MultiplyRoles::ListAndLoad::set_up(warp);
  }
  __device__ __forceinline__ void multiply(int warp) const {
    multiply_stages<Config>(this->params, multiplying_warpgroup(warp), this->storage);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    multiply_sm90(const __grid_constant__ ParamsOf<Config, Params> params) {
  run<Config, MultiplyRoles>(params);
}

template <class Config>
cudaError_t multiply_in(const MultiplyParams<float>& p, const Launch& how) {
  using Element = typename Config::Element;
  Params params{};
  const int blocks = cut_into_tiles<Config>(params, p, how.group_rows, how.multiprocessors);
  params.c_by_tma = p.c_leading * sizeof(Element) % 16 == 0;

  cudaError_t error = encode<Element>(params.map_a, layout(p.a, p.m, p.k, p.batch), kBlock);
  if (error == cudaSuccess) {
    error = encode<Element>(params.map_b, layout(p.b, p.n, p.k, p.batch), kBlock);
  }
  if (error == cudaSuccess && p.own_rows > 0) {
    error = encode<Element>(params.map_own_b, layout(p.own_b, p.n, p.own_rows, 1), kBlock);
  }
  if (error == cudaSuccess && params.c_by_tma) {
    error = encode<Element>(params.map_c, {p.c, p.n, p.m, p.c_leading, p.batch, p.c_batch_stride},
                            kWarpRows);
  }
  if (error != cudaSuccess) return error;
  return start<Config>(multiply_sm90<Config>, params, blocks, how.stream);
}

constexpr Major major(bool along_k) { return along_k ? Major::K : Major::MN; }

// Whether some block edge is 32, which needs granules of 32.
template <class Norm>
bool has_edge_of_32(const MultiplyParams<Norm>& p) {
  return std::min({p.log2_block_m, p.log2_block_k, p.log2_block_n}) == 5;
}

// Whether a Config agrees with its row of cuda/tiles.h.
template <class Config, TileConfig kTile>
constexpr bool kHasTile = Config::kRows* kBlock == kTile.rows&& Config::kColumns* kBlock ==
                          kTile.columns&& kTile.warp_rows == kBlock&& Config::kOwn* kBlock ==
                          kTile.warp_columns&& Config::kStages == kTile.stages;

// Computes p. Returns the error of the driver or of the launch, as all launchers do.
template <class Element, Tiles kTiles>
cudaError_t multiply(const MultiplyParams<float>& p, const Launch& how) {
  const auto run = [&]<bool kAlongA, bool kAlongB, bool kEdgeOf32, bool kLarge>(
                       std::bool_constant<kAlongA>, std::bool_constant<kAlongB>,
                       std::bool_constant<kEdgeOf32>, std::bool_constant<kLarge>) {
    constexpr TileConfig kTile = kLarge ? kTiles.large : kTiles.small;
    using Chosen =
        Config<Element, major(kAlongA), major(kAlongB), kEdgeOf32 ? 32 : 64, kTile.rows / kBlock,
               kTile.columns / kBlock, kTile.warp_columns / kBlock, kTile.stages>;
    static_assert(kHasTile<Chosen, kTile> &&
                  Chosen::kBlocksPerSm == kTile.blocks_per_multiprocessor);
    return multiply_in<Chosen>(p, how);
  };
  return with_constants(run, p.a.k_major, p.b.k_major, has_edge_of_32(p),
                        how.tile == TileSize::kLarge);
}

// The layouts of A, of B and of C of a block-sparse product (listed.cuh).
template <class Norm>
struct ListedLayouts {
  MatrixLayout a, b, c;

  ListedLayouts(const MultiplyParams<Norm>& p, const ProductLists& lists)
      : a(layout(p.a, lists.rows_a, p.k, 1)),
        b(layout(p.b, p.n, lists.rows_b, 1)),
        c{p.c, p.n, p.m, p.c_leading, 1, 0} {}
};

// Starts a kernel whose other parameters are set.
template <class Config, class Params, class Norm>
cudaError_t start_listed(void (*kernel)(Params), Params& params, const MultiplyParams<Norm>& p,
                         const ProductLists& lists, const Launch& how) {
  constexpr int kPerMultiprocessor = std::is_same_v<Norm, double> ? Config::kBlocksPerSm : 1;
  params.product = p;
  params.lists = lists;
  params.claims_tiles = true;
  const int blocks = std::min(lists.capacity, how.multiprocessors * kPerMultiprocessor);
  return start<Config>(kernel, params, blocks, how.stream);
}

// Calls run(edge of 32, large tile) with constants.
template <class Run, class Norm>
cudaError_t with_tile(const Run& run, const MultiplyParams<Norm>& p, const Launch& how) {
  return with_constants(run, has_edge_of_32(p), how.tile == TileSize::kLarge);
}

template <class Config>
cudaError_t multiply_listed_in(const MultiplyParams<float>& p, const ProductLists& lists,
                               const Launch& how) {
  using Element = typename Config::Element;
  ParamsOf<Config, Params> params{};
  params.c_by_tma = true;
  const ListedLayouts layouts(p, lists);
  cudaError_t error = encode<Element>(params.map_a, layouts.a, kBlock);
  if (error == cudaSuccess) error = encode<Element>(params.map_b, layouts.b, kBlock);
  if (error == cudaSuccess) error = encode<Element>(params.map_c, layouts.c, kWarpRows);
  if (error != cudaSuccess) return error;
  return start_listed<Config>(multiply_sm90<Config>, params, p, lists, how);
}

// Computes p over `lists`. A is K-major, and B is not.
template <class Element, Tiles kTiles>
cudaError_t multiply_listed(const MultiplyParams<float>& p, const ProductLists& lists,
                            const Launch& how) {
  const auto run = [&]<bool kEdgeOf32, bool kLarge>(std::bool_constant<kEdgeOf32>,
                                                    std::bool_constant<kLarge>) {
    constexpr TileConfig kTile = kLarge ? kTiles.large : kTiles.small;
    using Dense = Config<Element, Major::K, Major::MN, kEdgeOf32 ? 32 : 64, kTile.rows / kBlock,
                         kTile.columns / kBlock, kTile.warp_columns / kBlock, kTile.stages>;
    return multiply_listed_in<Listed<Dense>>(p, lists, how);
  };
  return with_tile(run, p, how);
}

}  // namespace spamm::kernels::multiply::sm90
