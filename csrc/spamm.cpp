// SpAMM as one op: norm map -> threshold -> multiply. What devices share: checks, memory for the
// result, products over several devices.
#include "spamm.h"

#include "checks.h"
#include "shards/spamm_devices.h"

namespace spamm {
namespace {

// The checks of all three ops.
Block check(const ProductArguments& x) {
  check_knob(x.knob);
  return check_product(x.a, x.b, x.block, x.norm_a, x.norm_b, x.knob.tau, x.input);
}

// Nothing if no devices are named, or one is faster. Computes symmetric products whole and mirrors.
OptTensor product_on_devices(ProductArguments& x) {
  if (!x.devices) return std::nullopt;
  OptTensor c = shards::spamm_on_devices(x);
  if (c && x.symmetric) mirror_upper(*c);
  return c;
}

}  // namespace

void mirror_upper(const Tensor& c) {
  // In strips: few calls for large matrices, and little memory beside them.
  constexpr int64_t kLeastStrip = 512, kMostStrips = 16;
  const int64_t size = c.size(-1);
  const int64_t strip = std::max(kLeastStrip, blocks_of(size, kMostStrips));
  const Tensor index = at::arange(std::min(strip, size), c.options().dtype(at::kLong));
  const Tensor is_upper = index.unsqueeze(1).le(index);
  for (int64_t first = 0; first < size; first += strip) {
    const int64_t rows = std::min(strip, size - first), end = first + rows;
    const auto part = [&](int64_t row, int64_t height, int64_t column, int64_t width) {
      return c.narrow(-2, row, height).narrow(-1, column, width);
    };
    const Tensor square = part(first, rows, first, rows);
    const Tensor upper = is_upper.narrow(0, 0, rows).narrow(1, 0, rows);
    square.copy_(at::where(upper, square, square.mT()));
    part(end, size - end, first, rows).copy_(part(first, rows, end, size - end).mT());
  }
}

bool share_norm_map(const Tensor& a, const Tensor& b, const Block& block) {
  return block.m == block.k && block.k == block.n && is_same_view(a, b);
}

std::tuple<Tensor, Tensor> norm_maps_of(const ProductArguments& x) {
  const Block block = check_block(x.block);
  const auto map_of_a = [&] { return norm_map(x.a, {block.m, block.k}); };
  if (!x.norm_a && !x.norm_b) {
    if (!share_norm_map(x.a, x.b, block)) return ops::norm_maps(x.a, x.b, x.block);
    const Tensor shared = map_of_a();
    return {shared, shared};
  }
  return {x.norm_a ? *x.norm_a : map_of_a(),
          x.norm_b ? *x.norm_b : norm_map(x.b, {block.k, block.n})};
}

NewProduct new_product(ProductArguments& x, bool wants_norms, EmptyTensor* empty) {
  const Block block = check(x);
  if (x.symmetric) check_symmetric(x.a, x.b, block, x.input);
  if (const OptTensor c = product_on_devices(x)) {
    return {block, *c, wants_norms ? norm_map(*c, {block.m, block.n}) : Tensor(), true};
  }
  const DimVector shape = product_shape(x.a, x.b);
  NewProduct result{block, empty(shape, x.a.scalar_type(), x.a.device()), Tensor(), false};
  if (wants_norms) {
    result.norms =
        empty(norm_map_shape(shape, block.m, block.n), norm_dtype(x.a.scalar_type()), x.a.device());
  }
  return result;
}

void product_into_given(ProductArguments& x, WriteProduct* write) {
  const Block block = check(x);
  check_into(x.out, x.a, x.b, block, x.input, x.symmetric, x.norms);
  const OptTensor c = product_on_devices(x);
  if (!c) return write(x, block, x.out, x.norms.value_or(Tensor()));
  x.out.copy_(*c);
  if (x.norms) x.norms->copy_(norm_map(x.out, {block.m, block.n}));
}

}  // namespace spamm
