// The epilogue of deviations in one pass over an output that is complete.
#include "cpu/reference/epilogue.h"

#include "reference/reference.h"

namespace spamm::cpu {
namespace {

using at::Tensor;

bool are_laid_out(const Tensor& output, const std::optional<Tensor>& residual, const Tensor& base,
                  at::MemoryFormat format) {
  return output.is_contiguous(format) && base.is_contiguous(format) &&
         (!residual || residual->is_contiguous(format));
}

bool supports(const Tensor& output, const std::optional<Tensor>& residual, const Tensor& base,
              Activation activation) {
  return writes_deviations(activation) &&
         (are_laid_out(output, residual, base, at::MemoryFormat::ChannelsLast) ||
          are_laid_out(output, residual, base, at::MemoryFormat::Contiguous));
}

// Each image is one row, which tasks write in parts.
Tensor run(const Tensor& output, const std::optional<Tensor>& residual, const Tensor& base,
           Activation activation) {
  constexpr int64_t kElementsPerTask = 32 << 10;
  const int64_t image = base.numel(), parts = (image + kElementsPerTask - 1) / kElementsPerTask;
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, output.scalar_type(), "conv2d_deviation", [&] {
        using Sum = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
        scalar_t* const to = output.mutable_data_ptr<scalar_t>();
        const scalar_t* const from = base.const_data_ptr<scalar_t>();
        const scalar_t* const add = residual ? residual->const_data_ptr<scalar_t>() : nullptr;
        at::parallel_for(0, output.size(0) * parts, 1, [&](int64_t begin, int64_t end) {
          for (int64_t task = begin; task < end; ++task) {
            const int64_t offset = task % parts * kElementsPerTask;
            const int64_t place = task / parts * image + offset;
            const PixelDeviations<scalar_t, scalar_t> pixels = {
                to + place,
                0,
                from + offset,
                0,
                add ? add + place : nullptr,
                0,
                1,
                std::min(kElementsPerTask, image - offset)};
            write_deviations<scalar_t, scalar_t, Sum>(pixels, activation, to + place, 0);
          }
        });
      });
  return output;
}

const Backends<ReferenceBackend> of_epilogue(at::kCPU, Rank::kPortable,
                                             {.epilogue = {&supports, &run}});

}  // namespace
}  // namespace spamm::cpu
