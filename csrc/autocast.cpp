// Autocast: products and convolutions run in the lower precision of the autocast region, as torch's
// own ops do. Norm maps and thresholds keep their type, and so do ops that write to memory that is
// given, as torch's do.
#include <ATen/autocast_mode.h>

#include "arguments.h"

namespace spamm {
namespace {

// The arguments of all ops that are cast.
constexpr std::string_view kCast[] = {"a",    "b",     "input",        "weight",  "bias",
                                      "base", "parts", "input_shards", "residual"};

template <c10::DeviceType device>
c10::IValue cast(const c10::IValue& value) {
  const auto dtype = at::autocast::get_lower_precision_fp_from_device_type(device);
  const auto cast_one = [&](const Tensor& t) {
    return at::autocast::cached_cast(dtype, t, device);
  };
  if (value.isTensor()) return cast_one(value.toTensor());
  if (!value.isTensorList()) return value;  // None
  std::vector<Tensor> result;
  for (const Tensor& t : value.toTensorVector()) result.push_back(cast_one(t));
  return result;
}

template <c10::DeviceType device>
void autocast(const c10::OperatorHandle& op, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(
      at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const auto& schema = op.schema().arguments();
  const auto arguments = stack->end() - static_cast<std::ptrdiff_t>(schema.size());
  bool same_weight = true;
  for (size_t i = 0; i < schema.size(); ++i) {
    const std::string_view name = schema[i].name();
    if (std::ranges::find(kCast, name) != std::end(kCast)) {
      c10::IValue result = cast<device>(arguments[i]);
      if (name == "weight") same_weight = result.is(arguments[i]);
      arguments[i] = std::move(result);
    } else if (name == "weight_is_ready" && !same_weight) {
      arguments[i] = false;  // the cast has written it just now
    }
  }
  op.callBoxed(stack);
}

template <c10::DeviceType device>
void register_ops(torch::Library& m) {
  for (const char* name :
       {"spamm", "spamm_with_norms", "conv2d", "dense_conv2d", "conv2d_with_norms"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<device>>());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, AutocastCPU, m) { register_ops<at::kCPU>(m); }
TORCH_LIBRARY_IMPL(spamm_torch, AutocastCUDA, m) { register_ops<at::kCUDA>(m); }

}  // namespace spamm
