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

// Encodes a map with boxes of `box_lines` lines of `box_length` entries, of 128 bytes as a rule.
template <class Element>
cudaError_t encode(CUtensorMap& map, const MatrixLayout& x, uint32_t box_lines,
                   uint32_t box_length = kLineBytes / sizeof(Element)) {
  // The stride of a dimension of size 1 may be anything, but the encoder checks it.
  const auto bytes = [](int64_t size, int64_t stride) {
    return static_cast<uint64_t>(size > 1 ? stride * sizeof(Element) : 16);
  };
  return encode_tensor_map<Element, 3>(
      map, x.data,
      {static_cast<uint64_t>(x.length), static_cast<uint64_t>(x.lines),
       static_cast<uint64_t>(x.batch)},
      {bytes(x.lines, x.line_stride), bytes(x.batch, x.batch_stride)}, {box_length, box_lines, 1},
      {1, 1, 1});
}

// `extent` is M for A and N for B.
inline MatrixLayout layout(const Operand& x, int64_t extent, int64_t k, int64_t batch) {
  const bool has_batch = x.batch_stride != 0;
  return {x.data,    x.k_major ? k : extent, x.k_major ? extent : k,
          x.leading, has_batch ? batch : 1,  x.batch_stride};
}

// Those of the operands: with `lists`, of all their stored blocks.
template <class Norm>
MatrixLayout layout_of_a(const MultiplyParams<Norm>& p, const ProductLists* lists) {
  return layout(p.a, lists != nullptr ? lists->rows_a : p.m, p.k, p.batch);
}
template <class Norm>
MatrixLayout layout_of_b(const MultiplyParams<Norm>& p, const ProductLists* lists) {
  return layout(p.b, p.n, lists != nullptr ? lists->rows_b : p.k, p.batch);
}

// Fills in the tiles of C and their segments. Returns the number of thread blocks to start, at most
// `most_blocks`.
template <class Config, class Norm>
int cut_into_tiles(TiledProduct<Norm>& params, const MultiplyParams<Norm>& p, const Launch& how,
                   int most_blocks) {
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
  const auto inner = [](int64_t size, int blocks, int tiles) {
    const int64_t rest = size % (blocks * kBlock);
    return tiles - (tiles > 1 && rest > 0 && 2 * rest <= blocks * kBlock ? 1 : 0);
  };
  const bool folded = params.folded_edge != 0;
  params.inner_rows = folded ? params.tile_rows : inner(p.m, Config::kRows, params.tile_rows);
  params.inner_columns =
      folded ? params.tile_columns : inner(p.n, Config::kColumns, params.tile_columns);
  if constexpr (Config::kSegmented) params.segments = how.segments;
  const int log2_segments = params.segments.log2_segments;
  params.tiles = static_cast<int>(params.tile_rows * params.tile_columns * p.batch)
                 << log2_segments;
  params.group_rows = how.group_rows;
  params.a_has_batch = p.a.batch_stride != 0;
  params.b_has_batch = p.b.batch_stride != 0;
  const int blocks = std::min(params.tiles, most_blocks);
  params.claims_tiles = blocks < params.tiles;
  // Limits of a thread block that drifts little, and of one of its tiles: with a long K few tiles
  // suffice.
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
// it the meetings of segments that follow it in memory. `alone`: each thread block asks for so much
// shared memory that no second one of them shares its multiprocessor. Else some do while others
// have none, where the kernel before leaves multiprocessors one by one.
template <class Config, class Params>
cudaError_t start(void (*kernel)(Params), const Params& params, int blocks, cudaStream_t stream,
                  bool alone = false) {
  const int others = params.segments.pieces;
  constexpr int kSharedBytes = sizeof(Storage<Config>);
  constexpr int kMostBytes = std::max(kSharedBytes, kMostSharedBytes / 2);
  static_assert(kMostBytes <= kMostSharedBytes);
  cudaError_t error = allow_shared_memory(reinterpret_cast<const void*>(kernel), kMostBytes);
  const bool counter = params.claims_tiles && !params.product.next_tile_is_zero;
  if (error == cudaSuccess && (counter || others > 0)) {
    constexpr int kMostThreads = 1024;
    error = kernels::launch(set_to_zero, 1, std::min(1 + others, kMostThreads), 0, true, stream,
                            params.product.next_tile, 1 + others);
  }
  if (error != cudaSuccess) return error;
  return kernels::launch(kernel, blocks, Config::kThreads, alone ? kMostBytes : kSharedBytes, true,
                         stream, params);
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

// Sets what is computed: the products of `lists`, or if they are null all tiles of C. Returns the
// number of thread blocks to start.
template <class Config, class Params, class Norm>
int set_product(Params& params, const MultiplyParams<Norm>& p, const ProductLists* lists,
                const Launch& how) {
  // Thread blocks of half types share a multiprocessor with those of the kernels around them.
  const int most = how.multiprocessors * (std::is_same_v<Norm, double> ? Config::kBlocksPerSm : 1);
  if constexpr (Config::kListed) {
    params.product = p;
    params.lists = *lists;
    params.claims_tiles = true;
    return std::min(lists->capacity, most);
  } else {
    return cut_into_tiles<Config>(params, p, how, most);
  }
}

template <class Config>
cudaError_t multiply_in(const MultiplyParams<float>& p, const ProductLists* lists,
                        const Launch& how) {
  using Element = typename Config::Element;
  ParamsOf<Config, Params> params{};
  const int blocks = set_product<Config>(params, p, lists, how);
  // TMA writes units of 16 bytes, also where a row ends within one.
  params.c_by_tma = p.c_leading * sizeof(Element) % 16 == 0 && p.n * sizeof(Element) % 16 == 0 &&
                    params.segments.log2_segments == 0;

  cudaError_t error = encode<Element>(params.map_a, layout_of_a(p, lists), kBlock);
  if (error == cudaSuccess) error = encode<Element>(params.map_b, layout_of_b(p, lists), kBlock);
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

// Tells whether some block edge is 32, which needs granules of 32.
template <class Norm>
bool has_edge_of_32(const MultiplyParams<Norm>& p) {
  return std::min({p.log2_block_m, p.log2_block_k, p.log2_block_n}) == 5;
}

// Calls run(whether there are lists, whether A is K-major, whether B is, others...) with constants.
template <class Run, class Norm, class... Others>
cudaError_t with_layouts(const Run& run, const MultiplyParams<Norm>& p, const ProductLists* lists,
                         Others... others) {
  const auto bind = [&](auto... first) {
    return [&run, first...](auto... rest) { return run(first..., rest...); };
  };
  constexpr std::true_type kYes{};
  constexpr std::false_type kNo{};
  return lists != nullptr ? with_constants(bind(kYes, kYes, kNo), others...)
                          : with_constants(bind(kNo), p.a.k_major, p.b.k_major, others...);
}

// Tells whether a Config agrees with its row of cuda/tiles.h.
template <class Config, TileConfig kTile>
constexpr bool kHasTile = Config::kRows* kBlock == kTile.rows&& Config::kColumns* kBlock ==
                          kTile.columns&& kTile.warp_rows == kBlock&& Config::kOwn* kBlock ==
                          kTile.warp_columns&& Config::kStages == kTile.stages;

// The kernel of dense storage, or over lists.
template <bool kListed, class Dense>
using ListedIf = std::conditional_t<kListed, Listed<Dense>, Dense>;

// Computes p, or the products of `lists` unless they are null: A is then K-major, and B is not.
// Returns the error of the driver or of the launch, as all launchers do.
template <class Element, Tiles kTiles>
cudaError_t multiply(const MultiplyParams<float>& p, const ProductLists* lists, const Launch& how) {
  const auto in = [&]<TileConfig kTile, bool kListed, bool kAlongA, bool kAlongB,
                      bool kEdgeOf32>() {
    using Dense =
        Config<Element, major(kAlongA), major(kAlongB), kEdgeOf32 ? 32 : 64, kTile.rows / kBlock,
               kTile.columns / kBlock, kTile.warp_columns / kBlock, kTile.stages>;
    static_assert(kHasTile<Dense, kTile> && Dense::kBlocksPerSm == kTile.blocks_per_multiprocessor);
    return multiply_in<ListedIf<kListed, Dense>>(p, lists, how);
  };
  const auto run = [&]<bool kListed, bool kAlongA, bool kAlongB, bool kEdgeOf32>(
                       std::bool_constant<kListed>, std::bool_constant<kAlongA>,
                       std::bool_constant<kAlongB>, std::bool_constant<kEdgeOf32>) {
    if constexpr (!kListed && !kEdgeOf32) {
      if (how.tile == TileSize::kMedium)
        return in.template operator()<kTiles.medium, false, kAlongA, kAlongB, false>();
      if (how.tile == TileSize::kSquare)
        return in.template operator()<kTiles.square, false, kAlongA, kAlongB, false>();
    }
    return how.tile == TileSize::kLarge
               ? in.template operator()<kTiles.large, kListed, kAlongA, kAlongB, kEdgeOf32>()
               : in.template operator()<kTiles.small, kListed, kAlongA, kAlongB, kEdgeOf32>();
  };
  return with_layouts(run, p, lists, has_edge_of_32(p));
}

}  // namespace spamm::kernels::multiply::sm90
