// The product on CUDA, shared by the ops multiply and spamm.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "block.h"
#include "cuda/device.h"
#include "cuda/heuristics.h"
#include "cuda/multiply/split.h"
#include "kernels/multiply/lists.h"

namespace spamm::cuda {

// A matrix as a batch of one.
inline at::Tensor as_batch(const at::Tensor& x) { return x.dim() == 3 ? x : x.unsqueeze(0); }

ProductSize size_of_product(const at::Tensor& a, const at::Tensor& b);

// The kernel for a product of this size on `device`.
Kernel kernel_for(at::ScalarType dtype, const ProductSize& size, const Block& block,
                  const OnDevice& device);

// The tile of its result; `upper_only`: of the part on and above the diagonal.
TileSize tile_for(Kernel kernel, const ProductSize& size, const OnDevice& device, bool upper_only);

// Results of earlier stages that product() reuses.
struct Prepared {
  // The size of the whole product, of which this is a part. It chooses kernel and tile, because
  // different ones round float32 differently.
  std::optional<ProductSize> whole = std::nullopt;
  // Result of kernel_for(). Stored, because PyTorch's TF32 setting may change between two calls.
  std::optional<Kernel> kernel = std::nullopt;
  // Rows of B from `first_own_row` on that lie here and not in `b`. Undefined: none. The kernel
  // must be one of reads_own_rows(), and the rows must pass reads_in_place().
  at::Tensor own_rows = {};
  int64_t first_own_row = 0;
  // The split parts of the operands, split_parts_of(kernel) of each.
  const SplitOperands* split_parts = nullptr;
  // A TileCounter that is zero when the previous kernel on the stream has ended.
  int* next_tile = nullptr;
  // A block-sparse product of matrices as in kernels/multiply/lists.h, by one of Hopper's kernels.
  // Norm maps are not read.
  const kernels::ProductLists* lists = nullptr;
};

// What is wanted besides a product.
struct Wanted {
  bool symmetric = false;  // the upper triangle of the product and its mirror image
  at::Tensor norms = {};   // undefined, or becomes the product's norm map; contiguous
};

// Whether the kernels can write to `c`: rows of contiguous entries, which do not overlap, from a
// 16-byte address on.
bool is_writable(const at::Tensor& c);

// Computes the op multiply. Its arguments have passed check_product(). Writes to `c`, which
// is_writable() and shares no memory with an argument.
void product_into(const at::Tensor& c, const at::Tensor& a, const at::Tensor& b,
                  const Prepared& prepared, const at::Tensor& norm_a, const at::Tensor& norm_b,
                  const at::Tensor& tau, const Block& block, const std::optional<at::Tensor>& input,
                  const at::Scalar& beta, const at::Scalar& alpha, const Wanted& wanted = {});

}  // namespace spamm::cuda
