// PTX instructions of sm_80: asynchronous copies into shared memory, ldmatrix and mma.sync.
// Fragment layouts are in the PTX ISA, "Warp level matrix instructions". With g = lane / 4 and
// t = lane % 4, a lane holds (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1) of each 16 x 8 result.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace spamm::kernels {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies the first `bytes` of a chunk and fills the rest with zeros. Reads nothing if bytes is 0.
__device__ inline void copy_async(void* to_shared, const void* from_global, int bytes) {
  asm volatile(
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)),
      "l"(from_global), "r"(bytes)
      : "memory");
}

// The same for a word of 4 bytes.
__device__ inline void copy_word_async(void* to_shared, const void* from_global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to_shared)),
               "l"(from_global), "r"(bytes)
               : "memory");
}

// Copies an entry of 4 or 8 bytes.
template <class Element>
__device__ void copy_entry_async(Element* to_shared, const Element* from_global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to_shared)),
               "l"(from_global), "n"(sizeof(Element))
               : "memory");
}

// Loads 2 bytes, or 0 if they do not exist. Volatile, so that the compiler issues several such
// loads before it uses the first. Not ld.global.nc: see overlap.cuh.
__device__ inline uint32_t load_two_bytes(const uint16_t* from, bool exists) {
  uint32_t entry = 0;
  asm volatile(
      "{\n.reg .pred exists;\nsetp.ne.b32 exists, %2, 0;\n"
      "@exists ld.global.u16 %0, [%1];\n}"
      : "+r"(entry)
      : "l"(from), "r"(static_cast<int>(exists)));
  return entry;
}

// Stores 16 bytes if `exists`. In one piece: the compiler may split an assignment into words.
__device__ inline void store_chunk(void* to, const uint32_t (&words)[4], bool exists) {
  asm volatile(
      "{\n.reg .pred exists;\nsetp.ne.b32 exists, %5, 0;\n"
      "@exists st.global.v4.u32 [%4], {%0, %1, %2, %3};\n}" ::"r"(words[0]),
      "r"(words[1]), "r"(words[2]), "r"(words[3]), "l"(to), "r"(static_cast<int>(exists))
      : "memory");
}

__device__ inline uint32_t load_shared(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// Makes a group of the copies that this thread has started since its last group.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending groups of this thread are in flight.
template <int kPending>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Loads four 8 x 8 matrices of 16-bit entries (or 8 x 4 of 32-bit entries). Lane l passes the
// address of row l % 8 of matrix l / 8, and receives entries (g, 2t), (g, 2t+1) of each matrix.
__device__ inline void load_matrices(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same with each matrix transposed: a lane receives entries (2t, g), (2t+1, g).
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// d += a b: 16 x 16 times 16 x 8, or with TF32 16 x 8 times 8 x 8, whose operands are float32 bit
// patterns that are already rounded.
#define SPAMM_MMA(kName, kShape, kType)                                                          \
  __device__ inline void kName(float(&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, \
                               uint32_t b0, uint32_t b1) {                                       \
    asm("mma.sync.aligned." kShape ".row.col.f32." kType "." kType                               \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                   \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                         \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                 \
  }
SPAMM_MMA(mma_f16, "m16n8k16", "f16")
SPAMM_MMA(mma_bf16, "m16n8k16", "bf16")
SPAMM_MMA(mma_tf32, "m16n8k8", "tf32")
#undef SPAMM_MMA

__device__ inline uint32_t round_to_tf32(uint32_t bits) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
  return rounded;
}

// d += a b, 16 x 4 times 4 x 8, float64. sm_80's largest instruction has 8 rows, so this uses two.
__device__ inline void mma_f64(double (&d)[4], double a0, double a1, double b0) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(d[0]), "+d"(d[1])
      : "d"(a0), "d"(b0));
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(d[2]), "+d"(d[3])
      : "d"(a1), "d"(b0));
}

// d += a b, 16 x 4 times 4 x 8, float64, in one instruction of sm_90 and newer. Volatile, so that
// the compiler does not move it across the loads of the next operands.
__device__ __forceinline__ void mma_f64_sm90(double (&d)[4], double a0, double a1, double b0) {
  asm volatile(
      "mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(a0), "d"(a1), "d"(b0));
}

}  // namespace spamm::kernels
