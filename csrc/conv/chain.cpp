// The op behind SpAMMChain: convolutions and max poolings one after the other. Each computes output
// norms for the convolution that follows. One call pays for Python and the dispatcher only once.
#include <ATen/core/List.h>
#include <torch/library.h>

#include <algorithm>

#include "checks.h"
#include "conv/layers.h"

namespace spamm {
namespace {

using OptTensor = std::optional<Tensor>;
using OptTensorList = c10::List<OptTensor>;

// `layers` lists each layer as its kind, then its settings. Kernel, stride, padding and dilation
// are pairs (rows, columns).
//   kConvolution  stride, padding, dilation, groups, activation, weight_is_ready, kind of knob,
//                 block (m, k, n), pixel block (images, rows, columns); zeros: the default block
//   kMaxPool      kernel, stride, padding, dilation, ceil_mode
enum Kind : int64_t { kConvolution, kMaxPool };
enum KnobKind : int64_t { kTau, kValidRatio, kMaxError };

// Reads `layers` number by number.
class Layers {
 public:
  explicit Layers(IntArrayRef numbers) : numbers_(numbers) {}

  bool done() const { return numbers_.empty(); }
  bool next_is(Kind kind) const { return !done() && numbers_.front() == kind; }
  IntArrayRef read(size_t count) {
    TORCH_CHECK_VALUE(count <= numbers_.size(), "layers must be whole; the last one lacks ",
                      count - numbers_.size(), " of its numbers");
    const IntArrayRef numbers = numbers_.slice(0, count);
    numbers_ = numbers_.slice(count);
    return numbers;
  }
  int64_t read() { return read(1).front(); }

 private:
  IntArrayRef numbers_;
};

at::OptionalIntArrayRef unless_zero(IntArrayRef edges) {
  const bool zero = std::all_of(edges.begin(), edges.end(), [](int64_t edge) { return edge == 0; });
  return zero ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(edges);
}

Activation as_activation(int64_t number) {
  constexpr auto kCount = static_cast<int64_t>(kActivationNames.size());
  TORCH_CHECK_VALUE(number >= 0 && number < kCount, "an activation must be a number from 0 to ",
                    kCount - 1, "; got ", number);
  return static_cast<Activation>(number);
}

// Reading the number must not wait for a GPU.
double host_number(const Tensor& knob) {
  TORCH_CHECK_VALUE(knob.is_cpu() && knob.dim() == 0,
                    "the knob of a valid_ratio or max_error must be 0-d and on the CPU; got shape ",
                    knob.sizes(), " on ", knob.device());
  return knob.item<double>();
}

void check_count(bool right, size_t weights) {
  TORCH_CHECK_VALUE(right, "weights must be as many as convolutions; got ", weights);
}

Tensor chain(const Tensor& input, at::TensorList weights, const OptTensorList& biases,
             const OptTensorList& norm_weights, at::TensorList knobs, IntArrayRef numbers) {
  TORCH_CHECK_VALUE(biases.size() == weights.size() && norm_weights.size() == weights.size() &&
                        knobs.size() == weights.size(),
                    "weights, biases, norm_weights and knobs must be equally many; got ",
                    weights.size(), ", ", biases.size(), ", ", norm_weights.size(), " and ",
                    knobs.size());
  Layers layers(numbers);
  TORCH_CHECK_VALUE(!layers.done(), "layers must hold a layer; got none");
  Tensor current = input;
  Tensor norms;  // output norms of the previous layer, or undefined
  const auto pass_on = [&](const ConvolutionResult& result) {
    current = result.output;
    norms = result.norms;
  };
  size_t convolutions = 0;
  while (!layers.done()) {
    const int64_t kind = layers.read();
    TORCH_CHECK_VALUE(kind == kConvolution || kind == kMaxPool,
                      "a layer's kind must be 0 (convolution) or 1 (max pooling); got ", kind);
    if (kind == kMaxPool) {
      const IntArrayRef kernel = layers.read(2), stride = layers.read(2), padding = layers.read(2),
                        dilation = layers.read(2);
      const bool ceil_mode = layers.read() != 0;
      pass_on(check_and_pool(current, kernel, stride, padding, dilation, ceil_mode,
                             layers.next_is(kConvolution)));
      continue;
    }
    check_count(convolutions < weights.size(), weights.size());
    const IntArrayRef stride = layers.read(2), padding = layers.read(2), dilation = layers.read(2);
    const int64_t groups = layers.read();
    const Activation activation = as_activation(layers.read());
    const bool weight_is_ready = layers.read() != 0;
    const int64_t knob_kind = layers.read();
    TORCH_CHECK_VALUE(knob_kind >= kTau && knob_kind <= kMaxError,
                      "a knob's kind must be 0 (tau), 1 (valid_ratio) or 2 (max_error); got ",
                      knob_kind);
    const IntArrayRef block = layers.read(3), pixel_block = layers.read(3);
    const Tensor& value = knobs[convolutions];
    Knob knob;
    if (knob_kind == kTau) knob.tau = value;
    if (knob_kind == kValidRatio) knob.valid_ratio = host_number(value);
    if (knob_kind == kMaxError) knob.max_error = host_number(value);
    const ConvArguments arguments = {.input = current,
                                     .weight = weights[convolutions],
                                     .bias = biases[convolutions],
                                     .stride = stride,
                                     .padding = padding,
                                     .dilation = dilation,
                                     .groups = groups,
                                     .knob = checked_knob(knob),
                                     .block = unless_zero(block),
                                     .pixel_block = unless_zero(pixel_block),
                                     .norm_weight = norm_weights[convolutions],
                                     .norm_input = norms.defined() ? OptTensor(norms) : OptTensor(),
                                     .residual = std::nullopt,
                                     .activation = activation,
                                     .weight_is_ready = weight_is_ready};
    pass_on(check_and_convolve(arguments, layers.next_is(kConvolution)));
    ++convolutions;
  }
  check_count(convolutions == weights.size(), weights.size());
  return current;
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) { m.impl("chain", &chain); }

}  // namespace spamm
