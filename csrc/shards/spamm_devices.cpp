// The op spamm with `devices`. Operands in host memory go to spamm_host.cpp. Otherwise A and B lie
// on one GPU, and so does C. The other GPUs fetch what they need of B, and then rows of A in
// chunks, while finished rows of C leave.
#include "shards/spamm_devices.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <utility>

#include "arguments.h"
#include "checks.h"
#include "shards/devices.h"
#include "shards/for_each_part.h"
#include "shards/part.h"
#include "shards/plan.h"
#include "threshold.h"

namespace spamm::shards {
namespace {

constexpr int64_t kChunks = 8;        // of rows of A that a remote part fetches, at most
constexpr int64_t kDelayNs = 150000;  // from the home part's first launch to a remote part's

// What a product takes one device at least if several are faster. With a tau or a bound nobody
// knows beforehand how little is valid, and from kLeastNs on a twentieth is enough: 27,000 rows of
// half types. Float32 needs more, since each device splits the whole of B.
constexpr double kLeastNs = 5e7, kLeastValidNs = 4e6, kLeastOfSplit = 3;

template <class T>
std::span<const T> entries(const Tensor& x) {
  return {x.const_data_ptr<T>(), static_cast<size_t>(x.numel())};
}

// The blocks of K from the first that some group of rows needs to the last, without the end.
std::pair<int64_t, int64_t> needed_columns(std::span<const int32_t> needed, int64_t blocks) {
  int64_t first = blocks, last = 0;
  for (; !needed.empty(); needed = needed.subspan(blocks)) {
    const auto row = needed.first(blocks);
    const auto is_needed = [](int32_t stages) { return stages != 0; };
    const auto begin = std::ranges::find_if(row, is_needed);
    if (begin == row.end()) continue;
    const auto end = std::ranges::find_if(row.rbegin(), row.rend(), is_needed);
    first = std::min(first, begin - row.begin());
    last = std::max(last, row.rend() - end);
  }
  return {std::min(first, last), last};
}

// Whether each launch splits the whole of B anew, so that rows of A are multiplied together.
bool splits(const Tensor& a) { return a.scalar_type() == at::kFloat; }

// Computes rows of C on another device than the operands', and sends them there. What it needs of B
// comes first. Then some rows of A come while those before are multiplied and their rows of C
// leave.
class RemotePart {
 public:
  // a, b and c: the whole operands and the result, on their device, as are the maps.
  RemotePart(const WholeProduct& whole, at::Device device, const Tensor& norm_a,
             const Tensor& norm_b, const Tensor& a, const Tensor& b, const Tensor& c)
      : whole_(whole),
        from_a_(a),
        from_b_(b),
        to_c_(c),
        lanes_(device, /*sends=*/true),
        home_(Lane::current(c.device())) {
    const auto on_device = lanes_.own().use();
    lanes_.own().wait_for(home_);
    norm_a_ = gather_rows(norm_a, {}, device);
    norm_b_ = gather_rows(norm_b, {}, device);
    b_ = at::empty(b.sizes(), b.options().device(device));
    lanes_.start();
  }
  ~RemotePart() { lanes_.end({&home_, 1}); }
  RemotePart(const RemotePart&) = delete;

  // Computes rows [row, row + rows) of C. needed: of the groups of these rows. tau: 0-d, on the
  // CPU.
  void run(int64_t row, int64_t rows, std::span<const int32_t> needed, const Tensor& tau) {
    fetch(needed_of_b(needed));
    const auto on_device = lanes_.own().use();
    a_ = at::empty({rows, whole_.k}, b_.options());
    c_ = at::empty({rows, whole_.n}, b_.options());
    lanes_.start();
    const int64_t groups = blocks_of(rows, kCutRows), blocks = norm_b_.size(0);
    const int64_t step = splits(a_) ? groups : blocks_of(groups, kChunks);
    for (int64_t group = 0, turn = 0; group < groups; group += step, ++turn) {
      const int64_t count = std::min(step, groups - group), first = group * kCutRows;
      run_rows(row, first, std::min(rows - first, count * kCutRows),
               needed.subspan(group * blocks, count * blocks), tau,
               lanes_.multiply(multiply_lane(tau, turn)));
    }
  }

 private:
  void fetch(std::span<const RowBlock> blocks) const {
    copy_blocks(lanes_.pull(), b_.device(), to_c_.device(), blocks);
  }

  // Blocks of B that are needed by some row: in each stage, runs of block rows.
  std::vector<RowBlock> needed_of_b(std::span<const int32_t> needed) const {
    const int64_t blocks = norm_b_.size(0);
    std::vector<int32_t> any(blocks);
    for (; !needed.empty(); needed = needed.subspan(blocks))
      std::ranges::transform(any, needed.first(blocks), any.begin(), std::bit_or());
    const auto need = std::make_unique<bool[]>(blocks);
    std::vector<RowBlock> copies;
    for (int64_t stage = 0; stage < whole_.stages(); ++stage) {
      for (int64_t k = 0; k < blocks; ++k) need[k] = any[k] >> stage & 1;
      const auto units = unit_copies(whole_, stage, {need.get(), static_cast<size_t>(blocks)},
                                     {from_b_, 0}, b_, whole_.first_column(stage));
      copies.insert(copies.end(), units.begin(), units.end());
    }
    return copies;
  }

  // Fetches rows of A, from the first needed block to the last, multiplies and sends. `first`
  // counts from `part_row`, the part's first row.
  void run_rows(int64_t part_row, int64_t first, int64_t rows, std::span<const int32_t> needed,
                const Tensor& tau, const Lane& multiply) {
    const int64_t edge = whole_.block.k, m = whole_.block.m, row = part_row + first;
    const Tensor a = a_.narrow(0, first, rows), c = c_.narrow(0, first, rows);
    const auto [begin, end] = needed_columns(needed, norm_b_.size(0));
    if (begin < end) {
      const int64_t columns = std::min(whole_.k, end * edge) - begin * edge;
      fetch({{block_between(a, 0, begin * edge, from_a_, row, begin * edge, rows, columns)}});
    }
    multiply.wait_for(lanes_.pull());
    {
      const auto on_lane = multiply.use();
      multiply_part(a, b_, norm_a_.slice(0, row / m, blocks_of(row + rows, m)), norm_b_, tau,
                    whole_, c);
    }
    lanes_.send().wait_for(multiply);
    copy_rows(lanes_.send(), to_c_.narrow(0, row, rows), c);
  }

  const WholeProduct& whole_;
  Tensor from_a_, from_b_, to_c_;
  Lanes lanes_;
  Lane home_;
  Tensor norm_a_, norm_b_, a_, b_, c_;
};

// What groups of kCutRows rows of A need of B. Rows of C are cut between groups.
struct NeededByGroups {
  // int32 (groups, KB): the stages in which a group needs a block row, as bits.
  Tensor stages;
  // int64 (2, groups): how many units it needs, and how many that the group before does not.
  Tensor units;
};

// Counted on the device, which takes microseconds where the host would take a millisecond.
NeededByGroups needed_by_groups(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau,
                                int64_t group_blocks, int64_t stage_blocks) {
  const int64_t groups = blocks_of(norm_a.size(0), group_blocks);
  const int64_t missing = groups * group_blocks - norm_a.size(0);
  const Tensor padded = missing == 0 ? norm_a : at::constant_pad_nd(norm_a, {0, 0, 0, missing});
  const Tensor largest = padded.contiguous().view({groups, group_blocks, norm_a.size(1)}).amax(1);
  const Tensor needed = needed_units(largest, norm_b, tau, stage_blocks);
  const Tensor bits = at::arange(needed.size(2), needed.options().dtype(at::kInt));
  const Tensor before = at::cat({at::ones_like(needed.slice(0, 0, 1)), needed.slice(0, 0, -1)});
  return {at::bitwise_left_shift(needed.to(at::kInt), bits).sum(2, /*keepdim=*/false, at::kInt),
          at::stack({needed, needed.gt(before)}).sum({2, 3}, /*keepdim=*/false, at::kLong)};
}

// Measured on two H200 with NVLink: a product of half blocks of 64 takes 0.69 ns of one GPU, and a
// byte 1 / 375 ns of a link. Other types multiply about as much slower as their entries' squares.
double ns_per_product(const WholeProduct& whole) {
  const auto [m, k, n] = whole.block;
  const double volume = static_cast<double>(m * k * n) / (64 * 64 * 64);
  return 0.69 * volume * static_cast<double>(whole.entry_bytes * whole.entry_bytes) / 4;
}

// By what one device takes at most. A valid ratio and a tau of 0 say how many products there are;
// any other knob may leave all.
bool pays_to_share(const WholeProduct& whole, const ProductArguments& product) {
  const auto [m, k, n] = whole.block;
  const int64_t products = blocks_of(whole.m, m) * blocks_of(whole.k, k) * blocks_of(whole.n, n);
  const Knob& knob = product.knob;
  const bool is_known = knob.valid_ratio || knob.threshold == 0.0;
  const double ns =
      knob.valid_ratio.value_or(1) * static_cast<double>(products) * ns_per_product(whole);
  const double least =
      (is_known ? kLeastValidNs : kLeastNs) * (splits(product.a) ? kLeastOfSplit : 1);
  return spamm::pays_to_share(ns, least, /*bytes=*/0);
}

// In ns. work: of each block row of A. needed and units: as NeededByGroups has them.
std::vector<GroupCost> costs_of_groups(std::span<const int64_t> work,
                                       std::span<const int32_t> needed,
                                       std::span<const int64_t> units, const WholeProduct& whole,
                                       int64_t group_blocks) {
  const int64_t blocks = blocks_of(whole.k, whole.block.k), edge = whole.block.k;
  const auto fetch = [&](int64_t rows, int64_t columns) {
    return static_cast<int64_t>(static_cast<double>(rows * columns * whole.entry_bytes) / 375);
  };
  const int64_t unit = fetch(edge, whole.columns(0));
  std::vector<GroupCost> costs;
  const int64_t groups = blocks_of(std::ssize(work), group_blocks);
  for (int64_t group = 0; group < groups; ++group) {
    const auto rows = work.subspan(group * group_blocks);
    const auto end = rows.begin() + std::min<int64_t>(group_blocks, std::ssize(rows));
    const auto products =
        static_cast<double>(std::accumulate(rows.begin(), end, int64_t{0})) / 1000;
    const auto [first, last] = needed_columns(needed.subspan(group * blocks, blocks), blocks);
    costs.push_back({static_cast<int64_t>(products * ns_per_product(whole)),
                     fetch(kCutRows, (last - first) * edge), units[group] * unit,
                     units[groups + group] * unit});
  }
  return costs;
}

void check_plain_product(const ProductArguments& product) {
  const Tensor& a = product.a;
  TORCH_CHECK(a.dim() == 2, "a product over several devices must be of two matrices; got shapes ",
              a.sizes(), " and ", product.b.sizes());
  TORCH_CHECK(!product.input,
              "a product over several devices must have no input to add; got one "
              "of shape ",
              product.input->sizes());
  TORCH_CHECK(product.alpha.equal(1),
              "a product over several devices must have a factor alpha of 1; got ",
              product.alpha.toDouble());
  TORCH_CHECK(a.is_cuda() || a.is_cpu(),
              "operands of a product over several devices must be on a CUDA device or on the CPU; "
              "got ",
              a.device());
}

}  // namespace

OptTensor spamm_on_devices(ProductArguments& product) {
  const Tensor &a = product.a, &b = product.b;
  std::vector<at::Device> devices = check_devices(*product.devices);
  check_plain_product(product);
  const Block block = check_block(product.block);
  const WholeProduct whole(a, a.size(0), b, block);
  const at::Device home = a.device();
  const auto own = std::ranges::find(devices, home);
  const bool is_home_used = own != devices.end();
  if (is_home_used && !pays_to_share(whole, product)) return std::nullopt;
  product.knob = checked_knob(product.knob);
  if (a.is_cpu()) return spamm_from_host(product, devices);
  refuse_capture(home);
  // The home part comes first, and starts before it is known what the others compute.
  if (is_home_used) std::iter_swap(devices.begin(), own);
  const auto on_home = Lane::current(home).use();
  // Maps are copied as rows, which must be contiguous.
  const auto [map_a, map_b] = norm_maps_of(product);
  const Tensor norm_a = map_a.contiguous(), norm_b = map_b.contiguous();
  const Tensor tau = threshold_from_knob(norm_a, norm_b, product.knob);
  const int64_t group_blocks = kCutRows / block.m;
  const auto on_host = [](const Tensor& x) {
    const auto options = x.options().device(at::kCPU).pinned_memory(x.is_cuda());
    return at::empty(x.sizes(), options).copy_(x, /*non_blocking=*/true);
  };
  const Tensor host_tau = tau.is_cpu() ? tau : on_host(tau);
  const auto by_groups = needed_by_groups(norm_a, norm_b, tau, group_blocks, whole.stage_blocks);
  const Tensor stages = on_host(by_groups.stages), units = on_host(by_groups.units);
  const Tensor work = on_host(row_work(norm_a, norm_b, tau));
  const Mark planned = Lane::current(home).mark();

  // Everything that needs no answer from the device is enqueued before the host waits for it.
  const Tensor source_a = with_contiguous_rows(a), source_b = with_contiguous_rows(b);
  const Tensor c = at::empty({whole.m, whole.n}, a.options());
  std::deque<RemotePart> remote;
  for (const at::Device device : devices) {
    if (device != home) remote.emplace_back(whole, device, norm_a, norm_b, source_a, source_b, c);
  }
  const auto row = [&](int64_t group) { return std::min(whole.m, group * kCutRows); };
  const auto multiply_at_home = [&](int64_t first, int64_t last) {
    if (first == last) return;
    const int64_t rows = row(last) - row(first);
    multiply_part(a.narrow(0, row(first), rows), b,
                  norm_a.slice(0, first * group_blocks, last * group_blocks), norm_b, tau, whole,
                  c.narrow(0, row(first), rows));
  };
  const auto parts = static_cast<int64_t>(devices.size());
  const int64_t started = is_home_used && !splits(a) ? blocks_of(whole.m, kCutRows) / parts : 0;
  multiply_at_home(0, started);
  wait_on_host(planned);
  const auto needed = entries<int32_t>(stages);
  const auto costs =
      costs_of_groups(entries<int64_t>(work), needed, entries<int64_t>(units), whole, group_blocks);
  auto cuts = cut_for_home(costs, parts, is_home_used ? 0 : -1, kDelayNs);
  for (int64_t p = 1; p <= parts; ++p) cuts[p] = std::max(cuts[p], started);

  const int64_t blocks = norm_b.size(0), first_remote = is_home_used ? 1 : 0;
  if (is_home_used) multiply_at_home(started, cuts[1]);
  for_each_part(parts - first_remote, current_streams(devices), [&](int64_t i) {
    const int64_t first = cuts[first_remote + i], last = cuts[first_remote + i + 1];
    if (first == last) return;
    remote[i].run(row(first), row(last) - row(first),
                  needed.subspan(first * blocks, (last - first) * blocks), host_tau);
  });
  return c;
}

}  // namespace spamm::shards
