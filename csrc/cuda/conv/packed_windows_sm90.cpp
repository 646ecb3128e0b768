// Hopper's convolution of a first layer with a wide kernel, such as ResNet's 7 x 7 with stride 2,
// and nothing skipped: packs the operands and runs conv.cuh on the windows.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>

#include "conv/backend.h"
#include "cuda/conv/arguments_sm90.h"
#include "cuda/conv/boxes_sm90.h"
#include "cuda/conv/launch_sm90.h"
#include "cuda/conv/run_sm90.h"
#include "cuda/conv/sizes_sm90.h"
#include "cuda/device.h"
#include "cuda/operand.h"
#include "threshold.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using namespace kernels::conv::sm90;

// The convolution of the packed operands. Its channels are the entries of a window.
Convolution of_windows(Convolution conv, const PackRowsParams& pack) {
  spamm::ConvShape& shape = conv.shape;
  shape.in_channels = kPackedLine;
  shape.input = {pack.rows(), shape.output.width};
  shape.kernel = {pack.kernel_pairs(), 1};
  shape.stride = {shape.stride.height / 2, 1};
  shape.padding = {0, 0};
  conv.norm_weight.reset();
  return in_dense_mode(conv);
}

bool supports(const Convolution& conv, const Knob& knob) {
  return is_half(conv.input.scalar_type()) && skips_nothing(knob) &&
         has_packed_windows(conv.shape) &&
         conv.shape.out_channels * conv.input.element_size() % kAlignment == 0 &&
         sizes_fit_hopper(conv);
}

bool fuses_epilogue(const Convolution&) { return true; }

ConvolutionResult run(const Convolution& conv, const Knob& knob) {
  const OnDevice device(conv.input);
  const cudaStream_t stream = device.stream();
  const Tensor input = conv.input.contiguous(at::MemoryFormat::ChannelsLast);
  const Tensor weight = conv.weight.contiguous(at::MemoryFormat::ChannelsLast);
  PackRowsParams pack = {.shape = kernel_shape(conv.shape, conv.shape.in_channels),
                         .input = input.const_data_ptr(),
                         .weight = weight.const_data_ptr(),
                         .pairs = nullptr,
                         .singles = nullptr,
                         .packed_weight = nullptr};
  const auto empty = [&](at::IntArrayRef sizes) {
    return at::empty(sizes, input.options(), at::MemoryFormat::Contiguous);
  };
  const int64_t images = conv.shape.images, rows = pack.rows(), columns = pack.columns();
  const bool has_single = conv.shape.kernel.height % 2 == 1;
  const Tensor pairs = empty({images, rows, columns, kPackedPair});
  const Tensor singles = empty({has_single ? images : 0, rows, columns, kPackedChannels});
  const Tensor packed_weight = empty({conv.shape.out_channels, pack.kernel_pairs(), kPackedLine});
  pack.pairs = pairs.mutable_data_ptr();
  pack.singles = has_single ? singles.mutable_data_ptr() : nullptr;
  pack.packed_weight = packed_weight.mutable_data_ptr();
  C10_CUDA_CHECK(launch_pack_rows(pack, stream));

  const Convolution windows = of_windows(conv, pack);
  Arguments arguments(windows, input.options(), kPackedLine);
  ConvParams& p = arguments.params;
  p.box = box_of(p.block);
  const int64_t pixel = kPackedPair * input.element_size();
  p.packed = {.singles = pack.singles,
              .kernel_columns = static_cast<int>(conv.shape.kernel.width),
              .column = pixel * conv.shape.stride.width,
              .row = pixel * columns,
              .image = pixel * columns * rows};
  arguments.set_dense(knob);
  arguments.set_output(conv.output_sizes());
  const auto finish_conv =
      input.scalar_type() == at::kHalf ? finish<__half> : finish<__nv_bfloat16>;
  return finish_conv(conv, arguments, pack.pairs, pack.packed_weight,
                     choose_tile(windows, p, /*dense=*/true, device.multiprocessors()), device);
}

const Backends<ConvBackend> registered(at::kCUDA, Rank::kSpecial,
                                       {&supports, &run, nullptr, &fuses_epilogue});

}  // namespace
}  // namespace spamm::cuda
