// A convolution of float32's accuracy for Hopper (sm_90a), by three products of split parts.
// Lists, tiles and barriers are those of conv.cuh, sums those of promoted_sums.cuh.
//
// Only for pixel blocks of one pixel of several images. Then an im2col block is 64 images x 64
// channels of one input pixel. So norm_map/split.cuh splits the input as a batch of matrices
// (images x channels), one for each pixel, and each kernel position reads the blocks of its pixel
// by bulk copies, with any stride and dilation. Blocks in the padding are not fetched. The output
// is stored from registers: a store of a warp fills four memory sectors.
#pragma once

#include "kernels/conv/sm90/launch.cuh"
#include "kernels/multiply/sm90/split/promoted_sums.cuh"

namespace spamm::kernels::conv::sm90 {

template <int kRows, int kBoxes, int kLastWidth, int kStages>
struct SplitConfig : Config<float, kRows, kBoxes, kLastWidth, kStages> {
  using Params = SplitConvParams;
  // For PromotedSums.
  using Later = kernels::multiply::sm90::NothingLater;
  static constexpr int kSplitParts = 2, kSets = 1, kOwn = 2, kColumns = kBoxes;
  static constexpr int kExactDepths = 1;  // unrolled by add_exact()
  static constexpr bool kKeepsRests = false;
  static constexpr auto kMajorA = kernels::sm90::Major::K, kMajorB = kernels::sm90::Major::K;
};

template <int kRows, int kBoxes, int kLastWidth, int kStages>
struct Blocks<SplitConfig<kRows, kBoxes, kLastWidth, kStages>> {
  struct Stage {
    OperandBlock weight[2 * kRows], pixels[2 * kBoxes];  // the high split parts first
    SplitHeader weight_headers[kRows], pixels_headers[kBoxes];
  };
  Stage stages[kStages];
};

// The header of a block in the padding. Such a block is valid only where the weight is infinite or
// NaN. That product is computed by FFMA, so the block needs no split parts.
__device__ const SplitHeader kPaddingHeader = {nullptr, {0}, {kSplitSpecial}, 0, kSplitBlock};

// Loads the weights (kWeights) or the pixels.
template <class Config, bool kWeights>
class SplitLoader : public StageWriter<Config, kWeights> {
  using Base = StageWriter<Config, kWeights>;
  using Base::at_;
  static constexpr int kBoxes = Config::kBoxes;
  static constexpr int kBlocks = kWeights ? Config::kRows : kBoxes;
  static constexpr int kPadding = -1;

 public:
  __device__ SplitLoader(const SplitConvParams& p, Storage<Config>& storage)
      : Base(storage.ring), p_(p), storage_(storage) {}

  __device__ void load(const Tile<Config>& tile, const Step& step, bool ends_tile) {
    const SplitOperand& operand = (kWeights ? p_.a : p_.b).split;
    int numbers[kBlocks];
    uint32_t needed = 0, bytes = 0;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (!needs(step.mask, i)) continue;
      needed |= 1u << i;
      numbers[i] = number_of(operand, tile, step, i);
      bytes += sizeof(SplitHeader);
      if (numbers[i] != kPadding) bytes += Config::kSplitParts * sizeof(OperandBlock);
    }
    this->announce(Notice::of(step.mask, ends_tile), tile, bytes);
    auto& stage = storage_.stages[at_.slot];
    Barrier& barrier = this->full();
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if ((needed >> i & 1) == 0) continue;
      OperandBlock* const to = kWeights ? stage.weight : stage.pixels;
      SplitHeader& header = kWeights ? stage.weight_headers[i] : stage.pixels_headers[i];
      if (numbers[i] == kPadding) {
        kernels::multiply::sm90::fetch_bulk(&kPaddingHeader, barrier, header);
        continue;
      }
      const auto& from =
          static_cast<const SplitBlock<Config::kSplitParts>*>(operand.blocks)[numbers[i]];
      kernels::multiply::sm90::fetch_bulk(&operand.header<1>(numbers[i]), barrier, header);
#pragma unroll
      for (int part = 0; part < Config::kSplitParts; ++part) {
        kernels::multiply::sm90::fetch_bulk(from.parts[part], barrier, to[part * kBlocks + i]);
      }
    }
    at_.advance();
  }

 private:
  // Tells whether the mask has a bit for row (kWeights) or box `i` of the tile.
  __device__ static bool needs(uint32_t mask, int i) {
    if constexpr (kWeights) return (mask >> (i * kBoxes) & ((1u << kBoxes) - 1)) != 0;
    return needed_boxes<Config>(mask) >> i & 1;
  }

  // The number of a block among the operand's. 32 bits hold it: a block takes 16 KiB of memory.
  // This thread's instructions, one step after the other, limit convolutions of few pixels.
  __device__ int number_of(const SplitOperand& operand, const Tile<Config>& tile, const Step& step,
                           int i) const {
    if constexpr (kWeights) {
      return (step.kernel_position * operand.extent + tile.channel / kBlock + i) * operand.depth +
             step.group;
    }
    const ConvShape& shape = p_.shape;
    const Box& box = tile.boxes[i];
    const int row =
        box.row * shape.stride.rows - shape.padding.rows + step.kernel_row * shape.dilation.rows;
    const int column = box.column * shape.stride.columns - shape.padding.columns +
                       step.kernel_column * shape.dilation.columns;
    const bool inside = static_cast<unsigned>(row) < shape.input.rows &&
                        static_cast<unsigned>(column) < shape.input.columns;
    if (!inside) return kPadding;
    const int pixel = row * shape.input.columns + column;
    return (pixel * operand.extent + box.image / kBlock) * operand.depth + step.group;
  }

  const SplitConvParams& p_;
  Storage<Config>& storage_;
};

// The first image of a box, and the index of its pixel in an image.
struct PixelBox {
  int image, pixel;
};

// Stores a thread's sums of a box: kCount sums from kFirst on.
template <int kFirst, int kCount, int kSize>
__device__ __forceinline__ void store_sums(const ConvParams& p, int first_channel, PixelBox box,
                                           const ChannelBias& bias, const float (&total)[kSize]) {
  const Extent& extent = p.shape.output;
  const int lane = threadIdx.x % 32;
  const int channel = first_channel + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const int image = box.image + lane % 4 * 2;
  const int64_t pixel_step = p.shape.out_channels;
  const int64_t image_step = pixel_step * extent.rows * extent.columns;
  float* const to =
      static_cast<float*>(p.output) + image * image_step + box.pixel * pixel_step + channel;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int across = i / 4 * 8 + i % 2, down = i / 2 % 2 * 8;
    const float value = total[kFirst + i] + bias.values[i / 2 % 2];
    if (image + across < extent.images && channel + down < p.shape.out_channels) {
      to[across * image_step + down] = p.activation == Activation::kRelu ? rectified(value) : value;
    }
  }
}

// The largest terms are not computed: any loss of digits may do harm. Only pairs of two faint
// blocks count. Zeros beside a faint block would make exact products of all channels that are
// switched off.
struct UnknownTerms {
  static constexpr SplitKind kBesideFaint = kSplitFaint;

  __device__ int at(int, int) const { return -0x8000; }
};

// `warpgroup` counts the multiplying warpgroups.
template <class Config>
__device__ void multiply_split_stages(const SplitConvParams& p, int warpgroup,
                                      Storage<Config>& storage) {
  const int row = warpgroup * 2 / Config::kBoxes, first_box = warpgroup * 2 % Config::kBoxes;
  auto& ring = storage.ring;
  using Stage = typename Storage<Config>::Stage;
  Descriptor<Config, Stage> weight(storage.stages[0].weight[row]);
  Descriptor<Config, Stage> pixels(storage.stages[0].pixels[first_box]);
  kernels::multiply::sm90::PromotedSums<Config> sums{kernels::multiply::sm90::NothingLater()};
  RingPosition<Config::kStages> at;
  while (true) {
    ring.full[at.slot].wait(at.phase);
    const Notice notice = ring.notices[at.slot];
    if (notice.ends_work()) break;
    const bool ends_tile = notice.ends_tile();
    PixelBox boxes[2] = {};
    int channel = 0;
    if (ends_tile) {
      const Tile<Config>& tile = ring.tiles[at.slot];
      channel = tile.channel + row * kBlock;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Box& box = tile.boxes[first_box + i];
        boxes[i] = {box.image, box.row * p.shape.output.columns + box.column};
      }
    }
    const auto release = [&] { kernels::sm90::release(ring.empty[at.slot]); };
    const uint32_t bits = notice.mask(warpgroup);
    if (bits != 0) {
      const auto& stage = storage.stages[at.slot];
      sums.add(
          p, bits, *weight, *pixels, stage.weight_headers[row], stage.pixels_headers + first_box,
          UnknownTerms{}, [] {}, release);
    } else {
      release();
    }
    at.advance();
    weight.advance(at.slot == 0);
    pixels.advance(at.slot == 0);
    if (ends_tile) {
      ChannelBias bias;
      bias.load(p, channel, static_cast<const float*>(p.bias));
      store_sums<0, kBlock / 2>(p, channel, boxes[0], bias, sums.totals.values);
      store_sums<kBlock / 2, Config::kLastWidth / 2>(p, channel, boxes[1], bias,
                                                     sums.totals.values);
      sums.reset();
    }
  }
}

template <class Config_>
struct SplitKernel : BoxKernel<Config_> {
  template <bool kWeights>
  using Loader = SplitLoader<Config_, kWeights>;
};

template <class Config>
struct SplitRoles : ConvRoles<SplitKernel<Config>> {
  __device__ __forceinline__ void set_up(int warp) const {
    set_up_barriers<Config>(this->storage, warp);
  }
  __device__ __forceinline__ void multiply(int warp) const {
    multiply_split_stages<Config>(this->p, kernels::sm90::multiplying_warpgroup(warp),
                                  this->storage);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    conv_split_sm90(const __grid_constant__ SplitConvParams p) {
  run<SplitRoles<Config>>(p);
}

// Like convolve(), but the caller also sets a and b of p, and a pixel block is one pixel of several
// images.
template <Tiles kTiles>
cudaError_t convolve_split(SplitConvParams p, const Launch& how) {
  complete(p);
  return with_last_width(p, [&]<int kWidth>(std::integral_constant<int, kWidth>) {
    constexpr TileConfig kTile = kTiles.small;
    using Chosen = SplitConfig<kTile.rows / kBlock, kTile.columns / kBlock, kWidth, kTile.stages>;
    static_assert(kHasTile<Chosen, kTile>);
    const int blocks = cut_into_tiles<Chosen>(p, how.multiprocessors);
    if (blocks == p.tiles) p.next_tile = nullptr;
    return start<SplitRoles<Chosen>>(conv_split_sm90<Chosen>, p, blocks, 0, how.stream);
  });
}

}  // namespace spamm::kernels::conv::sm90
