// Hopper's convolution of deviations from a reference image, in pixel blocks of one image:
// activation(sums + base) - activation(base), in float32, rounded once. It is conv.cuh with a tail:
// the load warps bring the base into the ring as the last step of a tile, so that it is on its way
// while the products run. Output blocks without a product and without a residual have no such step:
// their sums are zero, and so is the result, which half types store from one block of zeros.
#pragma once

#include "kernels/common/activation.cuh"
#include "kernels/conv/sm90/conv.cuh"
#include "kernels/reference/sm90/pixel_norms.cuh"

namespace spamm::kernels::reference {

template <class Element, int kRows, int kBoxes, int kStages>
struct DeviationConfig : Config<Element, kRows, kBoxes, kBlock, kStages> {
  using Params = DeviationParams;
  // Boxes without a product and a residual are zero, and stored without being staged.
  static constexpr bool kStoresZeros = sizeof(Element) == 2;
};

// What boxes without a product are stored from.
template <bool kIsThere>
struct ZeroBlock {
  OperandBlock zeros;
};
template <>
struct ZeroBlock<false> {};

template <class Stages, bool kStoresZeros>
struct WithZeros : Stages, ZeroBlock<kStoresZeros> {};

template <class Config, class Stages = Blocks<Config>>
using DeviationStorage = Storage<Config, WithZeros<Stages, Config::kStoresZeros>>;

// Fills the block that boxes of zeros are stored from. All multiplying warpgroups call it.
template <class Config, class Shared>
__device__ __forceinline__ void clear_zeros(Shared& storage) {
  constexpr int kThreads = 128 * Config::kWarpgroups;
  auto* const words = reinterpret_cast<uint4*>(storage.zeros.bytes);
  for (int i = threadIdx.x % kThreads; i < sizeof(OperandBlock) / sizeof(uint4); i += kThreads) {
    words[i] = {};
  }
  cute::tma_store_fence();
  cutlass::arch::NamedBarrier::sync(kThreads, kFirstPairBarrier);
}

// ---- The base -----------------------------------------------------------------------------------

constexpr uint16_t kBaseStep = 0xfffe;  // in place of a kernel position

// The notice of a stage that brings the base, or a part of its 64 channels.
struct BaseNotice {
  static constexpr int kPartShift = 20;
  static constexpr uint32_t kIsBase = 1u << 28;

  __device__ static Notice of(uint32_t mask, int part, bool ends_tile) {
    return {Notice::of_residual(mask, ends_tile).bits | part << kPartShift | kIsBase};
  }
  __device__ static bool is(Notice notice) { return notice.bits & kIsBase; }
  __device__ static uint32_t part(Notice notice) { return notice.bits >> kPartShift & 0xff; }
};

// Lists the steps that bring residual and base. `used`: the bits of the lane's steps, for output
// blocks that get a product.
template <class Config, class Norms>
__device__ __forceinline__ void list_addends(const DeviationParams& p, const Tile<Config>& tile,
                                             const Norms& norms, uint32_t used,
                                             ListWriter<Config>& writer) {
  if (brings_residual<Config>(p)) {
    used = ~0u;
    list_addend<Step::kResidual>(tile, norms, used, writer);
  }
  // Without a product and a residual, sums are zero, and so is what the base makes of them.
  if (p.base != nullptr) {
    list_addend<kBaseStep>(tile, norms, __reduce_or_sync(~0u, used), writer);
  }
}

template <class Config>
struct DeviationList : BoxList<Config> {
  // Many tiles have no step, and claiming them would take most of the time.
  static constexpr bool kClaimsEarly = true;

  __device__ __forceinline__ static void list(const DeviationParams& p, const Tile<Config>& tile,
                                              const TileNorms<Config>& norms, float tau,
                                              ListWriter<Config>& writer) {
    const uint32_t used = list_valid_steps(p, tile, norms, tau, writer);
    list_addends(p, tile, norms, used, writer);
  }
};

template <class Config, bool kWeights, class Shared>
class DeviationLoader : public Loader<Config, kWeights, Shared> {
 public:
  using Loader<Config, kWeights, Shared>::Loader;

  __device__ void load(const Tile<Config>& tile, const Step& step, bool ends_tile) {
    if (!loads_addend(tile, step, ends_tile)) this->load_boxes(tile, step, ends_tile);
  }

 protected:
  // Whether the step brings the residual or the base. If so, fills its stages.
  __device__ __forceinline__ bool loads_addend(const Tile<Config>& tile, const Step& step,
                                               bool ends_tile) {
    if (this->loads_residual(tile, step, ends_tile)) return true;
    if (step.kernel_position != kBaseStep) return false;
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      const bool last = part == Config::kParts - 1;
      this->load_addend(this->p_.map_base, tile, step, /*is_shared=*/true, part,
                        BaseNotice::of(step.mask, part, last && ends_tile));
    }
    return true;
  }
};

// ---- The end of a tile --------------------------------------------------------------------------

// Calls change(sum, x) for the thread's sums of 64 pixels, from value kFirst on, and the entries x
// of a box of float32. The box has 32 channels: those of warps 2 * part and 2 * part + 1.
template <int kFirst, int kSize, class Change>
__device__ __forceinline__ void change_half_box(const OperandBlock& block, int part,
                                                float (&acc)[kSize], const Change& change) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  if (warp / 2 != part) return;
  const uint8_t* sources[4];  // two neighbouring pixels of the first channel, then of the second
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int line = lane % 4 * 2 + i % 2, chunk = warp % 2 * 4 + i / 2 * 2 + lane / 16;
    sources[i] = block.bytes + line * kLineBytes + (chunk ^ line) * 16 + lane / 4 % 4 * 4;
  }
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) {
    change(acc[kFirst + i],
           *reinterpret_cast<const float*>(sources[i % 4] + i / 4 * 8 * kLineBytes));
  }
}

template <class Config, int kFirst, class Change>
__device__ __forceinline__ void change_sums(const OperandBlock& box, int part,
                                            float (&acc)[Config::kValues], const Change& change) {
  if constexpr (Config::kParts == 1) {
    change_box<typename Config::Element, kBlock, kFirst>(box, acc, change);
  } else {
    change_half_box<kFirst>(box, part, acc, change);
  }
}

// Turns the sums of a warpgroup's boxes whose bits are set into deviations. `part`: of 64 channels,
// those of the stage.
template <class Config>
__device__ __forceinline__ void deviate(Activation activation, uint32_t bits, int part,
                                        const OperandBlock* boxes, float (&acc)[Config::kValues]) {
  with_activation(activation, [&](auto function) {
    // Without a fused multiply-add, with which a sum of zero would not give zero.
    const auto change = [&](float& sum, float base) {
      sum = __fsub_rn(function(sum + base), function(base));
    };
    if (bits & 1) change_sums<Config, 0>(boxes[0], part, acc, change);
    if (bits & 2) change_sums<Config, kBlock / 2>(boxes[1], part, acc, change);
  });
}

template <class Config>
struct DeviationOutput {
  __device__ __forceinline__ static const CUtensorMap* map_of(const DeviationParams& p,
                                                              int& channel) {
    return map_of_phase(p, channel);
  }
  template <class Staged>
  __device__ __forceinline__ static void see(const DeviationParams& p, int channel, const Box& box,
                                             const Staged& staged) {
    store_pixel_norms<typename Config::Element>(p, channel, box, staged);
  }
};

// Stores a box of zeros, with the norms of its pixels. Nothing is staged, so nothing waits for the
// store before.
__device__ __forceinline__ void store_zeros(const DeviationParams& p, int channel, const Box& box,
                                            const OperandBlock& zeros) {
  if (threadIdx.x % 128 == 0) {
    int first = channel;
    const CUtensorMap* const map = map_of_phase(p, first);
    cute::SM90_TMA_STORE_4D::copy(map, &zeros, first, box.column, box.row, box.image);
    cute::tma_store_arrive();
  }
  store_norms_of_zeros(p, channel, box);
}

// Stores a warpgroup's boxes. Those whose bits are not set in `computed` are zero.
template <class Config>
__device__ __forceinline__ void store_deviations(const DeviationParams& p, int channel,
                                                 const Box* boxes, uint32_t computed,
                                                 const OperandBlock& zeros, OperandBlock& staging,
                                                 const float (&acc)[Config::kValues]) {
  using Output = DeviationOutput<Config>;
  const ChannelBias none;
  uint32_t pairs[kBlock / 4];
  if (computed & 1) {
    store_box<Config, 0, Output>(p, channel, boxes[0], staging, none, /*relu=*/false, acc, pairs);
  } else {
    store_zeros(p, channel, boxes[0], zeros);
  }
  if (computed & 2) {
    store_box<Config, 1, Output>(p, channel, boxes[1], staging, none, /*relu=*/false, acc, pairs);
  } else {
    store_zeros(p, channel, boxes[1], zeros);
  }
}

// ---- The kernel ---------------------------------------------------------------------------------

template <class Config>
class DeviationWork : public BoxWork<Config> {
 public:
  template <class Shared>
  __device__ explicit DeviationWork(Shared& storage) : BoxWork<Config>(storage) {
    if constexpr (Config::kStoresZeros) clear_zeros<Config>(storage);
  }

  __device__ __forceinline__ uint32_t bits_of(const Notice& notice, int warpgroup) {
    const uint32_t bits = notice.mask(warpgroup);
    computed_ |= bits | notice.brought_mask(warpgroup);
    return bits;
  }

  template <class Stage>
  __device__ __forceinline__ void add(const DeviationParams& p, const Notice& notice, int warpgroup,
                                      Stage& stage, int first_box, float (&acc)[Config::kValues]) {
    if (!BaseNotice::is(notice)) {
      BoxWork<Config>::add(p, notice, warpgroup, stage, first_box, acc);
    } else {
      deviate<Config>(p.base_activation, notice.brought_mask(warpgroup), BaseNotice::part(notice),
                      &stage.box(first_box), acc);
    }
  }

  template <class Shared>
  __device__ __forceinline__ void finish(const DeviationParams& p, int warpgroup, int channel,
                                         const Box* boxes, Shared& storage,
                                         float (&acc)[Config::kValues]) {
    if constexpr (Config::kStoresZeros) {
      store_deviations<Config>(p, channel, boxes, computed_, storage.zeros,
                               storage.output[warpgroup], acc);
      computed_ = 0;
    } else {
      store<Config, DeviationOutput<Config>>(p, channel, boxes, storage.output[warpgroup],
                                             storage.squares[warpgroup], ChannelBias{}, acc);
    }
  }

 protected:
  uint32_t computed_ = 0;  // bits of the boxes that got sums in this tile
};

template <class Config_>
struct DeviationKernel : BoxKernel<Config_> {
  using Storage = DeviationStorage<Config_>;
  template <bool kWeights>
  using Loader = DeviationLoader<Config_, kWeights, Storage>;
  using List = DeviationList<Config_>;
  using Operands = StagedOperands<Config_, Storage>;
  using Work = DeviationWork<Config_>;
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    deviation_conv_sm90(const __grid_constant__ DeviationParams p) {
  run<ConvRoles<DeviationKernel<Config>>>(p);
}

}  // namespace spamm::kernels::reference
