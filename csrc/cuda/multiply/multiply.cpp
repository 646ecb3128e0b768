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
#include "cuda/forced_segments.h"
#include "cuda/forced_tile.h"
#include "cuda/heuristics.h"
#include "cuda/hopper.h"
#include "cuda/multiply/launch.h"
#include "cuda/multiply/segments.h"
#include "cuda/multiply/symmetric.h"
#include "cuda/multiply/write_result.h"
#include "cuda/norm_map/norm_map.h"
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
    p.c_batch_stride = c.stride(0);
    p.c_leading = c.size(1) > 1 ? c.stride(1) : c.size(2);
  }
};

Tensor multiply(MultiplyArguments& x) {
  const Block block = check_product(x.a, x.b, x.block, x.norm_a, x.norm_b, x.tau, x.input);
  ProductSize size = size_of_product(x.a, x.b);
  if (x.whole) {
    check_whole(x.a, x.b, *x.whole);
    size.m = (*x.whole)[0], size.n = (*x.whole)[1];
  }
  auto shape = x.a.sizes().vec();
  shape.back() = x.b.size(-1);
  const Tensor c = at::empty(shape, x.a.options());
  product_into(c, x.a, x.b, {.whole = size}, x.norm_a, x.norm_b, x.tau, block, x.input, x.beta,
               x.alpha);
  return c;
}

// Whether `rows` of B, from `first` on, can be read where they are, beside the other rows in `b`.
bool reads_in_place(Kernel kernel, const Tensor& rows, int64_t first, const Tensor& b) {
  constexpr int64_t kStep = 64;  // rows that a kernel loads together
  const int64_t last = first + rows.size(0);
  const auto has_rows = [](const Tensor& x) { return reads_along(x.unsqueeze(0), 2, 1); };
  return reads_own_rows(kernel) && first % kStep == 0 && (last % kStep == 0 || last == b.size(0)) &&
         has_rows(rows) && has_rows(b);
}

void multiply_part(MultiplyPartArguments& x) {
  const Block block = check_product(x.a, x.b, x.block, x.norm_a, x.norm_b, x.tau, std::nullopt);
  check_part(x.out, x.a, x.b, x.whole, x.own_rows, x.first_own_row);
  const OnDevice device(x.a);
  const ProductSize size = {
      .batch_a = 1, .batch_b = 1, .batch = 1, .m = x.whole[0], .n = x.whole[1], .k = x.a.size(1)};
  Prepared prepared = {.whole = size, .kernel = kernel_for(x.a.scalar_type(), size, block, device)};
  if (x.own_rows && x.own_rows->numel() > 0) {
    if (reads_in_place(*prepared.kernel, *x.own_rows, x.first_own_row, x.b)) {
      prepared.own_rows = *x.own_rows;
      prepared.first_own_row = x.first_own_row;
    } else {
      x.b.narrow(0, x.first_own_row, x.own_rows->size(0)).copy_(*x.own_rows);
    }
  }
  const bool in_place = is_writable(x.out);
  const Tensor c = in_place ? x.out : at::empty(x.out.sizes(), x.out.options());
  product_into(c, x.a, x.b, prepared, x.norm_a, x.norm_b, x.tau, block, std::nullopt, 1, 1);
  if (!in_place) x.out.copy_(c);
}

void multiply_into(MultiplyIntoArguments& x) {
  const Block block = check_product(x.a, x.b, x.block, x.norm_a, x.norm_b, x.tau, x.input);
  check_into(x.out, x.a, x.b, block, x.input, x.symmetric, x.norms);
  const auto write = [&](const Tensor& c, const Tensor& map) {
    product_into(c, x.a, x.b, {}, x.norm_a, x.norm_b, x.tau, block, x.input, x.beta, x.alpha,
                 {x.symmetric, map});
  };
  write_result(x.out, x.norms, {x.a, x.b, x.norm_a, x.norm_b, x.tau, x.input.value_or(Tensor())},
               block, write);
}

// Computes what is wanted besides `c`, whose upper triangle or whole is set.
void complete(const Tensor& c, const Block& block, const Wanted& wanted, const OnDevice& device) {
  const Tensor batch = as_batch(c);
  const bool norms_follow = wanted.norms.defined() && !(wanted.symmetric && has_norms_of(block.m));
  if (wanted.symmetric) {
    complete_symmetric(batch, block.m, norms_follow ? Tensor() : wanted.norms, device);
  }
  if (norms_follow) norm_map_into(c, block.m, block.n, wanted.norms);
}

}  // namespace

bool is_writable(const Tensor& c) {
  const Tensor batch = as_batch(c);
  const auto aligned = [&](int64_t stride) { return stride * c.element_size() % kAlignment == 0; };
  return (batch.size(2) <= 1 || batch.stride(2) == 1) &&
         (batch.size(1) <= 1 || batch.stride(1) >= batch.size(2)) &&
         (batch.size(0) <= 1 || (c.is_contiguous() || aligned(batch.stride(0)))) &&
         reinterpret_cast<uintptr_t>(c.const_data_ptr()) % kAlignment == 0;
}

ProductSize size_of_product(const Tensor& a, const Tensor& b) {
  const auto matrices = [](const Tensor& x) {
    return x.dim() == 3 && x.stride(0) != 0 ? x.size(0) : 1;
  };
  return {.batch_a = matrices(a),
          .batch_b = matrices(b),
          .batch = a.dim() == 3 ? a.size(0) : 1,
          .m = a.size(-2),
          .n = b.size(-1),
          .k = a.size(-1)};
}

Kernel kernel_for(at::ScalarType dtype, const ProductSize& size, const Block& block,
                  const OnDevice& device) {
  const bool hopper =
      has_hopper_kernels(device.properties()) && tensor_maps_take(size.m, size.n, size.k);
  return choose_kernel(dtype, block, allow_tf32(), hopper, size);
}

TileSize tile_for(Kernel kernel, const ProductSize& size, const OnDevice& device, bool upper_only) {
  return choose_tile(kernel, size.batch, size.m, size.n, device.multiprocessors(), forced_tile(),
                     upper_only);
}

void product_into(const Tensor& c, const Tensor& a, const Tensor& b, const Prepared& prepared,
                  const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau, const Block& block,
                  const std::optional<Tensor>& input, const Scalar& beta, const Scalar& alpha,
                  const Wanted& wanted) {
  const OnDevice device(a);
  if (c.numel() == 0) return;
  const bool adds_input = input && beta.toDouble() != 0;
  const Tensor addend = adds_input ? as_batch(input->expand(c.sizes())) : Tensor();
  const ProductSize size = prepared.whole ? *prepared.whole : size_of_product(a, b);
  const Kernel kernel =
      prepared.kernel ? *prepared.kernel : kernel_for(a.scalar_type(), size, block, device);
  const Tensor batch_a = as_batch(a), batch_b = as_batch(b), batch_c = as_batch(c);
  const TileSize tile = tile_for(kernel, size, device, wanted.symmetric);
  const kernels::Launch how = {
      .tile = tile,
      .multiprocessors = device.multiprocessors(),
      .stream = device.stream(),
      .group_rows = group_rows(blocks_of(c.size(-1), find_tile(kernel, tile)->config.columns))};
  std::optional<ProductSegments> segments;
  if (kernel == Kernel::kSm90F64 && prepared.lists == nullptr) {
    const int count =
        choose_product_segments(kernel, size, device.multiprocessors(), forced_segments());
    // Large tiles have none; only SPAMM_TORCH_TILE takes them where small ones would have some.
    segments.emplace(tile == TileSize::kSmall ? count : 1, batch_c.size(0), batch_c.size(1),
                     batch_c.size(2), find_tile(kernel, tile)->config);
  }
  // Calls start(params), where `params` has everything but the operands. Throws if start() returns
  // an error.
  const auto with_params = [&]<class Norm>(Norm, const auto& start) {
    Arguments<Norm> arguments(norm_a, norm_b, tau, block, addend, beta, alpha, a.size(-1), batch_c);
    std::optional<TileCounter> own;
    arguments.params.upper_only = wanted.symmetric;
    arguments.params.next_tile = prepared.next_tile;
    arguments.params.next_tile_is_zero = prepared.next_tile != nullptr;
    if (segments) {
      arguments.params.next_tile = segments->next_tile();
      arguments.params.next_tile_is_zero = false;  // that holds for the counter it replaces
    } else if (claims_tiles(kernel) && prepared.next_tile == nullptr) {
      arguments.params.next_tile = own.emplace().get();
    }
    C10_CUDA_CHECK(start(arguments.params));
  };
  const auto run_as = [&]<class Norm>(Norm, const auto& multiply) {
    const Tensor readable_a = readable(batch_a), readable_b = readable(batch_b);
    with_params(Norm{}, [&](kernels::MultiplyParams<Norm>& p) {
      p.a = operand(readable_a, 2);
      p.b = operand(readable_b, 1);
      if (prepared.own_rows.defined()) {
        p.own_b = operand(as_batch(prepared.own_rows), 1);
        p.first_own_row = prepared.first_own_row;
        p.own_rows = prepared.own_rows.size(0);
      }
      return multiply(p, how);
    });
  };
  const auto run = [&]<class Norm>(Multiply<Norm> multiply) { run_as(Norm{}, multiply); };
  const auto run_split = [&](const auto& multiply) {
    const SplitOperands& parts = prepared.split_parts
                                     ? *prepared.split_parts
                                     : SplitOperands(batch_a, batch_b, split_parts_of(kernel),
                                                     block, Tensor(), Tensor(), device.stream());
    const Tensor terms = prepared.lists != nullptr ? parts.empty_terms_of(c, block)
                                                   : parts.empty_terms(batch_c.size(0), block);
    with_params(float{}, [&](kernels::MultiplyParams<float>& p) {
      p.a = parts.a.operand();
      p.b = parts.b.operand();
      return multiply(p, parts.a.source(), parts.b.source(), terms.mutable_data_ptr<int16_t>(),
                      how);
    });
  };
  const auto run_listed = [&]<class Norm>(ListedMultiply<Norm> multiply) {
    run_as(Norm{}, [&](const kernels::MultiplyParams<Norm>& p, const kernels::Launch& launch) {
      return multiply(p, *prepared.lists, launch);
    });
  };
  const auto run_listed_split = [&](ListedSplitMultiply multiply) {
    run_split([&](const kernels::MultiplyParams<float>& p, const auto&... others) {
      return multiply(p, *prepared.lists, others...);
    });
  };
  if (prepared.lists != nullptr) {
    if (kernel == Kernel::kSm90F16) return run_listed(multiply_listed_f16);
    if (kernel == Kernel::kSm90Bf16) return run_listed(multiply_listed_bf16);
    if (kernel == Kernel::kSm90F64) return run_listed(multiply_listed_f64);
    if (kernel == Kernel::kSm90F32x1) return run_listed_split(multiply_listed_f32x1);
    return run_listed_split(multiply_listed_f32x3);
  }
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
      run_as(double{},
             [&](const kernels::MultiplyParams<double>& p, const kernels::Launch& launch) {
               return multiply_sm90_f64(p, launch, segments->params());
             });
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
  complete(c, block, wanted, device);
}

namespace {

std::string name_of_kernel(at::Device device, at::ScalarType dtype, const Block& block) {
  const bool hopper = has_hopper_kernels(check_device(device));
  return kernel_name(choose_kernel(dtype, block, allow_tf32(), hopper));
}

const Backends<NamedKernels> named(at::kCUDA, Rank::kPortable, {&name_of_kernel});

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) {
  m.impl("multiply", boxed<&multiply>());
  m.impl("multiply_into", boxed<&multiply_into>());
  m.impl("multiply_part", boxed<&multiply_part>());
}

}  // namespace spamm::cuda
