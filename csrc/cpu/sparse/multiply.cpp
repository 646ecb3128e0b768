// C = alpha * (A @ B over a list of block products) + beta * input, all of stored blocks alone.
//
// Threads claim groups of neighbouring block rows of C, those with the most products first. A group
// packs the blocks of A that it needs. It then goes through its block columns, and through K in
// slices: a block of B is packed once for all of its rows. Slices, runs and sums are those of dense
// storage (cpu/multiply/slice_kernel.h), and so are the bits.
#include <atomic>
#include <bit>

#include "block.h"
#include "cpu/common/machine.h"
#include "cpu/common/transpose.h"
#include "cpu/multiply/slice_kernel.h"
#include "cpu/norm_map/strip_norms.h"
#include "sparse/csr.h"

namespace spamm::cpu {
namespace {

constexpr int64_t kGroupRows = 512;      // of C, at most
constexpr int64_t kGroupsPerThread = 4;  // at least, if C has enough block rows
// The stride of packed rows of A: a slice, but no power of two, whose multiples evict each other.
constexpr int64_t kPageStride = kSliceDepth + 32;

// T: type of the operands. P: type of the packed panels.
template <class T, class P>
class ListProduct {
  using N = std::conditional_t<std::is_same_v<T, double>, double, float>;
  using Kernel = SliceKernel<T, P>;
  using Sum = typename Kernel::Sum;

 public:
  // Checked; all tensors are contiguous. Writes `values` and, unless it is empty, `norms`.
  ListProduct(const BsrMultiplyArguments& x, const Pattern& c, const Pattern& a,
              const std::optional<Pattern>& input, const Tensor& values, const Tensor& norms)
      : c_(c),
        a_(a),
        input_(input),
        first_(x.first.const_data_ptr<int64_t>()),
        slots_a_(x.slots_a.const_data_ptr<int32_t>()),
        slots_b_(x.slots_b.const_data_ptr<int32_t>()),
        values_a_(x.values_a.const_data_ptr<T>()),
        values_b_(x.values_b.const_data_ptr<T>()),
        values_input_(input ? x.values_input->const_data_ptr<T>() : nullptr),
        values_(values.mutable_data_ptr<T>()),
        norms_(norms.numel() > 0 ? norms.mutable_data_ptr<N>() : nullptr),
        edge_(x.values_a.size(1)),
        per_slice_(kSliceDepth / edge_),
        kernel_{{edge_, edge_, edge_}},
        alpha_(x.alpha.to<Sum>()),
        beta_(x.beta.to<Sum>()),
        symmetric_(x.symmetric) {}

  void run() const {
    const std::vector<Range> groups = groups_by_work();
    std::atomic<size_t> next{0};
    at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
      Workspace workspace(kernel_.panel_size(), kGroupRows * edge_);
      for (size_t number; (number = next++) < groups.size();)
        multiply_group(groups[number], workspace);
      Microkernel<P>::release();
    });
  }

 private:
  // A block of C: in which row of the group, its number, and the products that are still to do.
  struct Item {
    int64_t column, row, block, next, end;
    uint64_t mask = 0;
    bool started = false;
  };

  struct Workspace {
    Workspace(int64_t panel_size, int64_t sums_size) : panel(panel_size), sums(sums_size) {}

    std::vector<P> panel;        // of B: a slice of one block column
    std::vector<Sum> sums;       // of one block column of the group
    std::vector<P> packed;       // the group's blocks of A, in pages of rows of one slice
    std::vector<int64_t> place;  // in `packed`, of each stored block of the group's rows; -1: none
    std::vector<Item> items;     // by column, then by row
  };

  int64_t block_size() const { return edge_ * edge_; }
  int64_t products_of(Range rows) const {
    return first_[c_.crow[rows.end()]] - first_[c_.crow[rows.begin]];
  }

  std::vector<Range> groups_by_work() const {
    const int64_t wanted = kGroupsPerThread * at::get_num_threads();
    const int64_t rows =
        std::clamp<int64_t>(c_.rows / wanted, 1, std::max<int64_t>(1, kGroupRows / edge_));
    std::vector<Range> groups;
    for (int64_t i = 0; i < c_.rows; i += rows) groups.push_back({i, std::min(rows, c_.rows - i)});
    std::stable_sort(groups.begin(), groups.end(), [&](const Range& x, const Range& y) {
      return products_of(x) > products_of(y);
    });
    return groups;
  }

  void multiply_group(const Range& rows, Workspace& workspace) const {
    pack_a(rows, workspace);
    find_items(rows, workspace.items);
    for (size_t from = 0, to; from < workspace.items.size(); from = to) {
      for (to = from + 1; to < workspace.items.size(); ++to)
        if (workspace.items[to].column != workspace.items[from].column) break;
      multiply_column(rows, &workspace.items[from], &workspace.items[0] + to, workspace);
    }
  }

  // Packs the blocks of A that products need. A page has the rows of a block, each one slice long,
  // so that few strides occur (slice_kernel.h). Neighbours in a slice are neighbours in a page.
  void pack_a(const Range& rows, Workspace& workspace) const {
    const int64_t begin = a_.crow[rows.begin], end = a_.crow[rows.end()];
    std::vector<int64_t>& place = workspace.place;
    place.assign(end - begin, -1);
    for (int64_t p = first_[c_.crow[rows.begin]]; p < first_[c_.crow[rows.end()]]; ++p)
      place[slots_a_[p] - begin] = 0;
    int64_t pages = 0, filled = per_slice_;
    for (int64_t i = rows.begin; i < rows.end(); ++i) {
      for (int64_t e = a_.crow[i], run; e < a_.crow[i + 1]; e += run) {
        run = 1;
        if (place[e - begin] < 0) continue;
        while (e + run < a_.crow[i + 1] && place[e + run - begin] == 0 &&
               a_.col[e + run] == a_.col[e] + run && a_.col[e + run] % per_slice_ != 0)
          ++run;
        if (filled + run > per_slice_) {
          ++pages;
          filled = 0;
        }
        for (int64_t d = 0; d < run; ++d, ++filled)
          place[e + d - begin] = (pages - 1) * edge_ * kPageStride + filled * edge_;
      }
    }
    if (static_cast<int64_t>(workspace.packed.size()) < pages * edge_ * kPageStride)
      workspace.packed = std::vector<P>(pages * edge_ * kPageStride);
    for (int64_t e = begin; e < end; ++e) {
      if (place[e - begin] < 0) continue;
      copy_rows(view(values_a_, e), workspace.packed.data() + place[e - begin], kPageStride, edge_);
    }
  }

  // Lists, of a symmetric C, only blocks on and above the diagonal.
  void find_items(const Range& rows, std::vector<Item>& items) const {
    items.clear();
    for (int64_t i = rows.begin; i < rows.end(); ++i)
      for (int64_t c = c_.crow[i]; c < c_.crow[i + 1]; ++c)
        if (!symmetric_ || c_.col[c] >= i)
          items.push_back({c_.col[c], i - rows.begin, c, first_[c], first_[c + 1]});
    std::stable_sort(items.begin(), items.end(),
                     [](const Item& x, const Item& y) { return x.column < y.column; });
  }

  // One block column of a group, in slices of K.
  void multiply_column(const Range& rows, Item* from, Item* to, Workspace& workspace) const {
    const int64_t first_slot = a_.crow[rows.begin];
    int64_t slot_of[kSliceDepth / 32];  // of B, for each block of the slice
    while (true) {
      int64_t slice = std::numeric_limits<int64_t>::max();
      for (const Item* item = from; item < to; ++item)
        if (item->next < item->end) slice = std::min(slice, k_of(item->next) / per_slice_);
      if (slice == std::numeric_limits<int64_t>::max()) break;
      uint64_t needed = 0;
      for (Item* item = from; item < to; ++item) {
        item->mask = 0;
        for (int64_t p = item->next; p < item->end && k_of(p) / per_slice_ == slice; ++p) {
          slot_of[k_of(p) % per_slice_] = slots_b_[p];
          item->mask |= uint64_t{1} << (k_of(p) % per_slice_);
        }
        needed |= item->mask;
      }
      for (; needed; needed &= needed - 1) {
        const int64_t depth = std::countr_zero(needed);
        kernel_.pack(view(values_b_, slot_of[depth]), depth, workspace.panel.data());
      }
      for (Item* item = from; item < to; ++item) {
        Sum* const sums = workspace.sums.data() + item->row * block_size();
        each_run(item->mask, [&](Range run) {
          const int64_t slot = slots_a_[item->next];
          const RowsOfA<P> a{workspace.packed.data() + workspace.place[slot - first_slot],
                             kPageStride};
          kernel_.multiply_panel(a, edge_, run.size * edge_, workspace.panel.data(), run.begin,
                                 edge_, sums, edge_, item->started);
          item->started = true;
          item->next += run.size;
        });
      }
    }
    for (const Item* item = from; item < to; ++item)
      finish(rows.begin + item->row, *item, workspace.sums.data() + item->row * block_size());
  }

  int64_t k_of(int64_t product) const { return a_.col[slots_a_[product]]; }

  View<T> view(const T* values, int64_t slot) const {
    return {values + slot * block_size(), edge_, 1, edge_, edge_};
  }

  // Writes a block of C, its norm and, of a symmetric C, its mirror image.
  void finish(int64_t i, const Item& item, const Sum* sums) const {
    T* const out = values_ + item.block * block_size();
    const Sum* const computed = item.started ? sums : nullptr;
    std::optional<View<T>> input;
    if (input_) {
      // A block that is not stored is one of zeros, which dense storage adds, too.
      static const T zero(0);
      const int64_t slot = input_->find(i, item.column);
      input = slot < 0 ? View<T>{&zero, 0, 0, edge_, edge_} : view(values_input_, slot);
    }
    write_rows<T, Sum>(computed, edge_, alpha_, input ? &*input : nullptr, beta_, out, edge_, edge_,
                       edge_);
    if (symmetric_ && item.column == i) {
      for (int64_t r = 0; r < edge_; ++r)
        for (int64_t c = r + 1; c < edge_; ++c) out[c * edge_ + r] = out[r * edge_ + c];
    } else if (symmetric_) {
      const int64_t mirror = c_.find(item.column, i);
      transpose(out, edge_, values_ + mirror * block_size(), edge_, edge_, edge_);
      write_norm(mirror);
    }
    write_norm(item.block);
  }

  void write_norm(int64_t block) const {
    if (norms_ == nullptr) return;
    const Strip<T> strip{values_ + block * block_size(), edge_, edge_, edge_};
    strip_norms(strip, edge_, norms_ + block, 1);
  }

  const Pattern &c_, &a_;
  const std::optional<Pattern>& input_;
  const int64_t* first_;
  const int32_t *slots_a_, *slots_b_;
  const T *values_a_, *values_b_, *values_input_;
  T* values_;
  N* norms_;                  // null: not wanted
  int64_t edge_, per_slice_;  // per_slice_: blocks in a slice of K
  Kernel kernel_;
  Sum alpha_, beta_;
  bool symmetric_;
};

// Checks that the lists lead to stored blocks alone, in the order of k.
void check_lists(const Pattern& c, const Pattern& a, const BsrMultiplyArguments& x) {
  const int64_t* const places = x.first.const_data_ptr<int64_t>();
  const int32_t* const in_a = x.slots_a.const_data_ptr<int32_t>();
  const int32_t* const in_b = x.slots_b.const_data_ptr<int32_t>();
  bool fits = places[0] == 0 && places[c.stored()] == x.slots_a.numel();
  for (int64_t e = 0; fits && e < c.stored(); ++e) fits = places[e] <= places[e + 1];
  for (int64_t i = 0; fits && i < c.rows; ++i)
    for (int64_t e = c.crow[i]; fits && e < c.crow[i + 1]; ++e)
      for (int64_t p = places[e]; fits && p < places[e + 1]; ++p)
        fits = in_a[p] >= a.crow[i] && in_a[p] < a.crow[i + 1] && in_b[p] >= 0 &&
               in_b[p] < x.values_b.size(0) && (p == places[e] || in_a[p - 1] < in_a[p]);
  // The mirror image of each block above the diagonal is stored, and no other block below it.
  int64_t above = 0, below = 0;
  for (int64_t i = 0; fits && x.symmetric && i < c.rows; ++i)
    for (int64_t e = c.crow[i]; fits && e < c.crow[i + 1]; ++e) {
      above += c.col[e] > i;
      below += c.col[e] < i;
      fits = c.col[e] < c.rows && (c.col[e] <= i || c.find(c.col[e], i) >= 0);
    }
  TORCH_CHECK(fits && above == below,
              "a plan must list stored blocks of a and b in the order of k; got another");
}

std::tuple<Tensor, Tensor> bsr_multiply(BsrMultiplyArguments& x) {
  check_arguments(x);
  constexpr int64_t kAnyColumns = std::numeric_limits<int64_t>::max();
  const Pattern c(x.crow, x.col, kAnyColumns, "the result"), a(x.crow_a, x.col_a, kAnyColumns, "a");
  for (Tensor* tensor : {&x.first, &x.slots_a, &x.slots_b, &x.values_a, &x.values_b})
    *tensor = tensor->contiguous();
  check_lists(c, a, x);
  std::optional<Pattern> input;
  if (x.adds_input()) {
    input.emplace(*x.crow_input, *x.col_input, kAnyColumns, "input");
    x.values_input = x.values_input->contiguous();
  }
  const int64_t edge = x.values_a.size(1);
  const Tensor values = at::empty({c.stored(), edge, edge}, x.values_a.options());
  const Tensor norms = x.empty_norms(c.stored());
  if (c.stored() == 0) return {values, norms};
  with_large_pages(values);
  with_panel_types(x.values_a.scalar_type(), [&]<class T, class P> {
    ListProduct<T, P>(x, c, a, input, values, norms).run();
  });
  return {values, norms};
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CPU, m) { m.impl("bsr_multiply", boxed<&bsr_multiply>()); }

}  // namespace spamm::cpu
