// The end of a Hopper convolution: its launch, and output norms if they are wanted.
#pragma once

#include "conv/backend.h"
#include "cuda/conv/arguments_sm90.h"
#include "cuda/device.h"
#include "kernels/common/tile.h"

namespace spamm::cuda {

// `p` has its shape and box. `dense`: nothing is skipped.
kernels::TileSize choose_tile(const Convolution& conv, const kernels::conv::sm90::ConvParams& p,
                              bool dense, int multiprocessors);

// The logarithm of the number of segments of a tile's steps. `dense`: nothing is skipped.
int choose_log2_segments(const Convolution& conv, bool dense, int multiprocessors);

// Whether the kernel for deviations runs: for a base or norms by pixel.
bool runs_as_deviation(const Convolution& conv);

// Starts the kernel. `arguments` has all parameters but those of the output norms. Element: __half,
// __nv_bfloat16, or float for TF32.
template <class Element>
ConvolutionResult finish(const Convolution& conv, Arguments& arguments, const void* input,
                         const void* weight, kernels::TileSize tile, const OnDevice& device);

}  // namespace spamm::cuda
