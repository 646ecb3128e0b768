// C = alpha * (A @ B over the valid block products) + beta * input.
//
// C is cut into tiles of some blocks each, which threads take one after another. For each slice of
// K, a tile lists its valid products as bit masks and multiplies runs of neighbouring valid k in
// one call of the microkernel, into sums that stay in the thread's cache until the tile is written
// out, rounded once. Slices keep what a tile reads of A and B in cache and bound the number of
// kernel shapes.
#include <ATen/Dispatch.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <vector>

#include "backend.h"
#include "checks.h"
#include "cpu/epilogue.h"
#include "cpu/large_pages.h"
#include "cpu/microkernel.h"
#include "cpu/panels.h"
#include "cpu/valid_masks.h"

namespace spamm::cpu {
namespace {

using at::IntArrayRef;
using at::Scalar;
using at::Tensor;
using OptTensor = std::optional<Tensor>;

constexpr int64_t kSliceDepth = 512;    // of K, multiplied before a tile moves on
constexpr int64_t kPanelWidth = 64;     // as wide as packing for matrix instructions goes
constexpr int64_t kTileEdge = 512;      // rows and columns of a tile of C, at most
constexpr int64_t kTilesPerThread = 4;  // at least, where C has as many blocks
constexpr int64_t kPackedBytes = 32 * 1024 * 1024;  // of B, at a time

// The larger norm; NaN, which makes every product valid, is larger than all.
template <class N>
N larger(N x, N y) {
  return y > x || std::isnan(y) ? y : x;
}

// ---- The product -------------------------------------------------------------------------------

struct Arguments {
  Tensor a, b;            // (batches, M, K) and (batches, K, N), of any strides
  Tensor norm_a, norm_b;  // their norm maps, contiguous
  Tensor input;           // (batches, M, N), of any strides; undefined where ignored
  Tensor result;          // (batches, M, N), contiguous
  Block block;
  double tau;
  Scalar alpha, beta;
};

// T: type of the operands; P: of the panels that are multiplied.
template <class T, class P>
class Product {
  using N = std::conditional_t<std::is_same_v<T, double>, double, float>;
  using Sum = typename Microkernel<P>::Sum;
  static constexpr bool kVnni = Microkernel<P>::kVnni;

 public:
  explicit Product(const Arguments& arguments)
      : arguments_(arguments),
        block_(arguments.block),
        width_(std::min(block_.n, kPanelWidth)),
        batches_(arguments.a.size(0)),
        rows_(arguments.a.size(1)),
        depth_(arguments.a.size(2)),
        columns_(arguments.b.size(2)),
        mb_(arguments.norm_a.size(1)),
        kb_(arguments.norm_a.size(2)),
        nb_(arguments.norm_b.size(2)),
        alpha_(arguments.alpha.to<Sum>()),
        beta_(arguments.beta.to<Sum>()) {
    choose_tiles();
    find_largest_norms();
    place_a();
  }

  void run() {
    const int64_t groups = batches_ * groups_per_batch_;
    const int64_t bytes = group_size() * static_cast<int64_t>(sizeof(P));
    const int64_t step = std::clamp<int64_t>(kPackedBytes / std::max<int64_t>(1, bytes), 1, groups);
    packed_b_ = with_large_pages(at::empty({step * bytes}, at::kByte));
    sums_ = at::empty({at::get_num_threads() * sums_size() * static_cast<int64_t>(sizeof(Sum))},
                      at::kByte);
    for (int64_t first = 0; first < groups; first += step) {
      const Range groups_now{first, std::min(step, groups - first)};
      pack_b(groups_now);
      multiply(groups_now);
    }
  }

 private:
  // A group is the blocks of B's columns that a tile covers; groups are numbered through all
  // batches.
  struct Group {
    int64_t batch;
    Range j;
  };

  Group group(int64_t number) const {
    const int64_t first = number % groups_per_batch_ * tile_columns_;
    return {number / groups_per_batch_, {first, std::min(tile_columns_, nb_ - first)}};
  }

  int64_t padded_depth() const { return kb_ * block_.k; }
  int64_t panel_size() const { return padded_depth() * block_.n; }  // of one block column of B
  int64_t group_size() const { return tile_columns_ * panel_size(); }
  int64_t sums_size() const { return tile_rows_ * block_.m * tile_columns_ * block_.n; }

  Norms<N> norms(int64_t batch) const {
    return {arguments_.norm_a.const_data_ptr<N>() + batch * mb_ * kb_,
            arguments_.norm_b.const_data_ptr<N>() + batch * kb_ * nb_, kb_, nb_,
            static_cast<N>(arguments_.tau)};
  }

  template <class U>
  static View<U> view(const Tensor& matrices, int64_t batch) {
    return {matrices.const_data_ptr<U>() + batch * matrices.stride(0), matrices.stride(1),
            matrices.stride(2), matrices.size(1), matrices.size(2)};
  }

  void choose_tiles() {
    tile_rows_ = std::min(kTileEdge / block_.m, mb_);
    tile_columns_ = std::min(kTileEdge / block_.n, nb_);
    const auto tiles = [&] {
      return batches_ * blocks_of(mb_, tile_rows_) * blocks_of(nb_, tile_columns_);
    };
    while (tiles() < kTilesPerThread * at::get_num_threads() && tile_rows_ * tile_columns_ > 1) {
      int64_t& larger =
          tile_rows_ * block_.m >= tile_columns_ * block_.n ? tile_rows_ : tile_columns_;
      larger = larger == 1 ? 1 : blocks_of(larger, 2);
      if (larger == 1) {
        tile_rows_ = blocks_of(tile_rows_, 2);
        tile_columns_ = blocks_of(tile_columns_, 2);
      }
    }
    groups_per_batch_ = blocks_of(nb_, tile_columns_);
  }

  // For each k of each batch, the largest norm in A's column k and in B's row k: a block that is
  // not valid with the largest on the other side is not needed at all.
  void find_largest_norms() {
    largest_a_.assign(batches_ * kb_, N(0));
    largest_b_.assign(batches_ * kb_, N(0));
    for (int64_t batch = 0; batch < batches_; ++batch) {
      const Norms<N> maps = norms(batch);
      N *of_a = &largest_a_[batch * kb_], *of_b = &largest_b_[batch * kb_];
      for (int64_t i = 0; i < mb_; ++i)
        for (int64_t k = 0; k < kb_; ++k) of_a[k] = larger(of_a[k], maps.a[i * kb_ + k]);
      for (int64_t k = 0; k < kb_; ++k)
        for (int64_t j = 0; j < nb_; ++j) of_b[k] = larger(of_b[k], maps.b[k * nb_ + j]);
    }
  }

  void place_a() {
    const View<T> whole = view<T>(arguments_.a, 0);
    const bool rows_are_contiguous =
        (whole.column_stride == 1 || depth_ == 1) && (whole.row_stride >= depth_ || rows_ == 1);
    if constexpr (std::is_same_v<T, P>) {
      if (rows_are_contiguous && (!kVnni || depth_ % 2 == 0)) {
        a_ = whole.data;
        lda_ = std::max(whole.row_stride, depth_);
        batch_stride_a_ = arguments_.a.stride(0);
        return;
      }
    }
    lda_ = padded_depth();
    batch_stride_a_ = rows_ * lda_;
    packed_a_ = with_large_pages(
        at::empty({batches_ * batch_stride_a_ * static_cast<int64_t>(sizeof(P))}, at::kByte));
    P* target = reinterpret_cast<P*>(packed_a_.mutable_data_ptr());
    a_ = target;
    at::parallel_for(0, batches_ * mb_, 1, [&](int64_t from, int64_t to) {
      for (int64_t task = from; task < to; ++task) {
        const int64_t batch = task / mb_, i = task % mb_;
        const View<T> source = view<T>(arguments_.a, batch);
        const Norms<N> maps = norms(batch);
        P* rows = target + batch * batch_stride_a_ + i * block_.m * lda_;
        for (int64_t k = 0; k < kb_; ++k) {
          if (maps.a[i * kb_ + k] * largest_b_[batch * kb_ + k] < maps.tau) continue;
          copy_rows(source.block(i * block_.m, k * block_.k, block_.m, block_.k),
                    rows + k * block_.k, lda_, block_.k);
        }
      }
    });
  }

  // Block column j of B within the packed groups.
  P* panel(Range groups_now, int64_t number, int64_t column) const {
    P* packed = reinterpret_cast<P*>(packed_b_.mutable_data_ptr());
    return packed + (number - groups_now.begin) * group_size() + column * panel_size();
  }

  void pack_b(Range groups_now) {
    at::parallel_for(0, groups_now.size * kb_, 1, [&](int64_t from, int64_t to) {
      for (int64_t task = from; task < to; ++task) {
        const int64_t number = groups_now.begin + task / kb_, k = task % kb_;
        const auto [batch, j] = group(number);
        const Norms<N> maps = norms(batch);
        const View<T> source = view<T>(arguments_.b, batch);
        for (int64_t column = 0; column < j.size; ++column) {
          if (largest_a_[batch * kb_ + k] * maps.b[k * nb_ + j.begin + column] < maps.tau) continue;
          pack_block(source.block(k * block_.k, (j.begin + column) * block_.n, block_.k, block_.n),
                     panel(groups_now, number, column), k);
        }
      }
    });
  }

  // A panel of B is [n / width][K][width]: columns no wider than the microkernel's packing goes.
  void pack_block(const View<T>& block, P* panel, int64_t k) const {
    for (int64_t c = 0; c < block.columns; c += width_) {
      P* target = panel + c * padded_depth() + k * block_.k * width_;
      const View<T> part = block.block(0, c, block.rows, width_);
      if constexpr (kVnni) {
        copy_vnni(part, target, width_);
      } else {
        copy_rows(part, target, width_, width_);
      }
    }
  }

  void multiply(Range groups_now) const {
    const int64_t row_tiles = blocks_of(mb_, tile_rows_);
    std::atomic<int64_t> next{0};
    at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t thread, int64_t) {
      Sum* sums = reinterpret_cast<Sum*>(sums_.mutable_data_ptr()) + thread * sums_size();
      while (true) {
        const int64_t tile = next++;
        if (tile >= groups_now.size * row_tiles) break;
        const int64_t number = groups_now.begin + tile / row_tiles;
        const int64_t first = tile % row_tiles * tile_rows_;
        multiply_tile(group(number), {first, std::min(tile_rows_, mb_ - first)},
                      panel(groups_now, number, 0), sums);
      }
      Microkernel<P>::release();
    });
  }

  void multiply_tile(const Group& group, Range i, const P* b, Sum* sums) const {
    const Norms<N> maps = norms(group.batch);
    const Range j = group.j;
    const int64_t blocks = i.size * j.size, block_size = block_.m * block_.n;
    std::vector<uint64_t> masks(blocks);
    std::vector<char> started(blocks, 0);
    const int64_t slice = kSliceDepth / block_.k;
    for (int64_t k = 0; k < kb_; k += slice) {
      const Range ks{k, std::min(slice, kb_ - k)};
      find_valid(maps, i, ks, j, masks.data());
      for (int64_t column = 0; column < j.size; ++column) {
        for (int64_t row = 0; row < i.size; ++row) {
          const int64_t c = row * j.size + column;
          uint64_t mask = masks[c];
          if (mask == 0) continue;
          Sum* block_sums = sums + c * block_size;
          if (!started[c]) std::fill_n(block_sums, block_size, Sum(0));
          started[c] = 1;
          while (mask) {
            const int begin = std::countr_zero(mask);
            const int size = std::countr_one(mask >> begin);
            mask &= begin + size == kMaskBits ? 0 : ~uint64_t{0} << (begin + size);
            multiply_run(group.batch, i.begin + row, {k + begin, size}, j.begin + column,
                         b + column * panel_size(), block_sums);
          }
        }
      }
    }
    for (int64_t row = 0; row < i.size; ++row)
      for (int64_t column = 0; column < j.size; ++column) {
        const int64_t c = row * j.size + column;
        write(group.batch, i.begin + row, j.begin + column,
              started[c] ? sums + c * block_size : nullptr);
      }
  }

  void multiply_run(int64_t batch, int64_t i, Range k, int64_t j, const P* panel, Sum* sums) const {
    const int64_t rows = std::min(block_.m, rows_ - i * block_.m);
    const int64_t columns = std::min(block_.n, columns_ - j * block_.n);
    int64_t depth = std::min(k.size * block_.k, depth_ - k.begin * block_.k);
    if (kVnni) depth += depth % 2;
    const P* a = a_ + batch * batch_stride_a_ + i * block_.m * lda_ + k.begin * block_.k;
    for (int64_t c = 0; c < columns; c += width_) {
      const P* b = panel + c * padded_depth() + k.begin * block_.k * width_;
      Microkernel<P>::multiply_add(rows, width_, depth, a, lda_, b, width_, sums + c, block_.n);
    }
  }

  void write(int64_t batch, int64_t i, int64_t j, const Sum* sums) const {
    const int64_t row = i * block_.m, column = j * block_.n;
    T* out = arguments_.result.mutable_data_ptr<T>() + (batch * rows_ + row) * columns_ + column;
    const int64_t rows = std::min(block_.m, rows_ - row),
                  columns = std::min(block_.n, columns_ - column);
    if (arguments_.input.defined()) {
      const View<T> input = view<T>(arguments_.input, batch).block(row, column, rows, columns);
      write_rows(sums, block_.n, alpha_, &input, beta_, out, columns_, rows, columns);
    } else {
      write_rows<T, Sum>(sums, block_.n, alpha_, nullptr, beta_, out, columns_, rows, columns);
    }
  }

  const Arguments& arguments_;
  Block block_;
  int64_t width_;  // of a panel of B
  int64_t batches_, rows_, depth_, columns_, mb_, kb_, nb_;
  Sum alpha_, beta_;
  int64_t tile_rows_, tile_columns_, groups_per_batch_;
  std::vector<N> largest_a_, largest_b_;
  const P* a_;
  int64_t lda_, batch_stride_a_;
  Tensor packed_a_, packed_b_, sums_;
};

// The input, seen in the product's shape; undefined where it does not matter.
Tensor expanded_input(const OptTensor& input, const Tensor& a, IntArrayRef shape,
                      const Scalar& beta) {
  if (!input) return {};
  TORCH_CHECK_TYPE(input->scalar_type() == a.scalar_type(), "input must be ", a.scalar_type(),
                   " as the operands are; got ", input->scalar_type());
  check_same_device(*input, a, "input", "the operands");
  TORCH_CHECK(at::is_expandable_to(input->sizes(), shape), "input must broadcast to shape ", shape,
              "; got shape ", input->sizes());
  if (beta.toDouble() == 0) return {};
  return input->expand(shape);
}

Tensor multiply(const Tensor& a, const Tensor& b, const Tensor& norm_a, const Tensor& norm_b,
                const Tensor& tau, IntArrayRef block, const OptTensor& input, const Scalar& beta,
                const Scalar& alpha) {
  check_operands(a, b);
  const Block edges = check_block(block);
  check_norm_map_of(norm_a, a, edges.m, edges.k, "norm_a");
  check_norm_map_of(norm_b, b, edges.k, edges.n, "norm_b");
  check_tau(tau, a.device());
  auto shape = a.sizes().vec();
  shape.back() = b.size(-1);
  const Tensor addend = expanded_input(input, a, shape, beta);
  const Tensor result = with_large_pages(at::empty(shape, a.options()));
  if (result.numel() == 0) return result;

  const auto as_batch = [](const Tensor& t) {
    return t.defined() && t.dim() == 2 ? t.unsqueeze(0) : t;
  };
  const Arguments arguments{as_batch(a),
                            as_batch(b),
                            as_batch(norm_a.contiguous()),
                            as_batch(norm_b.contiguous()),
                            as_batch(addend),
                            as_batch(result),
                            edges,
                            tau.item<double>(),
                            alpha,
                            beta};
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, a.scalar_type(), "multiply", [&] {
    if constexpr (sizeof(scalar_t) == 2) {
      if (!multiplies_natively(a.scalar_type())) {
        Product<scalar_t, float>(arguments).run();
        return;
      }
    }
    Product<scalar_t, scalar_t>(arguments).run();
  });
  return result;
}

}  // namespace

std::string backend_name(at::ScalarType dtype, const Block&) {
  if (dtype == at::kDouble) return "cpu-plain";
  if (at::isReducedFloatingType(dtype) && multiplies_natively(dtype)) return "cpu-brgemm-vnni";
  const std::string name = has_float_brgemm() ? "cpu-brgemm" : "cpu-blas";
  return dtype == at::kFloat ? name : name + "-float32";
}

TORCH_LIBRARY_IMPL(spamm_torch, CPU, m) { m.impl("multiply", &multiply); }

}  // namespace spamm::cpu
