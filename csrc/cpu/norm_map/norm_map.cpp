// Norm maps on the CPU, in one pass over the matrix.
#include "checks.h"
#include "cpu/norm_map/strip_norms.h"
#include "stage_range.h"

namespace spamm::cpu {
namespace {

using at::Tensor;

constexpr int64_t kElementsPerTask = 32 << 10;  // with fewer, starting a thread does not pay

// `a` (batch, M, K) has unit stride along K; `norms` (batch, MB, KB) has any strides.
template <class T, class N>
void norms_along_rows(const Tensor& a, int64_t m, int64_t k, const Tensor& norms) {
  const int64_t rows = a.size(1), columns = a.size(2);
  const int64_t block_rows = norms.size(1), strips = blocks_of(columns, kStrip);
  const int64_t tasks = a.size(0) * block_rows * strips;
  if (tasks == 0) return;
  const int64_t elements = std::min(m, rows) * std::min(kStrip, columns);
  const T* first = a.const_data_ptr<T>();
  N* first_norm = norms.mutable_data_ptr<N>();
  const auto from_a = a.strides(), to_norms = norms.strides();
  at::parallel_for(0, tasks, blocks_of(kElementsPerTask, elements), [&](int64_t from, int64_t to) {
    for (int64_t task = from; task < to; ++task) {
      const int64_t column = task % strips * kStrip;
      const int64_t i = task / strips % block_rows;
      const int64_t batch = task / strips / block_rows;
      const Strip<T> strip{first + batch * from_a[0] + i * m * from_a[1] + column, from_a[1],
                           std::min(m, rows - i * m), std::min(kStrip, columns - column)};
      N* out = first_norm + batch * to_norms[0] + i * to_norms[1] + column / k * to_norms[2];
      strip_norms(strip, k, out, to_norms[2]);
    }
  });
}

Tensor norm_map(const Tensor& a, at::IntArrayRef block) {
  check_operand_dtype(a.scalar_type(), "a");
  check_matrices(a, "a");
  check_block_pair(block);
  const Tensor result = at::empty(norm_map_shape(a.sizes(), block[0], block[1]),
                                  a.options().dtype(norm_dtype(a.scalar_type())));

  const auto as_batches = [](const Tensor& t) {
    return t.dim() == 2 ? t.unsqueeze(0) : t.flatten(0, -3);
  };
  Tensor matrices = as_batches(a), norms = as_batches(result);
  int64_t m = block[0], k = block[1];
  // By strides alone: a part of one row has the norms of the whole.
  if (matrices.stride(1) == 1 && matrices.stride(2) != 1) {
    // The norms of the transpose are the transposed norms, and its rows are contiguous.
    matrices = matrices.mT();
    norms = norms.mT();
    std::swap(m, k);
  } else if (matrices.stride(2) != 1) {
    matrices = matrices.contiguous();
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, a.scalar_type(), "norm_map", [&] {
    using N = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    norms_along_rows<scalar_t, N>(matrices, m, k, norms);
  });
  return result;
}

// Without the dispatcher between: its calls take longer than the norms of small matrices.
std::tuple<Tensor, Tensor> norm_maps(const Tensor& a, const Tensor& b, at::IntArrayRef block) {
  const Block edges = check_block(block);
  check_matrix_pair(a, b);
  const auto map = [](const Tensor& x, int64_t rows, int64_t columns) {
    const StageRange stage(kNormMapStage);
    return norm_map(x, {rows, columns});
  };
  return {map(a, edges.m, edges.k), map(b, edges.k, edges.n)};
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CPU, m) {
  m.impl("norm_map", &norm_map);
  m.impl("norm_maps", &norm_maps);
}

}  // namespace spamm::cpu
