// What a device can implement for conv2d_max_pool, to be registered by backends.h.
#pragma once

#include "conv/backend.h"

namespace spamm {

// A convolution that skips nothing, and max pooling of its output: 2 x 2 pixels, with stride 2. The
// result has the bits of both, one after the other.
struct ConvPoolBackend {
  bool (*supports)(const Convolution&);                // the output is not empty
  at::Tensor (*run)(const Convolution&, const Knob&);  // in any memory format
};

}  // namespace spamm
