// Convolutions and max poolings one after the other in a single call, each leaving its output's
// norms for the convolution that follows: what SpAMMChain runs, so that the host pays for Python
// and the dispatcher once.
#include <ATen/core/List.h>
#include <torch/library.h>

#include "checks.h"
#include "layers.h"

namespace spamm {
namespace {

using OptTensor = std::optional<Tensor>;
using OptTensorList = c10::List<OptTensor>;

// A layer is a kind and then its settings, pairs being (rows, columns).
//   kConvolution  stride, padding, dilation, groups, relu, knob, block (m, k, n) and pixel block
//                 (images, rows, columns), either all zero for the default
//   kMaxPool      kernel, stride, padding, dilation, ceil_mode
enum Kind : int64_t { kConvolution, kMaxPool };
enum KnobKind : int64_t { kTau, kValidRatio, kMaxError };

// The layers, number by number.
class Layers {
 public:
  explicit Layers(IntArrayRef numbers) : numbers_(numbers) {}

  bool done() const { return numbers_.empty(); }
  bool next_is(Kind kind) const { return !done() && numbers_.front() == kind; }
  IntArrayRef take(size_t count) {
    TORCH_CHECK_VALUE(count <= numbers_.size(), "layers must be whole; the last one lacks ",
                      count - numbers_.size(), " of its numbers");
    const IntArrayRef taken = numbers_.slice(0, count);
    numbers_ = numbers_.slice(count);
    return taken;
  }
  int64_t take() { return take(1).front(); }

 private:
  IntArrayRef numbers_;
};

at::OptionalIntArrayRef unless_zero(IntArrayRef edges) {
  return edges.front() == 0 ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(edges);
}

Tensor chain(const Tensor& input, at::TensorList weights, const OptTensorList& biases,
             const OptTensorList& norm_weights, at::TensorList knobs, IntArrayRef numbers) {
  TORCH_CHECK_VALUE(biases.size() == weights.size() && norm_weights.size() == weights.size() &&
                        knobs.size() == weights.size(),
                    "weights, biases, norm_weights and knobs must be equally many; got ",
                    weights.size(), ", ", biases.size(), ", ", norm_weights.size(), " and ",
                    knobs.size());
  Layers layers(numbers);
  Tensor current = input;
  OptTensor norms;
  size_t convolutions = 0;
  while (!layers.done()) {
    const int64_t kind = layers.take();
    TORCH_CHECK_VALUE(kind == kConvolution || kind == kMaxPool,
                      "a layer's kind must be 0 (convolution) or 1 (max pooling); got ", kind);
    if (kind == kMaxPool) {
      const IntArrayRef kernel = layers.take(2), stride = layers.take(2), padding = layers.take(2),
                        dilation = layers.take(2);
      std::tie(current, norms) =
          max_pool2d_with_norms(current, kernel, stride, padding, dilation, layers.take() != 0);
      continue;
    }
    TORCH_CHECK_VALUE(convolutions < weights.size(),
                      "weights must be as many as convolutions; got ", weights.size());
    const IntArrayRef stride = layers.take(2), padding = layers.take(2), dilation = layers.take(2);
    const int64_t groups = layers.take();
    const bool relu = layers.take() != 0;
    const int64_t knob_kind = layers.take();
    const IntArrayRef block = layers.take(3), pixel_block = layers.take(3);
    const Tensor& knob = knobs[convolutions];
    const auto number_of = [&](KnobKind kind) {
      return knob_kind == kind ? std::optional(knob.item<double>()) : std::nullopt;
    };
    auto result = check_and_convolve(
        current, weights[convolutions], biases[convolutions], stride, padding, dilation, groups,
        knob_kind == kTau ? OptTensor(knob) : OptTensor(), number_of(kValidRatio),
        number_of(kMaxError), unless_zero(block), unless_zero(pixel_block),
        norm_weights[convolutions], norms, relu, layers.next_is(kConvolution));
    ++convolutions;
    current = result.output;
    norms = result.norms.defined() ? OptTensor(result.norms) : OptTensor();
  }
  return current;
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) { m.impl("chain", &chain); }

}  // namespace spamm
