// Fresh memory in large pages.
#pragma once

#include <ATen/core/Tensor.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>

namespace spamm::cpu {

// Asks the kernel to back a new tensor with 2 MiB pages. A product with few valid blocks writes its
// result in less time than the kernel needs to map it page by page.
inline const at::Tensor& with_large_pages(const at::Tensor& fresh) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 2 * 1024 * 1024;
  const auto begin = reinterpret_cast<uintptr_t>(fresh.mutable_data_ptr());
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t last = (begin + fresh.nbytes()) / kPage * kPage;
  // It is a hint: without large pages the kernel refuses it, and nothing is lost.
  if (first < last) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
  return fresh;
}

}  // namespace spamm::cpu
