// multiply on CUDA: turns tensors into kernel parameters. heuristics.h chooses kernel and tile.
#include "cuda/multiply/multiply.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <torch/library.h>

#include <optional>
#include <string>

#include "backend.h"
#include "checks.h"
#include "cuda/device.h"
#include "cuda/forced_tile.h"
#include "cuda/heuristics.h"
#include "cuda/hopper.h"
#include "cuda/multiply/launch.h"
#include "cuda/operand.h"
#include "cuda/tau_argument.h"
#include "cuda/tile_counter.h"
#include "tf32_setting.h"

namespace spamm::cuda {
namespace {

using at::Scalar;
using at::Tensor;

// The parameters of a product, except its operands, and the tensors that they point to.
template <class Norm>
struct Arguments {
  Tensor map_a, map_b, threshold, addend, c;
  kernels::MultiplyParams<Norm> params{};

  // `input` (batch, M, N) is undefined if nothing is added.
  Arguments(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau, const Block& block,
            const Tensor& input, const Scalar& beta, const Scalar& alpha, int64_t k,
            const Tensor& result)
      : map_a(norm_a.contiguous()),
        map_b(norm_b.contiguous()),
        threshold(tau_as(tau, map_a.scalar_type())),
        addend(input),
        c(result) {
    kernels::MultiplyParams<Norm>& p = params;
    p.norm_a = map_a.const_data_ptr<Norm>();
    p.norm_b = map_b.const_data_ptr<Norm>();
    p.tau = tau_argument<Norm>(threshold);
    p.batch = c.size(0), p.m = c.size(1), p.n = c.size(2), p.k = k;
    p.log2_block_m = log2_of(block.m);
    p.log2_block_k = log2_of(block.k);
    p.log2_block_n = log2_of(block.n);
    p.alpha = alpha.to<Norm>();
    if (addend.defined()) {
      p.beta = beta.to<Norm>();
      p.input = addend.const_data_ptr();
      std::copy_n(addend.strides().begin(), 3, p.input_strides);
    }
    p.c = c.mutable_data_ptr();
  }
};

Tensor multiply(const Tensor& a, const Tensor& b, const Tensor& norm_a, const Tensor& norm_b,
                const Tensor& tau, at::IntArrayRef block, const std::optional<Tensor>& input,
                const Scalar& beta, const Scalar& alpha) {
  const Block edges = check_product(a, b, block, norm_a, norm_b, tau, input);
  return product(a, b, {}, norm_a, norm_b, tau, edges, input, beta, alpha);
}

}  // namespace

Kernel kernel_for(const Tensor& a, const Tensor& b, const Block& block, const OnDevice& device) {
  const auto matrices = [](const Tensor& x) {
    return x.dim() == 3 && x.stride(0) != 0 ? x.size(0) : 1;
  };
  const ProductSize size = {.batch_a = matrices(a),
                            .batch_b = matrices(b),
                            .batch = a.dim() == 3 ? a.size(0) : 1,
                            .m = a.size(-2),
                            .n = b.size(-1),
                            .k = a.size(-1)};
  const bool hopper =
      has_hopper_kernels(device.properties()) && tensor_maps_take(size.m, size.n, size.k);
  return choose_kernel(a.scalar_type(), block, allow_tf32(), hopper, size);
}

Tensor product(const Tensor& a, const Tensor& b, const Prepared& prepared, const Tensor& norm_a,
               const Tensor& norm_b, const Tensor& tau, const Block& block,
               const std::optional<Tensor>& input, const Scalar& beta, const Scalar& alpha) {
  const OnDevice device(a);
  auto shape = a.sizes().vec();
  shape.back() = b.size(-1);
  const Tensor c = at::empty(shape, a.options());
  if (c.numel() == 0) return c;
  const bool adds_input = input && beta.toDouble() != 0;
  const Tensor addend = adds_input ? as_batch(input->expand(shape)) : Tensor();
  const Kernel kernel = prepared.kernel ? *prepared.kernel : kernel_for(a, b, block, device);
  const Tensor batch_a = as_batch(a), batch_b = as_batch(b), batch_c = as_batch(c);
  const int64_t batch = batch_c.size(0), m = batch_c.size(1), n = batch_c.size(2);
  const TileSize tile = choose_tile(kernel, batch, m, n, device.multiprocessors(), forced_tile());
  const kernels::Launch how = {
      .tile = tile,
      .multiprocessors = device.multiprocessors(),
      .stream = device.stream(),
      .group_rows = group_rows(blocks_of(n, find_tile(kernel, tile)->config.columns))};
  // Calls start(params), where `params` has everything but the operands. Throws if start() returns
  // an error.
  const auto with_params = [&]<class Norm>(Norm, const auto& start) {
    Arguments<Norm> arguments(norm_a, norm_b, tau, block, addend, beta, alpha, a.size(-1), batch_c);
    std::optional<TileCounter> own;
    arguments.params.next_tile = prepared.next_tile;
    arguments.params.next_tile_is_zero = prepared.next_tile != nullptr;
    if (claims_tiles(kernel) && prepared.next_tile == nullptr) {
      arguments.params.next_tile = own.emplace().get();
    }
    C10_CUDA_CHECK(start(arguments.params));
  };
  const auto run = [&]<class Norm>(Multiply<Norm> multiply) {
    const Tensor readable_a = readable(batch_a), readable_b = readable(batch_b);
    with_params(Norm{}, [&](kernels::MultiplyParams<Norm>& p) {
      p.a = operand(readable_a, 2);
      p.b = operand(readable_b, 1);
      return multiply(p, how);
    });
  };
  const auto run_split = [&](SplitMultiply multiply) {
    const SplitOperands& parts = prepared.split_parts
                                     ? *prepared.split_parts
                                     : SplitOperands(batch_a, batch_b, split_parts_of(kernel),
                                                     Tensor(), Tensor(), device.stream());
    with_params(float{}, [&](kernels::MultiplyParams<float>& p) {
      p.a = parts.a.operand();
      p.b = parts.b.operand();
      return multiply(p, parts.a.source(), parts.b.source(), how);
    });
  };
  switch (kernel) {
    case Kernel::kSm90F16:
      run(Multiply<float>(multiply_sm90_f16));
      break;
    case Kernel::kSm90Bf16:
      run(Multiply<float>(multiply_sm90_bf16));
      break;
    case Kernel::kSm90F32x1:
      run_split(multiply_sm90_f32x1);
      break;
    case Kernel::kSm90F32x3:
      run_split(multiply_sm90_f32x3);
      break;
    case Kernel::kSm90F64:
      run(Multiply<double>(multiply_sm90_f64));
      break;
    case Kernel::kSm80F16:
      run(Multiply<float>(multiply_sm80_f16));
      break;
    case Kernel::kSm80Bf16:
      run(Multiply<float>(multiply_sm80_bf16));
      break;
    case Kernel::kSm80Tf32:
      run(Multiply<float>(multiply_sm80_tf32));
      break;
    case Kernel::kSm80F32:
      run(Multiply<float>(multiply_sm80_f32));
      break;
    case Kernel::kSm80F64:
      run(Multiply<double>(multiply_sm80_f64));
      break;
  }
  return c;
}

namespace {

std::string name_of_kernel(at::Device device, at::ScalarType dtype, const Block& block) {
  const bool hopper = has_hopper_kernels(check_device(device));
  return kernel_name(choose_kernel(dtype, block, allow_tf32(), hopper));
}

const Backends<NamedKernels> named(at::kCUDA, Rank::kPortable, {&name_of_kernel});

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) { m.impl("multiply", &multiply); }

}  // namespace spamm::cuda
