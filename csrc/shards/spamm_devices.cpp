// The op spamm with `devices`. Operands in host memory go to spamm_host.cpp. Otherwise A and B lie
// on one GPU, and so does C. The other GPUs fetch their rows of A, and then what they need of B
// stage by stage, while finished columns of C leave.
#include "shards/spamm_devices.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <span>

#include "arguments.h"
#include "checks.h"
#include "environment.h"
#include "shards/part.h"
#include "shards/plan.h"
#include "threshold.h"

namespace spamm::shards {
namespace {

constexpr int64_t kDelayNs = 150000;  // from the home part's first launch to a remote part's

// The least time of a product on one device if several are faster. With a tau or a bound nobody
// knows beforehand how little is valid, and from kLeastNs on a twentieth is enough: 27,000 rows of
// half types. Float32 needs more, since each device splits the whole of B.
constexpr double kLeastNs = 5e7, kLeastValidNs = 4e6, kLeastOfSplit = 3;
constexpr int64_t kWiderOfSplit = 4;  // stages of float32, whose rows of A are split in each

// Tells whether each launch splits its operands anew, so that few launches are better.
bool splits(const Tensor& a) { return a.scalar_type() == at::kFloat; }

// The needs of kCutRows rows of A. Rows of C are cut between such groups.
struct Group {
  int64_t work;              // as of row_work
  int64_t units, new_units;  // of B; and those that the group before does not need
  int64_t first, last;       // needed blocks of K lie in [first, last)
};

// Returns int64 (groups, 5), each row a Group, and int32 (groups, KB): the stages in which a group
// needs a block row of B, as bits. Counted on the device, which takes microseconds where the host
// would take a millisecond.
std::array<Tensor, 2> groups_of(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau,
                                const WholeProduct& whole) {
  const int64_t edges = kCutRows / whole.block.m, blocks = norm_a.size(1);
  const int64_t groups = blocks_of(norm_a.size(0), edges),
                missing = groups * edges - norm_a.size(0);
  const Tensor largest =
      at::constant_pad_nd(norm_a, {0, 0, 0, missing}).view({groups, edges, blocks}).amax(1);
  const Tensor work = at::constant_pad_nd(row_work(norm_a, norm_b, tau), {0, missing});
  const Tensor needed = needed_units(largest, norm_b, tau, whole.stage_blocks);
  const Tensor before = at::cat({at::ones_like(needed.slice(0, 0, 1)), needed.slice(0, 0, -1)});
  const Tensor any = needed.any(2), k = at::arange(blocks, work.options());
  const Tensor bits = at::arange(needed.size(2), needed.options().dtype(at::kInt));
  return {at::stack(
              {work.view({groups, edges}).sum(1), needed.sum({1, 2}), needed.gt(before).sum({1, 2}),
               at::where(any, k, blocks).amin(1), at::where(any, k.add(1), 0).amax(1)},
              1),
          at::bitwise_left_shift(needed.to(at::kInt), bits).sum(2, /*keepdim=*/false, at::kInt)};
}

// Computes rows of C on another device than the operands', and sends them there. What it needs of A
// comes first, and then that of B.
class RemotePart : public Part {
 public:
  // a and b: the whole operands, on their device, as are the maps.
  RemotePart(const WholeProduct& whole, at::Device device, const Tensor& norm_a,
             const Tensor& norm_b, const Tensor& a, const Tensor& b)
      : Part(whole, device, kSendLane, {{b}, {0}}), from_(a) {
    const auto on_device = lanes_.own().use();
    lanes_.own().wait_for(Lane::current(a.device()));
    norm_a_ = gather_rows(norm_a, {}, device);
    take_norms(gather_rows(norm_b, {}, device));
    take_buffers(a.options());
  }

  // Computes `to`, which are rows of C from `row` on. groups, and needed (groups, KB): of these
  // rows, as of groups_of. tau: 0-d, on the CPU.
  void run(const Tensor& to, int64_t row, std::span<const Group> groups, const int32_t* needed,
           const Tensor& tau) {
    const auto on_device = lanes_.own().use();
    const auto [m, edge, n] = whole_.block;
    const int64_t rows = to.size(0), count = std::ssize(groups);
    const auto options = from_.options().device(device());
    const Tensor a = at::empty({rows, whole_.k}, options), c = at::empty({rows, whole_.n}, options);
    lanes_.start();
    std::vector<RowBlock> copies;  // of pieces, each from the first needed block to the last
    const int64_t step = blocks_of(count, kMostCopies);
    for (int64_t group = 0; group < count; group += step) {
      const auto piece = groups.subspan(group, std::min(step, count - group));
      const int64_t column = std::ranges::min(piece, {}, &Group::first).first * edge;
      const int64_t last = std::ranges::max(piece, {}, &Group::last).last * edge;
      if (column >= last) continue;
      const int64_t first = group * kCutRows;
      copies.push_back(block_between(a, first, column, from_, row + first, column,
                                     std::min(rows - first, step * kCutRows),
                                     std::min(whole_.k, last) - column));
    }
    copy_blocks(lanes_.pull(), device(), from_.device(), copies);
    const Tensor norms = norm_a_.slice(0, row / m, blocks_of(row + rows, m));
    Part::run({a, norms, {c}, to}, in_stages_of(needed, count), tau);
  }

 private:
  // The block rows of B that some group needs: bool (stages, KB).
  Tensor in_stages_of(const int32_t* needed, int64_t groups) const {
    const int64_t blocks = norm_a_.size(1);
    std::vector<int32_t> any(blocks);
    for (int64_t i = 0; i < groups; ++i, needed += blocks)
      std::transform(any.begin(), any.end(), needed, any.begin(), std::bit_or());
    const Tensor need = at::empty({whole_.stages(), blocks}, at::kBool);
    bool* to = need.mutable_data_ptr<bool>();
    for (int64_t stage = 0; stage < whole_.stages(); ++stage)
      to = std::ranges::transform(any, to, [&](int32_t bits) { return bits >> stage & 1; }).out;
    return need;
  }

  Tensor from_, norm_a_;
};

// Measured on two H200 with NVLink: a product of half blocks of 64 takes 0.69 ns of one GPU, and a
// byte 1 / 375 ns of a link. Other types multiply about as much slower as their entries' squares.
double ns_per_product(const WholeProduct& whole) {
  const auto [m, k, n] = whole.block;
  const double volume = static_cast<double>(m * k * n) / (64 * 64 * 64);
  return 0.69 * volume * static_cast<double>(whole.entry_bytes * whole.entry_bytes) / 4;
}

// By what one device takes at most: below that, the host takes longer to share the work than a
// device to do it. SPAMM_TORCH_ALL_DEVICES=1 shares all the same, for tests. A valid ratio and a
// tau of 0 say how many products there are; any other knob may leave all.
bool pays_to_share(const WholeProduct& whole, const ProductArguments& product) {
  const auto [m, k, n] = whole.block;
  const int64_t products = blocks_of(whole.m, m) * blocks_of(whole.k, k) * blocks_of(whole.n, n);
  const Knob& knob = product.knob;
  const bool is_known = knob.valid_ratio || knob.threshold == 0.0;
  const double ns =
      knob.valid_ratio.value_or(1) * static_cast<double>(products) * ns_per_product(whole);
  const double least =
      (is_known ? kLeastValidNs : kLeastNs) * (splits(product.a) ? kLeastOfSplit : 1);
  return is_set("SPAMM_TORCH_ALL_DEVICES") || ns >= least;
}

// In ns.
std::vector<GroupCost> costs_of(std::span<const Group> groups, const WholeProduct& whole) {
  const int64_t edge = whole.block.k;
  const auto fetch = [&](int64_t rows, int64_t columns) {
    return static_cast<int64_t>(static_cast<double>(rows * columns * whole.entry_bytes) / 375);
  };
  const int64_t unit = fetch(edge, whole.columns(0));
  std::vector<GroupCost> costs;
  for (const Group& group : groups) {
    const double products = static_cast<double>(group.work) / 1000;
    costs.push_back({static_cast<int64_t>(products * ns_per_product(whole)),
                     fetch(kCutRows, std::max<int64_t>(0, group.last - group.first) * edge),
                     group.units * unit, group.new_units * unit});
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
  WholeProduct whole(a, a.size(0), b, block);
  if (splits(a)) whole.stage_blocks *= kWiderOfSplit;
  const at::Device home = a.device();
  const auto own = std::ranges::find(devices, home);
  const bool is_home_used = own != devices.end();
  if (is_home_used && !pays_to_share(whole, product)) return std::nullopt;
  product.knob = checked_knob(product.knob);
  if (a.is_cpu()) return spamm_from_host(product, devices);
  if (whole.k == 0) return std::nullopt;
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
  const auto [figures, bits] = groups_of(norm_a, norm_b, tau, whole);
  const Tensor host_figures = on_host(figures), needed = on_host(bits);
  const Mark planned = Lane::current(home).mark();

  // Everything that needs no answer from the device is enqueued before the host waits for it.
  const Tensor source_a = with_contiguous_rows(a), source_b = with_contiguous_rows(b);
  const Tensor c = at::empty({whole.m, whole.n}, a.options());
  std::deque<RemotePart> remote;
  for (const at::Device device : devices) {
    if (device != home) remote.emplace_back(whole, device, norm_a, norm_b, source_a, source_b);
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
  const std::span groups(reinterpret_cast<const Group*>(host_figures.const_data_ptr<int64_t>()),
                         host_figures.size(0));
  auto cuts = cut_for_home(costs_of(groups, whole), parts, is_home_used ? 0 : -1, kDelayNs);
  for (int64_t p = 1; p <= parts; ++p) cuts[p] = std::max(cuts[p], started);

  const int64_t first_remote = is_home_used ? 1 : 0;
  if (is_home_used) multiply_at_home(started, cuts[1]);
  for_each_part(parts - first_remote, devices, [&](int64_t i) {
    const int64_t first = cuts[first_remote + i], last = cuts[first_remote + i + 1];
    if (first == last) return;
    remote[i].run(c.narrow(0, row(first), row(last) - row(first)), row(first),
                  groups.subspan(first, last - first),
                  needed.const_data_ptr<int32_t>() + first * needed.size(1), host_tau);
  });
  return c;
}

}  // namespace spamm::shards
