// A convolution of deviations whose input is several parts along its channels, and whose output may
// be in phases: what a device can implement without copies that join and place them.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "conv/backend.h"

namespace spamm {

struct DeviationParts {
  std::vector<at::Tensor> parts;  // of the input, one at least, in the order of the channels
  std::vector<at::Tensor> norms;  // pixel_norms() of them, or none
  bool in_phases;                 // the output's channels are [row][column][C] of 2 x 2 pixels
};

// How many neighbouring columns share a norm of an output that was in phases: 64 channels of the
// convolution are two columns of 32.
inline int64_t columns_of_norms(int64_t channels) {
  return 2 * channels == kLayerNormBlock ? 2 : 1;
}

// The result is channels-last, phases in their places, and has pixel_norms() of columns_of_norms()
// columns together. `conv.input` is the first part; the convolution's shape is that of the whole
// input.
struct DeviationPartsBackend {
  bool (*supports)(const Convolution& conv, const Knob& knob, const DeviationParts& given);
  ConvolutionResult (*run)(const Convolution& conv, const Knob& knob, const DeviationParts& given);
};

}  // namespace spamm
