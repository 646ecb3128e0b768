// Copies of rows between devices: by the copy engine, or through the host where one GPU cannot
// reach the other's memory.
#include "shards/row_copy.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/PeerToPeerAccess.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace spamm::cuda {
namespace {

using at::Tensor;

// SPAMM_TORCH_NO_PEER=1 makes every copy between GPUs go through the host.
bool peers_are_forbidden() {
  const char* const set = std::getenv("SPAMM_TORCH_NO_PEER");
  return set != nullptr && std::string_view(set) == "1";
}

// Whether `device` can read the memory of `other`. torch enables the access when first asked.
bool reaches(at::Device device, at::Device other) {
  if (!device.is_cuda() || !other.is_cuda() || device == other) return true;
  return !peers_are_forbidden() && at::cuda::get_p2p_access(device.index(), other.index());
}

void enqueue(const Tensor& to, const Tensor& from) {
  const auto pitch = [](const Tensor& x) {
    return std::max(x.stride(0), x.size(1)) * x.element_size();
  };
  C10_CUDA_CHECK(cudaMemcpy2DAsync(to.mutable_data_ptr(), pitch(to), from.const_data_ptr(),
                                   pitch(from), to.size(1) * to.element_size(), to.size(0),
                                   cudaMemcpyDefault, c10::cuda::getCurrentCUDAStream()));
}

void copy(const Tensor& to, const Tensor& from) {
  if (reaches(to.device(), from.device())) {
    enqueue(to, from);
    return;
  }
  const Tensor staged =
      at::empty(from.sizes(), from.options().device(at::kCPU).pinned_memory(true));
  enqueue(staged, from);
  enqueue(to, staged);
  at::getHostAllocator(at::kCUDA)->record_event(staged.mutable_data_ptr(),
                                                staged.storage().data_ptr().get_context(),
                                                c10::cuda::getCurrentCUDAStream().unwrap());
}

bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

const Backends<shards::RowCopy> copies(at::kCUDA, Rank::kPortable, {&copy, &is_capturing});

}  // namespace
}  // namespace spamm::cuda
