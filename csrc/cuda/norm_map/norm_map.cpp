// norm_map on CUDA: turns tensors into kernel parameters.
#include "cuda/norm_map/norm_map.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>
#include <limits>
#include <tuple>
#include <vector>

#include "checks.h"
#include "cuda/device.h"
#include "cuda/norm_map/launch.h"
#include "cuda/norm_map/layout.h"
#include "stage_range.h"

namespace spamm::cuda {
namespace {

using at::Tensor;

// A matrix or a batch of them, its block, and an uninitialised map.
struct Job {
  at::ScalarType dtype;
  Tensor matrices, map;
  std::array<int64_t, 2> block;

  // The map goes to `memory`, contiguous and of its shape, if that is defined.
  Job(const Tensor& a, std::array<int64_t, 2> block, const char* name, const Tensor& memory = {})
      : dtype(a.scalar_type()), map(memory), block(block) {
    auto shape = a.sizes().vec();
    shape[a.dim() - 2] = blocks_of(a.size(-2), block[0]);
    shape[a.dim() - 1] = blocks_of(a.size(-1), block[1]);
    if (!map.defined()) map = at::empty(shape, a.options().dtype(norm_dtype(a.scalar_type())));
    TORCH_CHECK(map.numel() <= std::numeric_limits<int32_t>::max(), name,
                " must have at most 2^31 - 1 blocks; got ", map.numel(), " for shape ", a.sizes());
    // Merges all batch dimensions into one. Copies only if no single stride can describe them.
    if (map.numel() != 0) matrices = a.reshape({-1, a.size(-2), a.size(-1)});
  }

  template <class Norm>
  kernels::NormMapParams<Norm> params() const {
    return norm_map_params<Norm>(matrices, block[0], block[1],
                                 map.view({-1, map.size(-2), map.size(-1)}));
  }
};

// Computes the maps of one or two matrices of one dtype in one launch.
template <class Norm>
void launch(at::ArrayRef<const Job*> jobs, int* zeroed, const OnDevice& device) {
  std::vector<kernels::NormMapParams<Norm>> params;
  for (const Job* job : jobs) {
    if (job->map.numel() != 0) params.push_back(job->params<Norm>());
  }
  if (params.empty()) return;
  launch_norm_maps(params.data(), static_cast<int>(params.size()), jobs[0]->dtype, zeroed, device);
}

void compute(at::ArrayRef<const Job*> jobs, int* zeroed, const OnDevice& device) {
  if (jobs[0]->map.scalar_type() == at::kDouble) {
    launch<double>(jobs, zeroed, device);
  } else {
    launch<float>(jobs, zeroed, device);
  }
}

Tensor norm_map_op(const Tensor& a, at::IntArrayRef block) {
  check_operand_dtype(a.scalar_type(), "a");
  check_block_pair(block);
  check_matrices(a, "a");
  return norm_map(a, block[0], block[1], nullptr);
}

std::tuple<Tensor, Tensor> norm_maps_op(const Tensor& a, const Tensor& b, at::IntArrayRef block) {
  check_matrix_pair(a, b);
  const StageRange stage(kNormMapStage);
  return norm_maps(a, b, check_block(block), nullptr);
}

}  // namespace

std::tuple<Tensor, Tensor> norm_maps(const Tensor& a, const Tensor& b, const Block& block,
                                     int* zeroed) {
  const OnDevice device(a);
  const Job job_a(a, {block.m, block.k}, "a"), job_b(b, {block.k, block.n}, "b");
  compute({&job_a, &job_b}, zeroed, device);
  return {job_a.map, job_b.map};
}

Tensor norm_map(const Tensor& a, int64_t rows, int64_t columns, int* zeroed) {
  const OnDevice device(a);
  const Job job(a, {rows, columns}, "a");
  compute({&job}, zeroed, device);
  return job.map;
}

void norm_map_into(const Tensor& a, int64_t rows, int64_t columns, const Tensor& map) {
  const OnDevice device(a);
  const Job job(a, {rows, columns}, "a", map);
  compute({&job}, nullptr, device);
}

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) {
  m.impl("norm_map", &norm_map_op);
  m.impl("norm_maps", &norm_maps_op);
}

}  // namespace spamm::cuda
