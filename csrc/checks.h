// Argument checks shared by all ops. Each message is one line: what was expected, and what came.
#pragma once

#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "activation.h"
#include "arguments.h"
#include "block.h"

namespace spamm {

inline Block check_block(at::IntArrayRef block) {
  TORCH_CHECK_VALUE(block.size() == 3 && is_block_edge(block[0]) && is_block_edge(block[1]) &&
                        is_block_edge(block[2]),
                    "block must be 32, 64 or 128, or a triple (m, k, n) of these; got ", block);
  return {block[0], block[1], block[2]};
}

inline void check_block_pair(at::IntArrayRef block) {
  TORCH_CHECK_VALUE(block.size() == 2 && is_block_edge(block[0]) && is_block_edge(block[1]),
                    "block must be 32, 64 or 128, or a pair (rows, columns) of these; got ", block);
}

// A dtype's name in Python: "float16" where ScalarType prints "Half".
inline std::string name_of(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}
inline std::string dtype_of(const at::Tensor& x) { return name_of(x.scalar_type()); }

inline void check_operand_dtype(at::ScalarType dtype, const char* name) {
  TORCH_CHECK_TYPE(
      dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble,
      name, " must be float16, bfloat16, float32 or float64; got ", name_of(dtype));
}

// The type of an operand's norms: float64 for float64, else float32.
inline at::ScalarType norm_dtype(at::ScalarType operand) {
  return operand == at::kDouble ? at::kDouble : at::kFloat;
}

inline void check_same_device(const at::Tensor& a, const at::Tensor& b, const char* name_a,
                              const char* name_b) {
  TORCH_CHECK(a.device() == b.device(), name_a, " and ", name_b,
              " must be on the same device; got ", a.device(), " and ", b.device());
}

inline void check_one_dtype(const at::Tensor& a, const at::Tensor& b, const char* name_a,
                            const char* name_b) {
  TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), name_a, " and ", name_b,
                   " must have one dtype; got ", dtype_of(a), " and ", dtype_of(b));
}

// `whose`: that of `other`, in the message.
inline void check_dtype_of(const at::Tensor& x, const at::Tensor& other, const char* name,
                           const char* whose) {
  TORCH_CHECK_TYPE(x.scalar_type() == other.scalar_type(), name, " must have ", whose, " dtype ",
                   dtype_of(other), "; got ", dtype_of(x));
}

inline at::DimVector product_shape(const at::Tensor& a, const at::Tensor& b) {
  at::DimVector shape(a.sizes());
  shape.back() = b.size(-1);
  return shape;
}

inline at::DimVector norm_map_shape(at::IntArrayRef sizes, int64_t block_rows,
                                    int64_t block_columns) {
  at::DimVector shape(sizes);
  shape.end()[-2] = blocks_of(sizes.end()[-2], block_rows);
  shape.end()[-1] = blocks_of(sizes.end()[-1], block_columns);
  return shape;
}

// Matrices, or batches of them, of one type and on one device.
inline void check_matrix_pair(const at::Tensor& a, const at::Tensor& b) {
  check_operand_dtype(a.scalar_type(), "a");
  check_one_dtype(a, b, "a", "b");
  check_same_device(a, b, "a", "b");
  TORCH_CHECK((a.dim() == 2 || a.dim() == 3) && a.dim() == b.dim(),
              "a and b must both be matrices (2-d) or batches of matrices (3-d); got shapes ",
              a.sizes(), " and ", b.sizes());
}

// Operands of a product: (M, K) x (K, N), or (batch, M, K) x (batch, K, N).
inline void check_operands(const at::Tensor& a, const at::Tensor& b) {
  check_matrix_pair(a, b);
  TORCH_CHECK(a.size(-1) == b.size(-2) && (a.dim() == 2 || a.size(0) == b.size(0)),
              "a's columns must match b's rows",
              a.dim() == 2 ? "" : ", and their batches each other", "; got shapes ", a.sizes(),
              " and ", b.sizes());
}

// A matrix, or a batch of any number of dimensions.
inline void check_matrices(const at::Tensor& x, const char* name) {
  TORCH_CHECK(x.dim() >= 2, name, " must be (..., rows, columns); got shape ", x.sizes());
}

// `input` is added to a product of shape `shape`, whose first operand is `a`.
inline void check_input(const at::Tensor& input, const at::Tensor& a, at::IntArrayRef shape) {
  check_dtype_of(input, a, "input", "the operands'");
  check_same_device(input, a, "input", "a");
  TORCH_CHECK(at::is_expandable_to(input.sizes(), shape),
              "input must broadcast to the product's shape ", shape, "; got ", input.sizes());
}

inline void check_norm_dtypes(const at::Tensor& norm_a, const at::Tensor& norm_b) {
  TORCH_CHECK_TYPE(norm_a.scalar_type() == at::kFloat || norm_a.scalar_type() == at::kDouble,
                   "norm_a must be float32 or float64; got ", dtype_of(norm_a));
  check_one_dtype(norm_a, norm_b, "norm_a", "norm_b");
}

// Norm maps of the operands of one product: (..., MB, KB) x (..., KB, NB).
inline void check_norm_maps(const at::Tensor& norm_a, const at::Tensor& norm_b) {
  check_norm_dtypes(norm_a, norm_b);
  check_same_device(norm_a, norm_b, "norm_a", "norm_b");
  TORCH_CHECK(
      norm_a.dim() >= 2 && norm_a.dim() == norm_b.dim() &&
          norm_a.sizes().slice(0, norm_a.dim() - 2) == norm_b.sizes().slice(0, norm_b.dim() - 2) &&
          norm_a.size(-1) == norm_b.size(-2),
      "norm maps must be (..., MB, KB) and (..., KB, NB); got shapes ", norm_a.sizes(), " and ",
      norm_b.sizes());
}

// A precomputed norm map must have `shape`, which norm_map returns for an operand of shape
// `operand_shape`. Its type and device must match `operand`.
inline void check_precomputed_norm_map(const at::Tensor& norm, at::IntArrayRef shape,
                                       const at::Tensor& operand, at::IntArrayRef operand_shape,
                                       const char* name) {
  TORCH_CHECK_TYPE(norm.scalar_type() == norm_dtype(operand.scalar_type()), name, " must be ",
                   name_of(norm_dtype(operand.scalar_type())), " for ", dtype_of(operand),
                   " operands; got ", dtype_of(norm));
  TORCH_CHECK(norm.sizes() == shape, name, " must have shape ", shape, " for an operand of shape ",
              operand_shape, "; got ", norm.sizes());
  TORCH_CHECK(norm.device() == operand.device(), name, " must be on the operands' device ",
              operand.device(), "; got ", norm.device());
}

inline void check_norm_map_of(const at::Tensor& norm, const at::Tensor& operand, int64_t block_rows,
                              int64_t block_columns, const char* name) {
  check_precomputed_norm_map(norm, norm_map_shape(operand.sizes(), block_rows, block_columns),
                             operand, operand.sizes(), name);
}

// `skip_norm_b` holds B's skip norms if they differ from its norms.
inline void check_skip_norm_map(const std::optional<at::Tensor>& skip_norm_b,
                                const at::Tensor& norm_b) {
  if (!skip_norm_b) return;
  check_dtype_of(*skip_norm_b, norm_b, "skip_norm_b", "norm_b's");
  check_same_device(*skip_norm_b, norm_b, "skip_norm_b", "norm_b");
  TORCH_CHECK(skip_norm_b->sizes() == norm_b.sizes(), "skip_norm_b must have norm_b's shape ",
              norm_b.sizes(), "; got ", skip_norm_b->sizes());
}

// tau is a 0-d floating tensor, on the operands' device or (a host scalar) on the CPU.
inline void check_tau(const at::Tensor& tau, at::Device device) {
  TORCH_CHECK_TYPE(at::isFloatingType(tau.scalar_type()),
                   "tau must be a floating-point tensor; got ", dtype_of(tau));
  TORCH_CHECK(tau.dim() == 0, "tau must be a 0-d tensor; got shape ", tau.sizes());
  TORCH_CHECK(!tau.requires_grad(),
              "tau must not require a gradient, since a threshold has none (detach it); got a "
              "tensor that does");
  TORCH_CHECK(tau.device() == device || tau.is_cpu(), "tau must be on the operands' device ",
              device, " or on the CPU; got ", tau.device());
}

inline void check_valid_ratio(double valid_ratio) {
  TORCH_CHECK_VALUE(valid_ratio > 0 && valid_ratio <= 1, "valid_ratio must be in (0, 1]; got ",
                    valid_ratio);
}

inline void check_max_error(double max_error) {
  TORCH_CHECK_VALUE(max_error >= 0, "max_error must be at least 0; got ", max_error);
}

// The aim of find_tau's search. Limits of the paper's search: the exact selection meets any valid
// limits, so they are only checked.
inline void check_search(const FindTauArguments& x) {
  TORCH_CHECK_VALUE(x.valid_ratio.has_value() != x.max_error.has_value(),
                    "exactly one of valid_ratio and max_error must be given; got ",
                    x.max_error ? "both" : "none");
  if (x.valid_ratio) check_valid_ratio(*x.valid_ratio);
  if (x.max_error) check_max_error(*x.max_error);
  TORCH_CHECK_VALUE(x.max_iterations > 0, "max_iterations must be positive; got ",
                    x.max_iterations);
  TORCH_CHECK_VALUE(x.tolerance >= 0, "tolerance must be at least 0; got ", x.tolerance);
}

// Refuses the knob of a call unless exactly one member is set.
inline void check_knob(const Knob& knob) {
  const std::pair<bool, const char*> members[] = {{knob.tau.has_value(), "tau"},
                                                  {knob.threshold.has_value(), "threshold"},
                                                  {knob.valid_ratio.has_value(), "valid_ratio"},
                                                  {knob.max_error.has_value(), "max_error"}};
  const auto names_of_set = [&] {
    std::string names;
    for (const auto& [is_set, name] : members)
      if (is_set) names += (names.empty() ? "" : " and ") + std::string(name);
    return names.empty() ? "none" : names;
  };
  TORCH_CHECK_VALUE(std::ranges::count(members, true, [](const auto& m) { return m.first; }) == 1,
                    "exactly one of tau, threshold, valid_ratio and max_error must be given; got ",
                    names_of_set());
  if (knob.valid_ratio) check_valid_ratio(*knob.valid_ratio);
  if (knob.max_error) check_max_error(*knob.max_error);
}

// The same, and a threshold becomes a 0-d CPU tensor, the form in which stages take a tau that the
// host knows.
inline Knob checked_knob(Knob knob) {
  check_knob(knob);
  if (knob.threshold) {
    knob.tau = c10::scalar_to_tensor(*knob.threshold);  // float64 on the CPU
    knob.threshold.reset();
  }
  return knob;
}

// The activation, and the slope that leaky_relu may have.
inline Activation check_activation(const ConvArguments& x) {
  const std::optional<Activation> activation = find_activation(x.activation);
  std::array<const char*, kActivations.size()> names;
  std::transform(kActivations.begin(), kActivations.end(), names.begin(),
                 [](const ActivationFacts& facts) { return facts.name; });
  TORCH_CHECK_VALUE(activation, "activation must be one of ", c10::Join(", ", names), "; got '",
                    x.activation, "'");
  const bool has_slope = x.slope.tensor || x.slope.number != Slope().number;
  TORCH_CHECK_VALUE(activation == Activation::kLeakyRelu || !has_slope,
                    "slope must be given with activation 'leaky_relu' alone; got activation '",
                    x.activation, "'");
  if (!x.slope.tensor) return *activation;
  const at::Tensor &slope = *x.slope.tensor, &weight = x.weight;
  TORCH_CHECK_TYPE(slope.scalar_type() == weight.scalar_type() || slope.scalar_type() == at::kFloat,
                   "slope must have the weight's dtype ", dtype_of(weight), ", or float32; got ",
                   dtype_of(slope));
  check_same_device(slope, weight, "slope", "weight");
  TORCH_CHECK(slope.dim() <= 1 && (slope.numel() == 1 || slope.numel() == weight.size(0)),
              "slope must have one entry, or shape [", weight.size(0), "] for a weight of shape ",
              weight.sizes(), "; got shape ", slope.sizes());
  return *activation;
}

// All arguments of a product; those that are absent are computed later. Returns the block.
inline Block check_product(const at::Tensor& a, const at::Tensor& b, at::IntArrayRef block_edges,
                           const std::optional<at::Tensor>& norm_a,
                           const std::optional<at::Tensor>& norm_b,
                           const std::optional<at::Tensor>& tau,
                           const std::optional<at::Tensor>& input) {
  check_operands(a, b);
  const Block block = check_block(block_edges);
  if (norm_a) check_norm_map_of(*norm_a, a, block.m, block.k, "norm_a");
  if (norm_b) check_norm_map_of(*norm_b, b, block.k, block.n, "norm_b");
  if (tau) check_tau(*tau, a.device());
  if (input) check_input(*input, a, product_shape(a, b));
  return block;
}

// A product whose upper triangle is computed and mirrored.
inline void check_symmetric(const at::Tensor& a, const at::Tensor& b, const Block& block,
                            const std::optional<at::Tensor>& input) {
  const int64_t size = a.size(-2);
  TORCH_CHECK(size == b.size(-1), "a symmetric product must be square; got shapes ", a.sizes(),
              " and ", b.sizes());
  TORCH_CHECK_VALUE(block.m == block.n,
                    "block must have m equal to n for a symmetric product; got m ", block.m,
                    " and n ", block.n);
  if (!input || input->numel() == 1) return;
  TORCH_CHECK(input->dim() >= 2 && input->size(-1) == size && input->size(-2) == size,
              "input must be a square matrix of ", size,
              " rows for a symmetric product; got shape ", input->sizes());
}

// `out` takes the product a @ b.
inline void check_out(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  check_dtype_of(out, a, "out", "the operands'");
  check_same_device(out, a, "out", "a");
  const at::DimVector shape = product_shape(a, b);
  TORCH_CHECK(out.sizes() == shape, "out must have the product's shape ", at::IntArrayRef(shape),
              "; got ", out.sizes());
}

// The arguments that spamm_into has and spamm has not.
inline void check_into(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                       const Block& block, const std::optional<at::Tensor>& input, bool symmetric,
                       const std::optional<at::Tensor>& norms) {
  check_out(out, a, b);
  at::assert_no_internal_overlap(out);
  if (symmetric) check_symmetric(a, b, block, input);
  if (!norms) return;
  check_norm_map_of(*norms, out, block.m, block.n, "norms");
  at::assert_no_internal_overlap(*norms);
}

// Tells whether `whole` of multiply is (M, N, 1): sums are not cut into segments, and all else has
// the bits of a product of M x N, which may be smaller.
inline bool keeps_order(at::IntArrayRef whole) { return whole.size() == 3 && whole[2] == 1; }

// `whole` is (M, N) of the product that a @ b is a part of, unless it keeps_order().
inline void check_whole(const at::Tensor& a, const at::Tensor& b, at::IntArrayRef whole) {
  if (keeps_order(whole)) return;
  const int64_t rows = a.size(-2), columns = b.size(-1);
  TORCH_CHECK_VALUE(whole.size() == 2 && whole[0] >= rows && whole[1] >= columns,
                    "whole must be (M, N) of the whole product, at least [", rows, ", ", columns,
                    "]; got ", whole);
}

// `out` is the part of a product of shape `whole` that is a @ b. `own_rows` are rows of b from
// `first_own_row` on.
inline void check_part(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                       at::IntArrayRef whole, const std::optional<at::Tensor>& own_rows,
                       int64_t first_own_row) {
  TORCH_CHECK(a.dim() == 2, "a part of a product must have matrices (2-d); got shape ", a.sizes());
  check_out(out, a, b);
  check_whole(a, b, whole);
  if (!own_rows) return;
  check_matrix_pair(b, *own_rows);
  TORCH_CHECK(own_rows->size(1) == b.size(1) && first_own_row >= 0 &&
                  first_own_row + own_rows->size(0) <= b.size(0),
              "own_rows must be rows of b, whose shape is ", b.sizes(), "; got shape ",
              own_rows->sizes(), " from row ", first_own_row, " on");
}

}  // namespace spamm
