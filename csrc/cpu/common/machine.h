// Offers of the machine: instructions that only some processors have, and large pages.
#pragma once

#include <ATen/core/Tensor.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>

// A function marked SPAMM_CPU_CLONES is compiled for AVX-512, for AVX2 and for the baseline. The
// loader picks the version for the machine. The compiler must be able to vectorise its loops. The
// functions that it calls must be SPAMM_INLINE, or they are compiled for the baseline only. The
// loader asks before ThreadSanitizer is ready, which then crashes: that build has the baseline.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__)
#define SPAMM_CPU_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SPAMM_CPU_CLONES
#endif
#define SPAMM_INLINE [[gnu::always_inline]] inline

namespace spamm::cpu {

#if defined(__x86_64__)
// The version of a function with the widest vectors that the machine has.
template <class Function>
Function of_machine(Function avx512, Function avx2, Function baseline) {
  if (__builtin_cpu_supports("avx512f")) return avx512;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? avx2 : baseline;
}
#endif

// Asks the operating system for 2 MiB pages for a new tensor. With few valid blocks, mapping a
// result in small pages would take longer than writing it.
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
