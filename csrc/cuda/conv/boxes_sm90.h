// Which pixels share a box of the Hopper convolution, where the pixel blocks do not say it.
#pragma once

#include <optional>

#include "conv/backend.h"

namespace spamm::cuda {

// Dense mode: nothing is skipped but padding, and no norms are taken. This is the same convolution
// with the pixel blocks that suit it, because which pixels share a block changes no bit of the
// result then. A 1 x 1 convolution becomes one of a single line of pixels, so that a block has
// neighbours in memory; its sizes are no longer those of its tensors.
Convolution in_dense_mode(Convolution conv);

// For pixel blocks of one pixel that more than half lack images: the box of several pixels of all
// images that fills tiles better. Each pixel is then judged by itself, as its block demands.
std::optional<Box> box_of_several_pixels(const Convolution& conv);

}  // namespace spamm::cuda
