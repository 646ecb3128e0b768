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
#include <tuple>
#include <vector>

// Operands are float16, bfloat16, float32 or float64 tensors on the CPU or a CUDA device, of any
// strides and any size, zero included. Norms are float32 (float64 for float64 operands). On CUDA
// everything runs asynchronously on the current stream, without host synchronisation, but where a
// function says that it waits.
//
// Options are set by name: mm(a, b, {.knob = {.valid_ratio = 0.3}, .block = {32, 32, 32}}).
//
// Errors: c10::ValueError for a knob or block out of range, c10::TypeError for a wrong dtype,
// c10::Error for shapes and devices that do not match. what_without_backtrace() is one line: what
// was expected, and what came. what() adds the stack of the call.
namespace spamm {

using at::DimVector;
using at::IntArrayRef;
using at::Scalar;
using at::Tensor;
using OptTensor = std::optional<Tensor>;

// Says how much is skipped. Exactly one member must be set.
struct Knob {
  OptTensor tau = {};  // 0-d floating tensor: on the operands' device, or a CPU scalar
  std::optional<double> threshold = {};    // tau as a number: the host knows it without waiting
  std::optional<double> valid_ratio = {};  // (0, 1]: share of block products to keep
  std::optional<double> max_error = {};    // >= 0: bound of norm(error) / (norm(A) * norm(B))
};

// ---- The stages -------------------------------------------------------------------------------

// Frobenius norms of the blocks of `a` (..., M, K): (..., ceil(M/m), ceil(K/k)) for block (m, k),
// each 32, 64 or 128. The relative error is at most 1e-5 over the whole range of the type.
Tensor norm_map(const Tensor& a, IntArrayRef block);

// The threshold whose valid ratio is nearest to `valid_ratio` (the larger one of two equally near):
// a 0-d tensor of the norms' type on their device.
Tensor find_tau(const Tensor& norm_a, const Tensor& norm_b, double valid_ratio);

// The largest threshold whose error bound is at most max_error * norm(A) * norm(B): 0-d, as above.
// `skip_norm_b`: see error_bound.
Tensor find_tau_for_error(const Tensor& norm_a, const Tensor& norm_b, double max_error,
                          const OptTensor& skip_norm_b = {});

// The paper's V: int32 (..., MB, NB), the number of valid k of each block of C.
Tensor valid_counts(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau);

// sum(V) / number of block products, 0-d, of the norms' type; 1 for empty maps.
Tensor valid_ratio(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau);

// A proven bound of the error of skipping (Frobenius norm): 0-d, of the norms' type, rounded up:
// sqrt(sum over (i,j) of (sum over skipped k of norm_a * norm_b)^2). `skip_norm_b`, if present, has
// norm_b's shape: it then decides what is skipped, and `norm_b` measures the error.
Tensor error_bound(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau,
                   const OptTensor& skip_norm_b = {});

struct MultiplyOptions {
  OptTensor input = {};  // broadcasts to the product's shape; beta = 0 ignores it (NaN included)
  Scalar beta = 1, alpha = 1;
  // (M, N) of the product that this one is a part of, cut where blocks end: each part then has the
  // bits of the whole. (M, N, 1): K is not cut into segments, however few tiles there are, and all
  // else is chosen as for a product of M x N, which may be smaller.
  std::optional<DimVector> whole = {};
};

// alpha * (A @ B over the valid block products) + beta * input, from norm maps and threshold. `a`
// is (M, K) or (batch, M, K), `b` (K, N) or (batch, K, N). block = (m, k, n).
Tensor multiply(const Tensor& a, const Tensor& b, const Tensor& norm_a, const Tensor& norm_b,
                const Tensor& tau, IntArrayRef block, const MultiplyOptions& options = {});

// ---- The pipeline: norm map, threshold, multiply ------------------------------------------------

struct ProductOptions {
  Knob knob;
  DimVector block = {64, 64, 64};      // (m, k, n)
  OptTensor norm_a = {}, norm_b = {};  // precomputed norm maps of `a` and `b`
  OptTensor input = {};                // broadcasts to the product's shape
  Scalar beta = 1, alpha = 1;
  // CUDA devices that share the work, with the bits of one. Operands on one CUDA device: the result
  // lies there, and the host waits once. Operands on the CPU: they stream through the devices, and
  // the result is complete, in pinned memory, when the call returns.
  std::optional<DimVector> devices = {};
  // The caller says that A @ B is symmetric, and `input` too: A = B symmetric, or both symmetric
  // and commuting. Blocks on and above the diagonal of C are computed (all of them over several
  // devices and by CUDA's portable kernels), and the lower triangle is the mirror image of the
  // upper one. The block's m must equal its n. The knob speaks of the whole product, and the
  // gradient is that of A @ B.
  bool symmetric = false;
};

// alpha * A @ B + beta * input of matrices. If `a` and `b` are one matrix in memory, cut alike, one
// norm map serves both.
Tensor mm(const Tensor& a, const Tensor& b, const ProductOptions& options);

// mm, and the norm map of C in blocks (m, n), with the bits of norm_map. On the CPU it is computed
// while C's blocks are in cache. The norms have no gradient.
std::tuple<Tensor, Tensor> mm_with_norms(const Tensor& a, const Tensor& b,
                                         const ProductOptions& options);

// mm into `out`, of the result's shape and type. It may share memory with any argument: X = 2 X -
// X @ X in place is mm_out(x, x, x, {.input = x, .beta = 2, .alpha = -1, ...}). No gradient.
void mm_out(const Tensor& out, const Tensor& a, const Tensor& b, const ProductOptions& options);

// Batched A @ B: (batch, M, K) x (batch, K, N). All batches share one threshold and one launch.
Tensor bmm(const Tensor& a, const Tensor& b, const ProductOptions& options);

// input @ weight^T + bias: input (..., in_features), weight (out_features, in_features).
Tensor linear(const Tensor& input, const Tensor& weight, const OptTensor& bias,
              const ProductOptions& options);

// mm of operands in shards, as many of A as of B, each pair on one device; several may share a
// device, and all may lie on the CPU. A's shards are its rows in order, cut at multiples of m. B's
// are rows of K, cut at multiples of k, or each is the whole of B. Returns C's rows, each beside
// those of A, with the bits of one device. Only blocks of B that have a valid product with a
// device's rows travel to it. Waits for each device once, but not if B is whole everywhere and tau
// is a number. Of the options, knob and block count.
std::vector<Tensor> mm_shards(at::TensorList a_shards, at::TensorList b_shards,
                              const ProductOptions& options);

// Cuts the rows of A, and so of C, into `parts` > 0 contiguous parts of about equal work, from the
// norm maps (MB, KB) and (KB, NB): the smallest possible work of the largest part. The work of rows
// is their number of valid block products, plus 0.006 times their number of all block products.
// Returns parts + 1 ascending row numbers. They are multiples of max(m, 128) but for the last,
// which is MB * m: it may lie beyond A's last row. Parts are empty where the rows are too few.
// Waits for the device.
std::vector<int64_t> row_cuts(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau,
                              int64_t parts, IntArrayRef block = {64, 64, 64});

// ---- Convolution --------------------------------------------------------------------------------

// The slope of leaky_relu below zero: `tensor`, if it is given, of one number or of (out_channels),
// which makes it PReLU, of the weight's type or float32; else `number`.
struct Slope {
  double number = 0.01;
  OptTensor tensor = {};
};

struct ConvOptions {
  DimVector stride = {1, 1}, padding = {0, 0}, dilation = {1, 1};
  int64_t groups = 1;  // they share one knob
  Knob knob = {};
  // By default the documented rule. With a tau, the default pixel block does not depend on the
  // batch size, so that a tau means the same for every batch.
  std::optional<DimVector> block = {}, pixel_block = {};
  OptTensor norm_weight = {}, norm_input = {};  // precomputed norms
  OptTensor residual = {};                      // of the result's shape and type
  // "none", "relu", "relu6", "hardswish", "silu" or "leaky_relu"; another name is a
  // c10::ValueError. It and the residual are computed in the same kernel if the device has one for
  // them.
  std::string activation = "none";
  Slope slope = {};
};

// activation(convolution + bias + residual), the 2-D convolution as weight matrix times im2col
// matrix. One that skips nothing (a tau <= 0 that the host knows) is dense_conv2d where that is
// faster: with groups > 1, or by its sizes, but for pixel blocks of one image.
Tensor conv2d(const Tensor& input, const Tensor& weight, const OptTensor& bias,
              const ConvOptions& options);

// at::conv2d with the same epilogue, by PyTorch's own convolution: nothing is skipped. Knob, blocks
// and norms do not count.
Tensor dense_conv2d(const Tensor& input, const Tensor& weight, const OptTensor& bias,
                    const ConvOptions& options = {});

// ---- Introspection ------------------------------------------------------------------------------

// The name of the kernel that multiply would run for such operands on this device, for example
// "cpu-plain" or "sm80-mma-f16".
std::string backend_for(at::Device device, at::ScalarType dtype, IntArrayRef block);

}  // namespace spamm
