// Norm maps as the threshold ops of the CPU read them, and the size of their tasks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstdint>

namespace spamm::cpu {

inline constexpr int64_t kStepsPerTask = 32 << 10;  // with fewer, starting a thread does not pay

// The number of items in a task, if an item takes `steps` steps.
inline int64_t grain(int64_t steps) {
  return std::max<int64_t>(1, kStepsPerTask / std::max<int64_t>(1, steps));
}

// Contiguous norm maps of a batch of products: A's (batches, MB, KB) and B's (batches, KB, NB).
template <class N>
struct Maps {
  at::Tensor owner_a, owner_b;
  const N *a, *b;
  int64_t batches, mb, kb, nb;

  Maps(const at::Tensor& norm_a, const at::Tensor& norm_b)
      : owner_a(norm_a.contiguous()),
        owner_b(norm_b.contiguous()),
        a(owner_a.const_data_ptr<N>()),
        b(owner_b.const_data_ptr<N>()),
        batches(c10::multiply_integers(norm_a.sizes().slice(0, norm_a.dim() - 2))),
        mb(norm_a.size(-2)),
        kb(norm_a.size(-1)),
        nb(norm_b.size(-1)) {}

  const N* row_of_a(int64_t row) const { return a + row * kb; }  // batch * mb + i
  const N* b_for_row(int64_t row) const { return b + row / mb * kb * nb; }
};

// function(a number of the maps' type).
template <class Function>
auto dispatch_norms(const at::Tensor& norm_a, const Function& function) {
  return norm_a.scalar_type() == at::kDouble ? function(double()) : function(float());
}

}  // namespace spamm::cpu
