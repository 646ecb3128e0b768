// C = alpha * (A B over valid blocks) + beta * input in float64 on Hopper (sm_90a): the tiles,
// lists and fragments of multiply_sm80.cuh, with a pipeline in which warps need not keep step.
//
// A thread block of sm_80 meets at every stage, and all of its warps then wait for their fragments
// together while the tensor cores idle: float64 keeps these busy for so long with one fragment that
// nothing else hides the wait. Here each stage has two barriers, one that its copies arrive at and
// one for the warps that are done with it, so that warps drift apart by up to kDrift stages.
// Limits and order of sums as in multiply_sm80.cuh.
#pragma once

#include "cutlass/arch/barrier.h"
#include "multiply_sm80.cuh"

namespace spamm::kernels::sm90 {

template <class Config_>
struct DriftConfig : Config_ {
  static constexpr int kDrift = Config_::kStages * 3 / 8, kWarps = Config_::kThreads / 32;
  static constexpr int kAhead = Config_::kStages - kDrift;  // stages that copies run ahead

  struct Storage : Config_::Storage {
    using Barrier = cutlass::arch::ClusterBarrier;
    alignas(8) Barrier full[Config_::kStages], empty[Config_::kStages];

    __device__ void initialize() {
      for (int i = 0; i < Config_::kStages; ++i) {
        full[i].init(Config_::kThreads);
        empty[i].init(kWarps);
      }
      cutlass::arch::fence_barrier_init();
    }
  };
};

// A position in the ring of stages; for the life of a thread block.
template <int kStages>
struct StagePosition {
  int slot = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    if (++slot == kStages) slot = 0, phase ^= 1;
  }
};

// Adds the products of the `count` steps that are listed.
template <class Config>
class DriftingPipeline {
  using Storage = typename Config::Storage;
  static constexpr int kStageDepth = Config::TileA::kDepth, kStagesPerStep = 32 / kStageDepth;

 public:
  __device__ explicit DriftingPipeline(Storage& storage) : storage_(storage) {}

  __device__ void multiply_list(const typename Config::List& list, int count,
                                const OperandStream<typename Config::TileA, Config::kThreads>& a,
                                const OperandStream<typename Config::TileB, Config::kThreads>& b,
                                WarpProduct<Config>& product) {
    const int stages = count * kStagesPerStep;
    const auto begin_copies = [&](int s) {
      if (s >= stages) return;
      const auto entry = list[s / kStagesPerStep];
      const int64_t k = static_cast<int64_t>(entry.step) * 32 + s % kStagesPerStep * kStageDepth;
      storage_.empty[to_.slot].wait(to_.phase ^ 1);
      auto& stage = storage_.stages[to_.slot];
      a.copy(stage.a, k, entry.rows());
      b.copy(stage.b, k, entry.columns());
      cutlass::arch::cpasync_barrier_arrive_noinc(
          reinterpret_cast<const uint64_t*>(&storage_.full[to_.slot]));
      to_.advance();
    };
    for (int s = 0; s < Config::kAhead; ++s) begin_copies(s);
    for (int s = 0; s < stages; ++s) {
      begin_copies(s + Config::kAhead);
      storage_.full[from_.slot].wait(from_.phase);
      product.multiply(storage_.stages[from_.slot], list[s / kStagesPerStep].mask());
      __syncwarp();
      if (threadIdx.x % 32 == 0) storage_.empty[from_.slot].arrive();
      from_.advance();
    }
    __syncthreads();  // all are done with the list
  }

 private:
  Storage& storage_;
  StagePosition<Config::kStages> to_, from_;
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    multiply_dmma_sm90(const __grid_constant__ typename Config::Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // the same build's other targets hold an empty kernel
  extern __shared__ __align__(128) char shared[];
  auto& storage = *reinterpret_cast<typename Config::Storage*>(shared);
  if (threadIdx.x == 0) storage.initialize();
  __syncthreads();
  DriftingPipeline<Config> pipeline(storage);
  for_each_tile<Config>(p, storage.list,
                        [&](const auto& list, int count, const auto& a, const auto& b,
                            auto& product) { pipeline.multiply_list(list, count, a, b, product); });
#endif
}

}  // namespace spamm::kernels::sm90
