// Starts the kernels for convolutions whose blocks are mostly empty.
#include "cuda/conv/launch.h"
#include "kernels/common/launch.cuh"
#include "kernels/conv/sm80/thin.cuh"

namespace spamm::cuda {
namespace {

using kernels::conv_thin, kernels::kThinThreads, kernels::NormOf, kernels::ThinParams;

// `kWidth`: channels read at a time; the most of which a group and a block have a multiple.
template <class Element, int kWidth = 16 / sizeof(Element)>
cudaError_t launch_widest(const ThinParams<NormOf<Element>>& p, ThinStage stage,
                          cudaStream_t stream) {
  if constexpr (kWidth > 1) {
    if (p.channels % kWidth != 0) return launch_widest<Element, kWidth / 2>(p, stage, stream);
  }
  const bool is_norms = stage == ThinStage::kNorms;
  const int64_t blocks = p.conv.pixels.block_count();
  const int64_t places = (blocks * p.pixels - 1) / kernels::kThinPixels + 1;
  // The output channels of a thread share what it reads of the input.
  constexpr int kOut = sizeof(Element) == 8 ? 2 : 4;
  const bool shares = p.conv.out_channels % kOut == 0;
  const int64_t outputs = places * p.groups * p.conv.out_channels / (shares ? kOut : 1);
  const int64_t threads =
      is_norms ? blocks * p.conv.pixels.positions * p.groups * p.depth_blocks : outputs;
  const bool once = p.channels == kWidth;
  const auto kernel = is_norms && once ? kernels::thin_norms<Element, kWidth, true>
                      : is_norms       ? kernels::thin_norms<Element, kWidth, false>
                      : shares         ? conv_thin<Element, kWidth, false, kOut>
                      : once           ? conv_thin<Element, kWidth, true, 1>
                                       : conv_thin<Element, kWidth, false, 1>;
  return kernels::launch(kernel, static_cast<unsigned>((threads - 1) / kThinThreads + 1),
                         kThinThreads, 0, /*overlap_previous=*/false, stream, p);
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

}  // namespace spamm::cuda
