// The load warps of the Hopper multiply. One thread for each operand reads the lists and fetches
// the blocks of each step into the next stage. fetch() is overloaded for each kernel's parameters.
#pragma once

#include "kernels/multiply/sm90/list.cuh"
#include "kernels/multiply/sm90/listed.cuh"
#include "kernels/multiply/sm90/params.h"
#include "kernels/multiply/sm90/pipeline.cuh"

namespace spamm::kernels::multiply::sm90 {

// Loads one operand's blocks.
template <class Config, bool kIsA, class Params>
class Loader : public StageWriter<typename Storage<Config>::Ring, kIsA> {
  using Base = StageWriter<typename Storage<Config>::Ring, kIsA>;
  using Base::at_;
  static constexpr int kBlocks = kIsA ? Config::kRows : Config::kColumns;

 public:
  __device__ Loader(const Params& params, Storage<Config>& storage)
      : Base(storage.ring), params_(params), storage_(storage) {}

  __device__ void load(TileOf<Config> tile, const StepOf<Config>& step, bool ends_tile) {
    constexpr int kStageDepth = Config::kStageDepth;
    if constexpr (kStageDepth == kBlock) {
      load_stage(tile, step.mask, step, first_stage(step), ends_tile);
    } else {
      const int depth = depth_of(step);
#pragma unroll 1
      for (int k = 0; k < depth; k += kStageDepth) {
        const bool ends = ends_tile && k + kStageDepth >= depth;
        const Mask<Config> mask = step.mask.at_depth(k);
        if (!ends && !mask.any()) continue;
        load_stage(tile, mask, step, (first_stage(step) * kBlock + k) / kStageDepth, ends);
      }
    }
  }

 private:
  // Cells count stages from their own beginning, and lie inside the operands.
  __device__ static int first_stage(const Step<Config>& step) { return step.index; }
  __device__ static int first_stage(const CellStep<Config>&) { return 0; }
  __device__ int depth_of(const Step<Config>& step) const {
    return min(kBlock, static_cast<int>(params_.product.k) - step.index * kBlock);
  }
  __device__ int depth_of(const CellStep<Config>&) const { return kBlock; }

  // Loads depths [number * kStageDepth, (number + 1) * kStageDepth) of K.
  __device__ void load_stage(TileOf<Config> tile, const Mask<Config>& mask,
                             const StepOf<Config>& step, int number, bool ends_tile) {
    const uint32_t needed = needed_blocks(mask);
    this->announce(Notice<Config>::of(mask, ends_tile), tile,
                   __popc(needed) * Config::kBytesPerBlock);
    const int batch =
        (kIsA ? params_.a_has_batch : params_.b_has_batch) ? batch_of<Config>(params_, tile) : 0;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if ((needed >> i & 1) == 0) continue;
      int block, stage = number;
      if constexpr (Config::kListed) {
        const GridPlace cell = place_of(params_.product, kIsA ? step.a[i] : step.b[i]);
        block = kIsA ? cell.row : cell.column;
        stage += (kIsA ? cell.column : cell.row) * (kBlock / Config::kStageDepth);
      } else {
        block = (kIsA ? tile.row : tile.column) + i;
      }
      fetch<Config, kIsA>(params_, batch, block, stage, i, this->full(), storage_.stages[at_.slot]);
    }
    at_.advance();
  }

  // A bit for each row (A) or column (B) of blocks of the tile in which the mask has a bit.
  __device__ static uint32_t needed_blocks(const Mask<Config>& mask) {
    uint32_t needed = 0;
#pragma unroll
    for (int block = 0; block < Config::kRows * Config::kColumns; ++block) {
      const bool any = mask.bits(block * Config::kBlockBits, Config::kBlockBits) != 0;
      const int line = kIsA ? block / Config::kColumns : block % Config::kColumns;
      needed |= static_cast<uint32_t>(any) << line;
    }
    return needed;
  }

  const Params& params_;
  Storage<Config>& storage_;
};

// The thread that loads one operand.
template <class Config, bool kIsA, class Params>
__device__ void load_lists(const Params& params, Storage<Config>& storage) {
  static_assert(Config::kLists == 2);
  Loader<Config, kIsA, Params> loader(params, storage);
  auto& ring = storage.ring;
  int from = 0;             // the list warp to read from
  uint32_t phases = 0;      // a bit for each list warp
  bool other_works = true;  // whether the other list warp may still list a tile
  while (true) {
    ring.list_full[from].wait(phases >> from & 1);
    phases ^= 1u << from;
    const auto& list = ring.lists[from];
    if (list.ends_work) {
      if (!other_works) break;
      other_works = false;
      from ^= 1;
      continue;
    }
    const TileOf<Config> tile = list.tile;
    const int count = list.count;
    const bool ends_tile = list.ends_tile;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      loader.load(tile, list.steps[i], ends_tile && i == count - 1);
    }
    if (ends_tile && count == 0) loader.end_tile(tile);
    ring.list_empty[from].arrive();
    if (ends_tile && other_works) from ^= 1;
  }
  loader.end_work();
}

// Set-up, load and list roles (common/roles_sm90.cuh), shared by the Hopper multiplies.
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

// A kernel whose roles are Roles<Config>.
template <class Config, template <class> class Roles, class Params>
__device__ __forceinline__ void run(const Params& params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  run_roles<Config>(Roles<Config>{{params, *reinterpret_cast<Storage<Config>*>(shared)}});
}

}  // namespace spamm::kernels::multiply::sm90
