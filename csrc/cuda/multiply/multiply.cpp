// From a product's tensors to the parameters of its kernel.
#include "cuda/multiply/multiply.h"

#include "backends.h"
#include "environment.h"

namespace spamm::cuda {
namespace {

using at::Tensor;

c10::DataPtr allocate_ints(int64_t count) {
  return c10::cuda::CUDACachingAllocator::get()->allocate(count * sizeof(int));
}

// The parameters of a product, except its operands.
template <class Norm>
kernels::MultiplyParams<Norm> params_of(const Product& x, int* counters) {
  const Matrices c(x.c);
  kernels::MultiplyParams<Norm> p{};
  p.norm_a = static_cast<const Norm*>(x.map_a);
  p.norm_b = static_cast<const Norm*>(x.map_b);
  p.tau = x.tau.argument<Norm>();
  p.batch = c.size(0), p.m = c.size(1), p.n = c.size(2), p.k = x.a.size(-1);
  p.log2_block_m = log2_of(x.block.m);
  p.log2_block_k = log2_of(x.block.k);
  p.log2_block_n = log2_of(x.block.n);
  p.alpha = x.alpha.to<Norm>();
  if (x.input != nullptr) {
    p.beta = x.beta.to<Norm>();
    p.input = x.input->const_data_ptr();
    for (int64_t dim = 3 - x.input->dim(), i = 0; dim < 3; ++dim, ++i) {
      p.input_strides[dim] = x.input->size(i) == 1 ? 0 : x.input->stride(i);
    }
  }
  p.c = x.c.mutable_data_ptr();
  p.c_batch_stride = c.stride(0);
  p.c_leading = c.size(1) > 1 ? c.stride(1) : c.size(2);
  p.upper_only = x.upper_only;
  p.next_tile = counters;
  p.next_tile_is_zero = x.counter_is_zero;
  return p;
}

template <class Norm>
Join<Norm>* joiner_of(Kernel kernel) {
  if constexpr (std::is_same_v<Norm, double>) {
    return join_f64;
  } else {
    return kernel == Kernel::kSm90F16    ? join_f16
           : kernel == Kernel::kSm90Bf16 ? join_bf16
                                         : join_f32;
  }
}

// Calls start(p). Where segments share the steps of a tile, it computes the sums of each in
// memory of its own, and a second kernel adds them.
template <class Norm, class Start>
cudaError_t multiply_in_segments(const kernels::MultiplyParams<Norm>& p, const Choice& choice,
                                 const kernels::Launch& how, const Start& start) {
  if (how.segments.log2_segments == 0 || how.segments.meetings != nullptr) return start(p);
  const auto whole = [](int64_t size, int edge) { return blocks_of(size, edge) * edge; };
  const int64_t rows = whole(p.m, choice.config.rows), columns = whole(p.n, choice.config.columns);
  const c10::DataPtr memory = c10::cuda::CUDACachingAllocator::get()->allocate(
      p.batch * choice.segments * rows * columns * sizeof(Norm));
  auto of_segments = p;
  of_segments.c = memory.get();
  of_segments.c_batch_stride = rows * columns, of_segments.c_leading = columns;
  of_segments.alpha = 1, of_segments.input = nullptr;
  if (const cudaError_t error = start(of_segments); error != cudaSuccess) return error;
  return joiner_of<Norm>(choice.kernel)(p, choice.segments, of_segments, how.stream);
}

Multiply<float>* launcher_of(Kernel kernel) {
  return kernel == Kernel::kSm90F16    ? multiply_sm90_f16
         : kernel == Kernel::kSm90Bf16 ? multiply_sm90_bf16
         : kernel == Kernel::kSm80F16  ? multiply_sm80_f16
         : kernel == Kernel::kSm80Bf16 ? multiply_sm80_bf16
         : kernel == Kernel::kSm80Tf32 ? multiply_sm80_tf32
                                       : multiply_sm80_f32;
}

cudaError_t launch_split_product(const Product& x, const Choice& choice, int* counters,
                                 const kernels::Launch& how) {
  const int parts = split_parts_of(choice.kernel);
  std::optional<SplitOperands> own;
  if (x.split_parts == nullptr) {
    own.emplace(x.a, x.b, parts, x.block, MapMemory(), MapMemory(), nullptr, how.stream);
  }
  const SplitOperands& split = own ? *own : *x.split_parts;
  // A number for each granule of whole blocks of C, and the counter behind them.
  const int64_t granules = granules_of(x.block), edge = kernels::kSplitBlock / granules;
  const auto granules_along = [&](int64_t size) {
    return granules * blocks_of(size, kernels::kSplitBlock);
  };
  const int64_t terms = x.lists != nullptr
                            ? x.c.numel() / (edge * edge)
                            : (x.c.dim() == 3 ? x.c.size(0) : 1) * granules_along(x.c.size(-2)) *
                                  granules_along(x.c.size(-1));
  const int64_t terms_in_ints = blocks_of(terms * sizeof(int16_t), sizeof(int));
  const c10::DataPtr memory = allocate_ints(terms_in_ints);
  auto p = params_of<float>(x, counters);
  p.a = split.a.operand();
  auto* const numbers = static_cast<int16_t*>(memory.get());
  p.b = split.b.operand();
  const auto multiply = parts == 1 ? multiply_sm90_f32x1 : multiply_sm90_f32x3;
  return multiply_in_segments(p, choice, how, [&](const auto& own) {
    return multiply(own, x.lists, split.a.source(), split.b.source(), numbers, how);
  });
}

// By a kernel that reads the operands as they lie.
template <class Norm>
cudaError_t launch_plain_product(const Product& x, const Choice& choice, const kernels::Launch& how,
                                 int* counters, Multiply<Norm>* multiply) {
  const int64_t alignment = x.own_rows.defined() ? kAlignment : choice.alignment;
  const Tensor a = readable(x.a, alignment), b = readable(x.b, alignment);
  auto p = params_of<Norm>(x, counters);
  p.a = operand(a, 2, alignment);
  p.b = operand(b, 1, alignment);
  if (x.own_rows.defined()) {
    p.own_b = operand(x.own_rows, 1);
    p.first_own_row = x.first_own_row;
    p.own_rows = x.own_rows.size(0);
  }
  return multiply_in_segments(p, choice, how,
                              [&](const auto& own) { return multiply(own, x.lists, how); });
}

cudaError_t launch(const Product& x, const Choice& choice, kernels::Launch how) {
  const Kernel kernel = choice.kernel;
  c10::DataPtr own;
  int* counters = x.counters;
  if (counters == nullptr && claims_tiles(kernel)) {
    own = allocate_ints(1 + choice.meetings);
    counters = static_cast<int*>(own.get());
  }
  if (choice.segments > 1 && x.lists == nullptr) {
    how.segments = {
        .log2_segments = static_cast<int>(log2_of(choice.segments)),
        .pieces = static_cast<int>(choice.meetings),
        .meetings = choice.meetings == 0 ? nullptr : reinterpret_cast<unsigned*>(counters + 1)};
  }
  if (split_parts_of(kernel) > 0) return launch_split_product(x, choice, counters, how);
  if (kernel == Kernel::kSm90F64 || kernel == Kernel::kSm80F64) {
    const auto multiply = kernel == Kernel::kSm90F64 ? multiply_sm90_f64 : multiply_sm80_f64;
    return launch_plain_product<double>(x, choice, how, counters, multiply);
  }
  return launch_plain_product<float>(x, choice, how, counters, launcher_of(kernel));
}

std::string name_of_kernel(at::Device device, at::ScalarType dtype, const Block& block) {
  const bool hopper = has_hopper_kernels(check_device(device));
  return kernel_name(choose_kernel(dtype, block, allow_tf32(), hopper));
}

const Backends<NamedKernels> named(at::kCUDA, Rank::kPortable, {&name_of_kernel});

}  // namespace

bool reads_in_place(Kernel kernel, const Tensor& rows, int64_t first, const Tensor& b) {
  constexpr int64_t kStep = 64;  // rows that a kernel loads together
  const int64_t last = first + rows.size(0);
  return reads_own_rows(kernel) && first % kStep == 0 && (last % kStep == 0 || last == b.size(0)) &&
         reads_along(rows, 2, 1) && reads_along(b, 2, 1);
}

void launch_product(const Product& product, const Choice& choice, const OnDevice& device) {
  C10_CUDA_CHECK(
      launch(product, choice,
             {.tile = choice.tile,
              .multiprocessors = device.multiprocessors(),
              .stream = device.stream(),
              .group_rows = group_rows(blocks_of(product.c.size(-1), choice.config.columns))}));
}

}  // namespace spamm::cuda
