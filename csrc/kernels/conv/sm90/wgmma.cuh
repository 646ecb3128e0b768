// Atoms of all widths up to 128 that are multiples of 8, for batches that fill a box only in part,
// and of the widths of tiles without boxes. Both operands are contiguous along the channels.
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/mma_sm90_gmma_ext.hpp>  // the less common widths

#include "kernels/common/tf32.h"
#include "kernels/common/wgmma_sm90.cuh"

namespace spamm::kernels::sm90 {

#define SPAMM_CONV_ATOMS(kN)                                                            \
  template <>                                                                           \
  struct Atom<__half, kN, Major::K, Major::K> {                                         \
    using Type = cute::SM90::GMMA::MMA_64x##kN##x16_F32F16F16_SS<Major::K, Major::K>;   \
  };                                                                                    \
  template <>                                                                           \
  struct Atom<__nv_bfloat16, kN, Major::K, Major::K> {                                  \
    using Type = cute::SM90::GMMA::MMA_64x##kN##x16_F32BF16BF16_SS<Major::K, Major::K>; \
  };
SPAMM_CONV_ATOMS(40)
SPAMM_CONV_ATOMS(96)
SPAMM_CONV_ATOMS(104)
SPAMM_CONV_ATOMS(160)
SPAMM_CONV_ATOMS(192)
SPAMM_CONV_ATOMS(208)
SPAMM_CONV_ATOMS(256)
#undef SPAMM_CONV_ATOMS

#define SPAMM_TF32_ATOM(kN)                                             \
  template <>                                                           \
  struct Atom<Tf32, kN, Major::K, Major::K> {                           \
    using Type = cute::SM90::GMMA::MMA_64x##kN##x8_F32TF32TF32_SS_TN<>; \
  };
SPAMM_TF32_ATOM(40)
SPAMM_TF32_ATOM(64)
SPAMM_TF32_ATOM(104)
SPAMM_TF32_ATOM(128)
#undef SPAMM_TF32_ATOM

}  // namespace spamm::kernels::sm90
