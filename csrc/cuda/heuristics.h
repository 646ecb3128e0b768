// Chooses kernel and tile of a product or a convolution, from the table of tiles.h. Plain functions
// of numbers, so that they can be tested without a GPU.
//
// All choices between kernels and tiles are here. The limits of a single kernel, and how it divides
// its grid and registers, are next to that kernel.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>

#include "block.h"
#include "cuda/tiles.h"
#include "kernels/conv/sm80/params.h"

namespace spamm::cuda {

// Tells whether a chip runs the Hopper kernels. They are built for sm_90a, which runs only on
// compute capability 9.0 (90), and a thread block uses all shared memory of a multiprocessor.
inline bool runs_hopper_kernels(int compute_capability, int64_t shared_bytes_per_block) {
  return compute_capability == 90 && shared_bytes_per_block >= 227 * 1024;
}

// Tells whether tensor maps, of 32-bit coordinates, can describe the operands of a product.
inline bool tensor_maps_take(int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kLongest = (int64_t{1} << 31) - 256;  // tiles may stick out
  return k > 0 && std::max({m, n, k}) <= kLongest;
}

// The number of split parts of a float32 operand in a kernel; 0 if the kernel does not split.
inline int split_parts_of(Kernel kernel) {
  return kernel == Kernel::kSm90F32x1 ? 1 : kernel == Kernel::kSm90F32x3 ? 2 : 0;
}

// `batch` products of (m x k) times (k x n). An operand that the whole batch shares is one matrix.
struct ProductSize {
  int64_t batch_a, batch_b, batch, m, n, k;
};

// The kernel of a product, unless its size makes choose_product() take another. `hopper`: the
// library holds the Hopper kernels, and the first two functions allow them.
//
// On Hopper, float32 is one product of split parts if PyTorch's setting allows TF32, else three.
// One product does not serve blocks of 32: their sums need a scale for each granule, and keeping
// them made it slower than the portable kernel.
inline Kernel choose_kernel(c10::ScalarType dtype, const Block& block, bool tf32, bool hopper) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return hopper ? Kernel::kSm90F16 : Kernel::kSm80F16;
    case c10::ScalarType::BFloat16:
      return hopper ? Kernel::kSm90Bf16 : Kernel::kSm80Bf16;
    case c10::ScalarType::Float:
      if (hopper && (!tf32 || std::min({block.m, block.k, block.n}) >= 64)) {
        return tf32 ? Kernel::kSm90F32x1 : Kernel::kSm90F32x3;
      }
      return tf32 ? Kernel::kSm80Tf32 : Kernel::kSm80F32;
    case c10::ScalarType::Double:
      return hopper ? Kernel::kSm90F64 : Kernel::kSm80F64;
    default:
      TORCH_CHECK_TYPE(false, "no CUDA kernel for ", dtype, " operands");
  }
}

inline const char* kernel_name(Kernel kernel) {  // in the order of Kernel
  constexpr const char* kNames[] = {
      "sm90-wgmma-f16", "sm90-wgmma-bf16", "sm90-wgmma-f32x1", "sm90-wgmma-f32x3", "sm90-dmma-f64",
      "sm80-mma-f16",   "sm80-mma-bf16",   "sm80-mma-tf32",    "sm80-simt-f32",    "sm80-dmma-f64"};
  return kNames[static_cast<int>(kernel)];
}

// Tells whether a kernel's thread blocks claim tiles from a counter: Hopper's, which come first.
constexpr bool claims_tiles(Kernel kernel) { return kernel <= Kernel::kSm90F64; }

// Tells whether a kernel can read some rows of B from another place than the others.
inline bool reads_own_rows(Kernel kernel) {
  return kernel == Kernel::kSm90F16 || kernel == Kernel::kSm90Bf16 || kernel == Kernel::kSm90F64;
}

// ---- Tiles --------------------------------------------------------------------------------------

// The forced tile, else the large one if it pays. The small one if the kernel lacks that tile.
inline TileSize pick_tile(Kernel kernel, bool large_pays, std::optional<TileSize> forced,
                          std::span<const TileRow> rows = kTiles) {
  const TileSize wanted = forced.value_or(large_pays ? TileSize::kLarge : TileSize::kSmall);
  return find_tile(kernel, wanted, rows) == nullptr ? TileSize::kSmall : wanted;
}

// Tells whether C is large enough for large tiles. They read each operand less often, but on a
// small C they leave multiprocessors idle. The table's limit counts areas of 128 x 128 of C for
// each multiprocessor. `upper_only`: only those on and above the diagonal are computed.
inline bool large_tile_pays(Kernel kernel, int64_t batch, int64_t m, int64_t n, int multiprocessors,
                            bool upper_only = false, std::span<const TileRow> rows = kTiles) {
  const TileRow* large = find_tile(kernel, TileSize::kLarge, rows);
  const int64_t down = blocks_of(m, 128), across = blocks_of(n, 128);
  const int64_t areas = batch * (upper_only ? down * (down + 1) / 2 : down * across);
  return large != nullptr && static_cast<double>(areas) >= large->pays_from * multiprocessors;
}

// The time of a product with nothing skipped by Hopper's kernels, in us. Thread blocks take turns
// of a tile, or of a segment of one, each; tiles that lie outside C for the most part come last and
// take half a turn. Of float64, the time is that of the multiprocessor with most steps. Fitted to
// an H200.
// `upper_only`: of tiles on and above the diagonal alone.
inline double product_time(const TileRow& row, const ProductSize& size, int multiprocessors,
                           bool upper_only = false, int segments = 1) {
  constexpr double kLight = 0.5;
  constexpr double kStart = 3.5;  // launch, the first norms and loads
  const auto inner = [](int64_t extent, int edge) {
    const int64_t tiles = blocks_of(extent, edge), rest = extent % edge;
    return tiles - (tiles > 1 && rest > 0 && 2 * rest <= edge ? 1 : 0);
  };
  const TileConfig& tile = row.config;
  int64_t all = blocks_of(size.m, tile.rows) * blocks_of(size.n, tile.columns);
  int64_t whole = inner(size.m, tile.rows) * inner(size.n, tile.columns);
  if (upper_only) {
    all = 0;
    for (int64_t row_of = 0; row_of < size.m; row_of += tile.rows) {
      all += blocks_of(size.n, tile.columns) - row_of / tile.columns;
    }
    whole = all;
  }
  all *= size.batch * segments, whole *= size.batch * segments;
  const double steps = static_cast<double>(blocks_of(size.k, 64)) / segments;
  // The sums of segments are written and read; two of float64 meet.
  const bool is_double = row.kernel == Kernel::kSm90F64;
  const double sums = static_cast<double>(size.batch * size.m * size.n) * segments;
  const double join = segments == 1                ? 0
                      : is_double && segments == 2 ? 3.5 * row.step
                                                   : 2.5 + sums * (is_double ? 16 : 8) / 3e6;
  if (is_double) {
    // Two tiles on a multiprocessor take nearly twice as long as one. The two of a first turn end
    // together, so both find another; later they end one by one. Within 7% for N = 512 to 1792.
    constexpr double kAlone = 1.15;
    const int64_t places = 2 * multiprocessors, turns = all / places, rest = all % places;
    const bool is_alone = rest <= multiprocessors && turns != 1;
    const double of_one = 2.0 * static_cast<double>(turns) + (rest == 0  ? 0
                                                              : is_alone ? kAlone
                                                                         : 2);
    return kStart + of_one * steps * row.step + join;
  }
  const int64_t turns = blocks_of(whole, multiprocessors);
  const int64_t light = all - whole - 2 * (turns * multiprocessors - whole);
  const double all_turns =
      static_cast<double>(turns) +
      kLight * static_cast<double>(blocks_of(std::max<int64_t>(light, 0), multiprocessors));
  return kStart + all_turns * (steps * row.step + row.end) + join;
}

// Tells whether product_time() speaks of all tiles of a kernel.
inline bool has_product_time(Kernel kernel) { return kernel <= Kernel::kSm90F32x3; }

// `upper_only`: only the upper triangle of a square C is computed. It changes the tile of float64
// alone, whose tiles all round alike: what is computed has the bits of the whole product.
// `has_all`: not only the small and the large one exist: in dense storage and blocks from 64 on.
//
// The tile of least time. Those of float64, of other chips, and of float32 at full accuracy, whose
// large tile would be less accurate for a small C, follow from the table's limit.
inline TileSize choose_tile(Kernel kernel, const ProductSize& size, int multiprocessors,
                            std::optional<TileSize> forced = std::nullopt, bool upper_only = false,
                            bool has_all = true) {
  const auto exists = [&](const TileRow& row) {
    return row.kernel == with_tiles(kernel) &&
           (has_all || row.size == TileSize::kSmall || row.size == TileSize::kLarge);
  };
  if (forced) {
    const TileRow* const row = find_tile(kernel, *forced);
    return row != nullptr && exists(*row) ? *forced : TileSize::kSmall;
  }
  if (!has_product_time(kernel) || kernel == Kernel::kSm90F32x3) {
    const bool counts_triangle = upper_only && kernel == Kernel::kSm90F64;
    return pick_tile(
        kernel,
        large_tile_pays(kernel, size.batch, size.m, size.n, multiprocessors, counts_triangle),
        std::nullopt);
  }
  TileSize best = TileSize::kSmall;
  double least = std::numeric_limits<double>::infinity();
  for (const TileRow& row : kTiles) {
    if (!exists(row)) continue;
    const double time = product_time(row, size, multiprocessors);
    if (time < least) best = row.size, least = time;
  }
  return best;
}

constexpr int kMostProductSegments = 32;

// The number of segments into which Hopper's product cuts the steps of each small tile, so that as
// many thread blocks share them: one, unless another takes clearly less time by these estimates.
// Segments round differently, so this follows from the size of the whole product and the device's
// number of multiprocessors alone: the same for its parts on devices of one model, and for a
// product of which only the upper triangle is asked for.
inline int choose_product_segments(Kernel kernel, const ProductSize& size, int multiprocessors,
                                   std::optional<int> forced = std::nullopt) {
  if (!claims_tiles(kernel)) return 1;
  const TileSize tile = choose_tile(kernel, size, multiprocessors);
  const TileRow &of_one = *find_tile(kernel, tile), &small = *find_tile(kernel, TileSize::kSmall);
  const bool is_double = kernel == Kernel::kSm90F64;
  if (forced || (is_double && tile != TileSize::kSmall)) {
    return tile == TileSize::kSmall ? *forced : 1;
  }
  // The steps of a segment, and of tiles that two or more share.
  constexpr int64_t kLeastSteps = 2, kLeastOfTwo = 8, kLeastOfMore = 12;
  const int parts = split_parts_of(kernel);
  // Operands are read from memory, by however many thread blocks.
  const double bytes = is_double ? 8 : parts == 2 ? 4 : 2;
  const double rate = is_double ? 2.6e6 : parts > 0 ? 4e6 : 1.9e6;
  const auto entries = static_cast<double>(size.k) *
                       static_cast<double>(size.batch_a * size.m + size.batch_b * size.n);
  const double least_possible = 6 + entries * bytes / rate;
  const int64_t steps = blocks_of(size.k, 64);
  double least = product_time(of_one, size, multiprocessors);
  const double clearly = (parts > 0 ? 0.95 : 0.85) * least;
  int best = 1;
  for (int segments = 2; segments <= kMostProductSegments; segments *= 2) {
    const double time = product_time(small, size, multiprocessors, false, segments);
    const bool meet = is_double && segments == 2;
    if (steps < std::max(segments * kLeastSteps, meet ? kLeastOfTwo : kLeastOfMore)) continue;
    if (time < least && (meet || std::max(time, least_possible) < clearly)) {
      least = time, best = segments;
    }
  }
  return best;
}

// Tells whether half of a symmetric product and a pass that mirrors it take clearly less time than
// the whole, by these estimates. The portable kernels know no half. `bytes`: of the result.
inline bool mirroring_pays(const TileRow& row, const ProductSize& size, int64_t bytes,
                           int multiprocessors, int segments = 1) {
  constexpr double kClearly = 0.95;
  const double mirror = 2.5 + static_cast<double>(bytes) / 3e6;
  return claims_tiles(row.kernel) &&
         product_time(row, size, multiprocessors, true, segments) + mirror <
             kClearly * product_time(row, size, multiprocessors, false, segments);
}

// Tells whether it pays to copy one operand of a half type where lines of both begin between the
// cache's sectors of 32 bytes, so that each 128 bytes take five. Measured: both cost a quarter of
// the time, one alone 1 to 7%. The norm pass writes the copy on the way, or, where there is none
// (`is_read`), reads the operand for it.
inline bool line_copy_pays(double product_us, int64_t bytes, bool is_read) {
  constexpr double kLoss = 0.18;  // the part of the product's time
  const double copied = 1 + static_cast<double>(bytes) * (is_read ? 2 : 1) / 3.3e6;
  return copied + (is_read ? 2 : 0) < kLoss * product_us;
}

// The way to compute a product. Found once a call.
struct Choice {
  Kernel kernel;
  TileSize tile;
  TileConfig config;       // of that tile
  int segments;            // of each tile
  int64_t meetings;        // of warps of two segments, of a whole product in tiles of segments
  int64_t alignment = 16;  // addresses and strides of operands are multiples of as many bytes
};

// Tells whether a product that skips nothing goes without norms. A norm pass sets the tile counter
// to zero on the way; a launch of its own does so in less time than norms take. Over many steps
// thread blocks keep pace only where tau is 0, with norms (list.cuh).
inline bool omits_norms(const Choice& choice, const ProductSize& size, int multiprocessors) {
  constexpr int64_t kMostSteps = 1 << 15, kMostOfTile = 383;
  const int64_t steps = blocks_of(size.k, 64);
  const int64_t tiles =
      size.batch * blocks_of(size.m, choice.config.rows) * blocks_of(size.n, choice.config.columns);
  return !claims_tiles(choice.kernel) || tiles <= multiprocessors ||
         (split_parts_of(choice.kernel) == 0 && steps <= kMostOfTile &&
          tiles / multiprocessors * steps <= kMostSteps);
}

// Facts of a chip, and of the environment, that choices depend on.
struct Chip {
  bool hopper;  // runs the Hopper kernels
  int multiprocessors;
  std::optional<TileSize> forced_tile = std::nullopt;
  std::optional<int> forced_segments = std::nullopt;
};

inline Choice choose_tiles(Kernel kernel, const ProductSize& size, const Chip& chip,
                           bool upper_only = false, bool has_all = true) {
  const TileSize tile =
      choose_tile(kernel, size, chip.multiprocessors, chip.forced_tile, upper_only, has_all);
  return {kernel, tile, find_tile(kernel, tile)->config, 1, 0};
}

// The turns of thread blocks that compute `tiles` of the portable kernels: how many steps' times
// pass for one step of each, in us. A step of 32 takes `alone`, or `shared` for each of several
// tiles on a multiprocessor, which has room for `together`. `turns`: how often each begins a tile.
struct PortableTurns {
  double turns, step;
};

inline PortableTurns portable_turns(Kernel kernel, int64_t tiles, int64_t together,
                                    int multiprocessors) {
  const auto [alone, shared] = [&]() -> std::pair<double, double> {
    switch (kernel) {
      case Kernel::kSm80F32:
        return {1.7, 1.13};
      case Kernel::kSm80F64:
        return {2.2, 1.39};
      case Kernel::kSm80Tf32:
        return {0.95, 0.5};
      default:
        return {0.7, 0.3};
    }
  }();
  const int64_t turns = tiles / (together * multiprocessors);
  const int64_t rest = blocks_of(tiles - turns * together * multiprocessors, multiprocessors);
  const double last = rest == 0 ? 0 : std::max(alone, shared * static_cast<double>(rest));
  return {static_cast<double>(turns + (rest != 0)),
          static_cast<double>(turns * together) * shared + last};
}

// The time of a float32 product by the portable kernels with nothing skipped, norms included, in
// us. They store C slowly. Measured on an H200.
inline double portable_time(Kernel kernel, const ProductSize& size, int multiprocessors,
                            int segments) {
  const TileConfig& tile = find_tile(kernel, TileSize::kSmall)->config;
  const int64_t tiles =
      size.batch * segments * blocks_of(size.m, tile.rows) * blocks_of(size.n, tile.columns);
  const auto [turns, step] =
      portable_turns(kernel, tiles, tile.blocks_per_multiprocessor, multiprocessors);
  const auto steps = static_cast<double>(blocks_of(blocks_of(size.k, 32), segments));
  const auto entries = static_cast<double>(size.batch * size.m * size.n);
  const double end = segments == 1 ? entries * 5e-6 : 2.5 + entries * segments * 8 / 3e6;
  const double read = static_cast<double>(size.batch_a * size.m * size.k) +
                      static_cast<double>(size.batch_b * size.k * size.n);
  return 3 + 3 * turns + steps * step + end + read * sizeof(float) / 2.8e6;
}

// The time of a product of short K with nothing skipped (multiply/sm80/short.cuh), norms included,
// in us: what a tile takes by itself, and for each further one of a multiprocessor. Measured on an
// H200.
inline double short_time(const ProductSize& size, int multiprocessors) {
  const TileConfig& tile = find_tile(Kernel::kSm80F32, TileSize::kNarrow)->config;
  const auto tiles = static_cast<double>(size.batch * blocks_of(size.m, tile.rows) *
                                         blocks_of(size.n, tile.columns));
  const auto depth = static_cast<double>(size.k);
  return 5.2 + 0.075 * depth + std::max(tiles / multiprocessors - 1, 0.0) * (0.6 + 0.025 * depth);
}

// The time to cut the operands of a float32 product into split parts, which are padded to blocks of
// 64 x 64, and to find the largest terms, in us.
inline double split_time(Kernel kernel, const ProductSize& size) {
  const auto bytes = [&](int64_t batch, int64_t rows, int64_t columns) {
    constexpr double kBlock = 64 * 64 * 2;  // of a half type
    return static_cast<double>(batch) *
           (4.0 * static_cast<double>(rows) * static_cast<double>(columns) +
            split_parts_of(kernel) * kBlock * static_cast<double>(blocks_of(rows, 64)) *
                static_cast<double>(blocks_of(columns, 64)));
  };
  return 7 + (bytes(size.batch_a, size.m, size.k) + bytes(size.batch_b, size.k, size.n)) / 3.3e6;
}

// `size`: of the whole product if this is part of one: kernels and tiles round float32 differently.
//
// Float32 takes the portable kernel, in segments if they pay, where that takes less time than to
// split the operands first: the product is small, or its K is short. With forced segments it does
// not. Float64 of short K goes by FMA where C is what takes the time.
inline Choice choose_product(c10::ScalarType dtype, const Block& block, bool allow_tf32,
                             const ProductSize& size, const Chip& chip, bool upper_only = false) {
  const bool hopper = chip.hopper && tensor_maps_take(size.m, size.n, size.k);
  const Kernel kernel = choose_kernel(dtype, block, allow_tf32, hopper);
  Choice found =
      choose_tiles(kernel, size, chip, upper_only, std::min({block.m, block.k, block.n}) >= 64);
  const auto take = [&](TileSize tile) {
    found.tile = tile, found.config = find_tile(kernel, tile)->config;
  };
  if (chip.forced_tile.value_or(TileSize::kSmall) == TileSize::kSmall) {
    found.segments =
        choose_product_segments(kernel, size, chip.multiprocessors, chip.forced_segments);
    if (found.segments > 1) take(TileSize::kSmall);
    if (kernel == Kernel::kSm90F64 && found.segments == 2) {
      found.meetings = size.batch * blocks_of(size.m, found.config.rows) *
                       blocks_of(size.n, found.config.columns) *
                       kernels::pieces_of_tile(found.config);
    }
  }
  // Lines off 16 bytes are read in place, which may cost a fifth of the product's time, unless the
  // operands are so small beside C that a copy takes less. The kernel has no batches of them.
  constexpr int64_t kMostOutputs = 600;  // for each line of an operand, measured
  if (kernel == Kernel::kSm90F64 && found.tile == TileSize::kSmall && size.batch == 1 &&
      size.k > 1 && size.m * size.n < kMostOutputs * (size.m + size.n)) {
    found.alignment = sizeof(double);
  }
  if (!hopper || chip.forced_tile || chip.forced_segments) return found;
  const auto take_portable = [&](Kernel portable, TileSize tile, int segments) {
    found = Choice{portable,
                   tile,
                   find_tile(portable, tile)->config,
                   segments,
                   /*meetings=*/0,
                   /*alignment=*/static_cast<int64_t>(c10::elementSize(dtype))};
  };
  const int64_t entries = size.batch * size.m * size.n;
  // Tensor cores have twice the rate, and store whole sectors of memory as fast.
  constexpr int64_t kShortOfDoubles = 40, kMostOfSectors = 1 << 22;
  if (dtype == c10::ScalarType::Double && size.k <= kShortOfDoubles &&
      (size.n % 4 != 0 || entries < kMostOfSectors)) {
    take_portable(Kernel::kSm80F64, TileSize::kNarrow, 1);
  }
  if (dtype != c10::ScalarType::Float) return found;
  const Kernel portable = choose_kernel(dtype, block, allow_tf32, /*hopper=*/false);
  // Costs that product_time() leaves out: a large C, and rows that begin between sectors.
  const bool is_counted = kernel == Kernel::kSm90F32x3 && found.tile == TileSize::kSmall;
  const double store =
      static_cast<double>(entries) * ((is_counted ? 0 : 0.7e-6) + (size.n % 8 == 0 ? 0 : 1.8e-6));
  double least = kernel == portable
                     ? portable_time(portable, size, chip.multiprocessors, 1)
                     : split_time(kernel, size) + store +
                           product_time(*find_tile(kernel, found.tile), size, chip.multiprocessors,
                                        /*upper_only=*/false, found.segments);
  for (int segments = 1; segments <= kMostProductSegments; segments *= 2) {
    const double time = portable_time(portable, size, chip.multiprocessors, segments);
    if (time < least) take_portable(portable, TileSize::kSmall, segments), least = time;
  }
  if (size.k <= kernels::kShortDepth && short_time(size, chip.multiprocessors) < least) {
    take_portable(Kernel::kSm80F32, TileSize::kNarrow, 1);
  }
  return found;
}

// The number of tile rows that a Hopper product computes together, so that they share columns of B
// in the L2 cache. Measured: with at most 16 tile columns, 8 rows are about one tile for each
// multiprocessor and 6% faster. With more columns, 16 rows are up to 1% faster.
inline int group_rows(int64_t tile_columns) { return tile_columns <= 16 ? 8 : 16; }

// ---- Convolutions -------------------------------------------------------------------------------

// With at most this many output channels, half of a tile of 128 channels is empty.
constexpr int64_t kNarrowOutput = 64;

// The tile of the portable convolution. Pixels and output channels are those of one group.
inline TileSize choose_conv_tile_sm80(Kernel kernel, int64_t groups, int64_t pixels,
                                      int64_t out_channels, int multiprocessors,
                                      std::optional<TileSize> forced = std::nullopt) {
  const bool pays = out_channels > kNarrowOutput &&
                    large_tile_pays(kernel, groups, pixels, out_channels, multiprocessors,
                                    /*upper_only=*/false, kConvTiles);
  return pick_tile(kernel, pays, forced, kConvTiles);
}

// The tile of the Hopper convolution. `boxes`: boxes of 64 output pixels. Large tiles pay if they
// make more waves than the table says; below that, small tiles fill more of the chip, and skip
// more. With nothing skipped only waves tell. Few output channels take the narrow tile.
inline TileSize choose_conv_tile_sm90(Kernel kernel, int64_t out_channels, int64_t boxes,
                                      int multiprocessors, bool skips_nothing,
                                      std::optional<TileSize> forced = std::nullopt) {
  if (out_channels <= kNarrowOutput &&
      find_tile(kernel, TileSize::kNarrow, kConvTiles) != nullptr) {
    return TileSize::kNarrow;
  }
  const auto* small = find_tile(kernel, TileSize::kSmall, kConvTiles);
  const auto* large = find_tile(kernel, TileSize::kLarge, kConvTiles);
  if (large == nullptr) return TileSize::kSmall;
  const auto tiles = [&](const TileConfig& tile) {
    return blocks_of(out_channels, tile.rows) * blocks_of(boxes, tile.columns / 64);
  };
  const auto waves = [&](const TileRow& row) {
    return static_cast<double>(blocks_of(tiles(row.config), multiprocessors));
  };
  constexpr double kLargeOverSmall = 1.85;  // the time of a tile, measured: 1.7 to 1.85
  const bool pays =
      static_cast<double>(tiles(large->config)) > large->pays_from * multiprocessors ||
      (skips_nothing && kLargeOverSmall * waves(*large) <= waves(*small));
  return pick_tile(kernel, pays, forced, kConvTiles);
}

// The same where each pixel of a box is judged by itself, in tiles of one row of 64 channels: where
// pixels are cleared for one row, another needs a step of its own. Medium ones spread few pixels
// over more multiprocessors; narrow ones load fewer bytes for each product.
inline TileSize choose_by_pixel_tile(int64_t out_channels, int64_t boxes, int multiprocessors) {
  constexpr int64_t kBoxesOfMedium = 2;
  const int64_t tiles = blocks_of(boxes, kBoxesOfMedium) * blocks_of(out_channels, kNarrowOutput);
  return tiles > multiprocessors ? TileSize::kNarrow : TileSize::kMedium;
}

// Clusters of 8 never won: 16 of them do not find room on an H200 at once.
constexpr int kMostSegments = 4;

// The number of segments into which Hopper's kernel of boxes cuts the steps of each tile, so that
// as many thread blocks share them: the largest power of two with which about all run at once and
// have enough steps each to be worth the exchange of sums. Segments round differently, so
// their number follows from the sizes of the convolution alone, not from boxes and tiles: the same
// with output norms and without. `pixels`: of the whole batch.
inline int choose_conv_segments(int64_t out_channels, int64_t pixels, int64_t steps,
                                int multiprocessors, std::optional<int> forced = std::nullopt) {
  constexpr int64_t kEdge = 128, kLeastSteps = 8;  // of a small tile, and of a segment
  if (out_channels <= kNarrowOutput) return 1;     // narrow tiles have no segments
  if (forced) return std::min(*forced, kMostSegments);
  const int64_t tiles = blocks_of(out_channels, kEdge) * blocks_of(pixels, kEdge);
  int segments = 1;
  while (2 * segments <= kMostSegments && 2 * segments * tiles <= multiprocessors &&
         2 * segments * kLeastSteps <= steps) {
    segments *= 2;
  }
  return segments;
}

// A tile of Hopper's convolution where nothing is skipped, and what the two thread blocks of a
// cluster share: the weights of two pixel tiles, or the pixels of two channel tiles.
struct UnskippedChoice {
  UnskippedTile tile;
  bool shares_weights;
};

// The one with the least time by a model of waves: every cluster computes as many pairs of tiles,
// a step takes as long as its products or its loads, and few stages hide less of their latency.
// The constants are fitted to the times of all tiles in ResNet-50's layers. No choice changes a bit
// of the result. `bytes`: of an entry. `steps`: 128 bytes deep. `pixels`: of the output.
inline UnskippedChoice choose_unskipped_tile(int bytes, int64_t out_channels, int64_t pixels,
                                             int64_t steps, int multiprocessors) {
  constexpr double kProducts = 2048 / 64;  // channels x pixels of a step in a cycle
  constexpr double kLoaded = 51;           // bytes a cycle from the L2 cache
  constexpr double kLine = 128;            // bytes of a step's channel or pixel
  constexpr double kOverlap = 0.44;        // the part of the shorter one that is not hidden
  constexpr double kLatency = 2.4;         // of a step's time, divided among the stages
  // The end of a tile, in cycles: latencies, and what a warpgroup does for each pixel.
  constexpr double kEnd = 530, kEndOfPixel = 13;
  UnskippedChoice best{};
  double least = std::numeric_limits<double>::infinity();
  for (const UnskippedTile& tile : kUnskippedTiles) {
    if (!tile.exists(bytes)) continue;
    for (const bool shares_weights : {true, false}) {
      const int64_t pairs = blocks_of(out_channels, tile.channels * (shares_weights ? 1 : 2)) *
                            blocks_of(pixels, tile.pixels * (shares_weights ? 2 : 1));
      const auto waves = static_cast<double>(blocks_of(pairs, std::max(multiprocessors / 2, 1)));
      const double channels = tile.channels, columns = tile.pixels;
      const double loaded = shares_weights ? channels / 2 + columns : channels + columns / 2;
      const double products = channels * columns / kProducts, loads = loaded * kLine / kLoaded;
      const double step = std::max(products, loads) + kOverlap * std::min(products, loads);
      const double time =
          waves * (static_cast<double>(steps) * step * (1 + kLatency / tile.stages(bytes)) + kEnd +
                   kEndOfPixel * bytes / 2 * tile.width());
      if (time < least) {
        least = time;
        best = {tile, shares_weights};
      }
    }
  }
  return best;
}

// Tells whether that kernel pays, where nothing is skipped. It does but where the kernel of boxes
// cuts the steps of few tiles into segments, or leaves out much. `padding_left_out()`, called last:
// the share of products that meet nothing but padding, and zero where they are not left out.
template <class Padding>
bool unskipped_conv_pays(int64_t out_channels, int64_t pixels, int64_t steps, int multiprocessors,
                         std::optional<int> forced, const Padding& padding_left_out) {
  constexpr double kMostPadding = 0.2;
  return choose_conv_segments(out_channels, pixels, steps, multiprocessors, forced) == 1 &&
         padding_left_out() <= kMostPadding;
}

// A convolution of Hopper's kernel of boxes.
struct ConvWork {
  Kernel kernel;
  int64_t out_channels;
  int64_t pixels;     // of the whole batch's output
  int64_t steps;      // 64 deep
  int64_t boxes;      // of 64 output pixels
  bool by_pixel;      // each pixel of a box is judged by itself
  bool has_segments;  // it may have several
  bool skips_nothing;
  bool computes_norms;
};

struct ConvChoice {
  TileSize tile;
  int segments;
  bool claims_tiles;
};

inline ConvChoice choose_conv_sm90(const ConvWork& work, int multiprocessors,
                                   std::optional<TileSize> forced_tile,
                                   std::optional<int> forced_segments) {
  ConvChoice found{};
  found.segments = !work.has_segments
                       ? 1
                       : choose_conv_segments(work.out_channels, work.pixels, work.steps,
                                              multiprocessors, forced_segments);
  const bool is_one = found.segments == 1;
  found.tile = !work.by_pixel ? choose_conv_tile_sm90(work.kernel, work.out_channels, work.boxes,
                                                      multiprocessors, work.skips_nothing && is_one,
                                                      forced_tile)
               : is_one       ? choose_by_pixel_tile(work.out_channels, work.boxes, multiprocessors)
                              : TileSize::kMedium;
  // Tiles are claimed from a counter, which the launch that computes norms also sets to zero. If
  // all norms are precomputed, it costs a launch of its own, which pays only for large tiles.
  found.claims_tiles =
      !work.skips_nothing && (work.computes_norms || found.tile == TileSize::kLarge);
  return found;
}

// Tells whether Hopper's convolution of float32 at full accuracy pays. Split parts are stored in
// blocks of 64 images x 64 channels; with fewer than 32 channels, most of a block is padding.
inline bool split_conv_pays(int64_t in_channels) { return in_channels >= 32; }

// A convolution where nothing is skipped, by the sizes of the whole batch.
struct UnskippedConv {
  int64_t images, in_channels, out_channels, positions;  // positions: of the kernel
  int64_t in_pixels, out_pixels;                         // of an image
};

// Estimates of the time of one of float32 at full accuracy on Hopper, in us: by split parts of 64
// images x 64 channels of each pixel, by an im2col matrix, and by cuDNN. Launches, bytes and
// products; rates are those measured on an H200. cuDNN's is that of float32's own units, but for
// large layers of many channels, where it has fewer products to compute.
struct UnskippedConvTimes {
  double split, matrix, cudnn;
};

inline UnskippedConvTimes unskipped_f32_times(const UnskippedConv& x) {
  const auto whole = [](int64_t size) { return blocks_of(size, 64) * 64; };
  const auto product = [](auto... sizes) { return (1.0 * ... * static_cast<double>(sizes)); };
  const auto flops = [&](int64_t images, int64_t in, int64_t out) {
    return 2 * product(images, x.out_pixels, x.positions, in, out);
  };
  const int64_t images = whole(x.images), in = whole(x.in_channels), out = whole(x.out_channels);
  const double own = flops(x.images, x.in_channels, x.out_channels);
  const double split_bytes =
      4 * product(images, x.in_pixels, in) + 4 * product(x.images, x.in_pixels, x.in_channels);
  // Written and read as float32, then as split parts.
  const double matrix_bytes = 16 * product(x.images, x.out_pixels, x.positions, in);
  const bool transforms =
      x.positions == 9 && x.in_channels >= 512 && x.images * x.out_pixels >= 1 << 14;
  return {.split = 6 + split_bytes / 3.5e6 + flops(images, in, out) / 180e6,
          .matrix = 20 + matrix_bytes / 3e6 + flops(x.images, in, out) / 150e6,
          .cudnn = 4 + own / (transforms ? 110e6 : 50e6)};
}

// The same of float64, by the portable kernel's tiles of 64 x 64. cuDNN's have 128 output channels,
// but for 1 x 1, and it takes contiguous images, which are brought from and to channels last.
inline bool own_f64_conv_pays(const UnskippedConv& x) {
  const auto whole = [](int64_t size, int64_t unit) { return blocks_of(size, unit) * unit; };
  const auto flops = [&](int64_t in, int64_t out) {
    return 2.0 * static_cast<double>(x.images * x.out_pixels * x.positions * in * out);
  };
  const auto bytes =
      8.0 *
      static_cast<double>(x.images * (x.in_pixels * x.in_channels + x.out_pixels * x.out_channels));
  const double own =
      flops(whole(x.in_channels, x.in_channels <= 32 ? 32 : 64), whole(x.out_channels, 64)) / 17e6;
  const double cudnn = x.positions == 1 ? flops(x.in_channels, x.out_channels) / 33e6
                                        : flops(x.in_channels, whole(x.out_channels, 128)) / 15e6;
  return own < cudnn + bytes / 1e6;
}

// The same of half types and TF32 on Hopper, which read channels in units of 16 bytes, or few in
// half types. Ours multiplies the padding of tiles of 64 output channels and steps of 128 bytes,
// cuDNN less of it, but it takes longer to start. In TF32 ours has no segments for few tiles.
// `bytes`: of an entry. Fitted to an H200.
inline bool own_tensor_core_conv_pays(int64_t bytes, const UnskippedConv& x, int multiprocessors) {
  const bool is_tf32 = bytes == 4;
  const int64_t unit = 16 / bytes, depth = 128 / bytes, pixels = x.images * x.out_pixels;
  if (x.out_channels % unit != 0) return false;
  if (x.in_channels < unit && !is_tf32) return true;
  const int64_t steps = x.positions * blocks_of(x.in_channels, 64);
  if (x.in_channels % unit != 0 ||
      (is_tf32 && choose_conv_segments(x.out_channels, pixels, steps, multiprocessors) > 1)) {
    return false;
  }
  const auto products = [&](int64_t in, int64_t out) {  // as many of half types
    return static_cast<double>(pixels * x.positions * in * out * (is_tf32 ? 2 : 1));
  };
  const int64_t in = blocks_of(x.in_channels, depth) * depth;
  const double own = 2.3 + products(in, blocks_of(x.out_channels, 64) * 64) / 183e6;
  return own < 7.6 + products(x.in_channels, x.out_channels) / 125e6;
}

// Tells whether our convolution is faster than cuDNN's where nothing is skipped.
inline bool own_unskipped_conv_pays(c10::ScalarType dtype, bool allow_tf32, bool hopper,
                                    int multiprocessors, const UnskippedConv& x) {
  if (dtype == c10::ScalarType::Double) return own_f64_conv_pays(x);
  if (!hopper) return false;
  if (dtype != c10::ScalarType::Float || allow_tf32) {
    return own_tensor_core_conv_pays(dtype == c10::ScalarType::Float ? 4 : 2, x, multiprocessors);
  }
  constexpr double kMargin = 1.1;
  const UnskippedConvTimes times = unskipped_f32_times(x);
  return split_conv_pays(x.in_channels) &&
         kMargin * std::min(times.split, times.matrix) < times.cudnn;
}

// A convolution that may skip. Pixels are an output image's, channels those of a group.
struct HeldConv {
  int64_t images, pixels, pixels_of_blocks;  // all those for which blocks have room
  int64_t in_pixels, positions;
  int64_t groups, in_channels, out_channels;
  int64_t block_m, block_k;
};

struct PackedChoice {
  TileSize tile;
  double time;  // of the product, in us
};

// The packed tile of least time where nothing is skipped (conv/sm80/packed.cuh). A step takes
// longer in narrow tiles, and where slices share a tile. More images than a quarter of 64 have no
// slices: they take the bits of whole batches. Measured on an H200.
inline PackedChoice choose_packed_tile(Kernel kernel, const HeldConv& x, int multiprocessors,
                                       std::optional<TileSize> forced = std::nullopt) {
  constexpr int64_t kMostSliced = 16;
  constexpr double kTurn = 4;  // launch or next tile, the first norms and loads, the end
  PackedChoice best{TileSize::kNarrow, std::numeric_limits<double>::infinity()};
  for (const TileSize size : {TileSize::kSmall, TileSize::kNarrow, TileSize::kMedium}) {
    const TileRow* const row = find_tile(kernel, size, kConvTiles);
    const bool is_sliced = size == TileSize::kMedium;
    if (row == nullptr || row->config.columns > x.block_m ||
        (is_sliced && x.images > kMostSliced)) {
      continue;
    }
    const TileConfig& tile = row->config;
    const int64_t tiles = x.groups * blocks_of(x.images * x.pixels, tile.rows) *
                          blocks_of(x.out_channels, tile.columns);
    const int64_t steps = x.positions * blocks_of(x.in_channels, x.block_k) * x.block_k / 32;
    const int64_t together = std::max(kernels::kPackedBlocks, tile.blocks_per_multiprocessor);
    const auto [turns, step] = portable_turns(kernel, tiles, together, multiprocessors);
    const double longer = is_sliced ? 1.35 : size == TileSize::kNarrow ? 1.15 : 1;
    const auto rounds =
        static_cast<double>(is_sliced ? blocks_of(steps, kernels::kPackedSlices) : steps);
    const double time = kTurn * turns + longer * rounds * step;
    if (time < best.time || forced == size) best = {size, time};
    if (forced == size) break;
  }
  return best;
}

// The time of the kernel that computes existing entries alone (conv/sm80/thin.cuh), norms included,
// in us. Both walk along their entries, each of which waits for memory; or products decide.
inline double thin_conv_time(c10::ScalarType dtype, const HeldConv& x) {
  const bool is_double = dtype == c10::ScalarType::Double, is_float = dtype == at::kFloat;
  // Products a us. Windows of many channels do not stay in the caches.
  const double rate = is_double ? 3e6 : x.in_channels > 32 ? 3.5e6 : is_float ? 10e6 : 8e6;
  const int64_t of_norm = std::min<int64_t>(x.images, 64) * std::min(x.in_channels, x.block_k);
  const int64_t of_output = x.in_channels * x.positions;
  const auto outputs = static_cast<double>(x.images * x.pixels * x.groups * x.out_channels);
  return 4 + 0.02 * static_cast<double>(of_norm) +
         static_cast<double>(of_output) * std::max(0.07, outputs / rate);
}

// The same of Hopper's split parts in tiles of 128 output channels and two pixels of 64 images.
inline double split_conv_time(const HeldConv& x, int multiprocessors) {
  const auto product = [](auto... sizes) { return (1.0 * ... * static_cast<double>(sizes)); };
  const auto turns = [&](int64_t pixels) {
    const int64_t tiles = blocks_of(x.out_channels, 128) * blocks_of(x.pixels_of_blocks, pixels);
    const int64_t whole = blocks_of(tiles, multiprocessors);
    return whole <= 2 ? static_cast<double>(whole) : product(tiles) / multiprocessors;
  };
  const int64_t in = blocks_of(x.in_channels, 64);
  const double bytes = product(256, x.pixels_of_blocks / x.pixels, x.in_pixels, in) +
                       product(512, x.positions, in, x.out_channels);
  const double steps = product(x.positions, in), all = turns(128);
  return 3.5 + bytes / 2.9e6 + all * (2 + steps) + 0.3 * std::min(all, 2.0) * steps;
}

// Sets the tile of a convolution of groups of one channel, or of few, that takes least time, in
// cycles of a multiprocessor. Images of a thread share the work of tests, but threads must abound.
template <class Norm>
void choose_depthwise(kernels::DepthwiseParams<Norm>& p, int64_t element_bytes, int64_t most_bytes,
                      int multiprocessors) {
  const auto parts = [](int64_t length, int64_t part) {
    return static_cast<int>(blocks_of(length, part));
  };
  const kernels::Im2colMatrix& m = p.conv.pixels;
  const int images = m.images_of(0), lanes = element_bytes == 2 ? 8 : 4, width = 1 << p.log2_width;
  p.log2_images = p.log2_slots = std::bit_width(static_cast<uint32_t>(images - 1));
  p.record = static_cast<int>(kernels::depthwise_record(element_bytes, width, images));
  p.sectors = parts(p.channels * element_bytes, kernels::kSectorBytes);
  const int64_t groups = int64_t{p.sectors} * m.image_blocks;
  const int64_t threads = groups * lanes * m.output.rows * m.output.columns;
  int64_t together = 1;  // images of a thread
  for (; p.log2_slots > 0 && together < 8; --p.log2_slots, together *= 2) {
    if (together > 1 && threads << (p.log2_slots - 1) < int64_t{256} * multiprocessors) break;
  }
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int place = 0; place < 36; ++place) {
    const int down = parts(m.output.rows, 1 << place % 6);
    const int across = parts(m.output.columns, 1 << place / 6);
    const kernels::Size2 tile = {parts(m.output.rows, down), parts(m.output.columns, across)};
    const kernels::Size2 area = {
        (tile.rows - 1) * m.stride.rows + 1 +
            (m.positions / m.kernel_columns - 1) * m.dilation.rows,
        (tile.columns - 1) * m.stride.columns + 1 + (m.kernel_columns - 1) * m.dilation.columns};
    const int64_t pixels = int64_t{area.rows} * area.columns, blocks = int64_t{down} * across;
    const int64_t bytes =
        kernels::depthwise_bytes(element_bytes, width, images, m.positions, pixels);
    if (bytes > most_bytes) continue;
    const int64_t rounds = blocks_of(blocks * groups, multiprocessors);
    const int64_t held = std::clamp<int64_t>(most_bytes / bytes, 1, 4);
    const int64_t turns = blocks_of(rounds, held), tenths = held == 1 ? 16 : held == 2 ? 12 : 10;
    // A warp has 16 rows of groups of several channels, of all images.
    const int64_t items = width > 1
                              ? blocks_of(tile.rows * tile.columns << p.log2_images, 8 * 16)
                              : blocks_of((tile.rows * tile.columns << p.log2_slots) * lanes, 256);
    const int64_t of_position = width == 1 ? 12 + 5 * together : p.log2_images >= 5 ? 15 : 45;
    const int64_t work =
        rounds * (pixels * (5 * images / 2 + 10) + 8 * items * (60 + m.positions * of_position));
    // 2.5 instructions a cycle, but less of one or two thread blocks; latencies, also of fragments;
    // and sectors from memory, half of them not hidden.
    const int64_t time = work * tenths / 25 + turns * (width == 1 ? 2000 : 5000) +
                         (rounds + turns) * pixels * images / 2;
    if (time >= least) continue;
    least = time, p.tile = tile, p.area = area, p.bytes = static_cast<int>(bytes);
    p.blocks = static_cast<uint32_t>(blocks * p.sectors), p.by_tiles = kernels::Divisor(across);
  }
  p.by_sectors = kernels::Divisor(p.sectors);
  p.by_area = kernels::Divisor(p.area.columns), p.by_tile = kernels::Divisor(p.tile.columns);
}

// The kernels of a convolution under a held tau, if not those that fill blocks and tiles up.
enum class HeldWay { kFilled, kThin, kPacked, kDepthwise };

// The way of least time. `packs`: rows can be packed; the portable kernel then does so by itself.
// Tensor cores round what they multiply in TF32, so there the number of images does not choose
// thin, but few channels of one group do; and Hopper's kernel of half types and TF32 takes pixels
// one by one. `hopper`: the chip's kernels take it; absent on other chips.
inline HeldWay choose_held_conv(c10::ScalarType dtype, bool allow_tf32, std::optional<bool> hopper,
                                bool packs, const HeldConv& x, int multiprocessors) {
  const bool is_half = at::isReducedFloatingType(dtype);
  const bool is_tf32 = dtype == c10::ScalarType::Float && allow_tf32;
  const Kernel kernel =
      choose_kernel(dtype, {x.block_m, x.block_k, 64}, allow_tf32, /*hopper=*/false);
  const bool is_boxed = (is_half || is_tf32) && hopper.value_or(false);
  const bool is_few = x.groups == 1 && x.in_channels < 8, has_few_images = packs;
  packs = packs && !is_boxed;
  HeldConv rows = x;  // of tiles
  if (!packs) rows.images = 64, rows.pixels = blocks_of(x.pixels_of_blocks, 64);
  const double norms =
      3.5 + 4e-6 * static_cast<double>(x.images * x.in_pixels * x.in_channels * x.groups) / 2.5;
  const double packed = norms + choose_packed_tile(kernel, rows, multiprocessors).time;
  const bool may_be_thin = x.groups > 1 || (is_half ? is_few && has_few_images : !is_tf32);
  if ((is_tf32 && is_few) || (may_be_thin && thin_conv_time(dtype, x) < packed)) {
    return HeldWay::kThin;
  }
  const bool pays = hopper && dtype == c10::ScalarType::Float &&
                    (!*hopper || packed < split_conv_time(x, multiprocessors));
  return packs && pays ? HeldWay::kPacked : HeldWay::kFilled;
}

// Tells whether an explicit im2col matrix pays. `kernel` would multiply it. Only three products of
// split parts are so much faster, in blocks of 64 and more, and not if most of the matrix is
// padding of few channels to blocks.
inline bool im2col_matrix_pays(Kernel kernel, const Block& block, int64_t group_in_channels) {
  return kernel == Kernel::kSm90F32x3 && std::min({block.m, block.k, block.n}) >= 64 &&
         group_in_channels >= 32;
}

}  // namespace spamm::cuda
