// Norm maps on the CPU, in one pass over the matrices.
#include <ATen/EmptyTensor.h>

#include <atomic>

#include "checks.h"
#include "cpu/norm_map/strip_norms.h"
#include "stage_range.h"

namespace spamm::cpu {
namespace {

using at::Tensor;

constexpr int64_t kElementsPerThread = 32 << 10;  // with fewer, starting a thread does not pay
constexpr int64_t kStripOfTask = kStrip / 4;      // columns; few, so that threads finish together

// (M, K) or (batch, M, K), of unit stride along K unless they are copied, and their norm maps.
struct Matrices {
  Matrices(const Tensor& given, int64_t block_rows, int64_t block_columns)
      : result(at::detail::empty_cpu(norm_map_shape(given.sizes(), block_rows, block_columns),
                                     norm_dtype(given.scalar_type()))),
        a(given.dim() > 3 ? given.flatten(0, -3) : given),
        norms(given.dim() > 3 ? result.flatten(0, -3) : result),
        m(block_rows),
        k(block_columns) {
    // By strides alone: a part of one row has the norms of the whole.
    if (a.stride(-2) == 1 && a.stride(-1) != 1) {
      // The norms of the transpose are the transposed norms, and its rows are contiguous.
      a = a.mT();
      norms = norms.mT();
      std::swap(m, k);
    } else if (a.stride(-1) != 1) {
      a = a.contiguous();
    }
    strips = blocks_of(a.size(-1), kStripOfTask);
    tasks = (a.dim() == 3 ? a.size(0) : 1) * norms.size(-2) * strips;
  }

  template <class T, class N>
  void compute(int64_t task) const {
    const bool is_batch = a.dim() == 3;
    const int64_t column = task % strips * kStripOfTask, i = task / strips % norms.size(-2);
    const int64_t batch = task / strips / norms.size(-2), stride = a.stride(-2);
    const Strip<T> strip{
        a.const_data_ptr<T>() + (is_batch ? batch * a.stride(0) : 0) + i * m * stride + column,
        stride, std::min(m, a.size(-2) - i * m), std::min(kStripOfTask, a.size(-1) - column)};
    N* out = norms.mutable_data_ptr<N>() + (is_batch ? batch * norms.stride(0) : 0) +
             i * norms.stride(-2) + column / k * norms.stride(-1);
    strip_norms(strip, k, out, norms.stride(-1));
  }

  Tensor result, a, norms;
  int64_t m, k, strips, tasks;
};

// Threads claim one strip after another, of all matrices.
template <size_t count>
void compute(const Matrices (&matrices)[count]) {
  int64_t tasks = 0, elements = 0;
  for (const Matrices& x : matrices) {
    tasks += x.tasks;
    elements += x.a.numel();
  }
  const int64_t threads = std::clamp<int64_t>(elements / kElementsPerThread, 1,
                                              std::min<int64_t>(tasks, at::get_num_threads()));
  std::atomic<int64_t> next{0};
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, matrices[0].a.scalar_type(), "norm_map", [&] {
        using N = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
        at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
          for (int64_t task; (task = next++) < tasks;) {
            const Matrices* x = matrices;
            for (; task >= x->tasks; ++x) task -= x->tasks;
            x->compute<scalar_t, N>(task);
          }
        });
      });
}

Tensor norm_map(const Tensor& a, at::IntArrayRef block) {
  check_operand_dtype(a.scalar_type(), "a");
  check_matrices(a, "a");
  check_block_pair(block);
  const Matrices matrices[] = {{a, block[0], block[1]}};
  compute(matrices);
  return matrices[0].result;
}

// With one start of threads, and none for small matrices.
std::tuple<Tensor, Tensor> norm_maps(const Tensor& a, const Tensor& b, at::IntArrayRef block) {
  const Block edges = check_block(block);
  check_matrix_pair(a, b);
  const StageRange stage(kNormMapStage);
  const Matrices matrices[] = {{a, edges.m, edges.k}, {b, edges.k, edges.n}};
  compute(matrices);
  return {matrices[0].result, matrices[1].result};
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CPU, m) {
  m.impl("norm_map", &norm_map);
  m.impl("norm_maps", &norm_maps);
}

}  // namespace spamm::cpu
