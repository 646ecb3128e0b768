// The launch of a product on CUDA, shared by the ops of products.
#pragma once

#include <ATen/core/Tensor.h>

#include "block.h"
#include "cuda/device.h"
#include "cuda/forced.h"
#include "cuda/heuristics.h"
#include "cuda/multiply/split.h"
#include "cuda/operand.h"
#include "kernels/multiply/lists.h"

namespace spamm::cuda {

// The facts of a device that heuristics.h asks for.
inline Chip chip_of(const OnDevice& device) {
  return {.hopper = has_hopper_kernels(device.properties()),
          .multiprocessors = device.multiprocessors(),
          .forced_tile = forced_tile(),
          .forced_segments = forced_segments()};
}

// The sizes of a whole product.
inline ProductSize size_of_product(const at::Tensor& a, const at::Tensor& b) {
  const auto matrices = [](const at::Tensor& x) {
    return x.dim() == 3 && x.stride(0) != 0 ? x.size(0) : 1;
  };
  return {.batch_a = matrices(a),
          .batch_b = matrices(b),
          .batch = a.dim() == 3 ? a.size(0) : 1,
          .m = a.size(-2),
          .n = b.size(-1),
          .k = a.size(-1)};
}

// C = alpha * (A B over valid blocks) + beta * input. Tensors are matrices or batches of them that
// have passed check_product(), and outlive the launch.
struct Product {
  const at::Tensor &a, &b;
  // Its rows are contiguous and do not overlap, and its address is a multiple of 16 bytes
  // (is_writable()). It shares no memory with the others and is not empty.
  const at::Tensor& c;
  Block block;
  const void *map_a = nullptr, *map_b = nullptr;  // contiguous norm maps
  Threshold tau = {};
  const at::Tensor* input = nullptr;  // null: nothing is added
  at::Scalar beta = 1, alpha = 1;
  bool upper_only = false;  // what lies below the diagonal may stay as it is
  // Rows of B from `first_own_row` on that lie here and not in `b`. The kernel must be one of
  // reads_own_rows(), and the rows must pass reads_in_place().
  at::Tensor own_rows = {};
  int64_t first_own_row = 0;
  // The split parts of the operands, split_parts_of(kernel) of each. Null: they are made here.
  const SplitOperands* split_parts = nullptr;
  // reads_b_once(): only A has split parts, and B's norms go to `norms_b` unless map_b has them.
  bool reads_b_once = false;
  MapMemory norms_b = {};
  // Device memory of 1 + Choice::meetings ints, allocated on the current stream, so that no launch
  // on another stream or in another graph can use it at the same time. Null: it is allocated here.
  // The first one may be zero when the previous kernel on the stream has ended.
  int* counters = nullptr;
  bool counter_is_zero = false;
  // A block-sparse product of matrices as in kernels/multiply/lists.h. Norm maps are not read.
  const kernels::ProductLists* lists = nullptr;
};

// Tells whether `rows` of B, from `first` on, can be read where they are, beside the other rows in
// `b`.
bool reads_in_place(Kernel kernel, const at::Tensor& rows, int64_t first, const at::Tensor& b);

// Tells whether the product reads B once, and computes norms and split parts of what it reads.
bool reads_b_once(const Choice& choice, const Block& block, const at::Tensor& a,
                  const at::Tensor& b, const OnDevice& device);

void launch_product(const Product& product, const Choice& choice, const OnDevice& device);

}  // namespace spamm::cuda
