// Copies of rows between devices: by the copy engine, or through the host without peer access.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/PeerToPeerAccess.h>

#include "cuda/device.h"
#include "shards/lane.h"

namespace spamm::cuda {
namespace {

using shards::RowBlock;

// Tells whether copies between the devices are direct. torch enables peer access when first asked.
// SPAMM_TORCH_NO_PEER=1 makes every copy between GPUs go through the host.
bool reaches(at::Device to, at::Device from) {
  if (!to.is_cuda() || !from.is_cuda() || to == from) return true;
  return !is_set("SPAMM_TORCH_NO_PEER") && at::cuda::get_p2p_access(to.index(), from.index());
}

void enqueue(const RowBlock& block) {
  C10_CUDA_CHECK(cudaMemcpy2DAsync(block.to, block.to_stride, block.from, block.from_stride,
                                   block.width, block.rows, cudaMemcpyDefault,
                                   c10::cuda::getCurrentCUDAStream()));
}

#if CUDART_VERSION >= 13000
// One call of the driver for all blocks, because each call takes the host several microseconds.
// The current stream must not be CUDA's default one.
void enqueue_together(std::span<const RowBlock> blocks) {
  const auto operand = [](const void* data, int64_t stride) {
    cudaMemcpy3DOperand operand{.type = cudaMemcpyOperandTypePointer, .op = {}};
    operand.op.ptr.ptr = const_cast<void*>(data);
    operand.op.ptr.rowLength = stride;
    return operand;
  };
  std::vector<cudaMemcpy3DBatchOp> copies;
  for (const RowBlock& block : blocks) {
    copies.push_back(
        {.src = operand(block.from, block.from_stride),
         .dst = operand(block.to, block.to_stride),
         .extent = {static_cast<size_t>(block.width), static_cast<size_t>(block.rows), 1},
         .srcAccessOrder = cudaMemcpySrcAccessOrderStream,
         .flags = 0});
  }
  C10_CUDA_CHECK(
      cudaMemcpy3DBatchAsync(copies.size(), copies.data(), 0, c10::cuda::getCurrentCUDAStream()));
}
#else
void enqueue_together(std::span<const RowBlock> blocks) {
  for (const RowBlock& block : blocks) enqueue(block);
}
#endif

void copy_through_host(const RowBlock& block) {
  const at::Tensor staged =
      at::empty({block.rows, block.width}, at::TensorOptions(at::kByte).pinned_memory(true));
  enqueue({staged.mutable_data_ptr(), block.from, block.width, block.from_stride, block.width,
           block.rows});
  enqueue(
      {block.to, staged.const_data_ptr(), block.to_stride, block.width, block.width, block.rows});
  // Pinned memory is reused once the streams that were recorded have passed this point.
  at::getHostAllocator(at::kCUDA)->record_event(staged.mutable_data_ptr(),
                                                staged.storage().data_ptr().get_context(),
                                                c10::cuda::getCurrentCUDAStream().unwrap());
}

void copy(at::Device to, at::Device from, std::span<const RowBlock> blocks) {
  if (!reaches(to, from)) {
    for (const RowBlock& block : blocks) copy_through_host(block);
  } else if (blocks.size() == 1) {
    enqueue(blocks[0]);
  } else {
    enqueue_together(blocks);
  }
}

const Backends<shards::RowCopy> copies(at::kCUDA, Rank::kPortable, {&copy, &is_capturing});

}  // namespace
}  // namespace spamm::cuda
