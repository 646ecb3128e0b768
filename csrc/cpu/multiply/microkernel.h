// The dense kernels for block products, C = A @ B or C += A @ B: gemm_rows() for float32 and
// float64, and ATen's brgemm for matrix instructions, which ATen exports.
//
// In gemm_rows(), a tile of C stays in registers for all of K; the old C is added last. The tile is
// as large as the registers of the instruction set allow. An entry is one chain of fused operations
// along K, so that its bits depend on no size, no layout and no neighbour. The last two vectors of
// a row may overlap, so that nothing is read or written beside the matrices.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/native/CPUBlas.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/common/machine.h"

namespace spamm::cpu {

// The end of sums that are complete: to = sum + bias + residual, and no less than 0 with `relu`.
template <class T>
struct Finish {
  T* const* to_rows;
  const T* bias;
  const T* const* residual_rows;  // null if there is no residual
  bool relu;
};

// Rows at equal distances in memory; with `by_columns`, A is stored by columns, at distances `lda`.
template <class T, bool by_columns>
struct StridedRows {
  const T* A;
  int64_t lda;
  T* C;
  int64_t ldc;
  bool add;

  static constexpr bool kAnyColumns = true;
  // Addresses of so many rows share one register, and distance another: twelve would lie in memory.
  static constexpr int kTogether = by_columns ? 16 : 3;
  static constexpr int64_t column = 0;
  static constexpr const Finish<T>* finish = nullptr;

  static void prefetch(int64_t, int64_t) {}

  int64_t row_distance() const { return by_columns ? 1 : lda; }
  int64_t step() const { return by_columns ? lda : 1; }  // along K
  const T* a(int64_t r) const { return A + r * row_distance(); }
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

  static constexpr bool kAnyColumns = false;
  static constexpr int kTogether = 1;

  void prefetch(int64_t r, int64_t K) const {
    if (r >= fetched) return;
    const char* row = reinterpret_cast<const char*>(a_rows[r]);
    for (int64_t byte = 0; byte < K * static_cast<int64_t>(sizeof(T)); byte += 64)
      __builtin_prefetch(row + byte);
  }

  static int64_t row_distance() { return 0; }
  static int64_t step() { return 1; }
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

// Computes a tile of `rows` x `vectors` vectors of C, from row `first` and column n on. The last
// vector begins at column `last` of the tile: it may overlap the one before, with equal entries.
template <class T, int bytes, int rows, int vectors, class Rows>
[[gnu::always_inline]] inline void multiply_tile(const Rows& of, int64_t first, int64_t n,
                                                 int64_t last, int64_t K, const T* B, int64_t ldb) {
  using Vector = Lanes<T, bytes>;
  constexpr int64_t lanes = bytes / sizeof(T);
  const auto at = [&](int v) { return v + 1 < vectors ? v * lanes : last; };
  // All loops over the tile are unrolled: sums that are indexed would lie in memory.
  Vector sums[rows][vectors];
  constexpr int together = Rows::kTogether, pointers = (rows + together - 1) / together;
  const T* a[pointers];
#pragma GCC unroll 16
  for (int p = 0; p < pointers; ++p) a[p] = of.a(first + p * together);
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    of.prefetch(first + rows + r, K);
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) sums[r][v] = Vector{};
  }
  B += n;
  for (int64_t k = 0; k < K; ++k, B += ldb) {
    Vector b[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      std::memcpy(&b[v], B + at(v), bytes);
      // The next columns of a B that is read in place: its rows are too far apart for hardware.
      if (Rows::kAnyColumns) __builtin_prefetch(B + (vectors + v) * lanes, 0, 2);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const T x = a[r / together][r % together * of.row_distance()];
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sums[r][v] += x * b[v];
    }
#pragma GCC unroll 16
    for (int p = 0; p < pointers; ++p) {
      const T* next = a[p] + of.step();
      asm("" : "+r"(next));  // a compiler would derive other pointers from it, one for each row
      a[p] = next;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    const T* before = of.before(first + r);
    if (before == nullptr) continue;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      Vector old;
      std::memcpy(&old, before + n + at(v), bytes);
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
    for (int v = 0; v < vectors; ++v) std::memcpy(of.to(first + r) + n + at(v), &sums[r][v], bytes);
  }
}

// Rows from `first` to M, in tiles of at most `most`.
template <class T, int bytes, int most, int vectors, class Rows>
[[gnu::always_inline]] inline void multiply_rows(const Rows& of, int64_t first, int64_t M,
                                                 int64_t n, int64_t last, int64_t K, const T* B,
                                                 int64_t ldb) {
  for (; first + most <= M; first += most)
    multiply_tile<T, bytes, most, vectors>(of, first, n, last, K, B, ldb);
  if constexpr (most > 1) {
    if (first < M) multiply_rows<T, bytes, most - 1, vectors>(of, first, M, n, last, K, B, ldb);
  }
}

// Tiles of `rows` x `vectors` vectors; with kAnyColumns, which needs a vector's columns, the last
// ones overlap: two vectors, or three of fewer rows.
template <class T, int bytes, int rows, int vectors, class Rows>
[[gnu::always_inline]] inline void multiply_tiles(const Rows& of, int64_t M, int64_t N, int64_t K,
                                                  const T* B, int64_t ldb) {
  constexpr int64_t lanes = bytes / sizeof(T), tile = vectors * lanes;
  int64_t n = 0;
  for (; Rows::kAnyColumns ? n + tile + lanes < N : n < N; n += tile)
    multiply_rows<T, bytes, rows, vectors>(of, 0, M, n, tile - lanes, K, B, ldb);
  if constexpr (Rows::kAnyColumns) {
    const int64_t last = N - n - lanes;
    if (last > lanes) {
      multiply_rows<T, bytes, rows * 2 / 3, 3>(of, 0, M, n, last, K, B, ldb);
    } else if (last > 0) {
      multiply_rows<T, bytes, rows, 2>(of, 0, M, n, last, K, B, ldb);
    } else {
      multiply_rows<T, bytes, rows, 1>(of, 0, M, n, 0, K, B, ldb);
    }
  }
}

#if defined(__x86_64__)
template <class T, class Rows>
[[gnu::target("avx512f")]] void gemm_rows_avx512(const Rows& of, int64_t M, int64_t N, int64_t K,
                                                 const T* B, int64_t ldb) {
  if (!Rows::kAnyColumns && N % (256 / static_cast<int64_t>(sizeof(T))) == 0) {
    multiply_tiles<T, 64, 6, 4>(of, M, N, K, B, ldb);
  } else {
    constexpr int64_t lanes = 64 / sizeof(T);
    const int64_t odd = Rows::kAnyColumns ? 0 : N % (2 * lanes);
    multiply_tiles<T, 64, 12, 2>(of, M, N - odd, K, B, ldb);
    if (odd > 0) multiply_rows<T, 64, 12, 1>(of, 0, M, N - odd, 0, K, B, ldb);
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

// M rows of K elements times B, whose rows of N elements are contiguous. N: 64 bytes at least; for
// ListedRows a multiple of 64 bytes.
template <class T, class Rows>
void gemm_rows(const Rows& of, int64_t M, int64_t N, int64_t K, const T* B, int64_t ldb) {
#if defined(__x86_64__)
  static const auto kernel =
      of_machine(gemm_rows_avx512<T, Rows>, gemm_rows_avx2<T, Rows>, gemm_rows_baseline<T, Rows>);
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

// C (M x N) = A (M x K) @ B (K x N), or added to C with `add`, which rounds once more. Rows of B
// and C are contiguous, of 64 bytes at least; `by_columns`: so are A's columns, not its rows.
template <class T>
void gemm(int64_t M, int64_t N, int64_t K, const T* A, int64_t lda, bool by_columns, const T* B,
          int64_t ldb, T* C, int64_t ldc, bool add);
extern template void gemm(int64_t, int64_t, int64_t, const float*, int64_t, bool, const float*,
                          int64_t, float*, int64_t, bool);
extern template void gemm(int64_t, int64_t, int64_t, const double*, int64_t, bool, const double*,
                          int64_t, double*, int64_t, bool);

// The kernel of dense products. P: the panels' type. C is float64 for float64, else float32.
template <class P>
struct Microkernel {
  static constexpr bool kVnni = std::is_same_v<P, c10::Half> || std::is_same_v<P, c10::BFloat16>;
  using Sum = std::conditional_t<std::is_same_v<P, double>, double, float>;

  // As gemm(). Matrix instructions need an even K and A's rows, and generate a kernel for each
  // combination of sizes and strides: callers use few of them (slice_kernel.h).
  static void multiply(int64_t M, int64_t N, int64_t K, const P* A, int64_t lda, bool by_columns,
                       const P* B, int64_t ldb, Sum* C, int64_t ldc, bool add) {
    if constexpr (kVnni) {
      at::native::cpublas::brgemm(M, N, K, lda, ldb, ldc, add, A, B, C, kVnni);
    } else {
      gemm(M, N, K, A, lda, by_columns, B, ldb, C, ldc, add);
    }
  }

  // Each thread calls this after its last product, because matrix instructions hold state.
  static void release() {
    if (kVnni) at::native::cpublas::brgemm_release(/*is_vnni=*/true);
  }
};

}  // namespace spamm::cpu
