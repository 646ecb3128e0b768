// The op peer_rows: memory of another process of this host.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/library.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

namespace spamm::cuda {
namespace {

using at::Tensor;

// The bytes of a handle: an offset, then what the allocator says of the whole storage.
Tensor handle_of(const Tensor& x) {
  auto [offset, name] = c10::cuda::CUDACachingAllocator::shareIpcHandle(x.storage().mutable_data());
  offset += static_cast<std::ptrdiff_t>(x.storage_offset() * x.element_size());
  const Tensor handle = at::empty({static_cast<int64_t>(sizeof(offset) + name.size())}, at::kByte);
  auto* const bytes = static_cast<char*>(handle.mutable_data_ptr());
  std::memcpy(bytes, &offset, sizeof(offset));
  name.copy(bytes + sizeof(offset), name.size());
  return handle;
}

Tensor rows_behind(const Tensor& handle, int64_t rows, const Tensor& like) {
  const auto* const bytes = static_cast<const char*>(handle.const_data_ptr());
  std::ptrdiff_t offset = 0;
  std::memcpy(&offset, bytes, sizeof(offset));
  std::string name(bytes + sizeof(offset), handle.numel() - sizeof(offset));
  const std::shared_ptr<void> memory =
      c10::cuda::CUDACachingAllocator::getIpcDevPtr(std::move(name));
  return at::for_blob(static_cast<char*>(memory.get()) + offset, {rows, like.size(1)})
      .deleter([memory](void*) {})
      .options(like.options())
      .target_device(like.device())  // which reads it, whatever device it lies on
      .make_tensor();
}

// Nothing where an allocator or a link cannot do it.
Tensor peer_rows(const Tensor& x, const std::optional<Tensor>& handle, int64_t rows) {
  try {
    return handle ? rows_behind(*handle, rows, x) : handle_of(x);
  } catch (const c10::Error&) {
    return at::empty({0}, at::kByte);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) { m.impl("peer_rows", &peer_rows); }

}  // namespace spamm::cuda
