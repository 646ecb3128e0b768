// Tests of the CUDA kernel and tile that serve a product or a convolution: numbers alone.
#include "cuda/heuristics.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "support.h"

namespace spamm::cuda {
namespace {

constexpr int64_t kHopperShared = 227 * 1024;
constexpr int kMultiprocessors = 132;  // of an H100

const std::vector<Kernel> kKernels = {
    Kernel::kSm90F16, Kernel::kSm90Bf16, Kernel::kSm90F32x1, Kernel::kSm90F32x3, Kernel::kSm90F64,
    Kernel::kSm80F16, Kernel::kSm80Bf16, Kernel::kSm80Tf32,  Kernel::kSm80F32,   Kernel::kSm80F64};

TEST(Heuristics, HopperKernelsRunOnHopperAlone) {
  EXPECT_TRUE(runs_hopper_kernels(90, kHopperShared));
  EXPECT_FALSE(runs_hopper_kernels(90, kHopperShared - 1));
  for (const int other : {80, 86, 89, 100, 120}) {
    EXPECT_FALSE(runs_hopper_kernels(other, kHopperShared)) << other;
  }
}

TEST(Heuristics, TensorMapsTakeWhat32BitCoordinatesReach) {
  for (const int64_t length : {int64_t{1}, int64_t{100'000}, int64_t{1} << 31}) {
    const bool takes = length < int64_t{1} << 31;
    EXPECT_EQ(tensor_maps_take(length, 1, 1), takes);
    EXPECT_EQ(tensor_maps_take(1, length, 1), takes);
    EXPECT_EQ(tensor_maps_take(1, 1, length), takes);
  }
  EXPECT_FALSE(tensor_maps_take(64, 64, 0));
}

TEST(Heuristics, KernelsByTypeBlockAndChip) {
  for (const Block& block : {Block{64, 64, 64}, Block{128, 64, 128}, Block{32, 64, 64},
                             Block{64, 32, 64}, Block{128, 128, 32}}) {
    const bool is_small = std::min({block.m, block.k, block.n}) == 32;
    const auto name = [&](c10::ScalarType dtype, bool tf32, bool hopper) -> std::string {
      return kernel_name(choose_kernel(dtype, block, tf32, hopper));
    };
    for (const bool tf32 : {false, true}) {
      EXPECT_EQ(name(at::kHalf, tf32, true), "sm90-wgmma-f16");
      EXPECT_EQ(name(at::kBFloat16, tf32, true), "sm90-wgmma-bf16");
      EXPECT_EQ(name(at::kDouble, tf32, true), "sm90-dmma-f64");
      EXPECT_EQ(name(at::kHalf, tf32, false), "sm80-mma-f16");
      EXPECT_EQ(name(at::kBFloat16, tf32, false), "sm80-mma-bf16");
      EXPECT_EQ(name(at::kDouble, tf32, false), "sm80-dmma-f64");
      EXPECT_EQ(name(at::kFloat, tf32, false), tf32 ? "sm80-mma-tf32" : "sm80-simt-f32");
    }
    EXPECT_EQ(name(at::kFloat, false, true), "sm90-wgmma-f32x3");  // in halves
    EXPECT_EQ(name(at::kFloat, true, true), is_small ? "sm80-mma-tf32" : "sm90-wgmma-f32x1");
  }
  EXPECT_THROW(choose_kernel(at::kInt, {64, 64, 64}, false, false), c10::TypeError);
  EXPECT_EQ(split_parts_of(Kernel::kSm90F32x1), 1);
  EXPECT_EQ(split_parts_of(Kernel::kSm90F32x3), 2);
  EXPECT_EQ(split_parts_of(Kernel::kSm80F32), 0);
}

TEST(Heuristics, SmallFloat32ProductsAreNotSplit) {
  const auto choose = [](const ProductSize& size, bool allow_tf32 = false,
                         std::optional<int> segments = std::nullopt) {
    const Chip chip = {
        .hopper = true, .multiprocessors = kMultiprocessors, .forced_segments = segments};
    return choose_product(at::kFloat, {64, 64, 64}, allow_tf32, size, chip);
  };
  const auto name = [&](const ProductSize& size, bool allow_tf32 = false) -> std::string {
    return kernel_name(choose(size, allow_tf32).kernel);
  };
  const auto batch_of = [](int64_t batch, int64_t m, int64_t n, int64_t k) {
    return ProductSize{batch, batch, batch, m, n, k};
  };
  EXPECT_EQ(name(batch_of(500'000, 4, 4, 4)), "sm80-simt-f32");
  EXPECT_EQ(name(batch_of(500'000, 4, 4, 4), true), "sm80-simt-f32");
  EXPECT_EQ(name(batch_of(100'000, 8, 8, 8)), "sm80-simt-f32");
  EXPECT_EQ(name(batch_of(1'000, 64, 2, 2)), "sm80-simt-f32");  // K and N padded 32 times
  EXPECT_EQ(name({1'000'000, 1, 1'000'000, 4, 4, 4}), "sm80-simt-f32");
  EXPECT_EQ(name(batch_of(1, 300, 200, 16)), "sm80-simt-f32");
  EXPECT_EQ(choose(batch_of(1, 300, 200, 16)).segments, 1);
  EXPECT_EQ(name(batch_of(1, 190, 50, 900)), "sm80-simt-f32");
  EXPECT_GT(choose(batch_of(1, 190, 50, 900)).segments, 1);
  EXPECT_EQ(choose(batch_of(1, 190, 50, 900), false, 1).kernel, Kernel::kSm90F32x3);
  EXPECT_EQ(name(batch_of(1, 19, 4186, 2969), true), "sm90-wgmma-f32x1");  // norms of B
  EXPECT_EQ(name(batch_of(1, 2010, 2586, 18)), "sm80-simt-f32");           // short K
  for (const int64_t n : {768, 1024, 2048, 4096}) {
    EXPECT_EQ(name(batch_of(1, n, n, n)), "sm90-wgmma-f32x3");
    EXPECT_EQ(name(batch_of(1, n, n, n), true), "sm90-wgmma-f32x1");
  }
}

TEST(Heuristics, ProductsOfFloat64ReadAnyLinesAndOmitNorms) {
  const auto check = [](const ProductSize& size, int64_t alignment, bool omits,
                        at::ScalarType dtype = at::kDouble, std::optional<int> segments = {}) {
    const Chip chip = {
        .hopper = true, .multiprocessors = kMultiprocessors, .forced_segments = segments};
    const Choice found = choose_product(dtype, {64, 64, 64}, false, size, chip);
    EXPECT_EQ(found.alignment, alignment);
    EXPECT_EQ(omits_norms(found, size, kMultiprocessors), omits);
  };
  check({1, 1, 1, 47, 5485, 1214}, 8, true);
  check({2, 2, 2, 47, 5485, 1214}, 16, true);               // batches may begin off 16 bytes, too
  check({1, 1, 1, 47, 5485, 1}, 16, true, at::kDouble, 1);  // no odd line
  check({1, 1, 1, 1603, 1533, 1198}, 16, true);             // a copy takes less
  check({1, 1, 1, 4096, 4096, 64 * 383}, 16, true);         // large tiles
  check({1, 1, 1, 4096, 4096, 64 * 384}, 16, false);        // keep pace
  check({1, 1, 1, 40'000, 20'000, 20'000}, 16, false);
  check({1, 1, 1, 512, 512, 512}, 16, true, at::kHalf);  // no counter
  check({1, 1, 1, 4096, 4096, 4096}, 16, true, at::kHalf);
  check({1, 1, 1, 32'768, 32'768, 32'768}, 16, false, at::kHalf);  // keep pace
}

TEST(Heuristics, LargeTilesOnceTheyFillTheChip) {
  const auto tile = [](Kernel kernel, int64_t batch, int64_t m, int64_t n) {
    return choose_tile(kernel, {batch, batch, batch, m, n, 1024}, kMultiprocessors);
  };
  struct Edges {
    Kernel kernel;
    int64_t small, large;
  };
  for (const auto& [kernel, small, large] :
       {Edges{Kernel::kSm80F16, 1408, 1536}, Edges{Kernel::kSm90F32x3, 1536, 1664},
        Edges{Kernel::kSm90F64, 1536, 2048}, Edges{Kernel::kSm90F32x1, 1024, 2048},
        Edges{Kernel::kSm90F16, 1024, 2048}}) {
    EXPECT_EQ(tile(kernel, 1, small, small), TileSize::kSmall) << kernel_name(kernel);
    EXPECT_EQ(tile(kernel, 1, large, large), TileSize::kLarge) << kernel_name(kernel);
  }
  EXPECT_EQ(tile(Kernel::kSm80F16, 1, 1536, 1408), TileSize::kLarge);  // 132 tiles of 128 x 128
  EXPECT_EQ(tile(Kernel::kSm80F16, 132, 1, 1), TileSize::kLarge);
  EXPECT_EQ(tile(Kernel::kSm90Bf16, 264, 1, 1), TileSize::kSmall);  // what is outside costs, too
}

TEST(Heuristics, TilesThatFillTheChip) {
  const auto tile = [](int64_t n, bool has_all = true) {
    return choose_tile(Kernel::kSm90F16, {1, 1, 1, n, n, n}, kMultiprocessors, std::nullopt, false,
                       has_all);
  };
  for (const int64_t n : {500, 1000, 1024}) EXPECT_EQ(tile(n), TileSize::kSmall) << n;
  for (const int64_t n : {1040, 1088, 1152, 1408}) EXPECT_EQ(tile(n), TileSize::kMedium) << n;
  for (const int64_t n : {2000, 2048, 4096, 8192, 8200}) EXPECT_EQ(tile(n), TileSize::kLarge) << n;
  for (const int64_t n : {2049, 2056, 2112}) EXPECT_EQ(tile(n), TileSize::kSquare) << n;
  for (int64_t n = 64; n < 10'000; n += 100) {
    const TileSize found = tile(n, false);
    EXPECT_TRUE(found == TileSize::kSmall || found == TileSize::kLarge);
  }
}

TEST(Heuristics, CopiesWhereLinesBeginBetweenSectors) {
  EXPECT_TRUE(line_copy_pays(2000, 8200 * 8200 * 2, false));
  EXPECT_TRUE(line_copy_pays(2000, 8200 * 8200 * 2, true));
  EXPECT_TRUE(line_copy_pays(36, 2056 * 2056 * 2, false));
  EXPECT_FALSE(line_copy_pays(11, 1000 * 1000 * 2, true));
  EXPECT_FALSE(line_copy_pays(100, 1'000'000'000, false));
}

TEST(Heuristics, HalfOfASymmetricProductPaysWhereItSavesTurns) {
  const auto pays = [](int64_t n, Kernel kernel = Kernel::kSm90F16, int64_t bytes = 2) {
    const ProductSize size = {1, 1, 1, n, n, n};
    const TileSize tile = choose_tile(kernel, size, kMultiprocessors);
    return mirroring_pays(*find_tile(kernel, tile), size, n * n * bytes, kMultiprocessors);
  };
  for (const int64_t n : {64, 1024, 1040, 2048}) EXPECT_FALSE(pays(n)) << n;
  for (const int64_t n : {4096, 8192, 16384}) EXPECT_TRUE(pays(n)) << n;
  EXPECT_FALSE(pays(1024, Kernel::kSm90F64, 8));
  EXPECT_TRUE(pays(4096, Kernel::kSm90F64, 8));
  EXPECT_FALSE(pays(8192, Kernel::kSm80F64, 8));  // computes the whole in any case
}

TEST(Heuristics, AForcedTileIsTakenWhereTheKernelHasIt) {
  for (const TileSize forced : {TileSize::kSmall, TileSize::kLarge}) {
    for (const int64_t edge : {1, 100'000}) {
      for (const Kernel kernel : kKernels) {
        EXPECT_EQ(choose_tile(kernel, {1, 1, 1, edge, edge, 64}, kMultiprocessors, forced), forced);
      }
      EXPECT_EQ(choose_conv_tile_sm80(Kernel::kSm80Tf32, 1, edge, edge, kMultiprocessors, forced),
                forced);
      EXPECT_EQ(choose_conv_tile_sm90(Kernel::kSm90Bf16, 64 + edge, edge, kMultiprocessors, false,
                                      forced),
                forced);
      EXPECT_EQ(choose_conv_tile_sm90(Kernel::kSm90Bf16, 64, edge, kMultiprocessors, true, forced),
                TileSize::kNarrow);
      EXPECT_EQ(
          choose_conv_tile_sm90(Kernel::kSm90F32x3, edge, edge, kMultiprocessors, true, forced),
          TileSize::kSmall);
    }
  }
}

TEST(Heuristics, CudnnWhereNothingIsSkippedAndItIsFaster) {
  using Sizes = std::vector<UnskippedConv>;
  const auto expect = [](at::ScalarType dtype, bool hopper, const Sizes& ours, const Sizes& cudnns,
                         bool tf32 = false) {
    for (const bool is_ours : {true, false}) {
      for (const UnskippedConv& x : is_ours ? ours : cudnns) {
        EXPECT_EQ(own_unskipped_conv_pays(dtype, tf32, hopper, kMultiprocessors, x), is_ours)
            << c10::toString(dtype) << ", " << x.images << " images, " << x.in_channels
            << " channels of " << x.in_pixels << " pixels";
      }
    }
  };
  const UnskippedConv large = {128, 256, 256, 9, 56 * 56, 56 * 56},
                      odd = {16, 100, 100, 9, 169, 169};
  const UnskippedConv stem = {1, 3, 64, 49, 224 * 224, 112 * 112};
  const UnskippedConv one = {1, 64, 64, 9, 56 * 56, 56 * 56};
  for (const bool hopper : {false, true}) {
    expect(at::kDouble, hopper,
           {large, one, {128, 32, 32, 9, 1024, 1024}, {32, 256, 64, 1, 56 * 56, 56 * 56}},
           {odd, stem, {17, 48, 96, 25, 35 * 35, 35 * 35}, {64, 512, 2048, 1, 49, 49}});
  }
  expect(at::kFloat, true,
         {large, {100, 64, 128, 9, 256, 256}, {2, 640, 640, 9, 1024, 1024}},  // by a matrix
         {stem, one, {2, 64, 64, 9, 512 * 512, 512 * 512}, {32, 24, 144, 1, 56 * 56, 56 * 56}});
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    // Padding counts where there is much to compute.
    expect(dtype, true,
           {stem,
            {1, 512, 512, 9, 196, 196},
            {8, 128, 32, 9, 3136, 3136},
            {32, 24, 144, 1, 3136, 3136}},
           {odd,
            {3, 33, 64, 9, 3500, 3500},
            {8, 32, 32, 9, 149 * 149, 147 * 147},
            {32, 128, 32, 9, 3136, 3136},
            {32, 16, 96, 1, 112 * 112, 112 * 112}});
  }
  expect(at::kFloat, false, {}, {large});
  expect(at::kHalf, false, {}, {large});
  // In TF32: few tiles, padding, and channels that are not aligned.
  expect(at::kFloat, true, {large, {8, 512, 128, 1, 784, 784}},
         {{8, 256, 256, 9, 196, 196},
          {32, 36, 72, 9, 2500, 2500},
          {32, 128, 32, 9, 3136, 3136},
          {128, 258, 256, 9, 3136, 3136}},
         /*tf32=*/true);
}

// 3 x 3 where `positions` is 9. Blocks have room for 64 images.
HeldConv held(int64_t images, int64_t edge, int64_t positions, int64_t in, int64_t out,
              int64_t groups = 1) {
  const auto block = [](int64_t channels) { return channels <= 32 ? 32 : 64; };
  return {.images = images,
          .pixels = edge * edge,
          .pixels_of_blocks = blocks_of(images, 64) * 64 * edge * edge,
          .in_pixels = edge * edge,
          .positions = positions,
          .groups = groups,
          .in_channels = in,
          .out_channels = out,
          .block_m = block(out),
          .block_k = block(in)};
}

TEST(Heuristics, EntriesAloneWhereBlocksAreMostlyEmpty) {
  for (const auto dtype : {at::kHalf, at::kFloat, at::kDouble}) {
    for (const std::optional<bool> hopper : {std::optional<bool>(), std::optional<bool>(false)}) {
      const auto way = [&](const HeldConv& x, bool packs, bool tf32 = false) {
        return choose_held_conv(dtype, tf32, hopper, packs, x, kMultiprocessors);
      };
      EXPECT_EQ(way(held(64, 56, 9, 1, 1, 96), false), HeldWay::kThin);
      EXPECT_EQ(way(held(64, 56, 9, 32, 32, 32), false), HeldWay::kFilled);
      EXPECT_EQ(way(held(64, 56, 1, 128, 128), false), HeldWay::kFilled);
      // A first layer; in TF32 the precision of a call follows the channels, not the images.
      EXPECT_EQ(way(held(8, 112, 49, 3, 64), true), HeldWay::kThin);
      EXPECT_EQ(way(held(64, 112, 49, 3, 64), false) == HeldWay::kThin, dtype != at::kHalf);
      EXPECT_EQ(way(held(64, 112, 49, 3, 64), false, true) == HeldWay::kThin, dtype != at::kHalf);
      EXPECT_NE(way(held(1, 56, 1, 128, 128), true, true),
                dtype == at::kFloat ? HeldWay::kThin : HeldWay::kPacked);
    }
  }
}

TEST(Heuristics, DepthwiseTilesFit) {
  for (const auto& [images, edge, kernel] :
       std::vector<std::array<int, 3>>{{1, 150, 3}, {3, 7, 15}, {8, 28, 7}, {64, 1, 9}}) {
    for (const int bytes : {2, 4, 8}) {
      kernels::DepthwiseParams<float> p{};
      kernels::Im2colMatrix& m = p.conv.pixels;
      m.images = images, m.log2_images = 6, m.image_blocks = 1, p.channels = 96;
      m.output = {edge, edge}, m.stride = {1, 2}, m.dilation = {1, 1};
      m.kernel_columns = kernel, m.positions = kernel * kernel;
      choose_depthwise(p, bytes, 227 << 10, kMultiprocessors);
      EXPECT_TRUE(p.tile.rows > 0 && p.bytes <= 227 << 10);
      EXPECT_TRUE(p.log2_slots <= p.log2_images && p.log2_images <= p.log2_slots + 3);
    }
  }
}

TEST(Heuristics, PackedRowsOfFewImages) {
  const auto way = [&](const HeldConv& x, bool tf32, std::optional<bool> hopper = true) {
    return choose_held_conv(at::kFloat, tf32, hopper, /*packs=*/true, x, kMultiprocessors);
  };
  for (const bool tf32 : {false, true}) {  // Hopper's TF32 takes pixels one by one
    const HeldWay packed = tf32 ? HeldWay::kFilled : HeldWay::kPacked;
    EXPECT_EQ(way(held(8, 56, 9, 64, 64), tf32), packed);
    EXPECT_EQ(way(held(8, 149, 9, 32, 32), tf32), packed);
    EXPECT_EQ(way(held(1, 112, 49, 3, 64), tf32), HeldWay::kThin);
    EXPECT_EQ(way(held(32, 28, 9, 256, 256), tf32), HeldWay::kFilled);
    EXPECT_EQ(way(held(32, 28, 9, 256, 256), tf32, false), HeldWay::kPacked);
    // The portable kernel packs by itself.
    EXPECT_EQ(way(held(8, 56, 9, 64, 64), tf32, std::nullopt), HeldWay::kFilled);
  }
  // Batches cut in two keep the kernel of whole blocks where sizes are small (and its bits).
  EXPECT_EQ(way(held(36, 3, 9, 72, 72), false), HeldWay::kFilled);
  EXPECT_EQ(way(held(100, 3, 9, 72, 72), false), HeldWay::kFilled);

  const auto tile = [&](const HeldConv& x, Kernel kernel = Kernel::kSm80F32,
                        std::optional<TileSize> forced = std::nullopt) {
    return choose_packed_tile(kernel, x, kMultiprocessors, forced).tile;
  };
  EXPECT_EQ(tile(held(8, 56, 9, 64, 64)), TileSize::kSmall);
  EXPECT_EQ(tile(held(8, 56, 9, 64, 32)), TileSize::kNarrow);  // a block of 32
  EXPECT_EQ(tile(held(1, 7, 1, 2048, 512)), TileSize::kMedium);
  EXPECT_EQ(tile(held(17, 7, 1, 2048, 512)), TileSize::kSmall);
  EXPECT_EQ(tile(held(1, 7, 1, 2048, 512), Kernel::kSm80F64), TileSize::kSmall);  // has no slices
  EXPECT_EQ(tile(held(8, 56, 9, 64, 64), Kernel::kSm80F32, TileSize::kMedium), TileSize::kMedium);
  EXPECT_EQ(tile(held(8, 56, 9, 64, 64), Kernel::kSm80F64, TileSize::kLarge), TileSize::kSmall);
}

TEST(Heuristics, LargeConvolutionTilesOnceTheyFillTheChip) {
  const auto sm90 = [](int64_t out_channels, int64_t boxes, bool skips_nothing = false) {
    return choose_conv_tile_sm90(Kernel::kSm90F16, out_channels, boxes, kMultiprocessors,
                                 skips_nothing);
  };
  EXPECT_EQ(sm90(128, 512), TileSize::kSmall);
  EXPECT_EQ(sm90(256, 528), TileSize::kSmall);  // two waves: 264 tiles of 128 x 256
  EXPECT_EQ(sm90(256, 529), TileSize::kLarge);
  EXPECT_EQ(sm90(512, 128, true), TileSize::kLarge);  // one wave of 128, not two of 256
  EXPECT_EQ(sm90(512, 128, false), TileSize::kSmall);
  EXPECT_EQ(sm90(512, 64, true), TileSize::kSmall);   // one wave either way
  EXPECT_EQ(sm90(512, 136, true), TileSize::kSmall);  // two waves of 136, three of 272
  const auto sm80 = [](int64_t groups, int64_t pixels, int64_t out_channels) {
    return choose_conv_tile_sm80(Kernel::kSm80F16, groups, pixels, out_channels, kMultiprocessors);
  };
  EXPECT_EQ(sm80(1, 131 * 128, 128), TileSize::kSmall);
  EXPECT_EQ(sm80(1, 132 * 128, 128), TileSize::kLarge);
  EXPECT_EQ(sm80(132, 128, 128), TileSize::kLarge);
  EXPECT_EQ(sm80(1, 1'000'000, 64), TileSize::kSmall);  // half of a large tile would be empty
}

TEST(Heuristics, NarrowTilesOfPixelsOnceMediumOnesAreMoreThanMultiprocessors) {
  EXPECT_EQ(choose_by_pixel_tile(128, 132, kMultiprocessors), TileSize::kMedium);
  EXPECT_EQ(choose_by_pixel_tile(128, 133, kMultiprocessors), TileSize::kNarrow);
  EXPECT_EQ(choose_by_pixel_tile(64, 264, kMultiprocessors), TileSize::kMedium);
  EXPECT_EQ(choose_by_pixel_tile(65, 264, kMultiprocessors), TileSize::kNarrow);
}

TEST(Heuristics, SegmentsWhereTilesAreFewAndStepsMany) {
  const auto segments = [](int64_t out_channels, int64_t pixels, int64_t steps,
                           std::optional<int> forced = std::nullopt) {
    return choose_conv_segments(out_channels, pixels, steps, kMultiprocessors, forced);
  };
  EXPECT_EQ(segments(512, 128 * 4, 72), 4);  // 16 tiles
  EXPECT_EQ(segments(512, 128 * 4, 31), 2);  // fewer than 8 steps each
  EXPECT_EQ(segments(512, 128 * 4, 15), 1);
  EXPECT_EQ(segments(512, 128 * 16, 72), 2);  // 64 tiles
  EXPECT_EQ(segments(512, 66 * 32, 72), 1);   // 68 tiles
  EXPECT_EQ(segments(512, 1 << 20, 72), 1);
  EXPECT_EQ(segments(65, 1, 10'000), 4);  // the most
  EXPECT_EQ(segments(64, 1, 10'000), 1);  // narrow tiles have none
  EXPECT_EQ(segments(64, 1, 10'000, 4), 1);
  for (const int forced : {1, 2, 4}) {
    EXPECT_EQ(segments(512, 1 << 20, 1, forced), forced);
  }
  // They are a power of two and run at once.
  for (const int multiprocessors : {1, 16, 114, 132}) {
    for (const int64_t pixels : {1, 1000, 5000, 20'000}) {
      for (const int64_t steps : {1, 9, 36, 288}) {
        const int found = choose_conv_segments(200, pixels, steps, multiprocessors);
        const int64_t tiles = 2 * blocks_of(pixels, 128);
        EXPECT_TRUE(found == 1 || ((found == 2 || found == 4) && found * 8 <= steps &&
                                   found * tiles <= multiprocessors));
      }
    }
  }
}

TEST(Heuristics, OneChoiceOfTileSegmentsAndClaims) {
  ConvWork work = {.kernel = Kernel::kSm90F16,
                   .out_channels = 512,
                   .pixels = 128 * 4,
                   .steps = 72,
                   .boxes = 128,
                   .by_pixel = false,
                   .has_segments = true,
                   .skips_nothing = true,
                   .computes_norms = false};
  const auto chosen = [&] { return choose_conv_sm90(work, 132, std::nullopt, std::nullopt); };
  EXPECT_EQ(chosen().segments, 4);
  EXPECT_EQ(chosen().tile, TileSize::kSmall);
  work.has_segments = false;
  EXPECT_EQ(chosen().segments, 1);
  EXPECT_EQ(chosen().tile, TileSize::kLarge);  // by waves, as nothing is skipped
  EXPECT_FALSE(chosen().claims_tiles);
  work.skips_nothing = false;
  EXPECT_EQ(chosen().tile, TileSize::kSmall);
  EXPECT_FALSE(chosen().claims_tiles);
  work.computes_norms = true;
  EXPECT_TRUE(chosen().claims_tiles);
  work.by_pixel = true;
  work.out_channels = 64;
  EXPECT_EQ(chosen().tile, TileSize::kMedium);
  work.has_segments = true;
  work.out_channels = 512;
  EXPECT_EQ(chosen().segments, 4);
  EXPECT_EQ(chosen().tile, TileSize::kMedium);
}

TEST(Heuristics, TilesOfConsecutivePixelsFillWaves) {
  const auto choose = [](int64_t out_channels, int64_t pixels, int64_t steps) {
    return choose_unskipped_tile(2, out_channels, pixels, steps, kMultiprocessors);
  };
  // ResNet-50 at batch 64: one wave of 66 clusters.
  EXPECT_EQ(choose(256, 64 * 14 * 14, 36).tile, (UnskippedTile{128, 192}));
  EXPECT_FALSE(choose(256, 64 * 14 * 14, 36).shares_weights);
  // Four channel tiles of 33 pixel tiles.
  EXPECT_EQ(choose(512, 64 * 7 * 7, 72).tile, (UnskippedTile{128, 96}));
  EXPECT_FALSE(choose(512, 64 * 7 * 7, 72).shares_weights);
  // One channel tile: two pixel tiles share its weights.
  EXPECT_EQ(choose(128, 64 * 28 * 28, 18).tile, (UnskippedTile{128, 128}));
  EXPECT_TRUE(choose(128, 64 * 28 * 28, 18).shares_weights);
  EXPECT_EQ(choose(64, 64 * 56 * 56, 9).tile.channels, 64);
  for (const int multiprocessors : {1, 2, 114, 132}) {
    for (const int64_t pixels : {1, 1000, 1 << 30}) {
      const UnskippedTile found = choose_unskipped_tile(2, 8, pixels, 1, multiprocessors).tile;
      EXPECT_TRUE(std::ranges::find(kUnskippedTiles, found) != std::end(kUnskippedTiles));
    }
  }
  // Shared memory, which the model of time counts too.
  EXPECT_EQ((UnskippedTile{128, 96}.stages(2)), 7);
  EXPECT_EQ((UnskippedTile{128, 192}.stages(2)), 5);
  EXPECT_EQ((UnskippedTile{64, 384}.stages(2)), 3);
}

TEST(Heuristics, ConsecutivePixelsPayWithoutSegments) {
  const auto pays = [](int64_t out_channels, int64_t pixels, int64_t steps, double padding = 0,
                       std::optional<int> forced = std::nullopt) {
    return unskipped_conv_pays(out_channels, pixels, steps, kMultiprocessors, forced,
                               [&] { return padding; });
  };
  EXPECT_TRUE(pays(256, 64 * 14 * 14, 36));
  EXPECT_TRUE(pays(256, 64 * 14 * 14, 36, 0.19));
  EXPECT_FALSE(pays(512, 128 * 16, 72));       // two segments
  EXPECT_FALSE(pays(512, 1 << 20, 72, 0.31));  // 3 x 3 on 4 x 4, which leaves out the padding
  EXPECT_FALSE(pays(512, 1 << 20, 72, 0, 2));  // forced segments
  EXPECT_TRUE(pays(1024, 14 * 14, 4));         // one image
  EXPECT_TRUE(pays(64, 64 * 56 * 56, 9));
}

TEST(Heuristics, SegmentsOfProductsWhereTilesFillTheChipUnevenly) {
  const auto segments = [](int64_t m, int64_t k, int64_t n,
                           std::optional<int> forced = std::nullopt) {
    return choose_product_segments(Kernel::kSm90F64, {1, 1, 1, m, n, k}, kMultiprocessors, forced);
  };
  // Cases that an H200 was measured to do faster, with nothing skipped.
  const std::map<int64_t, int> faster = {{512, 2},  {768, 1},  {1024, 1}, {1040, 2},
                                         {1100, 2}, {1280, 2}, {1536, 2}, {1792, 1}};
  for (const auto& [n, expected] : faster) EXPECT_EQ(segments(n, n, n), expected) << n;
  EXPECT_EQ(segments(64, 64 * 7, 64), 1);  // fewer than 4 steps each
  EXPECT_EQ(segments(64, 64 * 8, 64), 2);
  EXPECT_EQ(segments(64 * 5, 64 * 7, 64 * 53), 1);  // not even where a third of the time is to gain
  EXPECT_EQ(segments(64 * 5, 64 * 8, 64 * 53), 2);
  for (const int forced : {1, 2, 4}) {
    EXPECT_EQ(segments(1024, 64, 1024, forced), forced);
    EXPECT_EQ(segments(2048, 2048, 2048, forced), 1);  // large tiles have none
  }
}

TEST(Heuristics, SegmentsOfProductsOfLongKOnFewTiles) {
  for (const Kernel kernel : kKernels) {
    SCOPED_TRACE(kernel_name(kernel));
    const auto segments = [&](int64_t m, int64_t k, int64_t n,
                              std::optional<int> forced = std::nullopt) {
      return choose_product_segments(kernel, {1, 1, 1, m, n, k}, kMultiprocessors, forced);
    };
    const bool has_some = claims_tiles(kernel), is_double = kernel == Kernel::kSm90F64;
    EXPECT_EQ(segments(64, 20'000, 64), has_some ? kMostProductSegments : 1);
    EXPECT_EQ(segments(55, 1200, 124), has_some ? 8 : 1);  // of 2 or 3 steps
    const int parts = split_parts_of(kernel);
    EXPECT_EQ(segments(1, 4096, 4096), is_double || parts == 2 ? 4 : parts == 1 ? 2 : 1);  // memory
    EXPECT_EQ(segments(64, 20'000, 64, 4), has_some ? 4 : 1);
    for (const int64_t n : {64, 256, 768, 1000, 1024, 2048, 4096, 8192}) {
      EXPECT_EQ(segments(n, n, n), 1) << n;
      EXPECT_EQ(segments(n, 448, n), 1) << n;
    }
    EXPECT_EQ(segments(197, 768, 3072), 1);
    // Clearly less time than one segment takes.
    const TileRow& row = *find_tile(kernel, TileSize::kSmall);
    for (int64_t m = 64; has_some && m < 1000; m += 100) {
      const ProductSize size = {1, 1, 1, m, 200, 5000};
      const int found = choose_product_segments(kernel, size, kMultiprocessors);
      const auto time = [&](int number) {
        return product_time(row, size, kMultiprocessors, false, number);
      };
      EXPECT_LT(time(found), (found == 1                ? 1.01
                              : is_double && found == 2 ? 1
                              : parts > 0               ? 0.95
                                                        : 0.85) *
                                 time(1));
    }
  }
}

TEST(Heuristics, ProductsOfShortKGoByFma) {
  const auto chosen = [](c10::ScalarType dtype, int64_t m, int64_t n, int64_t k, bool hopper = true,
                         bool tf32 = false) {
    const Chip chip = {.hopper = hopper, .multiprocessors = kMultiprocessors};
    return choose_product(dtype, {64, 64, 64}, tf32, {1, 1, 1, m, n, k}, chip);
  };
  for (const bool tf32 : {false, true}) {
    const Choice choice = chosen(c10::kFloat, 7733, 6397, 21, true, tf32);
    EXPECT_EQ(choice.kernel, Kernel::kSm80F32);
    EXPECT_EQ(choice.tile, TileSize::kNarrow);
    EXPECT_EQ(choice.alignment, 4);
    EXPECT_NE(chosen(c10::kFloat, 7733, 6397, kernels::kShortDepth + 1, true, tf32).tile,
              TileSize::kNarrow);
    EXPECT_NE(chosen(c10::kFloat, 7733, 6397, 21, false, tf32).tile, TileSize::kNarrow);
  }
  EXPECT_NE(chosen(c10::kFloat, 8192, 8192, 128).tile, TileSize::kNarrow);
  EXPECT_EQ(chosen(c10::kDouble, 2010, 2586, 40).kernel, Kernel::kSm80F64);
  EXPECT_EQ(chosen(c10::kDouble, 2010, 2586, 41).kernel, Kernel::kSm90F64);
  EXPECT_EQ(chosen(c10::kHalf, 2010, 2586, 21).kernel, Kernel::kSm90F16);
}

TEST(Heuristics, ProductsTakeSmallTilesForTheirSegments) {
  const auto chosen = [](int64_t m, int64_t n, int64_t k, std::optional<TileSize> forced) {
    const Chip chip = {.hopper = true, .multiprocessors = kMultiprocessors, .forced_tile = forced};
    return choose_product(c10::kHalf, {64, 64, 64}, false, {1, 1, 1, m, n, k}, chip);
  };
  EXPECT_EQ(chosen(64, 64, 20'000, std::nullopt).segments, kMostProductSegments);
  EXPECT_EQ(chosen(64, 64, 20'000, TileSize::kLarge).segments, 1);
  EXPECT_EQ(chosen(64, 64, 20'000, TileSize::kLarge).tile, TileSize::kLarge);
  for (int64_t n = 64; n < 3000; n += 64) {
    const Choice choice = chosen(n, n, 10'000, std::nullopt);
    EXPECT_TRUE(choice.segments == 1 || choice.tile == TileSize::kSmall) << n;
    EXPECT_EQ(choice.config.rows, find_tile(choice.kernel, choice.tile)->config.rows) << n;
  }
}

TEST(Heuristics, TilesMostlyOutsideCostHalfATurn) {
  const TileRow& row = *find_tile(Kernel::kSm90F16, TileSize::kLarge);
  const auto time = [&](int64_t n) {
    return product_time(row, {1, 1, 1, n, n, 2048}, kMultiprocessors);
  };
  EXPECT_LT(time(2048), time(2056));              // 128 tiles fill the chip; 25 light ones follow
  EXPECT_LT(time(2056), 1.6 * time(2048));        // by half a turn
  EXPECT_GT(time(2048 + 192), 1.8 * time(2048));  // they have as much work as others
  EXPECT_LT(time(8200) / time(8192), 1.04);
}

// ---- The table of tiles -------------------------------------------------------------------------

void check_table(std::span<const TileRow> rows, const std::vector<Kernel>& kernels,
                 const std::set<Kernel>& with_one_tile) {
  std::set<std::pair<Kernel, TileSize>> seen;
  for (const TileRow& row : rows) {
    SCOPED_TRACE("kernel " + std::to_string(static_cast<int>(row.kernel)) + ", size " +
                 std::to_string(static_cast<int>(row.size)));
    EXPECT_TRUE(seen.emplace(row.kernel, row.size).second) << "stands twice";
    EXPECT_EQ(find_tile(row.kernel, row.size, rows), &row);
    const TileConfig& tile = row.config;
    EXPECT_EQ(tile.rows % tile.warp_rows, 0);
    EXPECT_EQ(tile.columns % tile.warp_columns, 0);
    const bool has_short_k = rows.data() == kTiles && row.size == TileSize::kNarrow;
    EXPECT_GE(tile.stages, has_short_k ? 1 : 2);
    EXPECT_GE(tile.blocks_per_multiprocessor, 1);
    EXPECT_EQ(row.pays_from > 0, row.size == TileSize::kLarge);
  }
  for (const Kernel kernel : kernels) {
    SCOPED_TRACE("kernel " + std::to_string(static_cast<int>(kernel)));
    const auto *small = find_tile(kernel, TileSize::kSmall, rows),
               *large = find_tile(kernel, TileSize::kLarge, rows);
    ASSERT_NE(small, nullptr);
    EXPECT_EQ(large == nullptr, with_one_tile.count(kernel) == 1);
    if (large != nullptr) {
      EXPECT_GT(large->config.rows * large->config.columns,
                small->config.rows * small->config.columns);
    }
  }
}

TEST(Tiles, EveryProductHasASmallAndALargeOne) { check_table(kTiles, kKernels, {}); }

TEST(Tiles, EveryConvolutionButTheSplitOneHasASmallAndALargeOne) {
  std::vector<Kernel> kernels = kKernels;
  std::erase(kernels, Kernel::kSm90F64);
  check_table(kConvTiles, kernels, {Kernel::kSm90F32x3});
}

TEST(Tiles, NarrowOnesHoldTheOutputChannelsThatAskForThem) {
  for (const Kernel kernel : {Kernel::kSm90F16, Kernel::kSm90Bf16, Kernel::kSm90F32x1}) {
    const TileRow* narrow = find_tile(kernel, TileSize::kNarrow, kConvTiles);
    ASSERT_NE(narrow, nullptr);
    EXPECT_EQ(narrow->config.rows, kNarrowOutput);
  }
}

// The instances that compile.
static_assert(kTilesOf<Kernel::kSm90F32x3>.small.rows == 64);
static_assert(kTilesOf<Kernel::kSm90F16>.narrow.rows == 0);
static_assert(kTilesOf<Kernel::kSm80F32, kConvTiles>.large.blocks_per_multiprocessor == 1);
static_assert(kTilesOf<Kernel::kSm90F32x3, kConvTiles>.large.rows == 0);

}  // namespace
}  // namespace spamm::cuda
