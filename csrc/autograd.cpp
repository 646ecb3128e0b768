// Dense gradients, registered once for all devices. The backward pass is that of the product (or
// the convolution) without skipping. It is composed of ATen ops, so that it can be differentiated
// again. Norms and thresholds have no gradient: they only decide what is skipped.
#include <ATen/FuncTorchTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "activation.h"
#include "arguments.h"
#include "checks.h"
#include "conv/backend.h"

namespace spamm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool needs_grad(const Tensor& t) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !t._fw_grad(/*level=*/0).defined(),
      "spamm_torch's gradients are of reverse mode; got a forward-mode dual "
      "tensor of shape ",
      t.sizes());
  return t.requires_grad();
}
bool needs_grad(const OptTensor& t) { return t && needs_grad(*t); }
bool needs_grad(const std::vector<Tensor>& list) {
  return std::any_of(list.begin(), list.end(), [](const Tensor& t) { return needs_grad(t); });
}

void refuse_functorch() {
  const auto& transforms = at::functorch::functorchTLSAccessor();
  if (!transforms) return;
  try {
    transforms->checkSupportsCppAutogradFunction();
  } catch (const c10::Error&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "spamm_torch's gradients are those of torch.autograd; got a "
                                "gradient by a transform of torch.func");
  }
}

// Runs `op` below autograd. It goes through `Function` only if a gradient is needed, so that
// inference builds no graph and saves no tensor.
template <class Function, class Op, class... Inputs>
auto with_dense_gradient(const Op& op, std::initializer_list<bool> wanted, Inputs&&... inputs) {
  const bool any = std::find(wanted.begin(), wanted.end(), true) != wanted.end();
  if (at::GradMode::is_enabled() && any) {
    refuse_functorch();
    return Function::apply(op, inputs...);
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op();
}

// For ops without a gradient: autograd treats their outputs as constants.
void below_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

// The results of an op of tensors, which leave the stack.
variable_list run_below(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  below_autograd(op, keys, stack);
  variable_list results;
  for (c10::IValue& result : torch::jit::pop(*stack, op.schema().returns().size())) {
    results.push_back(std::move(result).toTensor());
  }
  return results;
}

// Registers `kernel` for these ops.
template <auto kernel>
void impl(torch::Library& m, std::initializer_list<const char*> names) {
  for (const char* name : names) m.impl(name, torch::CppFunction::makeFromBoxedFunction<kernel>());
}

// C = alpha * A @ B + beta * input; `op` computes C, or C and its norms, which have no gradient.
struct ProductFunction : torch::autograd::Function<ProductFunction> {
  template <class Op>
  static variable_list forward(AutogradContext* ctx, const Op& op, const Tensor& a, const Tensor& b,
                               const OptTensor& input, const Scalar& beta, const Scalar& alpha) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({a, b});
    ctx->saved_data["beta"] = beta;
    ctx->saved_data["alpha"] = alpha;
    if (input) ctx->saved_data["input_shape"] = input->sym_sizes();
    variable_list results = op();
    if (results.size() > 1) ctx->mark_non_differentiable({results[1]});
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    const auto saved = ctx->get_saved_variables();
    const Tensor &a = saved[0], &b = saved[1];
    const Scalar alpha = ctx->saved_data["alpha"].toScalar();
    Tensor grad_a, grad_b, grad_input;
    if (ctx->needs_input_grad(0)) grad_a = grad.matmul(b.mT()).mul(alpha);
    if (ctx->needs_input_grad(1)) grad_b = a.mT().matmul(grad).mul(alpha);
    if (ctx->saved_data.count("input_shape") && ctx->needs_input_grad(2)) {
      const auto shape = ctx->saved_data["input_shape"].toSymIntVector();
      grad_input = grad.sum_to_size_symint(shape).mul(ctx->saved_data["beta"].toScalar());
    }
    return {Tensor(), grad_a, grad_b, grad_input, Tensor(), Tensor()};
  }
};

// Tells whether no tensor has to do with gradients, which is usual, without reading the arguments.
bool is_plain(const c10::OperatorHandle& op, const Stack& stack) {
  return std::all_of(stack.end() - size_of(op), stack.end(), [](const c10::IValue& x) {
    if (!x.isTensor()) return true;
    const Tensor& t = x.toTensor();
    return !t.requires_grad() && !t._fw_grad(/*level=*/0).defined();
  });
}

// spamm, spamm_with_norms and multiply.
template <class Arguments>
void product_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (is_plain(op, *stack)) return below_autograd(op, keys, stack);
  const auto x = arguments_of<Arguments>(op, *stack);
  for (const Tensor& result :
       with_dense_gradient<ProductFunction>([&] { return run_below(op, keys, stack); },
                                            {needs_grad(x.a), needs_grad(x.b), needs_grad(x.input)},
                                            x.a, x.b, x.input, x.beta, x.alpha)) {
    stack->emplace_back(result);
  }
}

// The gradient of what an activation is applied to, of those that tell it from their output. Of the
// others, and of slopes, a gradient needs their argument: where one is wanted, such an activation
// is therefore torch's own, after the convolution.
Tensor grad_before(Activation activation, double slope, const Tensor& grad, const Tensor& output) {
  switch (activation) {
    case Activation::kNone:
      return grad;
    case Activation::kRelu:
      return at::threshold_backward(grad, output, 0);
    case Activation::kRelu6:
      return at::hardtanh_backward(grad, output, 0, 6);
    case Activation::kLeakyRelu:
      return at::leaky_relu_backward(grad, output, slope, /*self_is_result=*/true);
    case Activation::kHardswish:
    case Activation::kSilu:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, "no gradient of ", facts_of(activation).name, " by its output");
}

// activation(convolution + bias + residual); `op` computes it.
struct Conv2dFunction : torch::autograd::Function<Conv2dFunction> {
  template <class Op>
  static Tensor forward(AutogradContext* ctx, const Op& op, const Tensor& input,
                        const Tensor& weight, const OptTensor& bias, const OptTensor& residual,
                        const ConvOptions& options, Activation activation) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->saved_data["stride"] = IntArrayRef(options.stride);
    ctx->saved_data["padding"] = IntArrayRef(options.padding);
    ctx->saved_data["dilation"] = IntArrayRef(options.dilation);
    ctx->saved_data["groups"] = options.groups;
    ctx->saved_data["activation"] = static_cast<int64_t>(activation);
    ctx->saved_data["slope"] = options.slope.number;
    ctx->saved_data["has_residual"] = residual.has_value();
    if (bias) ctx->saved_data["bias_shape"] = bias->sym_sizes();
    const Tensor output = op();
    ctx->save_for_backward(activation == Activation::kNone ? variable_list{input, weight}
                                                           : variable_list{input, weight, output});
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto ints = [&](const char* name) { return ctx->saved_data[name].toDimVector(); };
    const bool with_bias = ctx->saved_data.count("bias_shape") > 0;
    const bool batched = saved[0].dim() == 4;
    const auto as_batch = [&](const Tensor& t) { return batched ? t : t.unsqueeze(0); };
    const auto activation = static_cast<Activation>(ctx->saved_data["activation"].toInt());
    const double slope = ctx->saved_data["slope"].toDouble();
    const Tensor grad =
        saved.size() == 3 ? grad_before(activation, slope, grads[0], saved[2]) : grads[0];
    auto dilation = ints("dilation");
    dilation.resize(2, dilation.front());
    for (int64_t d = 0; d < 2; ++d) {
      if (saved[1].sym_size(2 + d) == 1) dilation[d] = 1;  // as in check_convolution
    }
    const c10::SymInt zero(0);
    const auto bias_shape =
        with_bias ? ctx->saved_data["bias_shape"].toSymIntVector() : std::vector<c10::SymInt>{};
    auto [grad_input, grad_weight, grad_bias] = at::convolution_backward_symint(
        as_batch(grad), as_batch(saved[0]), saved[1],
        with_bias ? at::OptionalSymIntArrayRef(bias_shape) : at::OptionalSymIntArrayRef(),
        c10::fromIntArrayRefSlow(ints("stride")), c10::fromIntArrayRefSlow(ints("padding")),
        c10::fromIntArrayRefSlow(dilation), /*transposed=*/false, {zero, zero},
        ctx->saved_data["groups"].toInt(),
        {ctx->needs_input_grad(0), ctx->needs_input_grad(1),
         with_bias && ctx->needs_input_grad(2)});
    if (!batched && grad_input.defined()) grad_input = grad_input.squeeze(0);
    // Tensors that are absent have no number.
    const bool for_residual =
        ctx->saved_data["has_residual"].toBool() && ctx->needs_input_grad(with_bias ? 3 : 2);
    return {Tensor(), grad_input, grad_weight, grad_bias, for_residual ? grad : Tensor(),
            Tensor(), Tensor()};
  }
};

// A convolution with a dense gradient. `run` computes it with the activation that it is given.
template <class Run>
Tensor conv_with_gradient(const Run& run, const ConvArguments& x) {
  const Activation activation = check_activation(x);
  const Slope slope = x.slope;  // as the caller gave it
  const std::initializer_list<bool> wanted = {needs_grad(x.input), needs_grad(x.weight),
                                              needs_grad(x.bias), needs_grad(x.residual),
                                              needs_grad(slope.tensor)};
  const bool is_given = facts_of(activation).needs_argument || slope.tensor || !(slope.number >= 0);
  const bool apart = is_given && at::GradMode::is_enabled() &&
                     std::find(wanted.begin(), wanted.end(), true) != wanted.end();
  const Activation inside = apart ? Activation::kNone : activation;
  const ConvOptions& options = x;
  const Tensor output = with_dense_gradient<Conv2dFunction>(
      [&] { return run(inside); }, wanted, x.input, x.weight, x.bias, x.residual, options, inside);
  return apart ? apply_epilogue(output, std::nullopt, activation, slope) : output;
}

// conv2d and dense_conv2d.
template <class Arguments>
void conv_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (is_plain(op, *stack)) return below_autograd(op, keys, stack);
  auto x = arguments_of<Arguments>(op, *stack);
  const auto run = [&](Activation inside) {
    if (const std::string name(facts_of(inside).name); name != x.activation) {
      torch::jit::drop(*stack, size_of(op));
      x.activation = name;
      x.slope = {};
      push_arguments(op, *stack, x);
    }
    return run_below(op, keys, stack)[0];
  };
  stack->emplace_back(conv_with_gradient(run, x));
}

// The gradients of each part are those of its rows of A times the whole of B, which is gathered
// beside them. The gradients of B's shards are sums over the parts, through the copies made here.
void spamm_shards_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto [a, b, knob, block] = arguments_of<ProductShardsArguments>(op, *stack);
  below_autograd(op, keys, stack);
  if (!at::GradMode::is_enabled() || !(needs_grad(a) || needs_grad(b))) return;
  std::vector<Tensor> outputs = torch::jit::pop(*stack).toTensorVector();
  const OptTensor no_input;
  for (size_t p = 0; p < outputs.size(); ++p) {
    Tensor whole_b = b[p];
    if (whole_b.size(0) != a[p].size(1)) {
      std::vector<Tensor> rows;
      rows.reserve(b.size());
      for (const Tensor& shard : b) rows.push_back(shard.to(a[p].device()));
      whole_b = at::cat(rows);
    }
    outputs[p] = with_dense_gradient<ProductFunction>([&] { return variable_list{outputs[p]}; },
                                                      {needs_grad(a[p]), needs_grad(whole_b)}, a[p],
                                                      whole_b, no_input, 1, 1)[0];
  }
  stack->emplace_back(outputs);
}

// For ops that also return output norms, write to memory that is given, or run several layers: they
// are for inference. A gradient requested through them is most likely a mistake, so it is an error.
void check_no_gradient(const c10::OperatorHandle& op, Stack* stack) {
  if (is_plain(op, *stack)) return;
  bool wanted = false;
  for (const c10::IValue& argument : torch::jit::last(*stack, size_of(op)))
    wanted |= argument.isTensor() && needs_grad(argument.toTensor());
  TORCH_CHECK(!(at::GradMode::is_enabled() && wanted),
              op.schema().name().substr(op.schema().name().rfind(':') + 1),
              " is for inference and has no gradient: expected no_grad or inference_mode; got "
              "arguments that require one");
}

void refuse_gradient(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  check_no_gradient(op, stack);
  below_autograd(op, keys, stack);
}

// For ops that write to a tensor. Two kernels, because in inference mode only the second runs.
void refuse_gradient_of_out(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  check_no_gradient(op, stack);
  at::AutoDispatchBelowAutograd below_gradients;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// Moves the version counters of the tensors that are written, as torch's own ops do.
void count_versions(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto& parameters = op.schema().arguments();
  const auto arguments = torch::jit::last(*stack, parameters.size());
  std::vector<Tensor> written;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto* alias = parameters[i].alias_info();
    if (alias && alias->isWrite() && arguments[i].isTensor()) {
      written.push_back(arguments[i].toTensor());
    }
  }
  below_autograd(op, keys, stack);
  for (const Tensor& x : written) x.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, Autograd, m) {
  impl<&product_autograd<ProductArguments>>(m, {"spamm", "spamm_with_norms"});
  impl<&product_autograd<MultiplyArguments>>(m, {"multiply"});
  impl<&conv_autograd<ConvArguments>>(m, {"conv2d"});
  impl<&conv_autograd<DenseConvArguments>>(m, {"dense_conv2d"});
  impl<&spamm_shards_autograd>(m, {"spamm_shards"});
  impl<&refuse_gradient>(m,
                         {"conv2d_with_norms", "conv2d_max_pool", "max_pool2d", "multiply_part"});
  impl<&refuse_gradient_of_out>(m, {"spamm_into"});
  impl<&below_autograd>(m, {"norm_map", "norm_maps", "find_tau", "valid_counts", "error_bound",
                            "conv2d_weight_norm", "row_work"});
}

TORCH_LIBRARY_IMPL(spamm_torch, ADInplaceOrView, m) { impl<&count_versions>(m, {"spamm_into"}); }

// ---- Autocast ----------------------------------------------------------------------------------

// Products and convolutions run in the lower precision of the autocast region, as torch's own ops
// do. Norm maps and thresholds keep their type, and so do ops that write to given memory.

namespace {

// The arguments of all ops that are cast.
constexpr std::string_view kCast[] = {"a", "b", "input", "weight", "bias", "residual"};

template <c10::DeviceType device>
void autocast(const c10::OperatorHandle& op, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(
      at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const auto dtype = at::autocast::get_lower_precision_fp_from_device_type(device);
  const auto& schema = op.schema().arguments();
  const auto arguments = stack->end() - static_cast<std::ptrdiff_t>(schema.size());
  for (size_t i = 0; i < schema.size(); ++i) {
    const std::string_view name = schema[i].name();
    if (arguments[i].isTensor() && std::ranges::find(kCast, name) != std::end(kCast)) {
      arguments[i] = at::autocast::cached_cast(dtype, arguments[i].toTensor(), device);
    }
  }
  op.callBoxed(stack);
}

constexpr auto kCasting = {"spamm", "spamm_with_norms", "conv2d", "dense_conv2d",
                           "conv2d_with_norms"};

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, AutocastCPU, m) { impl<&autocast<at::kCPU>>(m, kCasting); }
TORCH_LIBRARY_IMPL(spamm_torch, AutocastCUDA, m) { impl<&autocast<at::kCUDA>>(m, kCasting); }

}  // namespace spamm
