// The dense kernels for block products: C = A @ B or C += A @ B. They are ATen's brgemm
// (Microkernel), and gemm_rows() for a few rows and a panel of float32 or float64: ATen exports no
// such kernel for float64, and none whose rows may lie anywhere in memory.
//
// In gemm_rows(), a tile of C stays in registers for all of K; the old C is added last. The tile is
// as large as the registers of the instruction set allow. A row's bits do not depend on the rows
// beside it. The instruction set is chosen at run time.
#pragma once

#include <ATen/Context.h>
#include <ATen/Dispatch.h>
#include <ATen/Version.h>
#include <ATen/native/CPUBlas.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace spamm::cpu {

// The end of sums that are complete: to = sum + bias + residual, and no less than 0 with
// `relu`.
template <class T>
struct Finish {
  T* const* to_rows;
  const T* bias;
  const T* const* residual_rows;  // null if there is no residual
  bool relu;
};

// Rows at equal distances in memory.
template <class T>
struct StridedRows {
  const T* A;
  int64_t lda;
  T* C;
  int64_t ldc;
  bool add;

  static constexpr int64_t column = 0;
  static constexpr const Finish<T>* finish = nullptr;

  static void prefetch(int64_t, int64_t) {}

  const T* a(int64_t r) const { return A + r * lda; }
  const T* before(int64_t r) const { return add ? to(r) : nullptr; }
  T* to(int64_t r) const { return C + r * ldc; }
};

// Rows anywhere in memory, to = before + a @ B: one pointer for each row. `before` may be `to`.
template <class T>
struct ListedRows {
  const T* const* a_rows;
  const T* const* before_rows;
  T* const* to_rows;
  int64_t column;           // of `before`, `to` and `finish` at which the panel's columns start
  const Finish<T>* finish;  // takes the place of `to`; null if the sums are not complete
  int64_t fetched;          // this many rows of A are asked for one tile ahead

  void prefetch(int64_t r, int64_t K) const {
    if (r >= fetched) return;
    const char* row = reinterpret_cast<const char*>(a_rows[r]);
    for (int64_t byte = 0; byte < K * static_cast<int64_t>(sizeof(T)); byte += 64)
      __builtin_prefetch(row + byte);
  }

  const T* a(int64_t r) const { return a_rows[r]; }
  const T* before(int64_t r) const { return before_rows[r] + column; }
  T* to(int64_t r) const { return to_rows[r] + column; }
};

template <class T, int bytes>
using Lanes [[gnu::vector_size(bytes)]] = T;

// Writes a tile of complete sums, from row `first` and column n on.
template <class T, int bytes, int rows, int vectors>
[[gnu::always_inline]] inline void finish_tile(const Finish<T>& finish, int64_t first, int64_t n,
                                               Lanes<T, bytes> (&sums)[rows][vectors]) {
  using Vector = Lanes<T, bytes>;
  constexpr int64_t lanes = bytes / sizeof(T);
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    const T* residual = finish.residual_rows ? finish.residual_rows[first + r] : nullptr;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      Vector addend;
      std::memcpy(&addend, finish.bias + n + v * lanes, bytes);
      Vector result = sums[r][v] + addend;
      if (residual) {
        std::memcpy(&addend, residual + n + v * lanes, bytes);
        result += addend;
      }
      if (finish.relu) result = result < 0 ? Vector{} : result;  // NaN stays
      std::memcpy(finish.to_rows[first + r] + n + v * lanes, &result, bytes);
    }
  }
}

// Computes a tile of `rows` x (`vectors` * lanes) elements of C, from row `first` on. B and C start
// at the tile's first column, n.
template <class T, int bytes, int rows, int vectors, class Rows>
[[gnu::always_inline]] inline void multiply_tile(const Rows& of, int64_t first, int64_t n,
                                                 int64_t K, const T* B, int64_t ldb) {
  using Vector = Lanes<T, bytes>;
  constexpr int64_t lanes = bytes / sizeof(T);
  // All loops over the tile are unrolled: sums that are indexed would lie in memory.
  Vector sums[rows][vectors];
  const T* a[rows];
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    a[r] = of.a(first + r);
    of.prefetch(first + rows + r, K);
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) sums[r][v] = Vector{};
  }
  for (int64_t k = 0; k < K; ++k) {
    Vector b[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) std::memcpy(&b[v], B + k * ldb + n + v * lanes, bytes);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sums[r][v] += a[r][k] * b[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    const T* before = of.before(first + r);
    if (before == nullptr) continue;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      Vector old;
      std::memcpy(&old, before + n + v * lanes, bytes);
      sums[r][v] += old;
    }
  }
  if (of.finish) {
    finish_tile<T, bytes, rows, vectors>(*of.finish, first, of.column + n, sums);
    return;
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v)
      std::memcpy(of.to(first + r) + n + v * lanes, &sums[r][v], bytes);
  }
}

// The last rows, at most `most`.
template <class T, int bytes, int most, int vectors, class Rows>
[[gnu::always_inline]] inline void multiply_last(const Rows& of, int64_t first, int64_t M,
                                                 int64_t n, int64_t K, const T* B, int64_t ldb) {
  if constexpr (most > 0) {
    if (M - first == most) {
      multiply_tile<T, bytes, most, vectors>(of, first, n, K, B, ldb);
    } else {
      multiply_last<T, bytes, most - 1, vectors>(of, first, M, n, K, B, ldb);
    }
  }
}

template <class T, int bytes, int rows, int vectors, class Rows>
[[gnu::always_inline]] inline void multiply_tiles(const Rows& of, int64_t M, int64_t N, int64_t K,
                                                  const T* B, int64_t ldb) {
  constexpr int64_t columns = vectors * (bytes / sizeof(T));
  for (int64_t n = 0; n < N; n += columns) {
    int64_t m = 0;
    for (; m + rows <= M; m += rows) multiply_tile<T, bytes, rows, vectors>(of, m, n, K, B, ldb);
    multiply_last<T, bytes, rows - 1, vectors>(of, m, M, n, K, B, ldb);
  }
}

#if defined(__x86_64__)
template <class T, class Rows>
[[gnu::target("avx512f")]] void gemm_rows_avx512(const Rows& of, int64_t M, int64_t N, int64_t K,
                                                 const T* B, int64_t ldb) {
  if (N % (256 / static_cast<int64_t>(sizeof(T))) == 0) {
    multiply_tiles<T, 64, 6, 4>(of, M, N, K, B, ldb);
  } else {
    multiply_tiles<T, 64, 12, 2>(of, M, N, K, B, ldb);
  }
}

template <class T, class Rows>
[[gnu::target("avx2,fma")]] void gemm_rows_avx2(const Rows& of, int64_t M, int64_t N, int64_t K,
                                                const T* B, int64_t ldb) {
  multiply_tiles<T, 32, 6, 2>(of, M, N, K, B, ldb);
}
#endif

template <class T, class Rows>
void gemm_rows_baseline(const Rows& of, int64_t M, int64_t N, int64_t K, const T* B, int64_t ldb) {
  multiply_tiles<T, 16, 4, 2>(of, M, N, K, B, ldb);
}

// M rows of K elements times B, whose rows of N elements are contiguous, a multiple of 128 bytes.
template <class T, class Rows>
void gemm_rows(const Rows& of, int64_t M, int64_t N, int64_t K, const T* B, int64_t ldb) {
#if defined(__x86_64__)
  static const auto kernel = __builtin_cpu_supports("avx512f") ? gemm_rows_avx512<T, Rows>
                             : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
                                 ? gemm_rows_avx2<T, Rows>
                                 : gemm_rows_baseline<T, Rows>;
#else
  constexpr auto kernel = gemm_rows_baseline<T, Rows>;
#endif
  kernel(of, M, N, K, B, ldb);
}

// Tells whether the operands are multiplied in their own type. Half types need matrix instructions
// for that, and B in VNNI layout: rows in pairs, [K/2][N][2]. Otherwise their panels are float32.
inline bool multiplies_natively(at::ScalarType dtype) {
  return !at::isReducedFloatingType(dtype) || at::native::cpublas::could_pack(dtype);
}

// Calls run<T, P>() with the types of tensors of `dtype` and of their panels.
template <class Run>
void with_panel_types(at::ScalarType dtype, const Run& run) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "spamm_torch", [&] {
    if constexpr (sizeof(scalar_t) == 2) {
      if (!multiplies_natively(dtype)) return run.template operator()<scalar_t, float>();
    }
    run.template operator()<scalar_t, scalar_t>();
  });
}

// Tells whether ATen's brgemm generates kernels for float32 on this machine. Otherwise it calls
// BLAS.
inline bool has_float_brgemm() {
  const auto capability = at::get_cpu_capability();
  return at::globalContext().userEnabledMkldnn() &&
         (capability == "AVX512" || capability == "AVX2");
}

// All operands are row-major. Callers use few combinations of sizes and strides: slice_kernel.h
// says why. P: type of the panels' elements. C is float64 for float64, else float32.
template <class P>
struct Microkernel {
  static constexpr bool kVnni = std::is_same_v<P, c10::Half> || std::is_same_v<P, c10::BFloat16>;
  using Sum = std::conditional_t<std::is_same_v<P, double>, double, float>;

  // The numbers that N is a multiple of. BLAS has bits of its own for each N, and takes whole
  // panels.
  static int64_t columns_step() {
    return std::is_same_v<P, double> ? 16 : kVnni ? 32 : has_float_brgemm() ? 16 : 64;
  }

  // C (M x N) = A (M x K) @ B (K x N), or added to C with `add`, which rounds once more. With VNNI,
  // K is even.
  static void multiply(int64_t M, int64_t N, int64_t K, const P* A, int64_t lda, const P* B,
                       int64_t ldb, Sum* C, int64_t ldc, bool add) {
    if constexpr (std::is_same_v<P, double>) {
      gemm_rows(StridedRows<double>{A, lda, C, ldc, add}, M, N, K, B, ldb);
    } else {
      at::native::cpublas::brgemm(M, N, K, lda, ldb, ldc, add, A, B, C, kVnni);
    }
  }

  // Tells whether a kernel is generated for each combination of sizes and strides.
  static bool generates() { return kVnni || (!std::is_same_v<P, double> && has_float_brgemm()); }

  // Each thread calls this after its last product, because matrix instructions hold state.
  static void release() {
    if (kVnni) at::native::cpublas::brgemm_release(/*is_vnni=*/true);
  }
};

}  // namespace spamm::cpu
