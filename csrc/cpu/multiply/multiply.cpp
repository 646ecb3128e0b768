// C = alpha * (A @ B over the valid block products) + beta * input.
//
// Threads claim one tile of C after another. A tile works through K in slices, so that the parts of
// A and B that it reads stay in cache. For each slice it computes bit masks of the valid products
// and calls the microkernel once for each run of neighbouring valid k. C itself takes the sums
// where it has their type; else they stay in the thread's cache until the tile is written, rounded
// once. Runs are cut into short pieces of K, because one long sum would be less accurate. Of a
// symmetric C only blocks on and above the diagonal are computed. Norms of C's blocks are computed
// while the blocks are in cache.
#include <ATen/EmptyTensor.h>

#include <atomic>
#include <bit>
#include <numeric>

#include "backends.h"
#include "checks.h"
#include "cpu/common/machine.h"
#include "cpu/common/transpose.h"
#include "cpu/multiply/microkernel.h"
#include "cpu/multiply/panels.h"
#include "cpu/multiply/slice_kernel.h"
#include "cpu/norm_map/strip_norms.h"
#include "spamm.h"
#include "stage_range.h"
#include "threshold.h"

namespace spamm::cpu {
namespace {

using at::IntArrayRef;
using at::Scalar;
using at::Tensor;
using OptTensor = std::optional<Tensor>;

constexpr int64_t kTileColumns = 512;   // of C, at most
constexpr int64_t kTilesPerThread = 4;  // at least, if C has enough blocks
constexpr double kGrain = 1 << 19;      // operations that are worth another thread
// With so few rows of A, each element of B is used so few times that a copy of it would not pay.
constexpr int64_t kFewRows = 8;
constexpr int64_t kLeastRows = 8;  // of a tile, where rows are cut

// The larger norm. NaN counts as the largest, because it makes every product valid.
template <class N>
N larger(N x, N y) {
  return y > x || std::isnan(y) ? y : x;
}

// ---- The product -------------------------------------------------------------------------------

struct Arguments {
  Tensor a, b;            // (M, K) and (K, N), or batches of them, of any strides
  Tensor norm_a, norm_b;  // their norm maps, contiguous; undefined if nothing is skipped
  Tensor input;           // (M, N) or a batch, of any strides; undefined if not added
  Tensor result;          // the same, rows contiguous
  Tensor norms;           // norm map of the result, to be computed; undefined if not wanted
  Block block;
  double tau;
  Scalar alpha, beta;
  bool symmetric;  // the lower triangle of the result is the mirror image of the upper one
};

// T: type of the operands. P: type of the packed panels.
template <class T, class P>
class Product {
  using N = std::conditional_t<std::is_same_v<T, double>, double, float>;
  using Kernel = SliceKernel<T, P>;
  using Sum = typename Kernel::Sum;
  static constexpr bool kVnni = Kernel::kVnni;
  // Measured: with matrix instructions, packing B for twice as many tiles costs less than sums that
  // do not fit in cache.
  static constexpr int64_t kTileRows = kVnni ? 256 : 512;

 public:
  explicit Product(const Arguments& arguments)
      : arguments_(arguments),
        block_(arguments.block),
        kernel_{block_},
        batches_(arguments.a.dim() == 3 ? arguments.a.size(0) : 1),
        rows_(arguments.a.size(-2)),
        depth_(arguments.a.size(-1)),
        columns_(arguments.b.size(-1)),
        mb_(blocks_of(rows_, block_.m)),
        kb_(blocks_of(depth_, block_.k)),
        nb_(blocks_of(columns_, block_.n)),
        alpha_(arguments.alpha.to<Sum>()),
        beta_(arguments.beta.to<Sum>()),
        skips_(arguments.norm_a.defined()),
        sums_in_c_(std::is_same_v<T, Sum> &&
                   !(arguments.input.defined() && may_overlap(arguments.input, arguments.result))) {
    kernel_.depth = std::min(kSliceDepth, block_.k * kb_);
    choose_tiles();
    place_a();
    reads_b_ = std::is_same_v<T, P> && !kVnni && !is_packed_ && rows_ <= kFewRows &&
               (arguments.b.stride(-1) == 1 || columns_ == 1);
  }

  // Threads claim the tiles of all batches, down a column first.
  void run() const {
    const int64_t row_tiles = blocks_of(rows_, tile_height_),
                  column_tiles = blocks_of(nb_, tile_columns_);
    const int64_t tiles = batches_ * column_tiles * row_tiles;
    std::atomic<int64_t> next{0};
    at::parallel_for(0, std::min(threads_, tiles), 1, [&](int64_t, int64_t) {
      Workspace workspace(*this);
      while (true) {
        const int64_t number = next++;
        if (number >= tiles) break;
        const int64_t first = number % row_tiles * tile_height_;
        const Range rows{first, std::min(tile_height_, rows_ - first)};
        const int64_t i = first / block_.m;
        const int64_t j = number / row_tiles % column_tiles * tile_columns_;
        const Tile tile{number / row_tiles / column_tiles,
                        rows,
                        {i, blocks_of(rows.end(), block_.m) - i},
                        {j, std::min(tile_columns_, nb_ - j)}};
        const bool is_below_diagonal = tile.i.begin >= tile.j.end();
        if (!(arguments_.symmetric && is_below_diagonal)) multiply_tile(tile, workspace);
      }
      Microkernel<P>::release();
    });
  }

 private:
  // Rows of C in one batch, and the blocks that they lie in.
  struct Tile {
    int64_t batch;
    Range rows, i, j;
  };

  // The rows of block row i that a tile has.
  Range rows_of(const Tile& tile, int64_t i) const {
    const int64_t first = std::max(tile.rows.begin, i * block_.m);
    return {first, std::min(tile.rows.end(), (i + 1) * block_.m) - first};
  }

  // A thread's memory for one tile, small enough to stay in its cache.
  struct Workspace {
    explicit Workspace(const Product& p)
        : masks(p.tile_rows_ * p.tile_columns_),
          started(masks.size()),
          buffer(at::detail::empty_cpu({p.sums_size() * static_cast<int64_t>(sizeof(Sum)) +
                                        p.kernel_.panel_size() * static_cast<int64_t>(sizeof(P))},
                                       at::kByte)),
          sums(static_cast<Sum*>(buffer.mutable_data_ptr())),
          panel(reinterpret_cast<P*>(sums + p.sums_size())) {}

    std::vector<uint64_t> masks;  // valid products of a slice, one mask for each block of C
    std::vector<char> started;    // whether a block of C has had a valid product
    Tensor buffer;
    Sum* sums;
    P* panel;  // of B: a slice of one block column
  };

  int64_t sums_size() const {
    return sums_in_c_ ? 0 : tile_rows_ * block_.m * tile_columns_ * block_.n;
  }

  Norms<N> norms(int64_t batch) const {
    return {arguments_.norm_a.const_data_ptr<N>() + batch * mb_ * kb_,
            arguments_.norm_b.const_data_ptr<N>() + batch * kb_ * nb_, kb_, nb_,
            static_cast<N>(arguments_.tau)};
  }

  // From one matrix of a batch to the next.
  static int64_t batch_stride(const Tensor& t) { return t.dim() == 3 ? t.stride(0) : 0; }

  template <class U>
  static View<U> view(const Tensor& matrices, int64_t batch) {
    return {matrices.const_data_ptr<U>() + batch * batch_stride(matrices), matrices.stride(-2),
            matrices.stride(-1), matrices.size(-2), matrices.size(-1)};
  }

  void choose_tiles() {
    tile_rows_ = std::min(kTileRows / block_.m, mb_);
    tile_columns_ = std::min(kTileColumns / block_.n, nb_);
    const auto tiles = [&] {
      return batches_ * blocks_of(mb_, tile_rows_) * blocks_of(nb_, tile_columns_);
    };
    const int64_t halves = arguments_.symmetric ? 2 : 1;  // of the tiles, one is computed
    const double operations = 2.0 * static_cast<double>(batches_ * rows_) *
                              static_cast<double>(depth_) * static_cast<double>(columns_);
    threads_ = static_cast<int64_t>(
        std::clamp<double>(operations / kGrain, 1, static_cast<double>(at::get_num_threads())));
    const int64_t wanted = threads_ == 1 ? 1 : halves * kTilesPerThread * threads_;
    // Each tile packs what it needs of B.
    while (tiles() < wanted && tile_rows_ * tile_columns_ > 1) {
      int64_t& halved = tile_columns_ > 1 ? tile_columns_ : tile_rows_;
      halved = blocks_of(halved, 2);
    }
    tile_height_ = tile_rows_ * block_.m;
    if (tiles() < wanted && !kVnni && !arguments_.symmetric && !arguments_.norms.defined())
      cut_rows();
  }

  // Few blocks do not share out evenly: rows are cut into equal parts, whatever block they are in,
  // no more than threads need, since each part packs B. The bits of C do not depend on it.
  void cut_rows() {
    const int64_t columns = batches_ * columns_;
    int64_t parts = blocks_of(threads_ * std::min(block_.n, columns_), columns);
    if (batches_ * nb_ * parts % threads_ != 0) parts *= 2;
    tile_height_ = blocks_of(rows_, std::min(parts, blocks_of(rows_, kLeastRows)));
    tile_rows_ = std::min(blocks_of(tile_height_, block_.m) + 1, mb_);
  }

  // The largest norm of each row of B's maps. A block of A that is not valid with it is not needed.
  std::vector<N> largest_norms() const {
    std::vector<N> largest(batches_ * kb_, N(0));
    for (int64_t row = 0; row < batches_ * kb_; ++row) {
      const N* norm_b = arguments_.norm_b.const_data_ptr<N>() + row * nb_;
      largest[row] = std::accumulate(norm_b, norm_b + nb_, N(0),
                                     [](N x, N y) { return larger(x, std::abs(y)); });
    }
    return largest;
  }

  // A is read in place if its rows are contiguous, or its columns. For matrix instructions its
  // shape must be early (slice_kernel.h), too, and K even: they sum an odd end of K in another
  // order than one that is padded, and bits must not depend on the layout. Otherwise A is packed.
  void place_a() {
    if constexpr (std::is_same_v<T, P>) {
      const View<T> whole = view<T>(arguments_.a, 0);
      const bool has_rows = whole.column_stride == 1 || depth_ == 1;
      bool in_place = has_rows || (!kVnni && (whole.row_stride == 1 || rows_ == 1));
      by_columns_ = !has_rows;
      lda_ = has_rows ? whole.row_stride : whole.column_stride;
      if constexpr (kVnni) {
        // The stride of a single row has no meaning.
        lda_ = rows_ == 1 ? kSliceDepth : std::max(whole.row_stride, depth_);
        in_place = in_place && (whole.row_stride >= depth_ || rows_ == 1) &&
                   depth_ % kDepthStep == 0 &&
                   is_early_shape(arguments_.a.scalar_type(), lda_, rows_ % block_.m,
                                  depth_ % block_.k, block_.m, block_.k, block_.n);
      }
      if (in_place) {
        a_ = whole.data;
        slice_stride_a_ = kSliceDepth * (by_columns_ ? lda_ : 1);
        row_stride_a_ = block_.m * (by_columns_ ? 1 : lda_);
        batch_stride_a_ = batch_stride(arguments_.a);
        return;
      }
    }
    pack_a();
  }

  // Packs A as [block row][slice][row][K of the slice], padded with zeros to multiply_run's sizes.
  void pack_a() {
    is_packed_ = true;
    by_columns_ = false;
    const int64_t padded_depth = kb_ * block_.k;
    lda_ = std::min<int64_t>(kSliceDepth, std::bit_ceil(static_cast<uint64_t>(padded_depth)));
    slice_stride_a_ = block_.m * lda_;
    row_stride_a_ = blocks_of(padded_depth, kSliceDepth) * slice_stride_a_;
    batch_stride_a_ = mb_ * row_stride_a_;
    packed_a_ = with_large_pages(
        at::empty({batches_ * batch_stride_a_ * static_cast<int64_t>(sizeof(P))}, at::kByte));
    a_ = static_cast<const P*>(packed_a_.const_data_ptr());
    P* const packed = static_cast<P*>(packed_a_.mutable_data_ptr());
    const std::vector<N> largest_b = skips_ ? largest_norms() : std::vector<N>();
    at::parallel_for(0, batches_ * mb_, 1, [&](int64_t from, int64_t to) {
      for (int64_t task = from; task < to; ++task) {
        const int64_t batch = task / mb_, i = task % mb_;
        const View<T> source = view<T>(arguments_.a, batch);
        for (int64_t k = 0; k < kb_; ++k) {
          if (skips_) {
            const Norms<N> maps = norms(batch);
            if (std::abs(maps.a[i * kb_ + k]) * largest_b[batch * kb_ + k] < maps.tau) continue;
          }
          const View<T> block = source.block(i * block_.m, k * block_.k, block_.m, block_.k);
          P* target = packed + (a(batch, i * block_.m, k * block_.k).data - a_);
          copy_rows(block, target, lda_, block_.k);
          for (int64_t r = block.rows; kVnni && r < rounded_rows(block.rows); ++r)
            std::fill_n(target + r * lda_, block_.k, P(0));
        }
      }
    });
  }

  // A from (row, first) on, as far as the row's block.
  RowsOfA<P> a(int64_t batch, int64_t row, int64_t first) const {
    return {a_ + batch * batch_stride_a_ + row / block_.m * row_stride_a_ +
                row % block_.m * (by_columns_ ? 1 : lda_) + first / kSliceDepth * slice_stride_a_ +
                first % kSliceDepth * (by_columns_ ? lda_ : 1),
            lda_, by_columns_};
  }

  void multiply_tile(const Tile& tile, Workspace& workspace) const {
    std::fill(workspace.started.begin(), workspace.started.end(), 0);
    const int64_t slice = kSliceDepth / block_.k;
    for (int64_t k = 0; k < kb_; k += slice) {
      const Range ks{k, std::min(slice, kb_ - k)};
      if (skips_) {
        find_valid(norms(tile.batch), tile.i, ks, tile.j, workspace.masks.data());
      } else {
        std::fill(workspace.masks.begin(), workspace.masks.end(), (uint64_t{1} << ks.size) - 1);
      }
      if (arguments_.symmetric) clear_lower(tile.i, tile.j, workspace.masks.data());
      for (int64_t column = 0; column < tile.j.size; ++column)
        multiply_column(tile, k, column, workspace);
    }
    for (int64_t row = 0; row < tile.i.size; ++row)
      for (int64_t column = 0; column < tile.j.size; ++column) {
        const int64_t i = tile.i.begin + row, j = tile.j.begin + column;
        if (arguments_.symmetric && i > j) continue;
        const bool started = workspace.started[row * tile.j.size + column];
        finish(tile.batch, rows_of(tile, i), j,
               started ? sums(tile, row, column, workspace) : Sums{});
      }
  }

  // The sums of a block of C, in rows `leading` apart.
  struct Sums {
    Sum* data = nullptr;
    int64_t leading = 0;
  };
  Sums sums(const Tile& tile, int64_t row, int64_t column, const Workspace& workspace) const {
    if constexpr (std::is_same_v<T, Sum>) {
      if (sums_in_c_) {
        const BlockOfC c =
            block_of_c(tile.batch, rows_of(tile, tile.i.begin + row), tile.j.begin + column);
        return {c.data, c.leading};
      }
    }
    return {workspace.sums + (row * tile.j.size + column) * block_.m * block_.n, block_.n};
  }

  // Tells whether block column j of B is read in place, for which it needs a vector's columns.
  bool reads_b(int64_t j) const { return reads_b_ && columns_ - j * block_.n >= Kernel::kLanes; }

  // One block column of a tile, for the slice of K that starts at block k.
  void multiply_column(const Tile& tile, int64_t k, int64_t column, Workspace& workspace) const {
    uint64_t needed = 0;
    for (int64_t row = 0; row < tile.i.size; ++row)
      needed |= workspace.masks[row * tile.j.size + column];
    if (needed == 0) return;
    if (!reads_b(tile.j.begin + column))
      pack(tile.batch, k, tile.j.begin + column, needed, workspace.panel);
    for (int64_t row = 0; row < tile.i.size; ++row) {
      const int64_t c = row * tile.j.size + column;
      each_run(workspace.masks[c], [&](Range run) {
        multiply_run(tile.batch, rows_of(tile, tile.i.begin + row), k, run, tile.j.begin + column,
                     workspace.panel, sums(tile, row, column, workspace), workspace.started[c]);
        workspace.started[c] = 1;
      });
    }
  }

  // Copies blocks of B's block column j. Bit d of `needed` stands for block k + d.
  void pack(int64_t batch, int64_t k, int64_t j, uint64_t needed, P* panel) const {
    const View<T> source = view<T>(arguments_.b, batch);
    for (; needed; needed &= needed - 1) {
      const int64_t depth = std::countr_zero(needed);
      kernel_.pack(source.block((k + depth) * block_.k, j * block_.n, block_.k, block_.n), depth,
                   panel);
    }
  }

  // Rows of a block of A times the blocks `run` of the panel. The panel starts at block k of K.
  void multiply_run(int64_t batch, Range a_range, int64_t k, Range run, int64_t j, const P* panel,
                    const Sums& sums, bool add) const {
    int64_t rows = a_range.size;
    const int64_t columns = std::min(block_.n, columns_ - j * block_.n);
    const int64_t first = (k + run.begin) * block_.k;
    int64_t depth = std::min(run.size * block_.k, depth_ - first);
    if (kVnni && is_packed_) {
      rows = rounded_rows(rows);
      depth = round_up(depth, kDepthStep);
    }
    const RowsOfA<P> a_rows = a(batch, a_range.begin, first);
    if constexpr (std::is_same_v<T, P>) {
      if (reads_b(j)) {
        const View<T> b = view<T>(arguments_.b, batch).block(first, j * block_.n, depth, columns);
        return kernel_.multiply(a_rows, rows, depth, b.data, b.row_stride, columns, sums.data,
                                sums.leading, add);
      }
    }
    kernel_.multiply_panel(a_rows, rows, depth, panel, run.begin, columns, sums.data, sums.leading,
                           add);
  }

  // Writes rows of a block in block column j of C and, of a symmetric C, its mirror image. `sums`
  // are null if no product was valid.
  void finish(int64_t batch, Range rows, int64_t j, const Sums& sums) const {
    const bool is_zero = sums.data == nullptr && !arguments_.input.defined();
    const int64_t i = rows.begin / block_.m;  // symmetric and with norms: the whole block
    write(batch, rows, j, sums);
    if (arguments_.symmetric) mirror(batch, i, j, is_zero);
    if (!arguments_.norms.defined()) return;
    write_norm(batch, i, j, is_zero);
    if (arguments_.symmetric && i != j) write_norm(batch, j, i, is_zero);
  }

  struct BlockOfC {
    T* data;
    int64_t leading, rows, columns;
  };
  BlockOfC block_of_c(int64_t batch, Range rows, int64_t j) const {
    const int64_t column = j * block_.n;
    const Tensor& result = arguments_.result;
    const int64_t leading = result.stride(-2);
    T* data =
        result.mutable_data_ptr<T>() + batch * batch_stride(result) + rows.begin * leading + column;
    return {data, leading, rows.size, std::min(block_.n, columns_ - column)};
  }
  BlockOfC block_of_c(int64_t batch, int64_t i, int64_t j) const {
    return block_of_c(batch, rows_of_block(i), j);
  }
  Range rows_of_block(int64_t i) const {
    return {i * block_.m, std::min(block_.m, rows_ - i * block_.m)};
  }

  void write(int64_t batch, Range range, int64_t j, const Sums& sums) const {
    if (sums.data && sums_in_c_ && alpha_ == 1 && !arguments_.input.defined()) return;
    const auto [out, leading, rows, columns] = block_of_c(batch, range, j);
    std::optional<View<T>> input;
    if (arguments_.input.defined())
      input = view<T>(arguments_.input, batch).block(range.begin, j * block_.n, rows, columns);
    write_rows<T, Sum>(sums.data, sums.leading, alpha_, input ? &*input : nullptr, beta_, out,
                       leading, rows, columns);
  }

  // Writes what block (i, j), on or above the diagonal, has as its mirror image.
  void mirror(int64_t batch, int64_t i, int64_t j, bool is_zero) const {
    if (i != j && is_zero) return write(batch, rows_of_block(j), i, {});
    const auto [upper, leading, rows, columns] = block_of_c(batch, i, j);
    if (i == j) {
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = r + 1; c < columns; ++c) upper[c * leading + r] = upper[r * leading + c];
      return;
    }
    // A few rows of the mirror image at a time, which are not in cache.
    T* lower = block_of_c(batch, j, i).data;
    for (int64_t c = 0; c < columns; c += kSquare) {
      transpose<T>(upper + c, leading, lower + c * leading, leading, rows,
                   std::min(kSquare, columns - c));
    }
  }

  void write_norm(int64_t batch, int64_t i, int64_t j, bool is_zero) const {
    const Tensor& norms = arguments_.norms;
    N* norm = norms.mutable_data_ptr<N>() + batch * batch_stride(norms) + i * norms.stride(-2) +
              j * norms.stride(-1);
    *norm = 0;
    if (is_zero) return;
    const auto [data, leading, rows, columns] = block_of_c(batch, i, j);
    strip_norms(Strip<T>{data, leading, rows, columns}, block_.n, norm, 1);
  }

  const Arguments& arguments_;
  Block block_;
  Kernel kernel_;
  int64_t batches_, rows_, depth_, columns_, mb_, kb_, nb_;
  Sum alpha_, beta_;
  bool skips_, sums_in_c_;
  int64_t threads_, tile_height_, tile_rows_, tile_columns_;  // tile_height_: in rows
  const P* a_;
  int64_t lda_, slice_stride_a_, row_stride_a_, batch_stride_a_;  // row_stride_a_: of block rows
  bool is_packed_ = false, by_columns_ = false, reads_b_;
  Tensor packed_a_;
};

// The input in the product's shape; undefined if it is not added.
Tensor expanded_input(const OptTensor& input, IntArrayRef shape, const Scalar& beta) {
  return input && beta.toDouble() != 0 ? input->expand(shape) : Tensor();
}

// Writes the product to `result`, whose rows are contiguous, and the result's norm map to `norms`
// if that is defined. The arguments have been checked.
void write_product(const Tensor& result, const MultiplyArguments& x, const Block& block,
                   bool symmetric = false, const Tensor& norms = {}) {
  if (result.numel() == 0) return;
  const bool skips = x.norm_a.defined();  // without norms, the caller knows that nothing is
  const auto maps_of = [&](const Tensor& norms) { return skips ? norms.contiguous() : Tensor(); };
  const Arguments arguments{x.a,
                            x.b,
                            maps_of(x.norm_a),
                            maps_of(x.norm_b),
                            expanded_input(x.input, result.sizes(), x.beta),
                            result,
                            norms,
                            block,
                            skips ? x.tau.item<double>() : 0,
                            x.alpha,
                            x.beta,
                            symmetric};
  with_panel_types(x.a.scalar_type(), [&]<class T, class P> { Product<T, P>(arguments).run(); });
}

Tensor empty(IntArrayRef shape, at::ScalarType dtype, at::Device) {
  return with_large_pages(at::detail::empty_cpu(shape, dtype));
}

// A block of C has the same bits in any part, so that the whole's size does not matter here.
Tensor multiply(MultiplyArguments& x) {
  const Block block = check_product(x.a, x.b, x.block, x.norm_a, x.norm_b, x.tau, x.input);
  if (x.whole) check_whole(x.a, x.b, *x.whole);
  const Tensor result = empty(product_shape(x.a, x.b), x.a.scalar_type(), x.a.device());
  write_product(result, x, block);
  return result;
}

bool has_contiguous_rows(const Tensor& out) { return out.size(-1) <= 1 || out.stride(-1) == 1; }

// Tells whether writing the product to `out` would change what is still to be read. Each element of
// `input` is read just before the element in its place is written.
bool overwrites_arguments(const Tensor& out, const MultiplyArguments& x) {
  const auto overwrites = [&](const Tensor& read) {
    return read.defined() && may_overlap(out, read);
  };
  return overwrites(x.a) || overwrites(x.b) || overwrites(x.norm_a) || overwrites(x.norm_b) ||
         (x.input && overwrites(*x.input) && !is_same_view(out, *x.input));
}

// The whole product. `out` and `norms` may share memory with any argument.
void write(const ProductArguments& product, const Block& block, const Tensor& out,
           const Tensor& norms) {
  // Norms that are not given decide nothing if nothing is skipped.
  const bool all_valid = !product.norm_a && !product.norm_b && skips_nothing(product.knob);
  const auto [norm_a, norm_b] = all_valid ? std::tuple(Tensor(), Tensor()) : norm_maps_of(product);
  const Tensor tau = threshold_from_knob(norm_a, norm_b, product.knob);
  const StageRange stage(kMultiplyStage);
  const MultiplyArguments x = {{product.input, product.beta, product.alpha},
                               product.a,
                               product.b,
                               norm_a,
                               norm_b,
                               tau,
                               product.block};
  const bool has_rows = has_contiguous_rows(out);
  const bool in_place = has_rows && !overwrites_arguments(out, x);
  const Tensor result = in_place ? out : empty(out.sizes(), out.scalar_type(), out.device());
  // norm_map sums in the order of memory. The norms of other layouts are therefore its own.
  const Tensor map = norms.defined() && has_rows
                         ? empty(norms.sizes(), norms.scalar_type(), norms.device())
                         : Tensor();
  write_product(result, x, block, product.symmetric, map);
  if (!in_place) out.copy_(result);
  // At the end: norms may be one of the given norm maps.
  if (norms.defined()) norms.copy_(has_rows ? map : norm_map(out, {block.m, block.n}));
}

void multiply_part(MultiplyPartArguments& x) {
  const Block block = check_product(x.a, x.b, x.block, x.norm_a, x.norm_b, x.tau, std::nullopt);
  check_part(x.out, x.a, x.b, x.whole, x.own_rows, x.first_own_row);
  if (x.own_rows) x.b.narrow(0, x.first_own_row, x.own_rows->size(0)).copy_(*x.own_rows);
  const bool in_place = has_contiguous_rows(x.out);
  const Tensor result = in_place ? x.out : at::empty(x.out.sizes(), x.out.options());
  write_product(result, x, block);
  if (!in_place) x.out.copy_(result);
}

std::string kernel_name(at::Device, at::ScalarType dtype, const Block&) {
  if (dtype == at::kDouble) return "cpu-plain";
  if (dtype == at::kFloat) return "cpu-plain-float32";
  return multiplies_natively(dtype) ? "cpu-brgemm-vnni" : "cpu-plain-half";
}

const Backends<NamedKernels> named(at::kCPU, Rank::kPortable, {&kernel_name});

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CPU, m) {
  m.impl("multiply", boxed<&multiply>());
  m.impl("multiply_part", boxed<&multiply_part>());
  ProductOps<empty, write, write>::register_in(m);
}

}  // namespace spamm::cpu
