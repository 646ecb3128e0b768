// The pattern of a block-sparse product and its valid products, from norms alone.
//
// Each block row of C is built by itself: a first pass over its products counts the valid ones of
// each column, a second writes them to their places. Both visit k in ascending order.
#include <numeric>

#include "cpu/threshold/norm_products.h"
#include "sparse/csr.h"

namespace spamm::cpu {
namespace {

using at::Tensor;

// Blocks of a row of C in ascending order, and how many valid products each has.
struct Row {
  std::vector<int64_t> columns, counts;
};

template <class N>
class Plan {
 public:
  Plan(const CheckedMaps& maps, N tau, bool symmetric, const std::optional<Pattern>& input)
      : maps_(maps), tau_(tau), symmetric_(symmetric), rows_(maps.a.rows) {
    each_row([&](int64_t i, std::vector<int64_t>& counts) {
      Row& row = rows_[i];
      maps_.each_valid(i, first_column(i), tau_, [&](int64_t, int64_t, int64_t j) {
        if (counts[j]++ == 0) row.columns.push_back(j);
      });
      if (input) add_input(*input, i, counts, row.columns);
      std::sort(row.columns.begin(), row.columns.end());
      for (const int64_t j : row.columns) {
        row.counts.push_back(counts[j]);
        counts[j] = 0;
      }
    });
  }

  // crow, col and first.
  std::tuple<Tensor, Tensor, Tensor> pattern() const {
    const auto index = at::TensorOptions().dtype(at::kLong);
    const int64_t rows = static_cast<int64_t>(rows_.size());
    const Tensor crow = at::empty({rows + 1}, index);
    int64_t* const offsets = crow.mutable_data_ptr<int64_t>();
    std::fill_n(offsets, rows + 1, 0);
    for (int64_t i = 0; i < rows; ++i)
      for (const int64_t j : rows_[i].columns) {
        ++offsets[i + 1];
        if (symmetric_ && j > i) ++offsets[j + 1];
      }
    for (int64_t i = 0; i < rows; ++i) offsets[i + 1] += offsets[i];
    const int64_t blocks = offsets[rows];
    const Tensor col = at::empty({blocks}, index), first = at::empty({blocks + 1}, index);
    int64_t* const columns = col.mutable_data_ptr<int64_t>();
    int64_t* const counts = first.mutable_data_ptr<int64_t>();
    // Mirror images come from rows above, in their order, and so before a row's own blocks.
    std::vector<int64_t> next(offsets, offsets + rows);
    for (int64_t i = 0; i < rows; ++i)
      for (size_t c = 0; c < rows_[i].columns.size(); ++c) {
        const int64_t j = rows_[i].columns[c];
        columns[next[i]] = j;
        counts[next[i]++] = rows_[i].counts[c];
        if (!symmetric_ || j == i) continue;
        columns[next[j]] = i;
        counts[next[j]++] = 0;
      }
    counts[blocks] = 0;
    std::exclusive_scan(counts, counts + blocks + 1, counts, int64_t{0});
    return {crow, col, first};
  }

  // The stored blocks of A and of B of each product.
  std::tuple<Tensor, Tensor> lists(const Tensor& crow, const Tensor& col,
                                   const Tensor& first) const {
    const int64_t* const offsets = crow.const_data_ptr<int64_t>();
    const int64_t* const columns = col.const_data_ptr<int64_t>();
    const int64_t* const places = first.const_data_ptr<int64_t>();
    const int64_t products = places[col.numel()];
    const Tensor slots_a = at::empty({products}, at::kInt), slots_b = at::empty_like(slots_a);
    int32_t* const a = slots_a.mutable_data_ptr<int32_t>();
    int32_t* const b = slots_b.mutable_data_ptr<int32_t>();
    each_row([&](int64_t i, std::vector<int64_t>& place) {
      for (int64_t c = offsets[i]; c < offsets[i + 1]; ++c) place[columns[c]] = places[c];
      maps_.each_valid(i, first_column(i), tau_, [&](int64_t slot_a, int64_t slot_b, int64_t j) {
        a[place[j]] = static_cast<int32_t>(slot_a);
        b[place[j]++] = static_cast<int32_t>(slot_b);
      });
    });
    return {slots_a, slots_b};
  }

 private:
  int64_t first_column(int64_t i) const { return symmetric_ ? i : 0; }

  // visit(row, a number for each column, zero at first) for each block row of C.
  template <class Visit>
  void each_row(const Visit& visit) const {
    at::parallel_for(0, maps_.a.rows, grain(maps_.mean_products()), [&](int64_t from, int64_t to) {
      std::vector<int64_t> numbers(maps_.b.columns);
      for (int64_t i = from; i < to; ++i) visit(i, numbers);
    });
  }

  void add_input(const Pattern& input, int64_t i, const std::vector<int64_t>& counts,
                 std::vector<int64_t>& columns) const {
    const int64_t* const end = input.col + input.crow[i + 1];
    for (const int64_t* j = input.col + input.crow[i]; j < end; ++j)
      if (*j >= first_column(i) && counts[*j] == 0) columns.push_back(*j);
  }

  const CsrMaps<N> maps_;
  const N tau_;
  const bool symmetric_;
  std::vector<Row> rows_;
};

BsrPlan bsr_plan(BsrPlanArguments& x) {
  check_plan(x);
  const CheckedMaps maps(x);
  std::optional<Pattern> input;
  if (x.crow_input) input.emplace(*x.crow_input, *x.col_input, x.columns, "input");
  return dispatch_norms(x.norm_a, [&](auto type) -> BsrPlan {
    using N = decltype(type);
    const Plan<N> plan(maps, static_cast<N>(x.tau.item<double>()), x.symmetric, input);
    const auto [crow, col, first] = plan.pattern();
    const auto* const places = static_cast<const int64_t*>(first.const_data_ptr());
    const double needed = x.needed_bytes(col.numel(), places[col.numel()]);
    if (!x.lists || (x.free_bytes && needed > static_cast<double>(*x.free_bytes))) {
      const Tensor none = at::empty({0}, at::kInt);
      return {crow, col, first, none, none.clone()};
    }
    const auto [slots_a, slots_b] = plan.lists(crow, col, first);
    return {crow, col, first, slots_a, slots_b};
  });
}

void bsr_check(const Tensor& crow, const Tensor& col, int64_t columns, std::string_view name) {
  Pattern(crow.cpu(), col.cpu(), columns, std::string(name).c_str());
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CPU, m) { m.impl("bsr_plan", boxed<&bsr_plan>()); }
TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) { m.impl("bsr_check", &bsr_check); }

}  // namespace spamm::cpu
