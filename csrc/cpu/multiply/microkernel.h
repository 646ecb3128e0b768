// The dense kernel for block products: C += A @ B, all row-major. It is ATen's brgemm, except for
// float64. Callers should use few combinations of sizes and strides (kernel_shapes.h says why).
#pragma once

#include <ATen/Context.h>
#include <ATen/Version.h>
#include <ATen/native/CPUBlas.h>

#include <type_traits>

#include "cpu/multiply/gemm_rows.h"

namespace spamm::cpu {

// Whether the operands are multiplied in their own type. Half types need matrix instructions for
// that, and B in VNNI layout: rows in pairs, [K/2][N][2]. Otherwise their panels are float32.
inline bool multiplies_natively(at::ScalarType dtype) {
  return !at::isReducedFloatingType(dtype) || at::native::cpublas::could_pack(dtype);
}

// Whether ATen's brgemm generates kernels for float32 on this machine. Otherwise it calls BLAS.
inline bool has_float_brgemm() {
  const auto capability = at::get_cpu_capability();
  return at::globalContext().userEnabledMkldnn() &&
         (capability == "AVX512" || capability == "AVX2");
}

// P: type of the panels' elements. C is float64 for float64, else float32.
template <class P>
struct Microkernel {
  static constexpr bool kVnni = std::is_same_v<P, c10::Half> || std::is_same_v<P, c10::BFloat16>;
  using Sum = std::conditional_t<std::is_same_v<P, double>, double, float>;

  // C (M x N) = A (M x K) @ B (K x N), or added to C with `add`, which rounds once more. N is a
  // multiple of 32. With VNNI, K is even.
  static void multiply(int64_t M, int64_t N, int64_t K, const P* A, int64_t lda, const P* B,
                       int64_t ldb, Sum* C, int64_t ldc, bool add) {
    if constexpr (std::is_same_v<P, double>) {
      gemm_rows(StridedRows<double>{A, lda, C, ldc, add}, M, N, K, B, ldb);
    } else {
      at::native::cpublas::brgemm(M, N, K, lda, ldb, ldc, add, A, B, C, kVnni);
    }
  }

  // Whether a kernel is generated for each combination of sizes and strides.
  static bool generates() { return kVnni || (!std::is_same_v<P, double> && has_float_brgemm()); }

  // Each thread calls this after its last product, because matrix instructions hold state.
  static void release() {
    if (kVnni) at::native::cpublas::brgemm_release(/*is_vnni=*/true);
  }
};

}  // namespace spamm::cpu
