// bsr_multiply on CUDA, by the multiply kernels over lists (kernels/multiply/params.h).
#include "cuda/multiply/multiply.h"

#include "cuda/device.h"
#include "cuda/norm_map/norm_map.h"
#include "cuda/sparse/maps.h"
#include "environment.h"
#include "stage_range.h"

namespace spamm::cuda {
namespace {

constexpr int64_t kCell = 64;

// A matrix: a pattern, and its blocks one below the other, with the tensors that hold them.
struct BlockMatrix {
  Tensor crow, col, values;  // values: (stored, edge, edge)
  kernels::Pattern pattern;
  Tensor cells = {}, in_cells = {};  // of blocks of 32

  BlockMatrix(const Tensor& crow_indices, const Tensor& col_indices, const Tensor& blocks)
      : crow(crow_indices.contiguous()),
        col(col_indices.contiguous()),
        values(blocks.contiguous()),
        pattern(pattern_of(crow, col)) {}

  int64_t edge() const { return values.size(1); }

  // Gives blocks of 32 memory in cells of their up to four neighbours. What no block fills stays as
  // it is: masks keep it out of products.
  void make_cells(const OnDevice& device) {
    cells = at::empty({values.size(0)}, values.options().dtype(at::kInt));
    launch_find_cells(pattern, cells.mutable_data_ptr<int>(), device.stream());
    in_cells = at::empty({values.size(0), kCell, kCell}, values.options());
  }

  // The matrices that the multiply kernels read or write, 2-D.
  Tensor rows() const {
    const Tensor& blocks = in_cells.defined() ? in_cells : values;
    return blocks.view({-1, blocks.size(2)});
  }
  const int* cell_numbers() const {
    return cells.defined() ? cells.const_data_ptr<int>() : nullptr;
  }

  // Strides of the blocks as they are stored, or as they are in cells.
  kernels::BlockMemory memory(bool of_cells = false) const {
    const Tensor& blocks = of_cells ? in_cells : values;
    return {.data = static_cast<uint8_t*>(const_cast<void*>(blocks.const_data_ptr())),
            .cells = of_cells ? cell_numbers() : nullptr,
            .edge = static_cast<int>(edge()),
            .entry_bytes = static_cast<int>(blocks.element_size())};
  }
};

void check_size(const Tensor& rows, const char* name) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 255;
  TORCH_CHECK(rows.size(0) <= kMost, "block-sparse products on CUDA take at most ", kMost,
              " rows of stored blocks in a matrix, blocks of 32 counted as 64; got ", rows.size(0),
              " for ", name);
}

// C = alpha * (A @ B over the lists) + beta * C, for C's blocks or, with `upper_only`, for those on
// and above the diagonal.
void multiply_lists(const BsrMultiplyArguments& x, const BlockMatrix& a, const BlockMatrix& b,
                    const BlockMatrix& c, bool adds_input, const OnDevice& device) {
  const int64_t edge = a.edge(), rows = c.pattern.rows * edge;
  const Block block{edge, edge, edge};
  const Chip chip = chip_of(device);
  // One product of split parts does not serve blocks of 32, which are in cells on Hopper.
  const bool in_cells = c.cells.defined();
  const Kernel kernel =
      choose_kernel(x.values_a.scalar_type(), block, allow_tf32() && !in_cells, chip.hopper);
  // Float32 rounds as in dense storage if it takes the tile of dense storage. The op does not know
  // C's columns, and most products are square.
  const ProductSize whole{.batch_a = 1, .batch_b = 1, .batch = 1, .m = rows, .n = rows, .k = rows};
  const Choice choice = choose_tiles(kernel, whole, chip, /*upper_only=*/false, /*has_all=*/false);
  const int log2_parts = edge > kCell ? 1 : 0;
  const int64_t capacity = x.col.numel() << 2 * log2_parts;
  TORCH_CHECK(capacity <= std::numeric_limits<int32_t>::max(),
              "block-sparse products on CUDA take at most 2^31 - 1 tiles; got ", capacity);
  const Tensor counts = at::zeros({kernels::kTileClasses + 1}, x.col.options().dtype(at::kInt));
  const Tensor places =
      at::empty({chip.hopper ? kernels::kTileClasses : 0, capacity, 2}, counts.options());
  const Tensor first = x.first.contiguous();
  const Tensor slots_a = x.slots_a.contiguous(), slots_b = x.slots_b.contiguous();
  const kernels::ProductLists lists{
      .c = c.pattern,
      .first = first.const_data_ptr<int64_t>(),
      .slots_a = slots_a.const_data_ptr<int>(),
      .slots_b = slots_b.const_data_ptr<int>(),
      .col_a = a.pattern.col,
      .rows_a = a.rows().size(0),
      .rows_b = b.rows().size(0),
      .cells_a = a.cell_numbers(),
      .cells_b = b.cell_numbers(),
      .cells_c = c.cell_numbers(),
      .log2_parts = log2_parts,
      .upper_only = x.symmetric,
      .places = static_cast<kernels::TilePlace*>(places.mutable_data_ptr()),
      .counts = counts.mutable_data_ptr<int>(),
      .capacity = static_cast<int>(capacity)};
  if (chip.hopper) {
    const auto granule = static_cast<int>(std::min(edge, kCell));
    launch_find_tiles(lists, choice.config, granule, device.stream());
  }
  const Tensor rows_a = a.rows(), rows_b = b.rows(), rows_c = c.rows();
  Product product{.a = rows_a,
                  .b = rows_b,
                  .c = rows_c,
                  .block = block,
                  .input = adds_input && x.beta.toDouble() != 0 ? &rows_c : nullptr,
                  .beta = x.beta,
                  .alpha = x.alpha,
                  .counters = counts.mutable_data_ptr<int>() + kernels::kTileClasses,
                  .counter_is_zero = true,
                  .lists = &lists};
  if (x.tau) product.tau = {*x.tau, norm_dtype(x.values_a.scalar_type())};
  launch_product(product, choice, device);
}

std::tuple<Tensor, Tensor> bsr_multiply(BsrMultiplyArguments& x) {
  check_arguments(x);
  for (const Tensor* tensor :
       {&x.crow, &x.col, &x.first, &x.slots_a, &x.slots_b, &x.crow_a, &x.col_a, &x.values_b})
    check_same_device(x.values_a, *tensor, "a's blocks", "the other arguments");
  const OnDevice device(x.values_a);
  if (x.tau) check_tau(*x.tau, x.values_a.device());
  const StageRange stage(kMultiplyStage);
  const int64_t edge = x.values_a.size(1), stored = x.col.numel();
  const Tensor values = at::empty({stored, edge, edge}, x.values_a.options());
  const Tensor norms = x.empty_norms(stored);
  if (stored == 0) return {values, norms};
  BlockMatrix c(x.crow, x.col, values);
  // A plan of a stated capacity may have room for products of matrices that store no block.
  const bool has_blocks = x.values_a.size(0) > 0 && x.values_b.size(0) > 0;
  const bool multiplies = x.slots_a.numel() > 0 && has_blocks, adds_input = x.adds_input();
  const bool in_cells = edge < kCell && has_hopper_kernels(device.properties());
  if (multiplies && in_cells) c.make_cells(device);
  if (adds_input) {
    const BlockMatrix input(*x.crow_input, *x.col_input, *x.values_input);
    launch_copy_blocks({.pattern = c.pattern,
                        .from = input.memory(),
                        .to = c.memory(c.cells.defined()),
                        .has_source = true,
                        .source = input.pattern,
                        .upper_only = x.symmetric},
                       device.stream());
  }
  if (multiplies) {
    BlockMatrix a(x.crow_a, x.col_a, x.values_a);
    TORCH_CHECK(!in_cells || (x.crow_b && x.col_b),
                "blocks of 32 on CUDA need b's pattern: expected crow_b and col_b; got none");
    BlockMatrix b(x.crow_b.value_or(x.crow_a), x.col_b.value_or(x.col_a), x.values_b);
    for (BlockMatrix* operand : {&a, &b}) {
      if (!in_cells) continue;
      operand->make_cells(device);
      launch_copy_blocks({operand->pattern, operand->memory(), operand->memory(true)},
                         device.stream());
    }
    check_size(a.rows(), "a"), check_size(b.rows(), "b"), check_size(c.rows(), "the result");
    multiply_lists(x, a, b, c, adds_input, device);
    if (c.cells.defined())
      launch_copy_blocks({c.pattern, c.memory(true), c.memory()}, device.stream());
  } else if (adds_input) {
    values.mul_(x.beta);
  } else {
    values.zero_();
  }
  const bool on_the_way = x.norms && x.symmetric && edge <= kCell;
  if (x.symmetric) {
    launch_mirror_blocks(c.pattern, values.mutable_data_ptr(), values.scalar_type(),
                         static_cast<int>(edge), on_the_way ? norms.mutable_data_ptr() : nullptr,
                         device.stream());
  }
  if (x.norms && !on_the_way)
    norm_map_into(values.view({stored * edge, edge}), edge, edge, norms, device);
  return {values, norms};
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) { m.impl("bsr_multiply", boxed<&bsr_multiply>()); }

}  // namespace spamm::cuda
