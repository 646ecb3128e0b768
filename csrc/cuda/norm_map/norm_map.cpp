// The ops of norm maps on CUDA.
#include "cuda/norm_map/norm_map.h"

#include "checks.h"
#include "cuda/device.h"
#include "stage_range.h"

namespace spamm::cuda {
namespace {

using at::Tensor;

// A map of `a`, not computed yet. The second is what computes it: all batch dimensions are one. It
// copies `a` to `kept` only if no single stride can describe them.
std::tuple<Tensor, MapJob> new_map(const Tensor& a, int64_t rows, int64_t columns, const char* name,
                                   Tensor& kept) {
  const Tensor map = at::empty(norm_map_shape(a.sizes(), rows, columns),
                               a.options().dtype(norm_dtype(a.scalar_type())));
  check_blocks(map.numel(), name, a.sizes());
  kept = a.dim() > 3 ? a.flatten(0, -3) : a;
  return {map, job_for(kept, rows, columns, map.mutable_data_ptr())};
}

Tensor norm_map_op(const Tensor& a, at::IntArrayRef block) {
  check_operand_dtype(a.scalar_type(), "a");
  check_block_pair(block);
  check_matrices(a, "a");
  const OnDevice device(a);
  Tensor kept;
  const auto [map, job] = new_map(a, block[0], block[1], "a", kept);
  write_norm_maps(job, a.scalar_type(), nullptr, device.multiprocessors(), device.stream());
  return map;
}

std::tuple<Tensor, Tensor> norm_maps_op(const Tensor& a, const Tensor& b, at::IntArrayRef block) {
  const Block edges = check_block(block);
  check_matrix_pair(a, b);
  const OnDevice device(a);
  const StageRange stage(kNormMapStage);
  Tensor kept_a, kept_b;
  const auto [map_a, job_a] = new_map(a, edges.m, edges.k, "a", kept_a);
  const auto [map_b, job_b] = new_map(b, edges.k, edges.n, "b", kept_b);
  write_norm_maps({job_a, job_b}, a.scalar_type(), nullptr, device.multiprocessors(),
                  device.stream());
  return {map_a, map_b};
}

}  // namespace

void check_blocks(int64_t norms, const char* name, at::IntArrayRef shape) {
  TORCH_CHECK(norms <= std::numeric_limits<int32_t>::max(), name,
              " must have at most 2^31 - 1 blocks; got ", norms, " for shape ", shape);
}

void norm_map_into(const Tensor& a, int64_t rows, int64_t columns, const Tensor& map,
                   const OnDevice& device) {
  check_blocks(map.numel(), "a", a.sizes());
  write_norm_maps(job_for(a, rows, columns, map.mutable_data_ptr()), a.scalar_type(), nullptr,
                  device.multiprocessors(), device.stream());
}

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) {
  m.impl("norm_map", &norm_map_op);
  m.impl("norm_maps", &norm_maps_op);
}

}  // namespace spamm::cuda
