// Warpgroup products of a 64-row block of A with parts of one or several blocks of 64 columns of B,
// all in shared memory, float32 sums.
//
// An operand block is 64 lines of 128 bytes, swizzled as TMA's 128-byte mode writes them. Where K
// is the contiguous dimension a line is a row of A or a column of B; where M or N is, a line is one
// k. Neighbouring blocks of B follow each other in memory, so that one instruction can span all of
// them. The instructions themselves are CUTLASS's atoms.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/util.hpp>
#include <utility>

namespace spamm::kernels::sm90 {

using cute::SM90::GMMA::Major;
using cute::SM90::GMMA::ScaleOut;

constexpr int kBlock = 64;  // rows, columns and depth of an operand block
constexpr int kLineBytes = 128;

struct alignas(1024) OperandBlock {
  uint8_t bytes[kBlock * kLineBytes];
};

// The atom that makes 64 x kN of C, kSliceDepth deep.
template <class Element, int kN, Major kMajorA, Major kMajorB>
struct Atom;
#define SPAMM_ATOM(Element, kN, Name)                                              \
  template <Major kMajorA, Major kMajorB>                                          \
  struct Atom<Element, kN, kMajorA, kMajorB> {                                     \
    using Type = cute::SM90::GMMA::MMA_64x##kN##x16_##Name##_SS<kMajorA, kMajorB>; \
  };
SPAMM_ATOM(__half, 32, F32F16F16)
SPAMM_ATOM(__half, 64, F32F16F16)
SPAMM_ATOM(__half, 128, F32F16F16)
SPAMM_ATOM(__nv_bfloat16, 32, F32BF16BF16)
SPAMM_ATOM(__nv_bfloat16, 64, F32BF16BF16)
SPAMM_ATOM(__nv_bfloat16, 128, F32BF16BF16)
#undef SPAMM_ATOM

// Addresses and distances in descriptors count 16 bytes.
constexpr uint32_t kDescriptorUnit = 16;

template <Major kMajor>
__device__ __forceinline__ uint64_t descriptor(const OperandBlock& block) {
  cute::GmmaDescriptor result;
  result.bitfield.layout_type_ = static_cast<uint8_t>(cute::SM90::GMMA::LayoutType::B128);
  result.bitfield.stride_byte_offset_ = 8 * kLineBytes / kDescriptorUnit;  // between 8-line groups
  // From one block to the next; K-major operands have no such step.
  result.bitfield.leading_byte_offset_ =
      kMajor == Major::MN ? sizeof(OperandBlock) / kDescriptorUnit : 1;
  result.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(&block) / kDescriptorUnit;
  return result;
}

// From the first column of a row of blocks of B to another: whole blocks, then 128 bytes or one
// entry a column.
template <Major kMajor>
constexpr uint32_t column_offset(int column) {
  const int within = column % kBlock * (kMajor == Major::K ? kLineBytes : kLineBytes / kBlock);
  return (column / kBlock * sizeof(OperandBlock) + within) / kDescriptorUnit;
}

// A slice is 32 bytes of K; from one to the next there are these bytes of each line, or 16 lines.
template <class Element>
constexpr int kSliceDepth = 32 / sizeof(Element);
template <Major kMajor>
constexpr uint32_t kSliceStep = (kMajor == Major::K ? 32 : 16 * kLineBytes) / kDescriptorUnit;

constexpr int kThreadValues = 32;  // of a 64 x 64 block of C, in each thread of the warpgroup

template <class AtomType, int kFirst, int kSize, int... kIndex>
__device__ __forceinline__ void fma(uint64_t a, uint64_t b, float (&acc)[kSize], ScaleOut scale,
                                    std::integer_sequence<int, kIndex...>) {
  AtomType::fma(a, b, acc[kFirst + kIndex]..., scale);
}

// The descriptor of what lies `units` further. Only the low word holds the address.
__device__ __forceinline__ uint64_t advance(cute::GmmaDescriptor descriptor, uint32_t units) {
  descriptor.reg32_[0] += units;
  return descriptor;
}

// acc, columns kColumn to kColumn + kWidth, += the block of A at `a` times these columns of the row
// of blocks of B at `b`, in the depths kDepth to kDepth + kDepths of both; = instead of += if
// `start` is Zero. Asynchronous: the caller fences before, commits and waits after.
template <class Element, Major kMajorA, Major kMajorB, int kColumn, int kWidth, int kDepth,
          int kDepths, int kSize>
__device__ __forceinline__ void multiply_columns(uint64_t a, uint64_t b, float (&acc)[kSize],
                                                 ScaleOut start = ScaleOut::One) {
  using AtomType = typename Atom<Element, kWidth, kMajorA, kMajorB>::Type;
  constexpr int kColumnValues = kBlock / kThreadValues;  // columns that share a value of a thread
  constexpr uint32_t kOffset = column_offset<kMajorB>(kColumn);
  constexpr int kDeep = kSliceDepth<Element>;
#pragma unroll
  for (int slice = kDepth / kDeep; slice < (kDepth + kDepths) / kDeep; ++slice) {
    fma<AtomType, kColumn / kColumnValues>(
        advance(a, slice * kSliceStep<kMajorA>), advance(b, kOffset + slice * kSliceStep<kMajorB>),
        acc, slice == kDepth / kDeep ? start : ScaleOut::One,
        std::make_integer_sequence<int, kWidth / kColumnValues>{});
  }
}

// ptxas serialises all wgmma of a kernel (C7511) in which instructions of different widths share
// accumulators. Moves that it cannot look through make them different values in its eyes; it then
// gives both the same registers, and no move is left in the code.
template <int kCount>
__device__ __forceinline__ void hand_over(const float* from, float* to) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("mov.b32 %0, %1;" : "=f"(to[i]) : "f"(from[i]));
}

}  // namespace spamm::kernels::sm90
