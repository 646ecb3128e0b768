// Large pages for new tensors.
#pragma once

#include <ATen/core/Tensor.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>

namespace spamm::cpu {

// Asks the operating system for 2 MiB pages. With few valid blocks, mapping a result in small pages
// would take longer than writing it.
inline const at::Tensor& with_large_pages(const at::Tensor& fresh) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 2 << 20;
  const auto begin = reinterpret_cast<uintptr_t>(fresh.mutable_data_ptr());
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t last = (begin + fresh.nbytes()) / kPage * kPage;
  // Only a hint: an operating system without large pages refuses it, which does no harm.
  if (first < last) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
  return fresh;
}

}  // namespace spamm::cpu
