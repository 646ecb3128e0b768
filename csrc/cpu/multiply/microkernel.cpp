// gemm() for both types: code of many tiles, which takes a compiler long.
#include "cpu/multiply/microkernel.h"

namespace spamm::cpu {

template <class T>
void gemm(int64_t M, int64_t N, int64_t K, const T* A, int64_t lda, bool by_columns, const T* B,
          int64_t ldb, T* C, int64_t ldc, bool add) {
  if (by_columns) {
    gemm_rows(StridedRows<T, true>{A, lda, C, ldc, add}, M, N, K, B, ldb);
  } else {
    gemm_rows(StridedRows<T, false>{A, lda, C, ldc, add}, M, N, K, B, ldb);
  }
}

template void gemm(int64_t, int64_t, int64_t, const float*, int64_t, bool, const float*, int64_t,
                   float*, int64_t, bool);
template void gemm(int64_t, int64_t, int64_t, const double*, int64_t, bool, const double*, int64_t,
                   double*, int64_t, bool);

}  // namespace spamm::cpu
