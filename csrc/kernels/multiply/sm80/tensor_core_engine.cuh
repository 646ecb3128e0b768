// Products of 32 x 32 sub-tiles on tensor cores by mma.sync. All instructions used here have the
// same operand layout, counted in registers along K: 16 rows of A are the four registers (g, t),
// (g+8, t), (g, t+4), (g+8, t+4). 8 columns of B are the two registers (g, t), (g, t+4) of B
// transposed. So one fragment load serves A, B and all types; only the order of registers differs.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/common/numeric.cuh"
#include "kernels/common/ptx_sm80.cuh"
#include "kernels/multiply/sm80/stage.cuh"

namespace spamm::kernels {

// The differences between the types: the register, K of one instruction, how often the loop over a
// stage can be unrolled without spilling, and the instruction.
template <class Element_, int kDepth_, int kUnroll_, auto kInstruction>
struct Mma {
  using Element = Element_;
  using Register = uint32_t;
  static constexpr int kDepth = kDepth_, kUnroll = kUnroll_;
  __device__ static Register prepare(Register r) {
    return std::is_same_v<Element, float> ? round_to_tf32(r) : r;
  }
  __device__ static void multiply(float (&d)[4], const Register (&a)[4], Register b0, Register b1) {
    kInstruction(d, a[0], a[1], a[2], a[3], b0, b1);
  }
};
using MmaF16 = Mma<__half, 16, 2, mma_f16>;
using MmaBf16 = Mma<__nv_bfloat16, 16, 2, mma_bf16>;
using MmaTf32 = Mma<float, 8, 1, mma_tf32>;

struct MmaF64 {
  using Element = double;
  using Register = double;
  static constexpr int kDepth = 8, kUnroll = 1;
  __device__ static Register prepare(Register r) { return r; }
  __device__ static void multiply(double (&d)[4], const Register (&a)[4], Register b0,
                                  Register b1) {
    mma_f64(d, a[0], a[1], b0);
    mma_f64(d, a[2], a[3], b1);
  }
};

template <class Mma>
struct TensorCoreEngine {
  using Element = typename Mma::Element;
  using Sum = NormOf<Element>;
  using Register = typename Mma::Register;

  // Sums of one sub-tile: two rows of four 16 x 8 results.
  struct SubTile {
    Sum sums[2][4][4] = {};
  };

  // 32 rows of A (or columns of B), kDepth of K.
  struct Fragment {
    Register registers[2][4];
  };

  // acc += A B over one stage, for the sub-tiles whose bit is set in `mask`.
  template <bool kAll, class TileA, class TileB, int kRows, int kColumns>
  __device__ static void multiply_stage(SubTile (&acc)[kRows][kColumns], const char* stage_a,
                                        const char* stage_b, int row, int column, uint32_t mask) {
    const auto place_a = place<TileA, Role::kA>(row);
    const auto place_b = place<TileB, Role::kB>(column);
#pragma unroll(Mma::kUnroll)
    for (int k = 0; k < TileA::kDepth; k += Mma::kDepth) {
      Fragment a[kRows], b;
#pragma unroll
      for (int r = 0; r < kRows; ++r) load<TileA, Role::kA>(a[r], stage_a, place_a, 32 * r, k);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        load<TileB, Role::kB>(b, stage_b, place_b, 32 * c, k);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (kAll || (mask >> (r * kColumns + c) & 1)) multiply(acc[r][c], a[r], b);
        }
      }
    }
  }

  // Nothing to do: the sums stay in the accumulators.
  template <int kRows, int kColumns>
  __device__ static void begin_step(SubTile (&)[kRows][kColumns], int, int) {}

  // Calls store(row, column, sums of four neighbouring columns) for all sums of this thread. Two
  // neighbouring lanes exchange sums of two neighbouring 16 x 8 results: each then has four columns
  // of one result instead of two columns of both.
  template <class TileA, class TileB, class Store>
  __device__ static void for_each(const SubTile& tile, const Store& store) {
    const int lane = threadIdx.x % 32, odd = lane & 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
        for (int below = 0; below < 2; ++below) {
          const Sum* left = tile.sums[half][2 * pair] + 2 * below;
          const Sum* right = tile.sums[half][2 * pair + 1] + 2 * below;
          const Sum got0 = __shfl_xor_sync(~0u, odd ? left[0] : right[0], 1);
          const Sum got1 = __shfl_xor_sync(~0u, odd ? left[1] : right[1], 1);
          const Sum sums[4] = {odd ? got0 : left[0], odd ? got1 : left[1], odd ? right[0] : got0,
                               odd ? right[1] : got1};
          store(half * 16 + below * 8 + lane / 4, (2 * pair + odd) * 8 + (lane % 4 - odd) * 2,
                sums);
        }
      }
    }
  }

 private:
  enum class Role { kA, kB };

  __device__ static void multiply(SubTile& tile, const Fragment& a, const Fragment& b) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Register* columns = b.registers[j / 2] + j % 2 * 2;
        Mma::multiply(tile.sums[i][j], a.registers[i], columns[0], columns[1]);
      }
    }
  }

  template <class Tile>
  static constexpr bool kByRows = Tile::kKMajor && sizeof(Element) <= 4;  // plain ldmatrix
  template <class Tile>
  static constexpr bool kTransposed = !Tile::kKMajor && sizeof(Element) == 2;

  // Tells whether register i of a 16-row fragment belongs to the lower (0) or upper (1) 8 rows (or
  // columns), and to the lower or upper part of the depth. For B the two registers of 8 columns are
  // neighbours, as the instruction requires.
  __device__ static constexpr int row_half(Role role, int i) {
    return role == Role::kA ? i % 2 : i / 2;
  }
  __device__ static constexpr int depth_half(Role role, int i) {
    return role == Role::kA ? i / 2 : i % 2;
  }

  // The lane's place in the 32 rows (or columns) that start at `mn`: the chunk whose address it
  // passes to ldmatrix, or its own entry.
  template <class Tile, Role kRole>
  __device__ static typename Tile::Place place(int mn) {
    constexpr int kEntries = Tile::kChunkElements;
    const int lane = threadIdx.x % 32, row = lane / 4, k = lane % 4;
    const int row_half_named = row_half(kRole, lane / 8);
    const int depth_half_named = depth_half(kRole, lane / 8);
    if constexpr (kByRows<Tile>) {
      return {mn + row_half_named * 8 + lane % 8, depth_half_named};
    } else if constexpr (kTransposed<Tile>) {
      return {depth_half_named * 8 + lane % 8, mn / kEntries + row_half_named};
    } else if constexpr (Tile::kKMajor) {
      return {mn + row, k / kEntries, k % kEntries * static_cast<int>(sizeof(Element))};
    } else {
      return {k, mn / kEntries + row / kEntries,
              row % kEntries * static_cast<int>(sizeof(Element))};
    }
  }

  // Loads the fragment that lies `mn` rows (or columns) and `k` entries of K after `place`.
  template <class Tile, Role kRole>
  __device__ static void load(Fragment& fragment, const char* stage,
                              const typename Tile::Place& place, int mn, int k) {
    constexpr int kEntries = Tile::kChunkElements;
#pragma unroll
    for (int half = 0; half < 2; ++half, mn += 16) {
      Register(&r)[4] = fragment.registers[half];
      if constexpr (kByRows<Tile>) {
        load_matrices(r, stage + place.offset(mn, k / kEntries));
      } else if constexpr (kTransposed<Tile>) {
        load_matrices_transposed(r, stage + place.offset(k, mn / kEntries));
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = mn + row_half(kRole, i) * 8, depth = k + depth_half(kRole, i) * 4;
          const int offset = Tile::kKMajor ? place.offset(row, depth / kEntries)
                                           : place.offset(depth, row / kEntries);
          r[i] = *reinterpret_cast<const Register*>(stage + offset);
        }
      }
#pragma unroll
      for (Register& x : r) x = Mma::prepare(x);
    }
  }
};

}  // namespace spamm::kernels
