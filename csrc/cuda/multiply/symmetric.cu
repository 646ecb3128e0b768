// Starts the kernel that completes symmetric products.
#include <c10/cuda/CUDAException.h>

#include <limits>

#include "block.h"
#include "cuda/multiply/multiply.h"
#include "kernels/common/launch.cuh"
#include "kernels/multiply/complete_symmetric.cuh"

namespace spamm::cuda {
namespace {

template <class Element>
void launch(const at::Tensor& c, int64_t block, const at::Tensor& norms, const OnDevice& device) {
  using Norm = kernels::NormOf<Element>;
  kernels::SymmetricParams<Element> params{};
  params.c = static_cast<Element*>(c.mutable_data_ptr());
  params.batch_stride = c.stride(0), params.leading = c.stride(1), params.size = c.size(1);
  params.log2_block = log2_of(block);
  if (norms.defined()) params.norms = norms.mutable_data_ptr<Norm>();
  const int64_t squares = blocks_of(c.size(1), kernels::kSquare);
  const int64_t blocks = c.size(0) * squares * (squares + 1) / 2;
  TORCH_CHECK(blocks <= std::numeric_limits<int32_t>::max(),
              "a symmetric product must have at most 2^31 - 1 squares of 64 x 64; got shape ",
              c.sizes());
  C10_CUDA_CHECK(kernels::launch(kernels::complete_symmetric<Element>,
                                 static_cast<unsigned>(blocks), kernels::kSquareThreads<Element>, 0,
                                 true, device.stream(), params, static_cast<int>(squares)));
}

}  // namespace

void complete_symmetric(const at::Tensor& c, int64_t block, const at::Tensor& norms,
                        const OnDevice& device) {
  switch (c.scalar_type()) {
    case at::kHalf:
      return launch<__half>(c, block, norms, device);
    case at::kBFloat16:
      return launch<__nv_bfloat16>(c, block, norms, device);
    case at::kFloat:
      return launch<float>(c, block, norms, device);
    default:
      return launch<double>(c, block, norms, device);
  }
}

}  // namespace spamm::cuda
