// C = alpha * (A B over valid blocks) + beta * input for Hopper (sm_90a). float32 operands, which
// norm_map/split.cuh has cut into split parts, are multiplied by float16 products.
//
// Two split parts: three products reach float32's accuracy (promoted_sums.cuh). One split part: one
// product reaches TF32's accuracy (scaled_sums.cuh). Block products that split parts cannot
// represent (norm_map/split.cuh) are computed from the original operands: by three bfloat16 parts
// (three_parts.cuh), or by FFMA.
//
// Tile, pipeline and limits are those of sm90/multiply.cuh.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "cutlass/arch/barrier.h"
#include "kernels/multiply/sm90/launch.cuh"
#include "kernels/multiply/sm90/load.cuh"
#include "kernels/multiply/sm90/pipeline.cuh"
#include "kernels/multiply/sm90/split/largest_terms.cuh"
#include "kernels/multiply/sm90/split/promoted_granules.cuh"
#include "kernels/multiply/sm90/split/promoted_sums.cuh"
#include "kernels/multiply/sm90/split/scaled_sums.cuh"

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

namespace spamm::kernels::multiply::sm90 {

__device__ __forceinline__ int multiplying_warp() {
  return threadIdx.x / 32 - kernels::sm90::kFirstMultiplyWarp;
}

// Stores a thread's kCount sums to the blocks of C from `first` on, of which some may not be whole:
// 8 x 32 at a time, two parts below each other.
template <int kCount, int kPart = 0, class Sums>
__device__ __forceinline__ void store_parts(const MultiplyParams<float>& p, Tile first,
                                            const Sums& sums, StoreRoom<float>& room) {
  constexpr int kColumns = StoreRoom<float>::kColumns, kRows = StoreRoom<float>::kRows;
  if constexpr (kPart * kColumns / 4 < kCount) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
      const int at = kPart / 2 * kColumns / 2 + kPart % 2 * 2 + 4 * i;
      auto& to = room.entries[lane / 4][8 * i + lane % 4 * 2];
      reinterpret_cast<EntryPair<float>&>(to) = {sums.total(at), sums.total(at + 1)};
    }
    room.store(p, first.batch, first.row * kBlock + warp_row() + kPart % 2 * kRows,
               first.column * kBlock + kPart / 2 * kColumns);
    store_parts<kCount, kPart + 1>(p, first, sums, room);
  }
}

// Stores sums of cells. They lie in C as a whole, and each has a place of its own.
template <class Config, int kBlockOfOwn = 0, class Sums>
__device__ __forceinline__ void store_cells(const MultiplyParams<float>& p,
                                            const OwnCells<Config>& own, const Sums& sums) {
  if constexpr (kBlockOfOwn < Config::kOwn) {
    const int cell = own.cells[kBlockOfOwn];
    if (cell >= 0) {
      const GridPlace place = place_of(p, cell);
      constexpr int kFirst = kBlockOfOwn * kThreadValues;
      const auto store = [&](auto adds) {
        for_pairs<kFirst, kThreadValues>({0, place.row, place.column}, sums, [&](auto... pair) {
          store_pair<decltype(adds)::value>(p, 0, pair...);
        });
      };
      p.input == nullptr ? store(std::false_type{}) : store(std::true_type{});
    }
    store_cells<Config, kBlockOfOwn + 1>(p, own, sums);
  }
}

template <class Config>
using TwoPartSums =
    std::conditional_t<Config::kGranules == 1, PromotedSums<Config>, PromotedGranules<Config>>;
template <class Config>
using SumsOf =
    std::conditional_t<Config::kSplitParts == 1, ScaledSums<Config>, TwoPartSums<Config>>;

// `warpgroup` counts the multiplying warpgroups.
template <class Config>
__device__ void multiply_stages(const ParamsOf<Config, SplitProduct>& params, int warpgroup,
                                Storage<Config>& storage) {
  const MultiplyParams<float>& p = params.product;
  const int row = warpgroup * Config::kOwn / Config::kColumns;
  const int column = warpgroup * Config::kOwn % Config::kColumns;
  auto& ring = storage.ring;
  Descriptor<Config, Config::kMajorA> a(storage.stages[0].a[0][row]);
  Descriptor<Config, Config::kMajorB> b(storage.stages[0].b[0][column]);
  const typename Config::Later later(storage.output.later[multiplying_warp()]);
  SumsOf<Config> sums(later);
  const std::conditional_t<Config::kTakesTurns, Turns, NoTurns> turns(warpgroup);
  RingPosition<Config::kStages> at;
  while (true) {
    ring.full[at.slot].wait(at.phase);
    const auto& notice = ring.notices[at.slot];
    if (notice.ends_work()) break;
    constexpr int kOwnBits = Config::kOwn * Config::kBlockBits;
    const uint32_t bits = notice.mask.bits(warpgroup * kOwnBits, kOwnBits);
    const bool ends_tile = notice.ends_tile();
    OwnPart<Config> tile{};
    const auto release = [&] {
      if (ends_tile) tile = own_part<Config>(ring.tiles[at.slot], row, column);
      kernels::sm90::release(ring.empty[at.slot]);
    };
    const auto begun = [&] { turns.pass(); };
    turns.wait();
    if (bits != 0) {
      const auto& stage = storage.stages[at.slot];
      const auto add = [&](const auto& terms) {
        sums.add(params, bits, *a, *b, stage.a_header[row], stage.b_header + column, terms, begun,
                 release);
      };
      const LargestTerms<Config> terms(params, ring.tiles[at.slot], row, column);
      if constexpr (Config::kGranules == 1) {
        notice.mask.is_marked() ? add(PlainTerms{}) : add(terms);
      } else {
        add(terms);
      }
    } else {
      begun();
      release();
    }
    at.advance();
    a.advance(at.slot == 0);
    b.advance(at.slot == 0);
    sums.add_later(params, ends_tile);
    if (ends_tile) {
      if constexpr (Config::kListed) {
        store_cells<Config>(p, tile, sums);
      } else {
        const Tile first{tile.batch, tile.row + row, tile.column + column};
        constexpr int kSums = Config::kOwn * kThreadValues;
        const bool whole =
            (first.row + 1) * kBlock <= p.m && (first.column + Config::kOwn) * kBlock <= p.n;
        const bool pairs = whole && p.c_leading % kStoreUnit == 0;
        if ((pairs && p.input == nullptr) || log2_segments<Config>(params) != 0) {
          for_pairs<0, kSums>(first, sums,
                              [&](auto... pair) { store_pair<false>(p, first.batch, pair...); });
        } else if (pairs) {
          for_pairs<0, kSums>(first, sums,
                              [&](auto... pair) { store_pair<true>(p, first.batch, pair...); });
        } else {
          store_parts<kSums>(p, first, sums, storage.output.rooms[multiplying_warp()]);
        }
      }
      sums.reset();
    }
  }
  turns.end();
}

template <class Config>
struct SplitRoles : ListAndLoad<Config, ParamsOf<Config, SplitProduct>> {
  __device__ __forceinline__ void multiply(int warp) const {
    multiply_stages<Config>(this->params, multiplying_warpgroup(warp), this->storage);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    multiply_split_sm90(const __grid_constant__ ParamsOf<Config, SplitProduct> params) {
  run<Config, SplitRoles>(params);
}

// ---- Launch ------------------------------------------------------------------------------------

template <class Config>
cudaError_t multiply_split_in(const MultiplyParams<float>& p, const ProductLists* lists,
                              const SplitSource& a, const SplitSource& b, int16_t* terms,
                              const Launch& how) {
  ParamsOf<Config, SplitProduct> params{};
  params.a = a;
  params.b = b;
  params.terms = terms;
  const int blocks = set_product<Config>(params, p, lists, how);
  const LargestTermsParams largest{
      p, a.split, b.split, params.a_has_batch, params.b_has_batch, terms, Config::kTermsOverTau};
  cudaError_t error;
  if constexpr (Config::kListed) {
    error = launch_listed_terms<Config::kGranules>(largest, *lists, how.stream);
  } else {
    error = launch_largest_terms<Config::kGranules>(largest, how.stream);
  }
  if (error != cudaSuccess) return error;
  return start<Config>(multiply_split_sm90<Config>, params, blocks, how.stream);
}

// Computes p, or the products of `lists` unless they are null, from the split operands a and b. Of
// p.a and p.b it only uses whether the batch stride is 0. `terms` is room for a number for each
// granule of the whole blocks of C, or of its cells. One split part takes block edges of 64 and
// more.
template <int kSplitParts, Tiles kTiles>
cudaError_t multiply_split(const MultiplyParams<float>& p, const ProductLists* lists,
                           const SplitSource& a, const SplitSource& b, int16_t* terms,
                           const Launch& how) {
  const auto run = [&]<bool kListed, bool kEdgeOf32, bool kLarge>(std::bool_constant<kListed>,
                                                                  std::bool_constant<kEdgeOf32>,
                                                                  std::bool_constant<kLarge>) {
    constexpr TileConfig kTile = kLarge ? kTiles.large : kTiles.small;
    constexpr int kGranule = kSplitParts == 2 && kEdgeOf32 ? 32 : kBlock;
    using Dense = SplitConfig<kSplitParts, kGranule, kTile.rows / kBlock, kTile.columns / kBlock,
                              kTile.warp_columns / kBlock, kTile.stages>;
    static_assert(kHasTile<Dense, kTile>);
    return multiply_split_in<ListedIf<kListed, Dense>>(p, lists, a, b, terms, how);
  };
  return with_constants(run, lists != nullptr, has_edge_of_32(p), how.tile == TileSize::kLarge);
}

}  // namespace spamm::kernels::multiply::sm90
