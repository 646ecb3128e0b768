// spamm/spamm.h: the C++ API of spamm_torch.
//
// Sparse approximate matrix multiplication (SpAMM): with A (M x K) cut into m x k blocks and B (K x
// N) into k x n blocks, both padded with zeros,
//
//   C[i,j] = sum over k of A[i,k] @ B[k,j]  where not (norm_a[i,k] * norm_b[k,j] < tau),
//
// norms being the blocks' Frobenius norms. Method: Challacombe and Bock, "Fast multiplication of
// matrices with decay" (2010); the flat form, the valid ratio and the GPU design: the cuSpAMM
// paper, "Accelerating Sparse Approximate Matrix Multiplication on GPUs".
//
// Operands are float16, bfloat16, float32 or float64 tensors on the CPU or a CUDA device, of any
// strides and any size, zero included. Norms are float32 (float64 for float64 operands). Everything
// is asynchronous on CUDA's current stream and free of host synchronisation.
//
// Errors: c10::ValueError for a knob or block out of range, c10::TypeError for a wrong dtype,
// c10::Error for shapes and devices that do not fit. what_without_backtrace() is one line, with
// what was expected and what came; what() adds the stack of the call.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace spamm {

using at::IntArrayRef;
using at::Scalar;
using at::Tensor;

// What decides which block products are skipped. Exactly one member must be set.
struct Knob {
  std::optional<Tensor> tau;  // 0-d floating tensor: on the operands' device, or a CPU scalar
  std::optional<double> valid_ratio;  // (0, 1]: share of block products to keep
  std::optional<double> max_error;    // >= 0: bound of norm(E) / (norm(A) * norm(B))

  static Knob with_tau(double tau);
  static Knob with_tau(const Tensor& tau);
  static Knob with_valid_ratio(double valid_ratio);
  static Knob with_max_error(double max_error);
};

// ---- The stages -------------------------------------------------------------------------------

// Frobenius norms of the blocks of `a` (..., M, K): (..., ceil(M/m), ceil(K/k)) for block (m, k),
// each 32, 64 or 128. Right to 1e-5 relative over the whole range of the type.
Tensor norm_map(const Tensor& a, IntArrayRef block);

// Threshold whose valid ratio is nearest to `valid_ratio` (the larger at equal distance): a 0-d
// tensor of the norms' type on their device. The selection is exact, so any `tolerance` >= 0
// (absolute, of the ratio) and any `max_iterations` > 0 of the paper's bisection are met; both are
// only checked.
Tensor find_tau(const Tensor& norm_a, const Tensor& norm_b, double valid_ratio,
                int64_t max_iterations = 20, double tolerance = 0.01);

// The largest threshold whose error bound is at most max_error * norm(A) * norm(B): 0-d, as above.
// `skip_norm_b` (as in error_bound) decides what is skipped where it differs from `norm_b`.
Tensor find_tau_for_error(const Tensor& norm_a, const Tensor& norm_b, double max_error,
                          const std::optional<Tensor>& skip_norm_b = std::nullopt);

// The paper's V: int32 (..., MB, NB), the number of valid k of each block of C.
Tensor valid_counts(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau);

// sum(V) / number of block products, 0-d, of the norms' type; 1 for empty maps.
Tensor valid_ratio(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau);

// A proven bound of the Frobenius norm of what skipping loses: 0-d, of the norms' type, rounded up.
// sqrt(sum over (i,j) of (sum over skipped k of norm_a * norm_b)^2). Where `skip_norm_b` is given
// (same shape as norm_b), it decides what is skipped while `norm_b` measures what that loses.
Tensor error_bound(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau,
                   const std::optional<Tensor>& skip_norm_b = std::nullopt);

// alpha * (A @ B over valid blocks) + beta * input, given norm maps and threshold. `a` (M, K) or
// (batch, M, K), `b` (K, N) or (batch, K, N); `input` broadcasts to the product's shape; beta = 0
// ignores it (NaN included). block = (m, k, n).
Tensor multiply(const Tensor& a, const Tensor& b, const Tensor& norm_a, const Tensor& norm_b,
                const Tensor& tau, IntArrayRef block,
                const std::optional<Tensor>& input = std::nullopt, const Scalar& beta = 1,
                const Scalar& alpha = 1);

// ---- The pipeline: norm map, threshold, multiply ------------------------------------------------

// A @ B. `norm_a` and `norm_b`, where given, stand for the norm maps of `a` and `b`.
Tensor mm(const Tensor& a, const Tensor& b, const Knob& knob, IntArrayRef block = {64, 64, 64},
          const std::optional<Tensor>& norm_a = std::nullopt,
          const std::optional<Tensor>& norm_b = std::nullopt);

// beta * input + alpha * A @ B; `input` broadcasts to (M, N).
Tensor addmm(const Tensor& input, const Tensor& a, const Tensor& b, const Knob& knob,
             IntArrayRef block = {64, 64, 64}, const Scalar& beta = 1, const Scalar& alpha = 1);

// Batched A @ B: (batch, M, K) x (batch, K, N). One threshold serves all batches, in one launch.
Tensor bmm(const Tensor& a, const Tensor& b, const Knob& knob, IntArrayRef block = {64, 64, 64});

// input (..., in_features) times weight (out_features, in_features) transposed, plus bias.
Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
              const Knob& knob, IntArrayRef block = {64, 64, 64});

// 2-D convolution as weight matrix times im2col matrix; arguments as at::conv2d. `block` and
// `pixel_block` default to the documented rule; with a tau, pixel blocks do not follow the batch,
// so that a tau means the same for every batch. Groups share one knob. `relu` rectifies the result,
// in the same kernel where the device has one for it.
Tensor conv2d(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
              const Knob& knob, IntArrayRef stride = {1, 1}, IntArrayRef padding = {0, 0},
              IntArrayRef dilation = {1, 1}, int64_t groups = 1,
              at::OptionalIntArrayRef block = std::nullopt,
              at::OptionalIntArrayRef pixel_block = std::nullopt, bool relu = false);

// Name of the kernel that multiply would run for these operands on this device, as in
// "cpu-brgemm" or "sm80-mma-f16".
std::string backend_for(at::Device device, at::ScalarType dtype, IntArrayRef block);

}  // namespace spamm
