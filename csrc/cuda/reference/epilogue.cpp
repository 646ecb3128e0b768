// The epilogue of deviations for convolutions whose kernel does not compute it (sm_80 and newer).
#include <c10/cuda/CUDAException.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/conv/sizes_sm90.h"
#include "cuda/device.h"
#include "cuda/operand.h"
#include "kernels/reference/params.h"
#include "reference/reference.h"

namespace spamm::cuda {
namespace {

using at::Tensor;

bool is_readable(const Tensor& x, at::MemoryFormat format) {
  return x.is_contiguous(format) &&
         reinterpret_cast<uintptr_t>(x.const_data_ptr()) % kAlignment == 0;
}

// float64 is left to ATen: the activations are those of float32.
bool supports(const Tensor& output, const std::optional<Tensor>& residual, const Tensor& base,
              Activation activation) {
  const auto fits = [&](at::MemoryFormat format) {
    return is_readable(output, format) && is_readable(base, format) &&
           (!residual || is_readable(*residual, format));
  };
  return activation != Activation::kNone && output.scalar_type() != at::kDouble &&
         base.numel() > 0 && base.numel() * base.element_size() % kAlignment == 0 &&
         (fits(at::MemoryFormat::ChannelsLast) || fits(at::MemoryFormat::Contiguous));
}

Tensor run(const Tensor& output, const std::optional<Tensor>& residual, const Tensor& base,
           Activation activation) {
  if (output.numel() == 0) return output;
  const OnDevice device(output);
  const int64_t entries = kAlignment / output.element_size();
  const kernels::reference::DeviationEpilogueParams params = {
      .output = output.mutable_data_ptr(),
      .residual = residual ? residual->const_data_ptr() : nullptr,
      .base = base.const_data_ptr(),
      .chunks = output.numel() / entries,
      .image_chunks = base.numel() / entries,
      .activation = activation};
  const auto launch =
      of_type(output.scalar_type(), kernels::reference::launch_deviation_epilogue<__half>,
              kernels::reference::launch_deviation_epilogue<__nv_bfloat16>,
              kernels::reference::launch_deviation_epilogue<float>);
  C10_CUDA_CHECK(launch(params, device.multiprocessors(), device.stream()));
  return output;
}

const Backends<ReferenceBackend> of_epilogue(at::kCUDA, Rank::kPortable,
                                             {.epilogue = {&supports, &run}});

}  // namespace
}  // namespace spamm::cuda
