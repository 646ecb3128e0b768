// Where the results of a product go that the caller gave memory for.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>

#include "cuda/multiply/multiply.h"
#include "cuda/norm_map/layout.h"
#include "same_memory.h"
#include "spamm/spamm.h"

namespace spamm::cuda {

// Calls write(c, map), which computes a product into `c` and its norm map into `map`, unless that
// is undefined. They are `out` and `norms` themselves if kernels can write there, and no memory of
// the tensors in `read` (undefined ones count for nothing) is overwritten; else others, which are
// copied in the end.
template <class Write>
void write_result(const at::Tensor& out, const std::optional<at::Tensor>& norms,
                  at::ArrayRef<at::Tensor> read, const Block& block, const Write& write) {
  const auto is_read = [&](const at::Tensor& x) {
    return std::any_of(read.begin(), read.end(),
                       [&](const at::Tensor& y) { return y.defined() && may_overlap(x, y); });
  };
  const bool in_place = is_writable(out) && !is_read(out);
  const at::Tensor c = in_place ? out : at::empty(out.sizes(), out.options());
  // norm_map sums in the order of memory. The norms of other layouts are therefore its own.
  const bool has_rows = lines_are_rows(as_batch(out));
  at::Tensor map;
  if (norms && has_rows) {
    const bool map_in_place =
        norms->is_contiguous() && !is_read(*norms) && !may_overlap(*norms, out);
    map = map_in_place ? *norms : at::empty(norms->sizes(), norms->options());
  }
  write(c, map);
  if (!in_place) out.copy_(c);
  if (norms && !map.is_same(*norms)) {
    norms->copy_(has_rows ? map : spamm::norm_map(out, {block.m, block.n}));
  }
}

}  // namespace spamm::cuda
