// The product of split parts where B is read once: its norms, its split parts and the product come
// from one pass. It serves few rows of A, such as the weights of a convolution beside its im2col
// matrix: then a strip of B's columns belongs to one tile of C, or to a few.
//
// Eight warps take the place of the load and list warps. They measure and cut B's granules as
// norm_map/split_granules.cuh does, from float32 stages that TMA fills, into the stages of
// multiply.cuh, and decide which products are valid. So all bits are those of the other way. A has
// been split before.
//
// Which products need the largest terms (largest_terms.cuh) is known only when all of a strip has
// been seen. Few tiles have any. So a tile is computed as if it had none; if that was wrong, it is
// computed once more, with its terms.
#pragma once

#include "kernels/multiply/sm90/multiply.cuh"
#include "kernels/multiply/sm90/split/multiply.cuh"
#include "kernels/norm_map/split_granules.cuh"

namespace spamm::kernels::multiply::sm90 {

struct OnePassProduct : SplitProduct {
  CUtensorMap map_b;             // of the float32 matrix
  NormMapParams<float> b_in_32;  // the same in blocks of 32 x 32; without norms if they are given
};

constexpr int kTeamThreads = 128, kTeams = 2;
constexpr int kFloatStages = 3;

// Tiles are two blocks wide: each granule of a step then has kGranuleThreads threads of a team.
struct OnePassConfig : SplitConfig<2, 32, 2, 2, 2, kTeams> {
  using Base = SplitConfig<2, 32, 2, 2, 2, kTeams>;
  static constexpr int kListCapacity = 1;  // there are no lists
  static constexpr int kThreads = kTeams * kTeamThreads + 128 * Base::kWarpgroups;
  // The teams need registers. So each half of a step is promoted before the next is multiplied.
  static constexpr bool kHalvesInTurn = true, kTakesTurns = false;
  static constexpr int kMultiplyRegisters = 160, kOtherRegisters = 96;
  static constexpr int kStepColumns = 4, kStepGranules = 2 * kStepColumns;
  // The messages between the threads of a team. They lie where the team's stage would have padding.
  struct Measured {
    alignas(16) uint16_t below[kStepGranules][kGranuleEdge];  // as in SplitProfile
    float norms[kStepGranules];
    int exponents[kStepGranules];
  };
  // The messages between the teams. A float32 stage has a barrier for each team: loads arrive in
  // any order, and a team that waits for every other phase takes a late one for the one after next.
  struct Shared {
    alignas(8) Barrier full[kTeams * kFloatStages];
    int kinds_a[kOnePassRows], terms[2 * kRows * kStepColumns];
    uint32_t kinds_b[kOnePassTiles / 4];
  };
  struct Stage {
    OperandBlock a[2][kRows], b[2][2];
    typename Base::Header a_header[kRows], b_header[2];
    Measured measured;
    Shared shared;  // of the first stage
  };
  struct Output {
    union {
      OperandBlock floats[kFloatStages][kStepColumns];  // two granules each
      NothingLater::Room later[kThreads / 32];
    };
  };
  static_assert(kStepGranules * kGranuleThreads == kTeamThreads);
  static_assert(kMaskBits == 16 * kRows);
};

// Two teams of four warps fill the stages, each every other one. All threads of both teams call
// everything together.
template <class Config>
class Producers {
  static constexpr int kRowGranules = 2 * Config::kRows;
  static constexpr int kSharers = kTeamThreads / (kRowGranules * Config::kStepGranules);
  static constexpr int kNoTerm = -0x8000;
  // Threads of different warps of a team share what one thread does.
  static constexpr int kFetchesFloats = 0, kFetchesA = 32, kWritesNotice = 64;

 public:
  __device__ Producers(const OnePassProduct& p, Storage<Config>& storage)
      : p_(p),
        storage_(storage),
        shared_(storage.stages[0].shared),
        steps_(p.a.split.depth),
        team_(threadIdx.x / kTeamThreads),
        thread_(threadIdx.x % kTeamThreads),
        column_(thread_ / kGranuleThreads / 2),
        half_(thread_ / kGranuleThreads % 2),
        member_(thread_ % kGranuleThreads),
        measured_(storage.stages[team_].measured) {}

  // One thread calls it before the first barrier.
  __device__ static void set_up(typename Config::Shared& shared) {
    for (Barrier& full : shared.full) full.init(1);
    for (int& kinds : shared.kinds_a) kinds = 0;
    for (uint32_t& kinds : shared.kinds_b) kinds = 0;
    for (int& term : shared.terms) term = kNoTerm;
  }

  __device__ void run() {
    const int own = (p_.tiles - 1 - static_cast<int>(blockIdx.x)) / static_cast<int>(gridDim.x) + 1;
    const uint64_t tiles = ~uint64_t{0} >> (kOnePassTiles - own);
    wait_for_previous_kernel();
    begin(tiles);
    for (int i = team_; i < own; i += kTeams) write_term(tile(i), kNoTerms);
    meet_all();
    compute<false>(tiles);
    find_kinds_a();
    meet_all();
    uint64_t again = 0;
    for (int i = 0; i < own; ++i) again |= static_cast<uint64_t>(asks_terms(i)) << i;
    if (again != 0) {
      begin(again);
      compute<true>(again);
      meet_all();
      begin(again);
      compute<false>(again);
    }
    if (is_own(number_)) {
      wait_for_stage();
      if (thread_ == 0) storage_.ring.notices[team_] = Notice<Config>::end_of_work();
      storage_.ring.full[team_].arrive();
    }
  }

 private:
  __device__ void meet() const {
    asm volatile("bar.sync %0, %1;" ::"r"(3 + team_), "n"(kTeamThreads) : "memory");
  }
  __device__ static void meet_all() {
    asm volatile("bar.sync 5, %0;" ::"n"(kTeams * kTeamThreads) : "memory");
  }
  __device__ bool is_own(int step) const { return step % kTeams == team_; }

  // The thread block's tile `number`. Those of a strip follow each other.
  __device__ Tile tile(int number) const {
    number = number * gridDim.x + blockIdx.x;
    return {0, number % p_.tile_rows * Config::kRows, number / p_.tile_rows * Config::kColumns};
  }

  // Fetches the first float32 stages of these tiles. All of them are free.
  __device__ void begin(uint64_t tiles) {
    tiles_ahead_ = tiles, step_ahead_ = 0;
    for (int i = 0; i < kFloatStages; ++i) {
      if (team_ == 0) fetch_floats(taken_ + i);
      go_ahead(1);
    }
    if (!is_own(number_)) go_ahead(1);  // a team refills the stages that it has emptied
  }

  __device__ void go_ahead(int steps) {
    step_ahead_ += steps;
    while (step_ahead_ >= steps_ && tiles_ahead_ != 0) {
      tiles_ahead_ &= tiles_ahead_ - 1;
      step_ahead_ -= steps_;
    }
  }

  __device__ void fetch_floats(int number) {
    if (thread_ != kFetchesFloats || tiles_ahead_ == 0) return;
    if (tiles_ahead_ != tiles_of_column_) {
      tiles_of_column_ = tiles_ahead_;
      column_ahead_ = tile(__ffsll(tiles_ahead_) - 1).column * kBlock;
    }
    auto& floats = storage_.output.floats[number % kFloatStages];
    full_of(number).arrive_and_expect_tx(sizeof(floats));
#pragma unroll
    for (int i = 0; i < Config::kStepColumns; ++i) {
      load_block<Major::MN>(p_.map_b, column_ahead_ + i * kGranuleEdge, step_ahead_ * kBlock, 0,
                            full_of(number), floats[i]);
    }
  }

  __device__ Barrier& full_of(int number) const {
    return shared_.full[number % (kTeams * kFloatStages)];
  }

  __device__ void wait_for_stage() { storage_.ring.empty[team_].wait(number_ / kTeams % 2 ^ 1); }

  // Computes the tiles whose bits are set, or with kFindsTerms only their largest terms. The teams
  // take the steps in turns.
  template <bool kFindsTerms>
  __device__ void compute(uint64_t tiles) {
    int turn = number_;
    for (; tiles != 0; tiles &= tiles - 1) {
      const int number = __ffsll(tiles) - 1;
      const Tile tile = this->tile(number);
      int largest = kNoTerm, kinds = 0;
#pragma unroll 1
      for (int step = 0; step < steps_; ++step, ++turn, ++taken_) {
        if (is_own(turn)) compute_step<kFindsTerms>(tile, step, kinds, largest);
        if constexpr (!kFindsTerms) ++number_;
      }
      if (member_ == 0 && (kinds & (kSplitFaint | kSplitWide)) != 0) add_kinds_b(number, kinds);
      if constexpr (kFindsTerms) store_terms(tile, largest);
    }
  }

  // A product of granules in a step, and kSharers threads that share it.
  __device__ int term_column() const { return thread_ / (2 * kSharers) % Config::kStepColumns; }
  __device__ int term_row() const { return thread_ / (2 * kSharers * Config::kStepColumns); }
  __device__ int term_half() const { return thread_ / kSharers % 2; }

  __device__ void write_term(const Tile& tile, int term) {
    const int row = tile.row * 2 + term_row(), column = tile.column * 2 + term_column();
    if (thread_ % (2 * kSharers) != 0) return;
    if (row >= p_.a.split.extent * 2 || column >= p_.b.split.extent * 2) return;
    const_cast<int16_t*>(p_.terms)[int64_t{row} * p_.b.split.extent * 2 + column] =
        static_cast<int16_t>(term);
  }

  // Writes the largest of what the teams have found for a tile.
  __device__ void store_terms(const Tile& tile, int largest) {
    int& term = shared_.terms[term_row() * Config::kStepColumns + term_column()];
    atomicMax(&term, largest);
    meet_all();
    if (team_ == 0) {
      const int least = least_term(p_.product.tau.value(), Config::kTermsOverTau);
      write_term(tile, term == kNoTerm ? kNoTerms : max(term, least));
      __syncwarp();
      term = kNoTerm;
    }
    meet_all();
  }

  __device__ int64_t block_of_a(int row, int step) const {
    return int64_t{min(row, p_.a.split.extent - 1)} * steps_ + step;
  }

  // The flags of all granules of A in each row of tiles.
  __device__ void find_kinds_a() {
    for (int row = 0; row < p_.tile_rows; ++row) {
      int kinds = 0;
      for (int i = threadIdx.x; i < Config::kRows * steps_; i += kTeams * kTeamThreads) {
        const int64_t block = block_of_a(row * Config::kRows + i / steps_, i % steps_);
#pragma unroll
        for (const uint8_t flags : p_.a.split.header<2>(block).flags) kinds |= flags;
      }
      if (kinds != 0) atomicOr(&shared_.kinds_a[row], kinds);
    }
  }

  // Four tiles share a word.
  __device__ void add_kinds_b(int number, int kinds) {
    atomicOr(&shared_.kinds_b[number / 4], static_cast<uint32_t>(kinds) << number % 4 * 8);
  }

  // Tells whether products of this tile ask for their largest terms.
  __device__ bool asks_terms(int number) const {
    const int a = shared_.kinds_a[tile(number).row / Config::kRows];
    const int b = static_cast<int>(shared_.kinds_b[number / 4] >> number % 4 * 8);
    return ((a & kSplitFaint) != 0 && (b & kSplitWide) != 0) ||
           ((b & kSplitFaint) != 0 && (a & kSplitWide) != 0);
  }

  // This thread's bit of the step's mask: see Mask. `norm_a` is load_norm_a()'s.
  __device__ int mask_row() const {
    const int bit = threadIdx.x % 32;
    return bit / 8 / Config::kColumns * 2 + bit % 2;
  }
  __device__ int mask_column() const {
    const int bit = threadIdx.x % 32;
    return bit / 8 % Config::kColumns * 2 + bit / 2 % 2;
  }
  __device__ int mask_half() const { return threadIdx.x % 8 / 4; }

  __device__ float load_norm_a(const Tile& tile, int step) const {
    const auto& product = p_.product;
    const int rows = ((product.m - 1) >> product.log2_block_m) + 1;
    const int depth = ((product.k - 1) >> product.log2_block_k) + 1;
    const int row = (tile.row * kBlock + mask_row() * kGranuleEdge) >> product.log2_block_m;
    const int k = min(step * 2 + mask_half(), depth - 1);
    return product.norm_a[int64_t{min(row, rows - 1)} * depth + k];
  }

  // Granules beyond the edge have the norm of the last one inside, as in TileNorms.
  __device__ Mask<Config> mask_of(const Tile& tile, int step, float norm_a) const {
    const auto& product = p_.product;
    const int columns = (product.n - 1) / kGranuleEdge + 1;
    const int depth = (product.k - 1) / kGranuleEdge + 1;
    const int column = min(mask_column(), columns - 1 - tile.column * 2);
    const int half = min(mask_half(), depth - 1 - step * 2);
    const bool inside = threadIdx.x % 32 < Config::kMaskBits &&
                        (tile.row + mask_row() / 2) * kBlock < product.m &&
                        (tile.column + mask_column() / 2) * kBlock < product.n;
    const float norm_b = measured_.norms[max(column, 0) * 2 + half];
    const bool valid = inside && is_valid(norm_product(norm_a, norm_b), product.tau.value());
    return {{__ballot_sync(~0u, valid)}};
  }

  // The largest term of this thread's product in a step.
  __device__ int term_of(const Tile& tile, int step, const Mask<Config>& mask) const {
    const int row = term_row(), column = term_column(), half = term_half();
    const int64_t block = block_of_a(tile.row + row / 2, step);
    const int part = thread_ % kSharers;
    constexpr int kWords = kGranuleEdge / 8 / kSharers;
    const auto* const of_a = reinterpret_cast<const uint4*>(
        p_.a.split.profile<2>(block).below[row % 2] + half * kGranuleEdge);
    const auto* const of_b = reinterpret_cast<const uint4*>(measured_.below[column * 2 + half]);
    uint32_t least = ~0u;
#pragma unroll
    for (int i = part * kWords; i < (part + 1) * kWords; ++i) {
      const uint4 x = of_a[i], y = of_b[i];
      least = __viaddmin_u16x2(x.x, y.x, least);
      least = __viaddmin_u16x2(x.y, y.y, least);
      least = __viaddmin_u16x2(x.z, y.z, least);
      least = __viaddmin_u16x2(x.w, y.w, least);
    }
    int all = min(least & 0xffff, least >> 16);
#pragma unroll
    for (int distance = kSharers / 2; distance > 0; distance /= 2)
      all = min(all, __shfl_xor_sync(~0u, all, distance));
    const int bit =
        (row / 2 * Config::kColumns + column / 2) * 8 + half * 4 + column % 2 * 2 + row % 2;
    if (mask.bits(bit, 1) == 0 || all >= kNothingAtK) return kNoTerm;
    return p_.a.split.header<2>(block).exponent(row % 2, half) +
           measured_.exponents[column * 2 + half] + 2 * kSplitBits - all;
  }

  // `kinds` and `largest`: what this thread has seen of the tile.
  template <bool kFindsTerms>
  __device__ void compute_step(const Tile& tile, int step, int& kinds, int& largest) {
    const float norm_a = load_norm_a(tile, step);
    const GranuleGroup group;
    NormPlace place(p_.b_in_32, NormGroup(kGranuleThreads), 0);
    place.batch = 0, place.line = step * 2 + half_, place.entry = tile.column * 2 + column_;
    place.exists =
        place.line * kGranuleEdge < p_.product.k && place.entry * kGranuleEdge < p_.product.n;
    const NormBlock<float> source = place.block<float>(p_.b_in_32);

    const int slot = taken_ % kFloatStages;
    full_of(taken_).wait(taken_ / (kTeams * kFloatStages) % 2);
    const uint32_t floats = shared_address(&storage_.output.floats[slot][column_]);
    const auto chunk = [&](int i) {
      const int line = half_ * kGranuleEdge + granule_line(i, member_);
      Chunk<float> x;
      asm volatile(
          "ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
          : "=r"(x.words[0]), "=r"(x.words[1]), "=r"(x.words[2]), "=r"(x.words[3])
          : "r"(floats + line * kLineBytes + (member_ % kGranuleLineChunks ^ line % 8) * 16));
      return x;
    };
    float sum = 0;
    bool nonzero = false;
    SplitScale scale;
    LargestAtK<false> most;
    if constexpr (kFindsTerms) {
      most = measure_granule<false>(chunk, member_, sum, nonzero);
      scale = granule_scale(most, source.lines_left);
    } else {
      // Loops, because the code of a step unrolled does not stay in the instruction cache.
      uint32_t largest_of_all = 0, least = ~0u;
      bool zeros = false;
      AnyNonzero<float> any;
#pragma unroll 1
      for (int first = 0; first < kGranuleLoads; first += kChain) {
        Chunk<float> chain[kChain];
        uint32_t four[4], two[2], one[1];
#pragma unroll
        for (int i = 0; i < kChain; ++i) {
          chain[i] = chunk(first + i);
          any.add(chain[i]);
          const auto magnitude = [&](int e) { return chain[i].words[e] & 0x7fffffffu; };
          four[i] = max(max(magnitude(0), magnitude(1)), max(magnitude(2), magnitude(3)));
        }
        sum += chain_of_squares(chain);
        const bool upper = (member_ & 4) != 0, odd = (member_ & 2) != 0;
        two[0] = max(upper ? four[2] : four[0], __shfl_xor_sync(~0u, upper ? four[0] : four[2], 4));
        two[1] = max(upper ? four[3] : four[1], __shfl_xor_sync(~0u, upper ? four[1] : four[3], 4));
        one[0] = max(odd ? two[1] : two[0], __shfl_xor_sync(~0u, odd ? two[0] : two[1], 2));
        const uint32_t here = max(one[0], __shfl_xor_sync(~0u, one[0], 1));
        const int line = granule_line(first + (upper ? 2 : 0) + (odd ? 1 : 0), member_);
        zeros |= here == 0 && line < source.lines_left;
        largest_of_all = max(largest_of_all, here);
        least = min(least, here - 1);
      }
      nonzero = any.found();
      const uint32_t own = 0xffffu << (threadIdx.x & kGranuleThreads);
      largest_of_all = __reduce_max_sync(own, largest_of_all);
      least = __reduce_min_sync(own, least) + 1;
      scale = split_scale<2>(largest_of_all, least, __any_sync(own, zeros));
    }
    kinds |= scale.kinds;
    float norm = 0;
    if (p_.b_in_32.norms != nullptr) {
      norm = norm_of_shares(source, group, place.exists, sum, nonzero);
    } else if (place.exists) {
      const int64_t columns = (p_.product.n - 1) / kGranuleEdge + 1;
      norm = p_.product.norm_b[place.line * columns + place.entry];
    }
    const int granule = column_ * 2 + half_;
    if (member_ == 0) {
      measured_.norms[granule] = norm;
      if (p_.b_in_32.norms != nullptr && place.exists && tile.row == 0) {
        p_.b_in_32.norms[place.line * p_.b_in_32.norm_line_stride +
                         place.entry * p_.b_in_32.norm_entry_stride] = norm;
      }
    }
    if constexpr (kFindsTerms) {
#pragma unroll
      for (int i = 0; i < most.kCount; ++i)
        measured_.below[granule][most.k(i)] = below_bound(scale, most.most[i]);
      if (member_ == 0) measured_.exponents[granule] = scale.exponent;
    }
    meet();
    const Mask<Config> mask = mask_of(tile, step, norm_a);
    if constexpr (kFindsTerms) {
      largest = max(largest, term_of(tile, step, mask));
    } else {
      wait_for_stage();
      auto& stage = storage_.stages[team_];
      Barrier& full = storage_.ring.full[team_];
      if (thread_ == kWritesNotice) {
        storage_.ring.notices[team_] = Notice<Config>::of(mask, step == steps_ - 1);
        storage_.ring.tiles[team_] = tile;
      }
      if (thread_ == kFetchesA) {
        const auto needed = [&](int row) { return mask.bits(row * 16, 16) != 0; };
        int blocks = 0;
        for (int row = 0; row < Config::kRows; ++row) blocks += needed(row);
        full.arrive_and_expect_tx(blocks * Config::kBytesPerBlock);
        for (int row = 0; row < Config::kRows; ++row) {
          if (needed(row)) fetch<Config, true>(p_, 0, tile.row + row, step, row, full, stage);
        }
      }
      if (mask.any()) {
        const int block = column_ / 2;
        constexpr int kTogether = 4;  // chunks, so that loads do not wait for stores
#pragma unroll 1
        for (int first = 0; first < kGranuleLoads; first += kTogether) {
          // Half of the threads go through their lines in another order, against bank conflicts.
          const auto line = [&](int i) { return (first + i) ^ member_ / kGranuleLineChunks * 2; };
          Chunk<float> chunks[kTogether];
#pragma unroll
          for (int i = 0; i < kTogether; ++i) chunks[i] = chunk(line(i));
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
            write_chunk(chunks[i], line(i), member_, scale.exponent, half_ * kGranuleEdge,
                        column_ % 2 * kGranuleLineChunks, stage.b[0][block].bytes,
                        stage.b[1][block].bytes);
          }
        }
        if (member_ == 0) write_header(stage.b_header[block], source.data, tile, step, scale);
        cutlass::arch::fence_view_async_shared();
      }
      if (thread_ != kFetchesA) full.arrive();
    }
    meet();
    fetch_floats(taken_ + kFloatStages);
    go_ahead(kTeams);
  }

  __device__ void write_header(typename Config::Header& header, const float* source,
                               const Tile& tile, int step, const SplitScale& scale) const {
    const int number = header.number(column_ % 2, half_);
    header.exponents[number] = static_cast<int16_t>(scale.exponent);
    header.flags[number] = static_cast<uint8_t>(scale.kinds);
    if (number == 0) {
      header.source = source;
      header.extent = edge_inside(p_.product.n - int64_t{tile.column + column_ / 2} * kBlock);
      header.depth = edge_inside(p_.product.k - int64_t{step} * kBlock);
    }
  }

  const OnePassProduct& p_;
  Storage<Config>& storage_;
  typename Config::Shared& shared_;
  const int steps_, team_, thread_;
  const int column_, half_, member_;  // of the thread's granule in a step
  typename Config::Measured& measured_;
  int number_ = 0, taken_ = 0;  // steps so far, and float32 stages, of both teams
  // The next float32 stage that the team fetches, and where the column of its tile begins.
  uint64_t tiles_ahead_ = 0, tiles_of_column_ = 0;
  int step_ahead_ = 0, column_ahead_ = 0;
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    multiply_one_pass_sm90(const __grid_constant__ OnePassProduct params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& storage = *reinterpret_cast<Storage<Config>*>(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    storage.ring.initialize(kTeamThreads, Config::kReleases);
    Producers<Config>::set_up(storage.stages[0].shared);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  constexpr int kProducers = kTeams * kTeamThreads / 32;  // warps
  if (warp < kProducers) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kOtherRegisters>();
    Producers<Config>(params, storage).run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kMultiplyRegisters>();
    multiply_stages<Config>(params, (warp - kProducers) / 4, storage);
  }
}

// Computes p from the split operand a, and from the matrix b, whose lines are its rows. Its address
// and stride are multiples of 16 bytes. There is no batch. `terms` is as for multiply_split().
inline cudaError_t multiply_in_one_pass(const MultiplyParams<float>& p, const SplitSource& a,
                                        const NormMapParams<float>& b, int16_t* terms,
                                        const Launch& how) {
  OnePassProduct params{};
  params.a = a;
  params.b.split.extent = static_cast<int>((p.n - 1) / kBlock + 1);
  params.b.extent_stride = 1, params.b.k_stride = b.line_stride;
  params.terms = terms;
  params.b_in_32 = b;
  const cudaError_t error =
      encode<float>(params.map_b, {b.data, b.length, b.lines, b.line_stride, 1, 0}, kBlock);
  if (error != cudaSuccess) return error;
  const int blocks = cut_into_tiles<OnePassConfig>(params, p, how, how.multiprocessors);
  params.claims_tiles = false;
  // cuda/heuristics.h does not choose it then.
  if (params.tile_rows > kOnePassRows || params.tiles > kOnePassTiles * blocks) {
    return cudaErrorInvalidValue;
  }
  return start<OnePassConfig>(multiply_one_pass_sm90<OnePassConfig>, params, blocks, how.stream);
}

}  // namespace spamm::kernels::multiply::sm90
