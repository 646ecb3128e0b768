// C = A @ B, or C += A @ B with `add`, in float64 and row-major. ATen exports no such kernel.
//
// A tile of C stays in registers for all of K; the old C is added last. The tile is as large as the
// registers of the instruction set allow. The instruction set is chosen at run time.
#pragma once

#include <cstdint>
#include <cstring>

namespace spamm::cpu {

// A vector of `bytes` bytes.
template <int bytes>
using DoubleLanes [[gnu::vector_size(bytes)]] = double;

// A tile of `rows` x (`vectors` * lanes) elements of C.
template <int bytes, int rows, int vectors>
[[gnu::always_inline]] inline void multiply_double_tile(int64_t K, const double* A, int64_t lda,
                                                        const double* B, int64_t ldb, double* C,
                                                        int64_t ldc, bool add) {
  using Lanes = DoubleLanes<bytes>;
  constexpr int64_t lanes = bytes / sizeof(double);
  Lanes sums[rows][vectors];
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < vectors; ++v) sums[r][v] = Lanes{};
  for (int64_t k = 0; k < K; ++k) {
    Lanes b[vectors];
    for (int v = 0; v < vectors; ++v) std::memcpy(&b[v], B + k * ldb + v * lanes, bytes);
    for (int r = 0; r < rows; ++r)
      for (int v = 0; v < vectors; ++v) sums[r][v] += A[r * lda + k] * b[v];
  }
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < vectors; ++v) {
      if (add) {
        Lanes before;
        std::memcpy(&before, C + r * ldc + v * lanes, bytes);
        sums[r][v] += before;
      }
      std::memcpy(C + r * ldc + v * lanes, &sums[r][v], bytes);
    }
}

template <int bytes, int rows, int vectors>
[[gnu::always_inline]] inline void gemm_double_tiled(int64_t M, int64_t N, int64_t K,
                                                     const double* A, int64_t lda, const double* B,
                                                     int64_t ldb, double* C, int64_t ldc,
                                                     bool add) {
  constexpr int64_t columns = vectors * bytes / sizeof(double);
  for (int64_t n = 0; n < N; n += columns) {
    int64_t m = 0;
    for (; m + rows <= M; m += rows)
      multiply_double_tile<bytes, rows, vectors>(K, A + m * lda, lda, B + n, ldb, C + m * ldc + n,
                                                 ldc, add);
    for (; m < M; ++m)
      multiply_double_tile<bytes, 1, vectors>(K, A + m * lda, lda, B + n, ldb, C + m * ldc + n, ldc,
                                              add);
  }
}

#if defined(__x86_64__)
[[gnu::target("avx512f")]] inline void gemm_double_avx512(int64_t M, int64_t N, int64_t K,
                                                          const double* A, int64_t lda,
                                                          const double* B, int64_t ldb, double* C,
                                                          int64_t ldc, bool add) {
  gemm_double_tiled<64, 8, 2>(M, N, K, A, lda, B, ldb, C, ldc, add);
}

[[gnu::target("avx2,fma")]] inline void gemm_double_avx2(int64_t M, int64_t N, int64_t K,
                                                         const double* A, int64_t lda,
                                                         const double* B, int64_t ldb, double* C,
                                                         int64_t ldc, bool add) {
  gemm_double_tiled<32, 4, 2>(M, N, K, A, lda, B, ldb, C, ldc, add);
}
#endif

inline void gemm_double_baseline(int64_t M, int64_t N, int64_t K, const double* A, int64_t lda,
                                 const double* B, int64_t ldb, double* C, int64_t ldc, bool add) {
  gemm_double_tiled<16, 4, 2>(M, N, K, A, lda, B, ldb, C, ldc, add);
}

// N must be a multiple of 16.
inline void gemm_double(int64_t M, int64_t N, int64_t K, const double* A, int64_t lda,
                        const double* B, int64_t ldb, double* C, int64_t ldc, bool add) {
#if defined(__x86_64__)
  static const auto kernel = __builtin_cpu_supports("avx512f") ? gemm_double_avx512
                             : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
                                 ? gemm_double_avx2
                                 : gemm_double_baseline;
#else
  constexpr auto kernel = gemm_double_baseline;
#endif
  kernel(M, N, K, A, lda, B, ldb, C, ldc, add);
}

}  // namespace spamm::cpu
