#!/usr/bin/env python3
"""Breaks the code in one place after another, and shows which of these the tests notice.

Each line of the table replaces one text of one file, and names the tests that should fail then. Of
the library, all texts are built at once, each behind a number that a run picks. Such a text is an
expression, or a statement with its semicolon. The files are put back, also after an interrupt.

    python scripts/mutate.py                     # all of them: half an hour on two cores
    python scripts/mutate.py --only cpu/conv     # those whose file or new text holds this
    python scripts/mutate.py --pytest="-m 'not thorough'"
"""

import argparse
import collections
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Mutation(NamedTuple):
    """One text of a file, what replaces it, and the tests below tests/ that should notice.

    "cpp:" stands before a filter of GoogleTest.
    """

    file: str
    old: str
    new: str
    tests: str


# fmt: off
TABLE = [Mutation(file, old, new, tests) for file, tests, changes in [
    ("spamm_torch/_arguments.py", "products/test_errors.py", [
        ("(max_error is not None) != 1:", "(max_error is not None) < 1:"),
        ("elif tau != tau:", "elif False:"),
    ]),
    ("spamm_torch/_arguments.py", "convolution/test_conv2d.py serving/test_nn.py", [
        ("32 if in_channels <= 32 else", "32 if in_channels < 32 else"),
    ]),
    ("spamm_torch/_arguments.py", "convolution/test_conv2d.py products/test_errors.py", [
        ("math.prod(edges) not in EDGES", "False"),
    ]),
    ("spamm_torch/_flops.py", "products/test_flops.py", [
        ("return 2 * math.prod(a) * b[-1]", "return math.prod(a) * b[-1]"),
    ]),
    ("spamm_torch/spatial.py", "products/test_spatial_order.py", [
        ("return low / 2 + high / 2", "return low"),
    ]),
    ("spamm_torch/likeness.py", "serving/test_likeness.py", [
        ("centres.masked_fill(least == most, 0.0)", "centres"),
    ]),
    ("spamm_torch/nn.py", "serving/test_freeze.py", [
        ("None if _is_cast_by_autocast(weight) else pinned.norms", "pinned.norms"),
    ]),
    ("spamm_torch/_exchange.py", "sharding/test_distributed.py", [
        ("index_copy_(0, self.block_rows, ", "index_copy_(0, self.block_rows.flip(0), "),
    ]),
    ("spamm_torch/_rank_product.py", "sharding/test_distributed.py", [
        ("            self._columns.axis.sum(counts)\n", ""),
    ]),
    ("spamm_torch/_axis.py", "sharding/test_distributed.py", [
        ("(c + edge // 2) // edge * edge", "c // edge * edge + 1"),
    ]),
    ("spamm_torch/networks/operands.py", "networks/test_convert.py networks/test_zoo.py", [
        ("batch_norm.eps, scale, shift)", "batch_norm.eps, None, shift)"),
        ("variance, batch_norm.eps,", "variance, 0.0,"),
    ]),
    ("spamm_torch/networks/sites.py", "networks/test_convert.py networks/test_zoo.py", [
        ("site.residual = other", "site.residual = None"),
        ("            site.activation = activation\n            self._take(site, node",
         "            self._take(site, node"),
        ("start < self._order[node] < stop and ", "False and "),
    ]),
    ("spamm_torch/networks/nodes.py", "networks/test_convert.py networks/test_zoo.py", [
        ("name if plain and slope == _SLOPE else", "name if plain else"),
        ('node.kwargs.get("alpha", 1) != 1', "False"),
    ]),
    ("spamm_torch/networks/plan.py", "networks/test_norms.py", [
        (" or _is_written(plan, value)", ""),
    ]),
    ("spamm_torch/networks/proof.py", "networks/test_lifecycle.py", [
        ("            and not any(self._hooks)\n", ""),
        ("return list(map(_version, self._present)), ", "return [], "),
    ]),
    ("spamm_torch/calibration/search.py", "calibration/test_search.py", [
        ("return self.drop <= max_drop and", "return self.drop <= 2 * max_drop and"),
        ("if held.is_within(run.max_drop):", "if True:"),
    ]),
    ("spamm_torch/calibration/statistics.py", "calibration/test_thresholds.py", [
        ("torch.stack(taus).mean()", "torch.stack(taus).amax()"),
    ]),
    ("csrc/cpu/norm_map/norm_map.cpp", "products/test_norm_map.py", [
        ("std::swap(m, k);", ""),
        ("batch * to_norms[0]", "0"),
    ]),
    ("csrc/cpu/norm_map/scaled_norm.h", "products/test_norm_map.py products/test_threshold.py", [
        ("(x * scale) * (x * scale) - excess", "(x * scale) * (x * scale)"),
    ]),
    ("csrc/cpu/norm_map/strip_norms.h", "products/test_norm_map.py", [
        ("if (rest == 0) return;", "return;"),
        ("sum >= kSafe<T> && std::isfinite(sum)", "std::isfinite(sum)"),
        ("sum >= kSafe<T> && std::isfinite(sum)", "sum >= kSafe<T>"),
        ("bits & std::numeric_limits<std::make_signed_t<Bits>>::max()", "bits"),
    ]),
    ("csrc/cpu/common/convert.h", "products/test_cpu.py products/test_multiply.py", [
        ("bits + 0x7fffu + ((bits >> 16) & 1u)", "bits + 0x8000u"),
        ("magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u", "0x7c00u"),
        ("magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)",
         "magnitude - (112u << 23) + 0x1000u"),
        ("magnitude < kOne ? subnormal : normal", "normal"),
    ]),
    ("csrc/cpu/common/transpose.h", "convolution/test_implicit_conv.py", [
        ("task / parts * rows * columns", "0"),
    ]),
    ("csrc/cpu/threshold/product_counter.h", "products/test_threshold.py", [
        ("target - lower < upper - target", "target - lower > upper - target"),
        ("size(a_, p) * size(b_, p) - finite_a * finite_b", "0"),
        ("std::bit_cast<Bits>(std::numeric_limits<N>::infinity()) + 1",
         "std::bit_cast<Bits>(std::numeric_limits<N>::infinity())"),
        ("no - yes > 1", "no - yes > 2"),
        ("a[i] * b[j - 1] < tau", "a[i] * b[j - 1] <= tau"),
    ]),
    ("csrc/cpu/threshold/threshold.cpp", "products/test_threshold.py", [
        ("!(a[k] * b[j] < tau)", "a[k] * b[j] >= tau"),
    ]),
    ("csrc/cpu/threshold/bound.h", "products/test_threshold.py", [
        ("root * (1 + slack)", "root * (1 - slack)"),
        ("rounded < bound ? std::nextafter(rounded, std::numeric_limits<N>::infinity()) : rounded",
         "rounded"),
        ("of(numbers[n]) <= largest ? largest : of(numbers[n])",
         "of(numbers[n]) > largest ? of(numbers[n]) : largest"),
        ("tau && holds(*tau) && (*tau == kInfinity || !holds(std::nextafter(*tau, kInfinity)))",
         "tau.has_value()"),
    ]),
    ("csrc/cpu/multiply/slice_kernel.h", "products/test_multiply.py products/test_cpu.py", [
        ("add || d > 0", "add"),
    ]),
    ("csrc/cpu/sparse/multiply.cpp", "sparse", [
        ("a_.col[e + run] % per_slice_ != 0", "true"),
        ("kernel_.pack(view(values_b_, slot_of[depth]), depth, workspace.panel.data());",
         "kernel_.pack(view(values_b_, slot_of[0]), depth, workspace.panel.data());"),
        ("write_norm(mirror);", ""),
        ("!symmetric_ || c_.col[c] >= i", "true"),
    ]),
    ("csrc/cpu/sparse/plan.cpp", "sparse", [
        ("*j >= first_column(i) && counts[*j] == 0", "counts[*j] == 0"),
        ("symmetric_ ? i : 0", "0"),
    ]),
    ("csrc/cpu/sparse/threshold.cpp", "sparse", [
        ("kernels::at_most(norm_of(lost.data(), static_cast<int64_t>(lost.size())))", "0.0"),
    ]),
    ("csrc/cpu/sparse/csr.h", "sparse", [
        ("norm_a[slot_a] * norm_b[slot_b] < tau", "norm_a[slot_a] * norm_b[slot_b] <= tau"),
        ("e == crow[i] || col[e - 1] < col[e]", "true"),
    ]),
    ("spamm_torch/sparse/products.py", "sparse", [
        ("share = 0.5 if drop else 1.0", "share = 1.0"),
        ("stays = ~(wide < below)", "stays = wide >= below"),
        ("torch.where(row <= column, stays, stays[mirror])", "stays"),
    ]),
    ("spamm_torch/sparse/ranks.py", "sharding/test_distributed.py", [
        ("numbers - first", "(numbers - first).flip(0)"),
    ]),
    ("csrc/cpu/threshold/maps.h", "products/test_threshold.py", [
        ("row / mb * kb * nb", "0"),
    ]),
    ("csrc/cpu/threshold/error_search.h", "products/test_threshold.py convolution/test_conv2d.py", [
        ("a * skip_norm_b[j] < tau", "a * b[j] < tau"),
    ]),
    ("csrc/cpu/threshold/histogram.cpp", "products/test_histogram.py", [
        ("key >= bins.low && bin < bins.count", "key > bins.low && bin < bins.count"),
        ("key >= bins.low && bin >= bins.count", "key >= bins.low && bin > bins.count"),
        ("bits < kInfinity ? bits : kInfinity", "bits"),
    ]),
    ("csrc/cpu/multiply/valid_masks.h", "products/test_multiply.py", [
        ("norm_a[depth] * norm_b[column] < norms.tau",
         "norm_a[depth] * norm_b[column] <= norms.tau"),
        ("norm_a[depth] * norm_b[column] < norms.tau",
         "!(norm_a[depth] * norm_b[column] >= norms.tau)"),
    ]),
    ("csrc/cpu/multiply/valid_masks.h", "products/test_symmetric.py", [
        ("i.begin + row - j.begin", "i.begin + row + 1 - j.begin"),
    ]),
    ("csrc/cpu/multiply/epilogue.h", "products/test_multiply.py", [
        ("beta * static_cast<Sum>(widen(value))", "static_cast<Sum>(widen(value))"),
        ("alpha * sums[r * ld_sums + c]", "sums[r * ld_sums + c]"),
    ]),
    ("csrc/cpu/multiply/kernel_shapes.h", "products/test_cpu.py", [
        ("return false;", "return true;"),
    ]),
    ("csrc/cpu/multiply/gemm_rows.h", "convolution/test_epilogue.py", [
        ("result = result < 0 ? Vector{} : result;", "result = result > 0 ? result : Vector{};"),
        ("result += addend;", ""),
    ]),
    ("csrc/cpu/multiply/multiply.cpp", "products/test_multiply.py products/test_outputs.py", [
        ("input && beta.toDouble() != 0", "input.has_value()"),
        ("sums == nullptr && !arguments_.input.defined()", "sums == nullptr"),
    ]),
    ("csrc/cpu/multiply/multiply.cpp", "products/test_outputs.py products/test_symmetric.py", [
        ("overwrites(x.b)", "false"),
        ("if (arguments_.symmetric && i != j) write_norm(batch, j, i, is_zero);", ""),
    ]),
    ("csrc/cpu/multiply/multiply.cpp", "products/test_multiply.py products/test_cpu.py", [
        ("kb_ * block_.k", "depth_"),
        ("y > x || std::isnan(y) ? y : x", "y > x ? y : x"),
        ("std::abs(maps.a[i * kb_ + k]) * largest_b[batch * kb_ + k] < maps.tau",
         "std::abs(maps.a[i * kb_ + k]) * largest_b[batch * kb_ + k] <= maps.tau"),
        ("i * row_stride_a_", "i * (row_stride_a_ - 1)"),
    ]),
    ("csrc/cpu/multiply/multiply.cpp",
     "sharding/test_multiply_part.py sharding/test_mm_shards.py", [
        ("if (x.own_rows) x.b.narrow(0, x.first_own_row, x.own_rows->size(0)).copy_(*x.own_rows);",
         ""),
    ]),
    ("csrc/spamm.cpp", "products/test_multiply.py products/test_outputs.py", [
        ("block.m == block.k && block.k == block.n && is_same_view(a, b)", "is_same_view(a, b)"),
    ]),
    ("csrc/spamm.cpp", "products/test_multiply.py products/test_errors.py", [
        ("norm_map(x.b, {block.k, block.n})", "norm_map(x.b, {block.n, block.k})"),
    ]),
    ("csrc/threshold.cpp", "convolution/test_conv2d.py convolution/test_batches.py", [
        ("skip_norm_b.value_or(norm_b)", "norm_b"),
    ]),
    ("csrc/autograd.cpp", "products/test_gradients.py", [
        ("grad.matmul(b.mT()).mul(alpha)", "grad.matmul(b.mT())"),
        ("grad.sum_to_size_symint(shape).mul(ctx->saved_data[\"beta\"].toScalar())",
         "grad.sum_to_size_symint(shape)"),
    ]),
    ("csrc/autograd.cpp", "convolution/test_epilogue.py", [
        ("at::hardtanh_backward(grad, output, 0, 6)", "grad"),
    ]),
    ("csrc/conv/conv2d.cpp", "convolution/test_conv2d.py", [
        ("check_norm_weight(conv);", ""),
    ]),
    ("csrc/conv/conv2d.cpp", "convolution/test_conv2d.py convolution/test_batches.py", [
        ("scale(norm_b, first).value_or(norm_b)", "norm_b"),
        ("first += volume(piece.count);", ""),
    ]),
    ("csrc/conv/im2col.cpp", "convolution/test_conv2d.py convolution/test_batches.py", [
        ("source_.stride(2) * shape_.dilation.width", "source_.stride(2)"),
    ]),
    ("csrc/cpu/conv/conv.cpp", "convolution/test_conv2d.py convolution/test_batches.py", [
        ("ColumnNorms::kSkip", "ColumnNorms::kPlain"),
        ("padding.height != 0 || padding.width != 0", "padding.height != 0"),
        ("PartialBlockScale(conv.blocks, columns.options())(columns, 0)",
         "std::optional<Tensor>()"),
    ]),
    ("csrc/cpu/conv/product.h", "convolution/test_conv2d.py convolution/test_batches.py", [
        ("!(norm_a[0] * (scale * norms[p * next]) < tau)",
         "!(norm_a[0] * norms[p * next] < tau)"),
        ("!(norm_a[0] * (scale * norms[p * next]) < tau)",
         "!(norm_a[0] * (scale * norms[p * next]) <= tau)"),
        ("!(norm_a[b] * (scale * norms[b]) < tau)", "!(norm_a[b] * norms[b] < tau)"),
        ("!(norm_a[b] * (scale * norms[b]) < tau)", "!(norm_a[b] * (scale * norms[b]) <= tau)"),
        ("std::fill_n(valid, tile.columns.size, of_padding);",
         "std::fill_n(valid, tile.columns.size, uint64_t{0});"),
        ("if (finite) drop_padding(run, workspace);", "drop_padding(run, workspace);"),
    ]),
    ("csrc/cpu/conv/product.h", "convolution/test_epilogue.py convolution/test_deviation.py", [
        ("!base_ && channels % panels_.width() == 0", "channels % panels_.width() == 0"),
        ("bias_.template const_data_ptr<T>() + channel", "bias_.template const_data_ptr<T>()"),
    ]),
    ("csrc/cpu/conv/seen.h", "convolution/test_conv2d.py convolution/test_batches.py", [
        ("right_ < 0 ? blocks_of(-right_, stride) : 0", "right_ < 0 ? -right_ / stride : 0"),
        ("blocks_of(shape_.input.width - right_, stride)",
         "(shape_.input.width - right_) / stride"),
    ]),
    ("csrc/cpu/conv/pixels.h", "convolution/test_conv2d.py convolution/test_batches.py", [
        ("whole_blocks && pixels.group_stride == channels", "pixels.group_stride == channels"),
    ]),
    ("csrc/cpu/conv/weight_panels.h", "convolution/test_conv2d.py convolution/test_batches.py", [
        ("others += !(x - x == 0);", ""),
        ("finite &= state == State::kFinite;", ""),
    ]),
    ("csrc/cpu/conv/norms.h", "convolution/test_conv2d.py convolution/test_batches.py", [
        ("partial_block_scale<N>(blocks_.grid, blocks_.edge, block)", "N(1)"),
        ("std::min((block[1] + 1) * edge[1], grid[1])", "(block[1] + 1) * edge[1]"),
    ]),
    ("csrc/cpu/conv/epilogue.h", "convolution/test_epilogue.py", [
        ("sum[c] + bias[c] + static_cast<Sum>(widen(add[c]))", "sum[c] + bias[c]"),
    ]),
    ("csrc/cpu/conv/activate.h", "convolution/test_epilogue.py", [
        ("x > 6 ? Sum(6) : x", "x"),
        ("x * from_0_to_6(x + 3) / 6", "x * from_0_to_6(x + 3) / 5"),
        ("return x < 0 ? Sum(0) : x;", "return x > 0 ? x : Sum(0);"),
        ("x * static_cast<Sum>(kLeakySlope)", "x"),
    ]),
    ("csrc/cpu/conv/dense_conv2d.cpp", "convolution/test_epilogue.py", [
        ("!conv.residual", "true"),
    ]),
    ("csrc/cpu/reference/epilogue.h", "convolution/test_deviation.py", [
        ("activate(s + static_cast<Sum>(widen(add[c])) + b) - activate(b)",
         "activate(s + static_cast<Sum>(widen(add[c])) + b)"),
        ("activate(s + b) - activate(b)", "activate(s + b)"),
    ]),
    ("csrc/cpu/reference/epilogue.cpp", "convolution/test_deviation.py", [
        ("from + offset", "from"),
    ]),
    ("csrc/reference/join_and_pool.cpp", "convolution/test_deviation.py", [
        ("output.sub_(of_reference);", ""),
    ]),
    ("csrc/cpu/reference/live_tiles.cpp",
     "convolution/test_deviation.py convolution/test_deviation_parts.py", [
        ("widen(values[c]) != 0", "widen(values[c]) > 0"),
        ("(output.end - 1) * stride - padding + window",
         "(output.end - 1) * stride - padding + window - 1"),
        ("only_zeros && at::isfinite(weight_norms(conv)).all().item<bool>()", "only_zeros"),
        ("write_row(tile, row, zeros_.data(), 0);", ""),
        ("(columns.begin - first_column) * channels", "0"),
    ]),
    ("csrc/reference/join_and_pool.cpp", "convolution/test_deviation.py", [
        ("pooled(input + reference)", "pooled(input)"),
    ]),
    ("csrc/shards/plan_maps.cpp", "sharding/test_plan.py", [
        ("products.lt(tau.to(products.scalar_type()))",
         "products.le(tau.to(products.scalar_type()))"),
        ("kWorkOfAny * norm_b.numel()", "0"),
    ]),
    ("csrc/shards/plan.cpp", "sharding/test_plan.py", [
        ("groups - (parts - part - 1)", "groups - (parts - part)"),
    ]),
    ("csrc/shards/host_part.cpp", "cpp:SpammHost*", [
        ("row_ / block.m", "0"),
        ("step.stage * product_.whole.stage_blocks", "0"),
    ]),
    ("csrc/cuda/heuristics.h", "cpp:Heuristics.*", [
        ("compute_capability == 90 &&", "compute_capability >= 90 &&"),
        ("steps >= 2 * kLeastSteps", "steps >= kLeastSteps"),
        ("split > kLittle && split >", "split >"),
    ]),
    ("csrc/shards/plan.cpp", "cpp:Runs.*", [
        ("gap(x) > gap(y)", "gap(x) < gap(y)"),
    ]),
    ("csrc/shards/remote_cuts.cpp", "cpp:RemoteCuts.*", [
        ("std::max(multiply, end.fetch_a - begin.fetch_a)",
         "std::min(multiply, end.fetch_a - begin.fetch_a)"),
    ]),
] for old, new in changes]
# fmt: on


PICK = """\
#ifndef SPAMM_MUTANT
#define SPAMM_MUTANT
#include <cstdlib>
static const int spamm_mutant = std::getenv("MUTANT") ? std::atoi(std::getenv("MUTANT")) : -1;
#endif
"""


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HYPOTHESIS_PROFILE": "ci", **variables}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)


def build() -> None:
    built = run(sys.executable, "setup.py", "--quiet", "build_ext", "--inplace")
    if built.returncode != 0:
        raise RuntimeError(f"the build failed:\n{(built.stdout + built.stderr)[-2000:]}")


def is_of_library(mutation: Mutation) -> bool:
    return mutation.file.startswith("csrc/") and mutation.file != "csrc/cuda/heuristics.h"


def guarded(text: str, mutations: list[Mutation]) -> str:
    """A file's text in which the variable MUTANT picks one of the mutations, by place in TABLE."""
    news = collections.defaultdict(dict)
    for mutation in mutations:
        news[mutation.old][TABLE.index(mutation)] = mutation.new

    def guard(found: re.Match[str]) -> str:
        old = found[0]
        if old.endswith(";"):
            chain = (f"if (spamm_mutant == {i}) {{ {new} }} else " for i, new in news[old].items())
            return f"{{ {''.join(chain)}{{ {old} }} }}"
        chain = (f"spamm_mutant == {i} ? ({new}) : " for i, new in news[old].items())
        return f"({''.join(chain)}({old}))"

    return PICK + re.sub("|".join(map(re.escape, news)), guard, text)


def is_noticed(mutation: Mutation, options: list[str]) -> bool:
    picked = {"MUTANT": str(TABLE.index(mutation))}
    if mutation.tests.startswith("cpp:"):
        folder = str(ROOT / "build" / "tests-cpp")
        made = run("cmake", "--build", folder)
        if made.returncode != 0:
            raise RuntimeError(f"the build failed:\n{made.stdout[-2000:]}")
        tests = f"--gtest_filter={mutation.tests.removeprefix('cpp:')}"
        return run(f"{folder}/spamm_torch_tests", tests, **picked).returncode != 0
    files = [f"tests/{file}" for file in mutation.tests.split()]
    result = run(sys.executable, "-m", "pytest", "-x", "-q", *options, *files, **picked)
    if result.returncode > 1:
        raise RuntimeError(f"pytest failed:\n{(result.stdout + result.stderr)[-2000:]}")
    return result.returncode != 0  # negative after a crash


def try_out(mutations: list[Mutation], options: list[str]) -> int:
    """Makes the mutations, undoes them, and returns how many of them the tests notice.

    Several are made together: those of the library, of which a run picks one.
    """
    texts = {mutation.file: (ROOT / mutation.file).read_text() for mutation in mutations}
    for mutation in mutations:
        count = texts[mutation.file].count(mutation.old)
        if count != 1:
            raise ValueError(f"{mutation.file} must hold {mutation.old!r} once; got {count} times")
    together = is_of_library(mutations[0])
    noticed = 0
    try:
        for file, text in texts.items():
            of_file = [mutation for mutation in mutations if mutation.file == file]
            old, new = of_file[0].old, of_file[0].new
            (ROOT / file).write_text(guarded(text, of_file) if together else text.replace(old, new))
        if together:
            build()
        for mutation in mutations:
            found = is_noticed(mutation, options)
            noticed += found
            print("noticed" if found else "MISSED ", mutation.file, repr(mutation.new), flush=True)
    finally:
        for file, text in texts.items():
            (ROOT / file).write_text(text)
        if together:
            build()
    return noticed


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", default="", help="mutations whose file or new text holds this (default: all)"
    )
    parser.add_argument("--pytest", default="", help="more options of pytest (default: none)")
    arguments = parser.parse_args(given)
    chosen = [m for m in TABLE if arguments.only in m.file or arguments.only in m.new]
    together = [mutation for mutation in chosen if is_of_library(mutation)]
    groups = [[mutation] for mutation in chosen if not is_of_library(mutation)]
    groups += [together] if together else []
    noticed = sum(try_out(group, shlex.split(arguments.pytest)) for group in groups)
    print(f"{noticed} of {len(chosen)} noticed")


if __name__ == "__main__":
    main()
