// Starts the kernels for convolutions whose blocks are mostly empty.
#include "cuda/conv/launch.h"
#include "kernels/common/launch.cuh"
#include "kernels/conv/sm80/depthwise.cuh"
#include "kernels/conv/sm80/thin.cuh"

namespace spamm::cuda {
namespace {

using kernels::conv_thin, kernels::kThinThreads, kernels::NormOf, kernels::ThinParams;
using kernels::depthwise, kernels::DepthwiseParams, kernels::narrow_groups;

// `kWidth`: channels read at a time.
template <class Element, int kWidth>
cudaError_t launch_width(const ThinParams<NormOf<Element>>& p, ThinStage stage,
                         cudaStream_t stream) {
  const kernels::Im2colMatrix& m = p.conv.pixels;
  const uint32_t blocks = m.block_count();
  const auto start = [&](auto kernel, dim3 grid, auto... lanes) {
    return kernels::launch(kernel, grid, kThinThreads, 0, /*overlap_previous=*/false, stream, p,
                           lanes...);
  };
  const bool are_images = m.log2_rows + m.log2_columns == 0;
  if (stage == ThinStage::kNorms) {
    const uint32_t norms = blocks * m.positions * p.groups * p.depth_blocks;
    const dim3 grid((norms - 1) / kThinThreads + 1);
    return are_images ? start(kernels::thin_norms<Element, kWidth, true>, grid)
                      : start(kernels::thin_norms<Element, kWidth, false>, grid);
  }
  // The output channels of a thread share what it reads of the input.
  constexpr int kOut = sizeof(Element) == 8 ? 4 : 8;
  const bool has_several = p.conv.out_channels % kOut == 0;
  const int images = kernels::thin_images(has_several ? kOut : 1);
  const bool shares = are_images && p.pixels % images == 0;
  const uint32_t chunks = p.groups * p.conv.out_channels / (has_several ? kOut : 1);
  const uint32_t tiles = (chunks - 1) / 32 + 1, lanes = (chunks - 1) / tiles + 1;
  const uint32_t places = shares ? blocks : blocks * p.pixels;
  const dim3 grid((places - 1) / (kThinThreads / lanes) + 1, tiles, shares ? p.pixels / images : 1);
  return kernels::with_constants(
      [&](auto several, auto shared) {
        constexpr int kShare = several ? kOut : 1;
        constexpr int kImages = shared ? kernels::thin_images(kShare) : 1;
        return start(conv_thin<Element, kWidth, kShare, kImages>, grid, lanes);
      },
      has_several, shares);
}

// The widest loads that the channels of a group and of a block are a multiple of.
template <class Element, int kWidth = 16 / sizeof(Element)>
cudaError_t launch_widest(const ThinParams<NormOf<Element>>& p, ThinStage stage,
                          cudaStream_t stream) {
  if (p.channels == 3) return launch_width<Element, 3>(p, stage, stream);
  if constexpr (kWidth > 1) {
    if (p.channels % kWidth != 0) return launch_widest<Element, kWidth / 2>(p, stage, stream);
  }
  return launch_width<Element, kWidth>(p, stage, stream);
}

}  // namespace

template <class Element, class Norm>
cudaError_t launch_thin(const ThinParams<Norm>& params, ThinStage stage, cudaStream_t stream) {
  return launch_widest<Element>(params, stage, stream);
}
template cudaError_t launch_thin<__half>(const ThinParams<float>&, ThinStage, cudaStream_t);
template cudaError_t launch_thin<__nv_bfloat16>(const ThinParams<float>&, ThinStage, cudaStream_t);
template cudaError_t launch_thin<float>(const ThinParams<float>&, ThinStage, cudaStream_t);
template cudaError_t launch_thin<double>(const ThinParams<double>&, ThinStage, cudaStream_t);

template <class Element, class Norm>
cudaError_t launch_thin(const DepthwiseParams<Norm>& p, int most_bytes, cudaStream_t stream) {
  constexpr auto kOne = depthwise<Element, 1, 1>;
  constexpr decltype(kOne) kKernels[][2] = {{kOne, kOne},
                                            {depthwise<Element, 2, 1>, depthwise<Element, 2, 4>},
                                            {depthwise<Element, 4, 1>, depthwise<Element, 4, 4>},
                                            {depthwise<Element, 8, 1>, depthwise<Element, 8, 4>}};
  auto kernel = kKernels[p.log2_images - p.log2_slots][p.log2_slots >= 2];
  if constexpr (sizeof(Element) == 2) {
    using Mma =
        std::conditional_t<std::is_same_v<Element, __half>, kernels::MmaF16, kernels::MmaBf16>;
    constexpr decltype(kOne) kGroups[][2] = {
        {narrow_groups<Mma, 4, 1>, narrow_groups<Mma, 4, 2>},
        {narrow_groups<Mma, 8, 1>, narrow_groups<Mma, 8, 2>},
        {narrow_groups<Mma, 16, 1>, narrow_groups<Mma, 16, 2>}};
    if (p.log2_width > 0) kernel = kGroups[p.log2_width - 2][p.log2_images >= 5];
  }
  const auto* const address = reinterpret_cast<const void*>(kernel);
  const cudaError_t error = kernels::allow_shared_memory(address, most_bytes);
  if (error != cudaSuccess) return error;
  return kernels::launch(kernel, dim3(p.blocks, p.conv.pixels.image_blocks),
                         kernels::kDepthwiseThreads, p.bytes, /*overlap_previous=*/false, stream,
                         p);
}
template cudaError_t launch_thin<__half>(const DepthwiseParams<float>&, int, cudaStream_t);
template cudaError_t launch_thin<__nv_bfloat16>(const DepthwiseParams<float>&, int, cudaStream_t);
template cudaError_t launch_thin<float>(const DepthwiseParams<float>&, int, cudaStream_t);
template cudaError_t launch_thin<double>(const DepthwiseParams<double>&, int, cudaStream_t);

}  // namespace spamm::cuda
