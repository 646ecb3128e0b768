// The argument lists of the ops on norm maps of block-sparse matrices; library.cpp has the schemas.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>

#include "arguments.h"

namespace spamm {

// The norm maps of A and of B.
struct BsrMaps {
  Tensor crow_a = {}, col_a = {}, norm_a = {}, crow_b = {}, col_b = {}, norm_b = {};
  int64_t columns = 0;  // of B, in blocks

  static auto maps(auto& x) {
    return std::tie(x.crow_a, x.col_a, x.norm_a, x.crow_b, x.col_b, x.norm_b, x.columns);
  }
};

struct BsrPlanArguments : BsrMaps {
  Tensor tau = {};
  bool symmetric = false;
  OptTensor crow_input = {}, col_input = {};
  bool lists = true;
  int64_t block_bytes = 0;
  std::optional<int64_t> free_bytes = {};

  static auto members(auto& x) {
    return std::tuple_cat(maps(x), std::tie(x.tau, x.symmetric, x.crow_input, x.col_input, x.lists,
                                            x.block_bytes, x.free_bytes));
  }

  double needed_bytes(int64_t blocks, int64_t products) const {
    return static_cast<double>(blocks) * static_cast<double>(block_bytes) +
           8.0 * static_cast<double>(products);
  }
};

struct BsrFindTauArguments : BsrMaps {
  std::optional<double> valid_ratio = {}, max_error = {};

  static auto members(auto& x) {
    return std::tuple_cat(maps(x), std::tie(x.valid_ratio, x.max_error));
  }
};

struct BsrErrorBoundArguments : BsrMaps {
  Tensor tau = {};

  static auto members(auto& x) { return std::tuple_cat(maps(x), std::tie(x.tau)); }
};

// The pattern and norms of a result; norm_a and norm_b are the operands', without a pattern.
struct BsrDropArguments {
  Tensor crow = {}, col = {}, norms = {};
  double below = 0;
  std::optional<double> share = {};
  OptTensor norm_a = {}, norm_b = {}, values = {};
  bool symmetric = false;

  static auto members(auto& x) {
    return std::tie(x.crow, x.col, x.norms, x.below, x.share, x.norm_a, x.norm_b, x.values,
                    x.symmetric);
  }
};

using BsrPlan = std::array<Tensor, 5>;  // crow, col, first, slots_a, slots_b
using BsrDrop = std::array<Tensor, 6>;  // crow, col, norms, numbers, bound, sums

template <auto kernel, size_t size, class Arguments>
void run_bsr(const c10::OperatorHandle& op, Stack* stack,
             std::array<Tensor, size> (*)(Arguments&)) {
  auto arguments = arguments_of<Arguments>(op, *stack);
  torch::jit::drop(*stack, size_of(op));
  for (Tensor& result : kernel(arguments)) stack->emplace_back(std::move(result));
}

// For ops that return many tensors, as `boxed` is for others.
template <auto kernel>
void run_bsr(const c10::OperatorHandle& op, Stack* stack) {
  run_bsr<kernel>(op, stack, kernel);
}

}  // namespace spamm
