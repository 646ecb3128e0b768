// The parameters of the kernels of deviations from a reference image, and their launches. On Hopper
// all images are channels-last, their channels a multiple of 16 bytes. A launch runs on the current
// stream; its result is the error code of the driver or the launch.
#pragma once

#include "kernels/common/integers.h"
#include "kernels/conv/sm90/params.h"

namespace spamm::kernels::reference {

using conv::sm90::ConvParams;
using conv::sm90::ConvShape;
using conv::sm90::Extent;
using conv::sm90::Log2Block;

// The second of two parts of an input along its channels: an image like the first, and the norms of
// its pixels. The channels of the first fill groups of 64.
struct SecondPart {
  const void* data;  // null: the input is in one part
  int channels;
  const float* norms;
};

// A convolution of deviations, in pixel blocks of one image: activation(sums + base) -
// activation(base). `activation` of ConvParams is kNone.
struct DeviationParams : ConvParams {
  CUtensorMap map_base;
  const void* base;  // one image like the output's; may be null
  Activation base_activation;
  float* norm_pixels;  // output norms (images, rows, columns, channel groups); may be null
  bool by_strips;      // takes_strips(); norm_input is then that of single pixels
  CUtensorMap map_second;
  SecondPart second;  // by strips
  // An output in phases that is put in its places: the channels of a pixel, 32 or a multiple of 64;
  // 0: the output is as it is. map_output is then that of the first phase (pixel_norms.cuh).
  int phase_channels;
  CUtensorMap map_phases[3];
};

// Whether the kernel by strips (strips.cuh) can compute a convolution of a half type that skips
// zeros alone.
inline bool takes_strips(const ConvShape& shape, const Log2Block& block, int log2_block_k) {
  const auto are = [](const Size2& size, int value) {
    return size.rows == value && size.columns == value;
  };
  return are(shape.kernel, 3) && are(shape.stride, 1) && are(shape.dilation, 1) &&
         block.images == 0 && block.rows == 3 && block.columns == 3 && log2_block_k <= 6;
}

// Max pooling: max(input + reference) - max(reference).
struct DeviationPoolParams : conv::sm90::PixelPoolParams {
  const void* reference;    // one image
  float* norms;             // (images, rows, columns, channel groups)
  const float* norm_input;  // of 2^log2_norm_columns columns together; null: not given
  int log2_norm_columns, norm_groups;
  int groups;
};
template <class Element>
cudaError_t launch_deviation_pool(DeviationPoolParams params, cudaStream_t stream);

// Concatenation along the channels.
constexpr int kMostJoined = 4;
struct JoinSource {
  const void* data;
  int first, channels;  // of the output's channels
};
struct JoinParams {
  JoinSource parts[kMostJoined];
  int count;
  void* output;
  float* norms;  // (images, rows, columns, groups of 64 channels)
  int images, channels, groups;
  Size2 size;
  Divisor by_lanes;  // threads of a pixel; set by the launch
};
template <class Element>
cudaError_t launch_join_deviations(JoinParams params, cudaStream_t stream);

// ---- Portable -----------------------------------------------------------------------------------

// The epilogue as a pass of its own. Images of one layout, in chunks of 16 bytes.
struct DeviationEpilogueParams {
  void* output;
  const void* residual;  // null if there is none
  const void* base;      // one image
  int64_t chunks, image_chunks;
  Activation activation;
};

// `stream` is the current stream. The result is the launch's error code.
template <class Element>
cudaError_t launch_deviation_epilogue(DeviationEpilogueParams params, int multiprocessors,
                                      cudaStream_t stream);

}  // namespace spamm::kernels::reference
