// The table that decides which CUDA kernel and tile serve a product: plain numbers, no device.
#include "cuda/heuristics.h"

#include <string>

#include "support.h"

namespace spamm::cuda {
namespace {

constexpr int64_t kHopperShared = 227 * 1024;

TEST(Heuristics, HopperKernelsRunOnHopperAlone) {
  EXPECT_TRUE(runs_hopper_kernels(90, kHopperShared));
  EXPECT_FALSE(runs_hopper_kernels(90, kHopperShared - 1));
  for (const int other : {80, 86, 89, 100, 120}) {
    EXPECT_FALSE(runs_hopper_kernels(other, kHopperShared)) << other;
  }
}

TEST(Heuristics, TensorMapsTakeWhat32BitCoordinatesReach) {
  constexpr int64_t kTooLong = int64_t{1} << 31;
  EXPECT_TRUE(tensor_maps_take(1, 1, 1));
  EXPECT_TRUE(tensor_maps_take(100'000, 100'000, 100'000));
  EXPECT_FALSE(tensor_maps_take(kTooLong, 1, 1));
  EXPECT_FALSE(tensor_maps_take(1, kTooLong, 1));
  EXPECT_FALSE(tensor_maps_take(1, 1, kTooLong));
  EXPECT_FALSE(tensor_maps_take(64, 64, 0));
}

TEST(Heuristics, KernelsByTypeAndChip) {
  const auto name = [](c10::ScalarType dtype, bool allow_tf32, bool hopper,
                       Block block = {64, 64, 64}) -> std::string {
    return kernel_name(choose_kernel(dtype, block, allow_tf32, hopper));
  };
  EXPECT_EQ(name(at::kHalf, false, true), "sm90-wgmma-f16");
  EXPECT_EQ(name(at::kBFloat16, false, true), "sm90-wgmma-bf16");
  EXPECT_EQ(name(at::kHalf, false, false), "sm80-mma-f16");
  EXPECT_EQ(name(at::kBFloat16, false, false), "sm80-mma-bf16");
  for (const bool hopper : {false, true}) {
    EXPECT_EQ(name(at::kDouble, true, hopper), hopper ? "sm90-dmma-f64" : "sm80-dmma-f64");
  }
  EXPECT_THROW(choose_kernel(at::kInt, {64, 64, 64}, false, false), c10::TypeError);
}

TEST(Heuristics, Float32InHalvesServesBlocksOf64AndMore) {
  const auto name = [](Block block, bool allow_tf32, bool hopper) -> std::string {
    return kernel_name(choose_kernel(at::kFloat, block, allow_tf32, hopper));
  };
  for (const Block& block : {Block{64, 64, 64}, Block{128, 64, 128}}) {
    EXPECT_EQ(name(block, false, true), "sm90-wgmma-f32x3");
    EXPECT_EQ(name(block, true, true), "sm90-wgmma-f32x1");
    EXPECT_EQ(name(block, false, false), "sm80-simt-f32");
    EXPECT_EQ(name(block, true, false), "sm80-mma-tf32");
  }
  for (const Block& block : {Block{32, 64, 64}, Block{64, 32, 64}, Block{128, 128, 32}}) {
    EXPECT_EQ(name(block, false, true), "sm80-simt-f32");
    EXPECT_EQ(name(block, true, true), "sm80-mma-tf32");
  }
}

TEST(Heuristics, HalvesByProducts) {
  EXPECT_EQ(split_parts_of(Kernel::kSm90F32x1), 1);
  EXPECT_EQ(split_parts_of(Kernel::kSm90F32x3), 2);
  EXPECT_EQ(split_parts_of(Kernel::kSm80F32), 0);
}

TEST(Heuristics, ManySmallFloat32MatricesAreNotSplit) {
  const auto name = [](const ProductSize& size, bool allow_tf32 = false) -> std::string {
    return kernel_name(choose_kernel(at::kFloat, {64, 64, 64}, allow_tf32, true, size));
  };
  const auto batch_of = [](int64_t batch, int64_t m, int64_t n, int64_t k) {
    return ProductSize{batch, batch, batch, m, n, k};
  };
  EXPECT_EQ(name(batch_of(500'000, 4, 4, 4)), "sm80-simt-f32");
  EXPECT_EQ(name(batch_of(500'000, 4, 4, 4), true), "sm80-mma-tf32");
  EXPECT_EQ(name(batch_of(100'000, 8, 8, 8)), "sm80-simt-f32");
  EXPECT_EQ(name(batch_of(1'000, 64, 2, 2)), "sm80-simt-f32");       // K and N padded 32 times
  EXPECT_EQ(name(batch_of(1'000, 32, 32, 32)), "sm90-wgmma-f32x3");  // 2.7 times the memory
  EXPECT_EQ(name(batch_of(1'000, 64, 64, 64)), "sm90-wgmma-f32x3");
  EXPECT_EQ(name(batch_of(1, 4, 4, 4)), "sm90-wgmma-f32x3");        // 32 KiB in all
  EXPECT_EQ(name(batch_of(1, 1, 4096, 4096)), "sm90-wgmma-f32x3");  // B is whole blocks
  EXPECT_EQ(name({1, 1, 1'000'000, 4, 4, 4}), "sm90-wgmma-f32x3");  // one matrix for all
  EXPECT_EQ(name({1'000'000, 1, 1'000'000, 4, 4, 4}), "sm80-simt-f32");
}

TEST(Heuristics, LargeTilesOnceTheyFillTheChip) {
  constexpr int kMultiprocessors = 132;
  const auto tile = [](Kernel kernel, int64_t batch, int64_t m, int64_t n) {
    return choose_tile(kernel, batch, m, n, kMultiprocessors);
  };
  EXPECT_EQ(tile(Kernel::kSm80F16, 1, 1024, 1024), Tile::kSmall);
  EXPECT_EQ(tile(Kernel::kSm80F16, 1, 1536, 1408), Tile::kLarge);  // 132 tiles of 128 x 128
  EXPECT_EQ(tile(Kernel::kSm80F16, 132, 1, 1), Tile::kLarge);
  EXPECT_EQ(tile(Kernel::kSm90F32x3, 1, 1024, 1024), Tile::kSmall);
  EXPECT_EQ(tile(Kernel::kSm90F32x3, 1, 1536, 1536), Tile::kSmall);
  EXPECT_EQ(tile(Kernel::kSm90F32x3, 1, 1664, 1664), Tile::kLarge);  // 169 tiles of 128 x 128
  EXPECT_EQ(tile(Kernel::kSm90F64, 1, 1536, 1536), Tile::kSmall);
  EXPECT_EQ(tile(Kernel::kSm90F64, 1, 2048, 2048), Tile::kLarge);
  EXPECT_EQ(tile(Kernel::kSm90F32x1, 1, 1024, 1024), Tile::kSmall);
  EXPECT_EQ(tile(Kernel::kSm90F32x1, 1, 1025, 1024), Tile::kLarge);
  EXPECT_EQ(tile(Kernel::kSm90F16, 1, 1024, 1024), Tile::kSmall);  // 128 tiles of 128 x 64
  EXPECT_EQ(tile(Kernel::kSm90F16, 1, 1025, 1024), Tile::kLarge);
  EXPECT_EQ(tile(Kernel::kSm90Bf16, 133, 1, 1), Tile::kLarge);
}

TEST(Heuristics, LargeConvolutionTilesFromTwoWavesOn) {
  constexpr int kMultiprocessors = 132;
  EXPECT_EQ(choose_conv_tile(128, 512, kMultiprocessors), Tile::kSmall);
  EXPECT_EQ(choose_conv_tile(256, 528, kMultiprocessors), Tile::kSmall);  // 264 tiles of 128 x 256
  EXPECT_EQ(choose_conv_tile(256, 529, kMultiprocessors), Tile::kLarge);
}

}  // namespace
}  // namespace spamm::cuda
