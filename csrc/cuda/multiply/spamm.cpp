// The ops of products on CUDA. Each chooses a kernel once, and then launches stage after stage. The
// launch that computes norms, or that splits float32 operands, also sets the multiply's tile
// counter to zero, which saves a launch.
#include "spamm.h"

#include <ATen/cuda/EmptyTensor.h>

#include "checks.h"
#include "cuda/multiply/multiply.h"
#include "cuda/norm_map/norm_map.h"
#include "cuda/operand.h"
#include "environment.h"
#include "stage_range.h"
#include "threshold.h"

namespace spamm::cuda {
namespace {

using at::Tensor;

// Without the dispatcher, which takes the host as long as the allocation.
Tensor empty(IntArrayRef shape, at::ScalarType dtype, at::Device device) {
  return Tensor(at::detail::empty_cuda(shape, dtype, device, std::nullopt));
}

const Tensor* added(const OptTensor& input, const Scalar& beta) {
  return input && beta.toDouble() != 0 ? &*input : nullptr;
}

// A product's norm maps: those given, and memory for others, with the product's counters behind.
class ProductNorms {
 public:
  // `shared`: one map serves both operands.
  ProductNorms(const ProductArguments& x, const Block& block, bool shared, int64_t counters)
      : dtype_(norm_dtype(x.a.scalar_type())), device_(x.a.device()) {
    add(x.a, x.norm_a, block.m, block.k, "a");
    if (!shared) add(x.b, x.norm_b, block.k, block.n, "b");
    const int64_t bytes = bytes_;
    memory_ = c10::cuda::CUDACachingAllocator::get()->allocate(bytes + counters * sizeof(int));
    auto* const memory = static_cast<std::byte*>(memory_.get());
    for (MapJob& job : jobs_) {
      job.map.norms = memory + reinterpret_cast<intptr_t>(job.map.norms);
    }
    counters_ = reinterpret_cast<int*>(memory + bytes);
  }

  // The maps to compute.
  at::ArrayRef<MapJob> jobs() const { return jobs_; }
  // The number of an operand's; none if its map is given.
  std::optional<size_t> job(int operand) const {
    const Map& map = maps_[std::min(operand, count_ - 1)];
    return map.given.defined() ? std::nullopt : std::optional(map.job);
  }
  const void* data(int operand) const {
    const Map& map = maps_[std::min(operand, count_ - 1)];
    return map.given.defined() ? map.given.const_data_ptr() : jobs_[map.job].map.norms;
  }
  MapMemory memory(int operand) const {
    return maps_[operand].given.defined() ? MapMemory() : jobs_[maps_[operand].job].map;
  }
  // It must not outlive this object.
  Tensor tensor(int operand) const {
    const Map& map = maps_[std::min(operand, count_ - 1)];
    if (map.given.defined()) return map.given;
    return at::for_blob(jobs_[map.job].map.norms, map.shape)
        .options(at::TensorOptions().dtype(dtype_).device(device_))
        .target_device(device_)
        .make_tensor();
  }
  int* counters() const { return counters_; }

 private:
  struct Map {
    Tensor given;     // contiguous, or undefined
    DimVector shape;  // of one that is computed, by job number `job`
    size_t job = 0;
  };

  void add(const Tensor& x, const OptTensor& given, int64_t rows, int64_t columns,
           const char* name) {
    Map& map = maps_[count_++];
    if (given) {
      map.given = given->contiguous();
      return;
    }
    map.shape = norm_map_shape(x.sizes(), rows, columns);
    map.job = jobs_.size();
    // Until there is memory, the address is the distance from its beginning.
    jobs_.push_back(job_for(x, rows, columns, reinterpret_cast<void*>(bytes_)));
    check_blocks(jobs_.back().norms(), name, x.sizes());
    constexpr int64_t kApart = 256;  // a multiple of a line of the caches
    bytes_ += blocks_of(jobs_.back().norms() * c10::elementSize(dtype_), kApart) * kApart;
  }

  at::ScalarType dtype_;
  at::Device device_;
  Map maps_[2];
  int count_ = 0;
  c10::SmallVector<MapJob, 2> jobs_;
  int64_t bytes_ = 0;
  c10::DataPtr memory_;
  int* counters_ = nullptr;
};

// The threshold of the knob, found from the maps if it is none.
Threshold threshold_of(const Knob& knob, const ProductNorms& maps, at::ScalarType norm_type) {
  if (knob.threshold) return Threshold(*knob.threshold);
  if (knob.tau) return {*knob.tau, norm_type};
  return {threshold_from_knob(maps.tensor(0), maps.tensor(1), knob), norm_type};
}

// Tells whether one pass can compute norms and split parts. It cannot if the batches share one
// matrix, which is split once and would fill the map of only one batch.
bool splits_with_norms(const Tensor& x) {
  return x.dim() == 2 || x.size(0) == 1 || x.stride(0) != 0;
}

bool splits_with_norms(const Tensor& a, const Tensor& b, const Block& block) {
  const int64_t granule = kernels::kSplitBlock / granules_of(block);
  return block.m == granule && block.k == granule && block.n == granule && splits_with_norms(a) &&
         splits_with_norms(b);
}

// Completes a symmetric `c`, whose upper triangle is set, and computes the norm map of `c`.
void complete(const Tensor& c, const Block& block, bool symmetric, const Tensor& norms,
              const OnDevice& device) {
  const bool on_the_way = symmetric && norms.defined() && block.m <= 64;
  if (symmetric) {
    const Tensor x = as_batch(c);
    launch_complete_symmetric(
        {x.mutable_data_ptr(), x.size(0), x.stride(0), x.stride(1), x.size(1)}, x.scalar_type(),
        log2_of(block.m), on_the_way ? norms.mutable_data_ptr() : nullptr, device.stream());
  }
  if (norms.defined() && !on_the_way) norm_map_into(c, block.m, block.n, norms, device);
}

// Tells whether b is the transpose of a, in the same memory.
bool is_transpose(const Tensor& a, const Tensor& b) {
  return a.dim() == 2 && b.dim() == 2 && a.const_data_ptr() == b.const_data_ptr() &&
         a.size(0) == b.size(1) && a.size(1) == b.size(0) && a.stride(0) == b.stride(1) &&
         a.stride(1) == b.stride(0);
}

// Tells whether lines of x begin between the sectors of the caches.
bool is_off_sectors(const Tensor& x) {
  constexpr int64_t kSector = 32;
  const Matrices from(x);
  const int64_t leading = step(from, reads_along(from, 2, 1) ? 1 : 2) * x.element_size();
  return leading % kSector != 0 || reinterpret_cast<uintptr_t>(from.data()) % kSector != 0;
}

// An operand as the kernels read it: copied by the norm pass where they cannot read it in place, or
// if `is_slow`. Lines of the copy begin with cache lines. Float32 is cut into split parts anyway.
class CopiedOperand {
 public:
  CopiedOperand(const Tensor& x, bool is_slow, int64_t alignment) : tensor(x) {
    const Matrices from(x);
    const bool in_place = reads_along(from, 2, 1, alignment) || reads_along(from, 1, 2, alignment);
    if (x.numel() == 0 || (in_place && !is_slow)) return;
    const bool by_rows = lines_are_rows(from);
    const int64_t lines = x.size(by_rows ? -2 : -1), length = x.size(by_rows ? -1 : -2);
    constexpr int64_t kCacheLine = 128;
    const int64_t unit = kCacheLine / x.element_size(), leading = blocks_of(length, unit) * unit;
    const int64_t batch = step(from, 0) == 0 ? 1 : from.size(0);
    const Tensor memory = empty({batch, lines, leading}, x.scalar_type(), x.device());
    address_ = memory.mutable_data_ptr();
    line_stride_ = leading, batch_stride_ = batch == 1 ? 0 : lines * leading;
    const Tensor whole = memory.narrow(2, 0, length);
    tensor = by_rows ? whole : whole.mT();
    tensor = x.dim() == 2 ? tensor.squeeze(0) : tensor.expand(x.sizes());
  }

  bool is_copied() const { return address_ != nullptr; }
  MapJob with_copy(MapJob job) const {
    job.copy = address_;
    job.copy_batch_stride = batch_stride_, job.copy_line_stride = line_stride_;
    return job;
  }

  Tensor tensor;

 private:
  void* address_ = nullptr;
  int64_t line_stride_ = 0, batch_stride_ = 0;
};

// `c` and `norms` share no memory with an argument, and the kernels can write to them.
void write_new(const ProductArguments& x, const Block& block, const Tensor& c,
               const Tensor& norms) {
  if (c.numel() == 0) return;
  const OnDevice device(x.a);
  const at::ScalarType dtype = x.a.scalar_type();
  const ProductSize size = size_of_product(x.a, x.b);
  const auto choose = [&, is_tf32 = allow_tf32(), chip = chip_of(device)](bool upper_only) {
    return choose_product(dtype, block, is_tf32, size, chip, upper_only);
  };
  const Choice half = choose(x.symmetric);
  // X X^T has the very bits above and below the diagonal: the same products, in the same order, and
  // norms of the same memory. Only float32 at full accuracy adds its parts in two orders.
  const bool mirrors =
      x.symmetric && (half.kernel == Kernel::kSm90F32x3 || x.input || x.norm_a || x.norm_b ||
                      !is_transpose(x.a, x.b) ||
                      mirroring_pays(*find_tile(half.kernel, half.tile), size, c.nbytes(),
                                     device.multiprocessors(), half.segments));
  const Choice choice = x.symmetric && !mirrors ? choose(false) : half;
  const TileRow& row = *find_tile(choice.kernel, choice.tile);
  const int split_parts = split_parts_of(choice.kernel);
  const bool split_norms = split_parts > 0 && splits_with_norms(x.a, x.b, block);
  const bool shared = !split_norms && !x.norm_a && !x.norm_b && share_norm_map(x.a, x.b, block);
  const ProductNorms maps(x, block, shared, 1 + choice.meetings);
  const bool is_half = has_product_time(choice.kernel) && split_parts == 0;
  const double product_us =
      is_half ? product_time(row, size, device.multiprocessors(), mirrors, choice.segments) : 0;
  // Then norms that are not given are not computed: whatever memory holds is not below -infinity.
  // So a product that needs no counter either is one launch. Split parts have norms on the way.
  const bool all_valid = split_parts == 0 && !x.norm_a && !x.norm_b && skips_nothing(x.knob) &&
                         omits_norms(choice, size, device.multiprocessors());
  const auto job_of = [&](int operand) { return all_valid ? std::nullopt : maps.job(operand); };
  const bool is_slow = is_half && is_off_sectors(x.a) && is_off_sectors(x.b) &&
                       line_copy_pays(product_us, x.b.nbytes(), /*is_read=*/!job_of(1));
  std::optional<CopiedOperand> copies[2];
  c10::SmallVector<MapJob, 4> jobs;
  if (!all_valid) jobs.append(maps.jobs().begin(), maps.jobs().end());
  if (split_parts == 0 && claims_tiles(choice.kernel)) {
    for (const int operand : {0, 1}) {
      const bool is_a = operand == 0;
      if (!is_a && shared) continue;
      const Tensor& tensor = is_a ? x.a : x.b;
      const CopiedOperand& copied =
          copies[operand].emplace(tensor, is_slow && (!is_a || shared), choice.alignment);
      if (!copied.is_copied()) continue;
      if (const auto job = job_of(operand)) {
        jobs[*job] = copied.with_copy(jobs[*job]);
      } else {
        const auto [m, k, n] = block;
        jobs.push_back(copied.with_copy({tensor, is_a ? m : k, is_a ? k : n, /*map=*/{}}));
      }
    }
  }
  Product product{.a = copies[0] ? copies[0]->tensor : x.a,
                  .b = copies[1]             ? copies[1]->tensor
                       : shared && copies[0] ? copies[0]->tensor
                                             : x.b,
                  .c = c,
                  .block = block,
                  .input = added(x.input, x.beta),
                  .beta = x.beta,
                  .alpha = x.alpha,
                  .upper_only = mirrors};
  std::optional<SplitOperands> split;
  if (split_norms) {
    const StageRange stage(kNormMapStage);
    split.emplace(x.a, x.b, split_parts, block, maps.memory(0), maps.memory(1), maps.counters(),
                  device.stream());
    product.split_parts = &*split;
    product.counter_is_zero = true;
  } else if (!jobs.empty()) {
    const StageRange stage(kNormMapStage);
    product.counter_is_zero =
        write_norm_maps(jobs, dtype, maps.counters(), device.multiprocessors(), device.stream());
  }
  product.map_a = maps.data(0), product.map_b = maps.data(1), product.counters = maps.counters();
  product.tau = all_valid ? Threshold(-std::numeric_limits<double>::infinity())
                          : threshold_of(x.knob, maps, norm_dtype(dtype));
  const StageRange stage(kMultiplyStage);
  launch_product(product, choice, device);
  complete(c, block, mirrors, norms, device);
}

// Tells whether kernels can write to `c`: contiguous rows without overlap, at a 16-byte address.
bool is_writable(const Tensor& c) {
  const Matrices x(c);
  return (x.size(2) <= 1 || x.stride(2) == 1) && (x.size(1) <= 1 || x.stride(1) >= x.size(2)) &&
         (x.size(0) <= 1 || c.is_contiguous() ||
          x.stride(0) * x.element_size() % kAlignment == 0) &&
         reinterpret_cast<uintptr_t>(x.data()) % kAlignment == 0;
}

// Writes to `out` and `norms` themselves if kernels can write there and no memory that is read is
// overwritten; else to others, which are copied in the end.
void write_given(const ProductArguments& x, const Block& block, const Tensor& out,
                 const Tensor& norms) {
  const auto is_read = [&](const Tensor& written) {
    const auto meets = [&](const OptTensor& y) { return y && may_overlap(written, *y); };
    return may_overlap(written, x.a) || may_overlap(written, x.b) || meets(x.norm_a) ||
           meets(x.norm_b) || meets(x.knob.tau) || meets(x.input);
  };
  const auto empty_like = [](const Tensor& y) {
    return empty(y.sizes(), y.scalar_type(), y.device());
  };
  const bool in_place = is_writable(out) && !is_read(out);
  const Tensor c = in_place ? out : empty_like(out);
  // norm_map sums in the order of memory. The norms of other layouts are therefore its own.
  const bool has_rows = lines_are_rows(out);
  Tensor map;
  if (norms.defined() && has_rows) {
    const bool map_in_place = norms.is_contiguous() && !is_read(norms) && !may_overlap(norms, out);
    map = map_in_place ? norms : empty_like(norms);
  }
  write_new(x, block, c, map);
  if (!in_place) out.copy_(c);
  if (norms.defined() && !map.is_same(norms)) {
    norms.copy_(has_rows ? map : spamm::norm_map(out, {block.m, block.n}));
  }
}

// The ops multiply and multiply_part, whose norm maps are given. `size`: of the whole product.
void multiply_with(const MultiplyArguments& x, const Block& block, const ProductSize& size,
                   const Tensor& c, bool has_one_segment, const OptTensor& own_rows = {},
                   int64_t first_own_row = 0) {
  if (c.numel() == 0) return;
  const OnDevice device(x.a);
  const at::ScalarType dtype = x.a.scalar_type();
  Chip chip = chip_of(device);
  if (has_one_segment) chip.forced_segments = 1;
  const Choice choice = choose_product(dtype, block, allow_tf32(), size, chip);
  const Tensor norm_a = x.norm_a.contiguous(), norm_b = x.norm_b.contiguous();
  Product product{.a = x.a,
                  .b = x.b,
                  .c = c,
                  .block = block,
                  .map_a = norm_a.const_data_ptr(),
                  .map_b = norm_b.const_data_ptr(),
                  .tau = {x.tau, norm_a.scalar_type()},
                  .input = added(x.input, x.beta),
                  .beta = x.beta,
                  .alpha = x.alpha};
  if (own_rows && own_rows->numel() > 0) {
    if (reads_in_place(choice.kernel, *own_rows, first_own_row, x.b)) {
      product.own_rows = *own_rows;
      product.first_own_row = first_own_row;
    } else {
      x.b.narrow(0, first_own_row, own_rows->size(0)).copy_(*own_rows);
    }
  }
  launch_product(product, choice, device);
}

Tensor multiply(MultiplyArguments& x) {
  const Block block = check_product(x.a, x.b, x.block, x.norm_a, x.norm_b, x.tau, x.input);
  ProductSize size = size_of_product(x.a, x.b);
  if (x.whole) {
    check_whole(x.a, x.b, *x.whole);
    size.m = (*x.whole)[0], size.n = (*x.whole)[1];
  }
  const Tensor c = empty(product_shape(x.a, x.b), x.a.scalar_type(), x.a.device());
  multiply_with(x, block, size, c, x.whole && keeps_order(*x.whole));
  return c;
}

void multiply_part(MultiplyPartArguments& x) {
  const Block block = check_product(x.a, x.b, x.block, x.norm_a, x.norm_b, x.tau, std::nullopt);
  check_part(x.out, x.a, x.b, x.whole, x.own_rows, x.first_own_row);
  const ProductSize size = {
      .batch_a = 1, .batch_b = 1, .batch = 1, .m = x.whole[0], .n = x.whole[1], .k = x.a.size(1)};
  const bool in_place = is_writable(x.out);
  const Tensor c = in_place ? x.out : at::empty(x.out.sizes(), x.out.options());
  multiply_with(x, block, size, c, false, x.own_rows, x.first_own_row);
  if (!in_place) x.out.copy_(c);
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) {
  m.impl("multiply", boxed<&multiply>());
  m.impl("multiply_part", boxed<&multiply_part>());
  ProductOps<empty, write_new, write_given>::register_in(m);
}

}  // namespace spamm::cuda
