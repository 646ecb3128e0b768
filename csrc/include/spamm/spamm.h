// spamm/spamm.h: the C++ API of spamm_torch.
//
// Sparse approximate matrix multiplication (SpAMM). A (M x K) is cut into m x k blocks and B (K x
// N) into k x n blocks, both padded with zeros. With the Frobenius norms of the blocks,
//
//   C[i,j] = sum over k of A[i,k] @ B[k,j]  where not (norm_a[i,k] * norm_b[k,j] < tau).
//
// Challacombe and Bock, "Fast multiplication of matrices with decay" (2010), describe the method.
// The cuSpAMM paper, "Accelerating Sparse Approximate Matrix Multiplication on GPUs", adds the flat
// form, the valid ratio and the GPU design.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

// Operands are float16, bfloat16, float32 or float64 tensors on the CPU or a CUDA device, of any
// strides and any size, zero included. Norms are float32 (float64 for float64 operands). On CUDA
// everything runs asynchronously on the current stream, without host synchronisation, but where a
// function says that it waits.
//
// Errors: c10::ValueError for a knob or block out of range, c10::TypeError for a wrong dtype,
// c10::Error for shapes and devices that do not match. what_without_backtrace() is one line: what
// was expected, and what came. what() adds the stack of the call.
namespace spamm {

using at::IntArrayRef;
using at::Scalar;
using at::Tensor;

// Says how much is skipped. Exactly one member must be set.
struct Knob {
  std::optional<Tensor> tau;        // 0-d floating tensor: on the operands' device, or a CPU scalar
  std::optional<double> threshold;  // tau as a number: the host knows it without waiting
  std::optional<double> valid_ratio;  // (0, 1]: share of block products to keep
  std::optional<double> max_error;    // >= 0: bound of norm(error) / (norm(A) * norm(B))

  static Knob with_tau(double tau);  // sets threshold
  static Knob with_tau(const Tensor& tau);
  static Knob with_valid_ratio(double valid_ratio);
  static Knob with_max_error(double max_error);
};

// ---- The stages -------------------------------------------------------------------------------

// Frobenius norms of the blocks of `a` (..., M, K): (..., ceil(M/m), ceil(K/k)) for block (m, k),
// each 32, 64 or 128. The relative error is at most 1e-5 over the whole range of the type.
Tensor norm_map(const Tensor& a, IntArrayRef block);

// The threshold whose valid ratio is nearest to `valid_ratio` (the larger one of two equally near):
// a 0-d tensor of the norms' type on their device. `max_iterations` > 0 and `tolerance` >= 0
// (absolute, of the ratio) belong to the paper's bisection. They are checked but not used, because
// the selection is exact.
Tensor find_tau(const Tensor& norm_a, const Tensor& norm_b, double valid_ratio,
                int64_t max_iterations = 20, double tolerance = 0.01);

// The largest threshold whose error bound is at most max_error * norm(A) * norm(B): 0-d, as above.
// `skip_norm_b`: see error_bound.
Tensor find_tau_for_error(const Tensor& norm_a, const Tensor& norm_b, double max_error,
                          const std::optional<Tensor>& skip_norm_b = std::nullopt);

// The paper's V: int32 (..., MB, NB), the number of valid k of each block of C.
Tensor valid_counts(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau);

// sum(V) / number of block products, 0-d, of the norms' type; 1 for empty maps.
Tensor valid_ratio(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau);

// A proven bound of the error of skipping (Frobenius norm): 0-d, of the norms' type, rounded up:
// sqrt(sum over (i,j) of (sum over skipped k of norm_a * norm_b)^2). `skip_norm_b`, if present, has
// norm_b's shape: it then decides what is skipped, and `norm_b` measures the error.
Tensor error_bound(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau,
                   const std::optional<Tensor>& skip_norm_b = std::nullopt);

// alpha * (A @ B over the valid block products) + beta * input, from norm maps and threshold. `a`
// is (M, K) or (batch, M, K), `b` (K, N) or (batch, K, N). `input` broadcasts to the product's
// shape; beta = 0 ignores it (NaN included). block = (m, k, n). `whole` is (M, N) of the product
// that this one is a part of, cut where blocks end: each part then has the bits of the whole.
Tensor multiply(const Tensor& a, const Tensor& b, const Tensor& norm_a, const Tensor& norm_b,
                const Tensor& tau, IntArrayRef block,
                const std::optional<Tensor>& input = std::nullopt, const Scalar& beta = 1,
                const Scalar& alpha = 1, at::OptionalIntArrayRef whole = std::nullopt);

// ---- The pipeline: norm map, threshold, multiply ------------------------------------------------

// A @ B. `norm_a` and `norm_b` are precomputed norm maps of `a` and `b`. If `a` and `b` are one
// matrix in memory, cut alike, one norm map serves both.
// With `symmetric` the caller says that A @ B is symmetric: A = B symmetric, or both symmetric and
// commuting. Blocks on and above the diagonal of C are computed (all of them over several devices
// and by CUDA's portable kernels), and the lower triangle is the mirror image of the upper one. C
// must be square, and the block's m equal to its n. The knob speaks of the whole product, and the
// gradient is that of A @ B.
Tensor mm(const Tensor& a, const Tensor& b, const Knob& knob, IntArrayRef block = {64, 64, 64},
          const std::optional<Tensor>& norm_a = std::nullopt,
          const std::optional<Tensor>& norm_b = std::nullopt, bool symmetric = false);

// beta * input + alpha * A @ B; `input` broadcasts to (M, N). With `symmetric`, `input` is
// symmetric too.
Tensor addmm(const Tensor& input, const Tensor& a, const Tensor& b, const Knob& knob,
             IntArrayRef block = {64, 64, 64}, const Scalar& beta = 1, const Scalar& alpha = 1,
             const std::optional<Tensor>& norm_a = std::nullopt,
             const std::optional<Tensor>& norm_b = std::nullopt, bool symmetric = false);

// mm and addmm that also return the norm map of C in blocks (m, n), with the bits of norm_map. On
// the CPU it is computed while C's blocks are in cache. The norms have no gradient.
std::tuple<Tensor, Tensor> mm_with_norms(const Tensor& a, const Tensor& b, const Knob& knob,
                                         IntArrayRef block = {64, 64, 64},
                                         const std::optional<Tensor>& norm_a = std::nullopt,
                                         const std::optional<Tensor>& norm_b = std::nullopt,
                                         bool symmetric = false);
std::tuple<Tensor, Tensor> addmm_with_norms(const Tensor& input, const Tensor& a, const Tensor& b,
                                            const Knob& knob, IntArrayRef block = {64, 64, 64},
                                            const Scalar& beta = 1, const Scalar& alpha = 1,
                                            const std::optional<Tensor>& norm_a = std::nullopt,
                                            const std::optional<Tensor>& norm_b = std::nullopt,
                                            bool symmetric = false);

// mm and addmm that write to `out`, of the result's shape and type. It may share memory with any
// argument: `input` may be `out`, and X = 2 X - X @ X in place is addmm_out(x, x, x, x, ...). No
// gradient.
void mm_out(const Tensor& out, const Tensor& a, const Tensor& b, const Knob& knob,
            IntArrayRef block = {64, 64, 64}, const std::optional<Tensor>& norm_a = std::nullopt,
            const std::optional<Tensor>& norm_b = std::nullopt, bool symmetric = false);
void addmm_out(const Tensor& out, const Tensor& input, const Tensor& a, const Tensor& b,
               const Knob& knob, IntArrayRef block = {64, 64, 64}, const Scalar& beta = 1,
               const Scalar& alpha = 1, const std::optional<Tensor>& norm_a = std::nullopt,
               const std::optional<Tensor>& norm_b = std::nullopt, bool symmetric = false);

// Batched A @ B: (batch, M, K) x (batch, K, N). All batches share one threshold and one launch.
Tensor bmm(const Tensor& a, const Tensor& b, const Knob& knob, IntArrayRef block = {64, 64, 64});

// input @ weight^T + bias: input (..., in_features), weight (out_features, in_features).
Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
              const Knob& knob, IntArrayRef block = {64, 64, 64});

// 2-D convolution as weight matrix times im2col matrix. Arguments as at::conv2d; groups share one
// knob. `block` and `pixel_block` default to the documented rule. With a tau, the default pixel
// block does not depend on the batch size, so that a tau means the same for every batch. The result
// is activation(convolution + bias + residual). `residual` has the result's shape and type.
// `activation` is one of "none", "relu", "relu6", "hardswish", "silu" and "leaky_relu" (slope
// 0.01); another name is a c10::ValueError. Both are computed in the same kernel if the device has
// one for them. A convolution with groups > 1 that skips nothing (a tau <= 0 that the host knows)
// is dense_conv2d.
Tensor conv2d(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
              const Knob& knob, IntArrayRef stride = {1, 1}, IntArrayRef padding = {0, 0},
              IntArrayRef dilation = {1, 1}, int64_t groups = 1,
              at::OptionalIntArrayRef block = std::nullopt,
              at::OptionalIntArrayRef pixel_block = std::nullopt,
              const std::optional<Tensor>& residual = std::nullopt,
              std::string_view activation = "none");

// at::conv2d with the same epilogue, by PyTorch's own convolution: nothing is skipped.
Tensor dense_conv2d(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                    IntArrayRef stride = {1, 1}, IntArrayRef padding = {0, 0},
                    IntArrayRef dilation = {1, 1}, int64_t groups = 1,
                    const std::optional<Tensor>& residual = std::nullopt,
                    std::string_view activation = "none");

// ---- Several devices ----------------------------------------------------------------------------

// Cuts the rows of A, and so of C, into `parts` > 0 contiguous parts of about equal work, from the
// norm maps (MB, KB) and (KB, NB): the smallest possible work of the largest part. The work of rows
// is their number of valid block products, plus 0.006 times their number of all block products.
// Returns parts + 1 ascending row numbers. They are multiples of max(m, 128) but for the last,
// which is MB * m: it may lie beyond A's last row. Parts are empty where the rows are too few.
// Waits for the device.
std::vector<int64_t> row_cuts(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau,
                              int64_t parts, IntArrayRef block = {64, 64, 64});

// mm of operands in shards, as many of A as of B, each pair on one device; several may share a
// device, and all may lie on the CPU. A's shards are its rows in order, cut at multiples of m. B's
// are rows of K, cut at multiples of k, or each is the whole of B. Returns C's rows, each beside
// those of A, with the bits of one device. Only blocks of B that have a valid product with a
// device's rows travel to it. Waits for each device once, but not if B is whole everywhere and tau
// is a number. No gradient.
std::vector<Tensor> mm_shards(at::TensorList a_shards, at::TensorList b_shards, const Knob& knob,
                              IntArrayRef block = {64, 64, 64});

// mm over several CUDA devices, given by their numbers, with the bits of one. Operands on one CUDA
// device: the result lies there, and the host waits once. Operands on the CPU: they stream through
// the devices, and the result is complete, in pinned memory, when the call returns.
Tensor mm_on_devices(const Tensor& a, const Tensor& b, IntArrayRef devices, const Knob& knob,
                     IntArrayRef block = {64, 64, 64});

// conv2d of a batch whose images are cut into shards (images, channels, height, width), one or more
// on each device. Returns a result beside each shard. `weight` and `bias` are one tensor, which is
// copied to the other devices, or one beside each shard; no bias is an empty list.
// Each shard but the last must be whole pixel blocks: with a tau, by default, a multiple of 64
// images. The results have the bits of the whole batch on one device, if all devices are alike: a
// knob, a default pixel block and a kernel are chosen for all images together. Gradients are dense.
std::vector<Tensor> conv2d_shards(at::TensorList input_shards, at::TensorList weight,
                                  at::TensorList bias, const Knob& knob,
                                  IntArrayRef stride = {1, 1}, IntArrayRef padding = {0, 0},
                                  IntArrayRef dilation = {1, 1}, int64_t groups = 1,
                                  at::OptionalIntArrayRef block = std::nullopt,
                                  at::OptionalIntArrayRef pixel_block = std::nullopt,
                                  std::string_view activation = "none");

// conv2d over several CUDA devices, given by their numbers: sends whole pixel blocks of images to
// each, and gathers the result beside the input.
Tensor conv2d_on_devices(const Tensor& input, const Tensor& weight,
                         const std::optional<Tensor>& bias, IntArrayRef devices, const Knob& knob,
                         IntArrayRef stride = {1, 1}, IntArrayRef padding = {0, 0},
                         IntArrayRef dilation = {1, 1}, int64_t groups = 1,
                         at::OptionalIntArrayRef block = std::nullopt,
                         at::OptionalIntArrayRef pixel_block = std::nullopt,
                         std::string_view activation = "none");

// ---- Introspection ------------------------------------------------------------------------------

// The name of the kernel that multiply would run for such operands on this device, for example
// "cpu-brgemm" or "sm80-mma-f16".
std::string backend_for(at::Device device, at::ScalarType dtype, IntArrayRef block);

}  // namespace spamm
