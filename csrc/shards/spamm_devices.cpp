// Products of operands in the memory of devices. The op spamm_shards: A and B lie in shards on
// several of them, and so does C. The op spamm with `devices`: A and B lie on one, and so does C;
// the others fetch their rows of A, and finished columns of C leave.
//
// Norms travel first. They say which blocks of B each device needs, and only those are sent. Stages
// run over columns of C and never over K, so that every sum is computed as on one device.
#include "shards/spamm_devices.h"

#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <span>

#include "arguments.h"
#include "backends.h"
#include "checks.h"
#include "environment.h"
#include "shards/part.h"
#include "shards/plan.h"
#include "threshold.h"

namespace spamm::shards {

using at::Tensor;
using at::TensorList;

namespace {

// ---- Operands in shards -------------------------------------------------------------------------

constexpr int64_t kTakenWhole = 32 << 20;  // bytes of B

// The first row of each shard, and the number of all rows.
std::vector<int64_t> cuts_of(TensorList shards, int64_t edge, const char* name) {
  std::vector<int64_t> cuts = {0};
  for (const Tensor& rows : shards) cuts.push_back(cuts.back() + rows.size(0));
  for (const int64_t cut : cuts) {
    TORCH_CHECK(cut % edge == 0 || cut == cuts.back(), name,
                " must be cut at multiples of the block's edge ", edge, "; got a cut at row ", cut);
  }
  return cuts;
}

// Tells whether each device has the whole of B, and not one shard of its rows.
bool is_whole_everywhere(TensorList b, int64_t k) {
  return std::ranges::all_of(b, [&](const Tensor& x) { return x.size(0) == k; });
}

void check_shards(TensorList a, TensorList b) {
  TORCH_CHECK_VALUE(!a.empty(), "a_shards must hold at least one tensor; got none");
  TORCH_CHECK_VALUE(b.size() == a.size(), "b_shards must hold as many tensors as a_shards, ",
                    a.size(), "; got ", b.size());
  const auto check_dtype = [](const Tensor& x, const Tensor& first) {
    TORCH_CHECK_TYPE(x.scalar_type() == first.scalar_type(), "all shards must have one dtype; got ",
                     dtype_of(first), " and ", dtype_of(x));
  };
  const auto check = [&](TensorList shards, const char* name) {
    const Tensor& first = shards[0];
    for (const Tensor& shard : shards) {
      check_operand_dtype(shard.scalar_type(), name);
      check_dtype(shard, first);
      TORCH_CHECK(shard.dim() == 2 && shard.size(1) == first.size(1), name,
                  " must be matrices (2-d) with one number of columns; got shapes ", first.sizes(),
                  " and ", shard.sizes());
      TORCH_CHECK(shard.device().type() == first.device().type(),
                  "all shards must be on CUDA devices or all on the CPU; got ", first.device(),
                  " and ", shard.device());
    }
  };
  check(a, "a_shards"), check(b, "b_shards");
  check_dtype(b[0], a[0]);
  const int64_t k = a[0].size(1);
  int64_t rows = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    TORCH_CHECK(a[i].device() == b[i].device(),
                "a_shards and b_shards must lie on the same devices "
                "in the same order; got ",
                a[i].device(), " and ", b[i].device(), " at ", i);
    rows += b[i].size(0);
  }
  TORCH_CHECK(rows == k || is_whole_everywhere(b, k), "b_shards must have ", k,
              " rows together, or each, as a_shards have ", k, " columns; got ", rows, " together");
}

std::vector<Tensor> multiply_shards(TensorList a, TensorList b, const Knob& knob,
                                    const Block& block) {
  const WholeProduct whole(a[0], cuts_of(a, block.m, "a_shards").back(), b[0], block);
  const auto count = std::ssize(a);
  const bool is_whole = is_whole_everywhere(b, whole.k);
  Shards shards;
  if (!is_whole) {
    shards.first = cuts_of(b, block.k, "b_shards");
    for (const Tensor& rows : b) shards.rows.push_back(with_contiguous_rows(rows));
  }

  // The map of B is computed in pieces, one a device, also if each device has the whole of B.
  std::vector<Tensor> norm_a, norm_b, results(count);
  std::vector<Mark> ready;  // when both are computed
  for (int64_t p = 0; p < count; ++p) {
    const auto row_of = [&](int64_t part) { return equal_cut(whole.k, block.k, part, count); };
    auto [map_a, map_b] =
        ops::norm_maps(a[p], is_whole ? b[p].slice(0, row_of(p), row_of(p + 1)) : shards.rows[p],
                       {block.m, block.k, block.n});
    norm_a.push_back(std::move(map_a)), norm_b.push_back(std::move(map_b));
    ready.push_back(Lane::current(a[p].device()).mark());
  }

  // All of a small B travels to each part, which takes less time than to read what is needed.
  // SPAMM_TORCH_PLAN_SHARDS=1 reads it all the same, for tests.
  const bool is_small = whole.k * whole.n * whole.entry_bytes <= kTakenWhole;
  const bool takes_all = is_small && !a[0].is_cpu() && !is_set("SPAMM_TORCH_PLAN_SHARDS");
  // Bool (stages, KB), on the CPU. Waits for the device once.
  const auto needed = [&](int64_t p, const Tensor& map_b, const Tensor& tau) {
    if (takes_all) return at::ones({whole.stages(), map_b.size(0)}, at::kBool);
    const Tensor largest = norm_a[p].amax(0, /*keepdim=*/true);
    return needed_units(largest, map_b, tau, whole.stage_blocks)[0].cpu().t().contiguous();
  };
  // Parts outlive the threads: when they end, streams of other devices wait for their copies.
  std::vector<std::optional<Part>> parts(count);
  // Everything that needs no answer from the device is enqueued before the host waits for it. Every
  // device searches by itself, and all find the same tau.
  const auto run_part = [&](int64_t p) {
    const at::Device device = a[p].device();
    const auto on_device = Lane::current(device).use();
    // From here on the pull lane waits for all shards, but not for multiplies of other parts.
    const Tensor map_b = gather_rows(norm_b, ready, device);
    const Tensor c = results[p] = at::empty({a[p].size(0), whole.n}, a[p].options());
    if (!is_whole) {
      Part& part = parts[p].emplace(whole, device, kPullLane, shards, p);
      part.take_norms(map_b);
      part.take_buffers(c.options());
      part.start();
    }
    // A number stays on the CPU, so that nothing waits for it.
    const Tensor tau =
        !knob.tau            ? threshold_from_knob(gather_rows(norm_a, ready, device), map_b, knob)
        : knob.tau->is_cpu() ? *knob.tau
                             : knob.tau->to(device, knob.tau->scalar_type(), /*non_blocking=*/true);
    if (is_whole) {
      multiply_part(a[p], b[p], norm_a[p], map_b, tau, whole, c);
    } else if (c.numel() > 0) {
      parts[p]->run({a[p], norm_a[p], {c}}, needed(p, map_b, tau), tau);
    }
  };
  // A thread does not pay where a part takes the host little time: no search, and no norms to read.
  if (a[0].is_cpu() || ((is_whole || takes_all) && knob.tau && knob.tau->is_cpu())) {
    for (int64_t p = 0; p < count; ++p) run_part(p);
  } else {
    std::vector<at::Device> devices;
    for (const Tensor& rows : a) devices.push_back(rows.device());
    if (knob.tau && !knob.tau->is_cpu()) devices.push_back(knob.tau->device());  // it is copied
    for_each_part(count, devices, run_part);
  }
  return results;
}

std::vector<Tensor> spamm_shards_op(ProductShardsArguments& x) {
  const TensorList a = x.a, b = x.b;
  const Knob knob = checked_knob(x.knob);
  const Block edges = check_block(x.block);
  check_shards(a, b);
  if (knob.tau) check_tau(*knob.tau, knob.tau->device());
  for (const Tensor& shard : a) refuse_capture(shard.device());
  if (a.size() == 1) return {ops::spamm({{.knob = knob, .block = x.block}, a[0], b[0]})};
  return multiply_shards(a, b, knob, edges);
}

// ---- Operands on one device ---------------------------------------------------------------------

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
// needs a block row of B, as bits. Counted on the device: microseconds for the host's millisecond.
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
bool pays_to_share(const ProductArguments& product) {
  const Tensor &a = product.a, &b = product.b;
  const WholeProduct whole(a, a.size(0), b, check_block(product.block));
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
  const auto fetch = [&](int64_t rows, int64_t columns) {
    return rows * columns * whole.entry_bytes / 375;
  };
  const int64_t edge = whole.block.k, unit = fetch(edge, whole.columns(0));
  std::vector<GroupCost> costs;
  for (const auto& [work, units, new_units, first, last] : groups) {
    costs.push_back({static_cast<int64_t>(static_cast<double>(work) / 1000 * ns_per_product(whole)),
                     fetch(kCutRows, std::max<int64_t>(0, last - first) * edge), units * unit,
                     new_units * unit});
  }
  return costs;
}

// The block rows of B that a group needs: bool (stages, KB). needed: (groups, KB), see groups_of.
Tensor in_stages_of(const Tensor& needed, int64_t stages) {
  const int64_t blocks = needed.size(1);
  const int32_t* bits = needed.const_data_ptr<int32_t>();
  std::vector<int32_t> any(blocks);
  for (int64_t i = 0; i < needed.size(0); ++i, bits += blocks)
    std::transform(any.begin(), any.end(), bits, any.begin(), std::bit_or());
  const Tensor need = at::empty({stages, blocks}, at::kBool);
  bool* to = need.mutable_data_ptr<bool>();
  for (int64_t stage = 0; stage < stages; ++stage)
    to = std::ranges::transform(any, to, [&](int32_t of) { return of >> stage & 1; }).out;
  return need;
}

// Copies what the groups of rows need of A, at most kMostCopies pieces, each from the first needed
// block to the last. to: these rows; from: the whole of A, of which they start at this row.
void fetch_rows(const Lane& lane, const Tensor& to, const Tensor& from, int64_t row, int64_t edge,
                std::span<const Group> groups) {
  std::vector<RowBlock> copies;
  const int64_t step = blocks_of(std::ssize(groups), kMostCopies);
  for (int64_t group = 0; group < std::ssize(groups); group += step) {
    const auto piece = groups.subspan(group, std::min(step, std::ssize(groups) - group));
    const int64_t column = std::ranges::min(piece, {}, &Group::first).first * edge;
    const int64_t last = std::ranges::max(piece, {}, &Group::last).last * edge;
    if (column >= last) continue;
    const int64_t first = group * kCutRows;
    copies.push_back(block_between(to, first, column, from, row + first, column,
                                   std::min(to.size(0) - first, step * kCutRows),
                                   std::min(to.size(1), last) - column));
  }
  copy_blocks(lane, to.device(), from.device(), copies);
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

// The CUDA devices of this machine with these numbers, in their order.
std::vector<at::Device> check_devices(at::IntArrayRef devices) {
  TORCH_CHECK_VALUE(!devices.empty(), "devices must name at least one CUDA device; got none");
  for (const int64_t device : devices)
    TORCH_CHECK_VALUE(std::ranges::count(devices, device) == 1, "devices must be distinct; got ",
                      devices);
  TORCH_CHECK(Backends<NamedKernels>::find(at::kCUDA) != nullptr,
              "devices must be CUDA devices, and this build of spamm_torch is for the CPU only "
              "(build it again where nvcc is found); got ",
              devices);
  const int64_t found = cuda_devices();
  std::vector<at::Device> result;
  for (const int64_t device : devices) {
    TORCH_CHECK_VALUE(found > 0, "devices must be CUDA devices, and this machine has none; got ",
                      device);
    TORCH_CHECK_VALUE(device >= 0 && device < found, "devices must be less than ", found,
                      ", the number of CUDA devices of this machine, and not negative; got ",
                      device);
    result.emplace_back(at::kCUDA, static_cast<at::DeviceIndex>(device));
  }
  return result;
}

}  // namespace

OptTensor spamm_on_devices(ProductArguments& product) {
  const Tensor& a = product.a;
  std::vector<at::Device> devices = check_devices(*product.devices);
  check_plain_product(product);
  const auto own = std::ranges::find(devices, a.device());
  const bool is_home_used = own != devices.end();
  if (is_home_used && !pays_to_share(product)) return std::nullopt;
  product.knob = checked_knob(product.knob);
  if (a.is_cpu()) return spamm_from_host(product, devices);
  if (a.size(1) == 0) return std::nullopt;
  // The home part comes first, and starts before it is known what the others compute.
  if (is_home_used) std::iter_swap(devices.begin(), own);
  return spamm_from_home(product, devices, is_home_used);
}

Tensor spamm_from_home(const ProductArguments& product, const std::vector<at::Device>& devices,
                       bool is_home_used) {
  const Tensor &a = product.a, &b = product.b;
  const at::Device home = a.device();
  refuse_capture(home);
  WholeProduct whole(a, a.size(0), b, check_block(product.block));
  if (splits(a)) whole.stage_blocks *= kWiderOfSplit;
  const auto on_home = Lane::current(home).use();
  // Maps are copied as rows, which must be contiguous.
  const auto [map_a, map_b] = norm_maps_of(product);
  const Tensor norm_a = map_a.contiguous(), norm_b = map_b.contiguous();
  const Tensor tau = threshold_from_knob(norm_a, norm_b, product.knob);
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
  const std::array<Mark, 1> ready = {Lane::current(home).mark()};
  const int64_t parts = std::ssize(devices), first_remote = is_home_used ? 1 : 0;
  std::vector<Tensor> maps_a;  // on other devices
  std::deque<Part> remote;
  for (int64_t p = first_remote; p < parts; ++p) {
    const auto on_device = Lane::current(devices[p]).use();
    maps_a.push_back(gather_rows(norm_a, ready, devices[p]));
    Part& part = remote.emplace_back(whole, devices[p], kSendLane, Shards{{source_b}, {0}});
    part.take_norms(gather_rows(norm_b, ready, devices[p]));
    part.take_buffers(a.options());
  }
  const int64_t group_blocks = kCutRows / whole.block.m;
  const auto row = [&](int64_t group) { return std::min(whole.m, group * kCutRows); };
  const auto rows_of = [&](const Tensor& x, int64_t first, int64_t last) {
    return x.slice(0, row(first), row(last));
  };
  const auto norms_of = [&](const Tensor& map, int64_t first, int64_t last) {
    return map.slice(0, first * group_blocks, last * group_blocks);
  };
  const auto multiply_at_home = [&](int64_t first, int64_t last) {
    if (first == last) return;
    multiply_part(rows_of(a, first, last), b, norms_of(norm_a, first, last), norm_b, tau, whole,
                  rows_of(c, first, last));
  };
  const int64_t started = is_home_used && !splits(a) ? blocks_of(whole.m, kCutRows) / parts : 0;
  multiply_at_home(0, started);
  wait_on_host(planned);
  const std::span groups(reinterpret_cast<const Group*>(host_figures.const_data_ptr<int64_t>()),
                         host_figures.size(0));
  auto cuts = cut_for_home(costs_of(groups, whole), parts, is_home_used ? 0 : -1, kDelayNs);
  for (int64_t p = 1; p <= parts; ++p) cuts[p] = std::max(cuts[p], started);

  if (is_home_used) multiply_at_home(started, cuts[1]);
  for_each_part(parts - first_remote, devices, [&](int64_t i) {
    const int64_t first = cuts[first_remote + i], last = cuts[first_remote + i + 1];
    if (first == last) return;
    Part& part = remote[i];
    const auto on_device = part.own().use();
    const Tensor to = rows_of(c, first, last);
    const auto options = a.options().device(part.device());
    const Tensor rows = at::empty({to.size(0), whole.k}, options);
    const Tensor result = at::empty(to.sizes(), options);
    part.start();
    fetch_rows(part.side(kPullLane), rows, source_a, row(first), whole.block.k,
               groups.subspan(first, last - first));
    part.run({rows, norms_of(maps_a[i], first, last), {result}, to},
             in_stages_of(needed.slice(0, first, last), whole.stages()), host_tau);
  });
  return c;
}

namespace {

// In the CPU's memory.
void copy_rows_on_cpu(at::Device, at::Device, std::span<const RowBlock> blocks) {
  for (const RowBlock& block : blocks) {
    for (int64_t row = 0; row < block.rows; ++row) {
      std::memcpy(static_cast<char*>(block.to) + row * block.to_stride,
                  static_cast<const char*>(block.from) + row * block.from_stride,
                  static_cast<size_t>(block.width));
    }
  }
}

const Backends<RowCopy> of_cpu(at::kCPU, Rank::kPortable,
                               {&copy_rows_on_cpu, [] { return false; }});

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) {
  m.impl("spamm_shards", boxed<&spamm_shards_op>());
}

}  // namespace spamm::shards
