// Starts the kernels for convolutions whose groups have few channels.
#include "cuda/conv/launch.h"
#include "kernels/common/launch.cuh"
#include "kernels/conv/grouped.cuh"

namespace spamm::cuda {
namespace {

using kernels::GroupedParams, kernels::kGroupedThreads, kernels::NormOf;

// `kWidth`: channels read at a time; the most of which a group has a multiple.
template <class Element, int kWidth = 16 / sizeof(Element)>
cudaError_t launch_widest(const GroupedParams<NormOf<Element>>& p, GroupedStage stage,
                          cudaStream_t stream) {
  if constexpr (kWidth > 1) {
    if (p.channels % kWidth != 0) return launch_widest<Element, kWidth / 2>(p, stage, stream);
  }
  const bool is_norms = stage == GroupedStage::kNorms;
  const int64_t blocks = p.conv.pixels.block_count();
  const int64_t places = (blocks * p.pixels - 1) / kernels::kGroupedPixels + 1;
  const int64_t threads = is_norms ? blocks * p.conv.pixels.positions * p.groups
                                   : places * p.groups * p.conv.out_channels;
  const auto kernel =
      is_norms ? kernels::grouped_norms<Element, kWidth> : kernels::conv_grouped<Element, kWidth>;
  return kernels::launch(kernel, static_cast<unsigned>((threads - 1) / kGroupedThreads + 1),
                         kGroupedThreads, 0, /*overlap_previous=*/false, stream, p);
}

}  // namespace

template <class Element, class Norm>
cudaError_t launch_grouped(const GroupedParams<Norm>& params, GroupedStage stage,
                           cudaStream_t stream) {
  return launch_widest<Element>(params, stage, stream);
}
template cudaError_t launch_grouped<__half>(const GroupedParams<float>&, GroupedStage,
                                            cudaStream_t);
template cudaError_t launch_grouped<__nv_bfloat16>(const GroupedParams<float>&, GroupedStage,
                                                   cudaStream_t);
template cudaError_t launch_grouped<float>(const GroupedParams<float>&, GroupedStage, cudaStream_t);
template cudaError_t launch_grouped<double>(const GroupedParams<double>&, GroupedStage,
                                            cudaStream_t);

}  // namespace spamm::cuda
