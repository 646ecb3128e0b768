// Warpgroup products of one operand block of A with a row of operand blocks of B. Operands are in
// shared memory, sums are float32. The instructions are CUTLASS's atoms.
//
// An operand block is 64 lines of 128 bytes with TMA's 128-byte swizzle. If K is contiguous, a line
// is a row of A or a column of B; if M or N is contiguous, a line is one k. Neighbouring blocks of
// B are adjacent in memory, so one instruction can span all of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cute/arch/mma_sm90.hpp>
#include <cute/arch/util.hpp>
#include <type_traits>
#include <utility>

namespace spamm::kernels::sm90 {

using cute::SM90::GMMA::Major;
using cute::SM90::GMMA::ScaleOut;

constexpr int kBlock = 64;  // rows, columns and depth of an operand block
constexpr int kLineBytes = 128;

struct alignas(1024) OperandBlock {
  uint8_t bytes[kBlock * kLineBytes];
};

// Descriptors count addresses and distances in units of 16 bytes.
constexpr uint32_t kDescriptorUnit = 16;

template <Major kMajor>
__device__ __forceinline__ uint64_t descriptor(const OperandBlock& block) {
  cute::GmmaDescriptor result;
  result.bitfield.layout_type_ = static_cast<uint8_t>(cute::SM90::GMMA::LayoutType::B128);
  result.bitfield.stride_byte_offset_ = 8 * kLineBytes / kDescriptorUnit;  // between 8-line groups
  // The distance to the next block. Unused for K-major operands.
  result.bitfield.leading_byte_offset_ =
      kMajor == Major::MN ? sizeof(OperandBlock) / kDescriptorUnit : 1;
  result.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(&block) / kDescriptorUnit;
  return result;
}

// The distance from column 0 of a row of blocks of B to `column`. Within a block a column is a line
// (K-major) or an entry (N-major).
template <Major kMajor>
constexpr uint32_t column_offset(int column) {
  const int within = column % kBlock * (kMajor == Major::K ? kLineBytes : kLineBytes / kBlock);
  return (column / kBlock * sizeof(OperandBlock) + within) / kDescriptorUnit;
}

// A slice is the K of one instruction, 32 bytes. The next slice is 32 bytes further along the lines
// (K-major) or 16 lines further.
template <class Element>
constexpr int kSliceDepth = 32 / sizeof(Element);
template <Major kMajor>
constexpr uint32_t kSliceStep = (kMajor == Major::K ? 32 : 16 * kLineBytes) / kDescriptorUnit;

// CUTLASS's element, and its atoms that compute 64 x kN of C from kSliceDepth of K: with A from
// shared memory, and from registers.
template <class Element>
using AtomElement = std::conditional_t<
    std::is_same_v<Element, __half>, cute::half_t,
    std::conditional_t<std::is_same_v<Element, __nv_bfloat16>, cute::bfloat16_t, cute::tfloat32_t>>;
template <class Element, int kN>
using AtomShape = cute::Shape<cute::_64, cute::Int<kN>, cute::Int<kSliceDepth<Element>>>;
template <class Element, int kN, Major kMajorA, Major kMajorB>
using Atom =
    decltype(cute::SM90::GMMA::ss_op_selector<AtomElement<Element>, AtomElement<Element>, float,
                                              AtomShape<Element, kN>, kMajorA, kMajorB>());
template <class Element>
using RegisterAtom =
    decltype(cute::SM90::GMMA::rs_op_selector<AtomElement<Element>, AtomElement<Element>, float,
                                              AtomShape<Element, kBlock>>());

constexpr int kThreadValues = 32;  // sums of a 64 x 64 block of C in each thread of a warpgroup

template <class AtomType, int kFirst, int kSize, int... kIndex>
__device__ __forceinline__ void fma(uint64_t a, uint64_t b, float (&acc)[kSize], ScaleOut scale,
                                    std::integer_sequence<int, kIndex...>) {
  AtomType::fma(a, b, acc[kFirst + kIndex]..., scale);
}

// The descriptor `units` further on. Only its low word holds the address.
__device__ __forceinline__ uint64_t advance(cute::GmmaDescriptor descriptor, uint32_t units) {
  descriptor.reg32_[0] += units;
  return descriptor;
}

// For columns [kColumn, kColumn + kWidth) of the row of blocks of B at `b`, and depths [kDepth,
// kDepth + kDepths): acc += a b, or acc = a b if `start` is Zero. `a` and `b` are descriptors.
// Asynchronous: the caller fences before, and commits and waits after.
template <class Element, Major kMajorA, Major kMajorB, int kColumn, int kWidth, int kDepth,
          int kDepths, int kSize>
__device__ __forceinline__ void multiply_columns(uint64_t a, uint64_t b, float (&acc)[kSize],
                                                 ScaleOut start = ScaleOut::One) {
  using AtomType = Atom<Element, kWidth, kMajorA, kMajorB>;
  constexpr int kColumnValues = kBlock / kThreadValues;  // columns for each sum of a thread
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

// Copies accumulators by moves that ptxas cannot see through. ptxas serialises all wgmma of a
// kernel (C7511) in which instructions of different widths share accumulators; after this copy it
// treats them as different values. It then assigns both the same registers, so no move remains.
template <int kCount>
__device__ __forceinline__ void hand_over(const float* from, float* to) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("mov.b32 %0, %1;" : "=f"(to[i]) : "f"(from[i]));
}

template <class Element, int... kIndex>
__device__ __forceinline__ void fma_registers(const uint32_t (&a)[4], uint64_t b,
                                              float (&acc)[kThreadValues], ScaleOut scale,
                                              std::integer_sequence<int, kIndex...>) {
  RegisterAtom<Element>::fma(a[0], a[1], a[2], a[3], b, acc[kIndex]..., scale);
}

// With A from registers, half types: acc += a b, or acc = a b if `scale` is Zero. `b` is the
// descriptor of 64 columns. Asynchronous: the caller fences before, and commits and waits after;
// until then it keeps `a` (keep_operands).
template <class Element>
__device__ __forceinline__ void multiply_registers(const uint32_t (&a)[4], uint64_t b,
                                                   float (&acc)[kThreadValues], ScaleOut scale) {
  fma_registers<Element>(a, b, acc, scale, std::make_integer_sequence<int, kThreadValues>{});
}

// Keeps registers that a product reads or writes from being used for something else before this.
template <int kSize>
__device__ __forceinline__ void keep_operands(uint32_t (&a)[kSize][4]) {
#pragma unroll
  for (auto& step : a) {
#pragma unroll
    for (uint32_t& word : step) cute::warpgroup_fence_operand(word);
  }
}

}  // namespace spamm::kernels::sm90
