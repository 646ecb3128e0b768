// Convolution of a batch over several devices. Each shard of the images is convolved where it lies,
// by the kernel that the whole batch would have had, so that the bits are those of the whole.
//
// A held tau needs nothing else of the other shards. A searched one depends on all images: the norm
// maps of all shards are brought to the first device, and the threshold found there to all others.
// That computes the norms twice.
#include <ATen/Functions.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "arguments.h"
#include "checks.h"
#include "conv/layers.h"
#include "conv/pixel_blocks.h"
#include "shards/devices.h"
#include "shards/plan.h"
#include "threshold.h"

namespace spamm {
namespace shards {
namespace {

using at::TensorList;

// Shards of one batch: (images, channels, height, width), on devices of one kind.
void check_shards(TensorList shards) {
  TORCH_CHECK_VALUE(!shards.empty(), "input_shards must hold at least one shard; got none");
  const Tensor& first = shards.front();
  for (const Tensor& shard : shards) {
    TORCH_CHECK(shard.dim() == 4 && shard.sizes().slice(1) == first.sizes().slice(1),
                "input_shards must be (images, channels, height, width), alike but for the images; "
                "got shapes ",
                first.sizes(), " and ", shard.sizes());
    TORCH_CHECK_TYPE(shard.scalar_type() == first.scalar_type(),
                     "input_shards must have one dtype; got ", dtype_of(first), " and ",
                     dtype_of(shard));
    TORCH_CHECK(shard.device().type() == first.device().type(),
                "input_shards must lie on devices of one kind; got ", first.device(), " and ",
                shard.device());
  }
}

// A pixel block must not hold images of two shards.
void check_pixel_blocks(const std::vector<Convolution>& shards) {
  const int64_t block_images = shards.front().blocks.edge[0];
  int64_t images_left = shards.front().whole_images;
  for (const Convolution& shard : shards) {
    const int64_t images = shard.shape.images;
    images_left -= images;
    TORCH_CHECK_VALUE(images_left == 0 || images % block_images == 0,
                      "each shard but the last must be whole pixel blocks, a multiple of ",
                      block_images, " images; got ", images);
  }
}

bool is_empty(const Convolution& conv) { return c10::multiply_integers(conv.output_sizes()) == 0; }

// The threshold that the knob asks for over all images, on the first shard's device. Nothing if the
// output has no pixel.
OptTensor search(const std::vector<Convolution>& shards, const Knob& knob) {
  Tensor norm_weight;
  std::vector<Tensor> pixels;
  for (const Convolution& shard : shards) {
    if (is_empty(shard)) continue;
    const ConvNormMaps maps = norm_maps_of(shard, knob);
    if (!norm_weight.defined()) norm_weight = maps.weight;
    pixels.push_back(maps.pixels.to(norm_weight.device()));
  }
  if (pixels.empty()) return std::nullopt;
  const Tensor norms = at::cat(pixels, -1);  // images are the slowest index of pixel blocks
  const PartialBlockScale scale(shards.front().whole_blocks(), norm_weight.options());
  return threshold_from_knob(norm_weight, norms, knob, scale(norms, 0));
}

// The knob of each shard. A tau on the CPU serves all devices.
std::vector<Knob> knobs_of(TensorList shards, const Knob& knob) {
  std::vector<Knob> knobs(shards.size(), knob);
  if (!knob.tau || knob.tau->is_cpu()) return knobs;
  const std::vector<Tensor> taus = beside(shards, {*knob.tau}, "tau");
  for (size_t p = 0; p < knobs.size(); ++p) knobs[p].tau = taus[p];
  return knobs;
}

void check_tau_of_shards(const Tensor& tau, at::Device of_shards) {
  check_tau(tau, tau.device());
  TORCH_CHECK(tau.is_cpu() || tau.device().type() == of_shards.type(),
              "tau must be on a device like the shards', ", of_shards, ", or on the CPU; got ",
              tau.device());
}

std::vector<Tensor> conv2d_shards_op(ConvShardsArguments& x) {
  check_shards(x.input_shards);
  x.knob = checked_knob(x.knob);
  if (x.knob.tau) check_tau_of_shards(*x.knob.tau, x.input_shards.front().device());
  const std::vector<Tensor> weights = beside(x.input_shards, x.weight, "weight");
  const std::vector<Tensor> biases =
      x.bias.empty() ? std::vector<Tensor>() : beside(x.input_shards, x.bias, "bias");
  int64_t images = 0;
  for (const Tensor& shard : x.input_shards) images += shard.size(0);

  std::vector<Knob> knobs = knobs_of(x.input_shards, x.knob);
  std::vector<Convolution> shards;
  for (size_t p = 0; p < x.input_shards.size(); ++p) {
    ConvArguments shard = {x, x.input_shards[p], weights[p],
                           biases.empty() ? OptTensor() : OptTensor(biases[p])};
    shard.knob = knobs[p];
    shards.push_back(check_conv2d(shard, /*wants_output_norms=*/false, images));
  }
  check_pixel_blocks(shards);
  if (!x.knob.tau) {
    if (const OptTensor found = search(shards, x.knob))
      knobs = knobs_of(x.input_shards, {.tau = found});
  }
  std::vector<Tensor> outputs;
  outputs.reserve(shards.size());
  for (size_t p = 0; p < shards.size(); ++p)
    outputs.push_back(convolve(shards[p], knobs[p]).output);
  return outputs;
}

// What one device takes at most, at 760 TFLOP/s for half types, as an H200; other types take longer
// by about the squares of their entries' sizes.
double ns_on_one(const Convolution& conv, const Knob& knob) {
  constexpr double kFlopPerNs = 760e3;
  const ConvShape& shape = conv.shape;
  const auto size = static_cast<double>(conv.input.element_size());
  const double flop = 2.0 * static_cast<double>(c10::multiply_integers(conv.output_sizes())) *
                      static_cast<double>(shape.group_in_channels() * shape.kernel_positions());
  return knob.valid_ratio.value_or(1) * flop / kFlopPerNs * size * size / 4;
}

double bytes_of_images(const Convolution& conv) {
  return static_cast<double>((conv.input.numel() + c10::multiply_integers(conv.output_sizes())) *
                             conv.input.element_size());
}

}  // namespace
}  // namespace shards

Tensor conv2d_on_devices(const ConvArguments& x) {
  std::vector<at::Device> places = check_devices(*x.devices);
  ConvArguments checked = x;
  checked.knob = checked_knob(x.knob);
  const Convolution conv = check_conv2d(checked, /*wants_output_norms=*/false);
  TORCH_CHECK_VALUE(!x.norm_weight && !x.norm_input && !x.residual,
                    "devices must be given without norm_weight, norm_input and residual; got one "
                    "of them");
  // Images travel to other devices and back only where that saves time.
  const auto home = std::ranges::find(places, x.input.device());
  if (home != places.end() && !pays_to_share(shards::ns_on_one(conv, x.knob), /*least_ns=*/1e6,
                                             shards::bytes_of_images(conv))) {
    places = {*home};
  }
  // Whole pixel blocks for each device, as evenly as possible. A small batch takes fewer devices.
  const int64_t images = conv.shape.images, block_images = conv.blocks.edge[0];
  const int64_t blocks = conv.blocks.count()[0];
  const int64_t parts = std::clamp<int64_t>(blocks, 1, static_cast<int64_t>(places.size()));
  const auto cut = [&](int64_t p) { return shards::equal_cut(images, block_images, p, parts); };
  std::vector<Tensor> shards;
  for (int64_t p = 0; p < parts; ++p) {
    const Tensor shard = conv.input.slice(0, cut(p), cut(p + 1));
    shards.push_back(shard.to(shard.options().device(places[p])));
  }
  const std::vector<Tensor> outputs = ops::conv2d_shards(
      {x, shards, {x.weight}, x.bias ? std::vector{*x.bias} : std::vector<Tensor>()});
  const auto as_given = [&](const Tensor& y) { return x.input.dim() == 4 ? y : y.squeeze(0); };
  if (parts == 1 && places[0] == x.input.device()) return as_given(outputs[0]);
  const Tensor output = at::empty(
      conv.output_sizes(), outputs.front().options().device(x.input.device()), conv.output_format);
  for (int64_t p = 0; p < parts; ++p) {
    output.slice(0, cut(p), cut(p + 1)).copy_(outputs[p]);
  }
  return as_given(output);
}

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) {
  m.impl("conv2d_shards", boxed<&shards::conv2d_shards_op>());
}

}  // namespace spamm
