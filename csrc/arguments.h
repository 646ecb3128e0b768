// The argument lists of the ops of whole products and convolutions, and the only place where they
// meet the dispatcher. It hands kernels a stack of values in the order of the schema (library.cpp);
// `boxed` reads a struct from it. A struct may have more members than the schema has arguments, in
// the end: these keep their defaults.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <tuple>
#include <utility>
#include <vector>

#include "spamm/spamm.h"

namespace spamm {

// ---- Lists --------------------------------------------------------------------------------------

// Arguments of spamm, spamm_with_norms, and with the last two spamm_into.
struct ProductArguments : ProductOptions {
  Tensor a = {}, b = {};
  Tensor out = {};
  OptTensor norms = {};

  static auto members(auto& x) {
    return std::tie(x.a, x.b, x.knob.tau, x.knob.threshold, x.knob.valid_ratio, x.knob.max_error,
                    x.block, x.norm_a, x.norm_b, x.input, x.beta, x.alpha, x.devices, x.symmetric,
                    x.out, x.norms);
  }
};

struct ProductShardsArguments {
  std::vector<Tensor> a = {}, b = {};
  Knob knob = {};
  DimVector block = {};

  static auto members(auto& x) {
    return std::tie(x.a, x.b, x.knob.tau, x.knob.threshold, x.knob.valid_ratio, x.knob.max_error,
                    x.block);
  }
};

struct FindTauArguments {
  Tensor norm_a = {}, norm_b = {};
  std::optional<double> valid_ratio = {}, max_error = {};
  OptTensor skip_norm_b = {};
  int64_t max_iterations = 20;
  double tolerance = 0.01;

  static auto members(auto& x) {
    return std::tie(x.norm_a, x.norm_b, x.valid_ratio, x.max_error, x.skip_norm_b, x.max_iterations,
                    x.tolerance);
  }
};

// Arguments of multiply.
struct MultiplyArguments : MultiplyOptions {
  Tensor a = {}, b = {}, norm_a = {}, norm_b = {}, tau = {};
  DimVector block = {};

  static auto members(auto& x) {
    return std::tie(x.a, x.b, x.norm_a, x.norm_b, x.tau, x.block, x.input, x.beta, x.alpha,
                    x.whole);
  }
};

struct MultiplyPartArguments : MultiplyArguments {
  Tensor out = {};
  DimVector whole = {};
  OptTensor own_rows = {};
  int64_t first_own_row = 0;

  static auto members(auto& x) {
    return std::tie(x.a, x.b, x.norm_a, x.norm_b, x.tau, x.block, x.out, x.whole, x.own_rows,
                    x.first_own_row);
  }
};

// Arguments of conv2d and conv2d_with_norms.
struct ConvArguments : ConvOptions {
  Tensor input = {}, weight = {};
  OptTensor bias = {};

  static auto geometry(auto& x) { return std::tie(x.stride, x.padding, x.dilation, x.groups); }
  static auto search(auto& x) {
    return std::tie(x.knob.threshold, x.knob.valid_ratio, x.knob.max_error, x.block, x.pixel_block);
  }
  static auto members(auto& x) {
    return std::tuple_cat(std::tie(x.input, x.weight, x.bias), geometry(x), std::tie(x.knob.tau),
                          search(x),
                          std::tie(x.norm_weight, x.norm_input, x.residual, x.activation,
                                   x.slope.number, x.slope.tensor));
  }
};

struct DenseConvArguments : ConvArguments {
  static auto members(auto& x) {
    return std::tuple_cat(std::tie(x.input, x.weight, x.bias), geometry(x),
                          std::tie(x.residual, x.activation, x.slope.number, x.slope.tensor));
  }
};

struct ConvPoolArguments : ConvArguments {
  static auto members(auto& x) {
    return std::tuple_cat(std::tie(x.input, x.weight, x.bias), geometry(x),
                          std::tie(x.norm_weight, x.activation, x.slope.number, x.slope.tensor));
  }
};

// ---- To and from the stack ----------------------------------------------------------------------

using torch::jit::Stack;

template <class T>
void read(const c10::IValue& value, T& x) {
  x = value.to<T>();
}
inline void read(const c10::IValue& value, DimVector& x) { x = value.toDimVector(); }
inline void read(const c10::IValue& value, std::vector<Tensor>& x) {
  if (!value.isNone()) x = value.toTensorVector();
}
template <class T>
void read(const c10::IValue& value, std::optional<T>& x) {
  if (!value.isNone()) read(value, x.emplace());
}

template <class T>
c10::IValue as_value(const T& x) {
  return x;
}
inline c10::IValue as_value(const DimVector& x) { return IntArrayRef(x); }
template <class T>
c10::IValue as_value(const std::optional<T>& x) {
  return x ? as_value(*x) : c10::IValue();
}

inline size_t size_of(const c10::OperatorHandle& op) { return op.schema().arguments().size(); }

// The arguments of a call, which stay on the stack.
template <class Arguments>
Arguments arguments_of(const c10::OperatorHandle& op, const Stack& stack) {
  Arguments result;
  const size_t count = size_of(op);
  const c10::IValue* const first = stack.data() + stack.size() - count;
  const auto read_each = [&](auto&... member) {
    size_t i = 0;
    ((i < count ? read(first[i++], member) : void()), ...);
  };
  std::apply(read_each, Arguments::members(result));
  return result;
}

template <class Arguments>
void push_arguments(const c10::OperatorHandle& op, Stack& stack, const Arguments& arguments) {
  const size_t end = stack.size() + size_of(op);
  const auto push_each = [&](const auto&... member) {
    ((stack.size() < end ? stack.push_back(as_value(member)) : void()), ...);
  };
  std::apply(push_each, Arguments::members(arguments));
}

// One result, or a tuple or an array of them.
template <class Results>
void push_results(Stack& stack, Results results) {
  if constexpr (requires { std::tuple_size<Results>::value; }) {
    std::apply([&](auto&... result) { (stack.emplace_back(std::move(result)), ...); }, results);
  } else {
    stack.emplace_back(std::move(results));
  }
}

template <class Result>
Result results_of(Stack& stack) {
  if constexpr (requires { std::tuple_size<Result>::value; }) {
    return {std::move(stack.end()[-2]).toTensor(), std::move(stack.back()).toTensor()};
  } else if constexpr (!std::is_void_v<Result>) {
    return std::move(stack.back()).to<Result>();
  }
}

template <auto kernel, class Result, class Arguments>
void run_boxed(const c10::OperatorHandle& op, Stack* stack, Result (*)(Arguments&)) {
  auto arguments = arguments_of<std::remove_const_t<Arguments>>(op, *stack);
  torch::jit::drop(*stack, size_of(op));
  if constexpr (std::is_void_v<Result>) {
    kernel(arguments);
  } else {
    push_results(*stack, kernel(arguments));
  }
}

template <auto kernel>
void run_boxed(const c10::OperatorHandle& op, Stack* stack) {
  run_boxed<kernel>(op, stack, kernel);
}

// The form in which a function of one of the structs above is registered.
template <auto kernel>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<&run_boxed<kernel>>();
}

// ---- Calls through the dispatcher ---------------------------------------------------------------

namespace ops {

inline c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// spamm/spamm.h declares other ops.
template <class Result, class Arguments>
Result call(const c10::OperatorHandle& op, const Arguments& arguments) {
  Stack stack;
  stack.reserve(size_of(op));
  push_arguments(op, stack, arguments);
  op.callBoxed(stack);
  return results_of<Result>(stack);
}

inline Tensor spamm(const ProductArguments& arguments) {
  static const auto op = find("spamm_torch::spamm");
  return call<Tensor>(op, arguments);
}

inline void multiply_part(const MultiplyPartArguments& arguments) {
  static const auto op = find("spamm_torch::multiply_part");
  call<void>(op, arguments);
}

inline std::tuple<Tensor, Tensor> norm_maps(const Tensor& a, const Tensor& b, IntArrayRef block) {
  static const auto op =
      find("spamm_torch::norm_maps")
          .typed<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, IntArrayRef)>();
  return op.call(a, b, block);
}

}  // namespace ops
}  // namespace spamm
