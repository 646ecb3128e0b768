#!/usr/bin/env python3
"""Breaks the code in one place after another, and shows which of these the tests notice.

Each line of the table replaces one text of one file, and names the tests that should fail then. The
files are put back, also after an interrupt. Changes of csrc/ build the library first.

    python scripts/mutate.py                     # all of them: half an hour on two cores
    python scripts/mutate.py --only cpu/conv     # those whose file or new text holds this
    python scripts/mutate.py --pytest="-m 'not thorough'"
"""

import argparse
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
    ("spamm_torch/networks/fold.py", "networks/test_convert.py networks/test_zoo.py", [
        ("batch_norm.eps, scale, shift)", "batch_norm.eps, None, shift)"),
        ("variance, batch_norm.eps,", "variance, 0.0,"),
    ]),
    ("spamm_torch/networks/sites.py", "networks/test_convert.py networks/test_zoo.py", [
        ("site.residual = other", "site.residual = None"),
        ("            site.activation = activation\n            self._take(site, node",
         "            self._take(site, node"),
        ("            start < self._order[node] < stop and ", "            False and "),
        ("name if plain and slope == _SLOPE else", "name if plain else"),
        ('node.kwargs.get("alpha", 1) != 1', "False"),
    ]),
    ("spamm_torch/networks/norm_flow.py", "networks/test_norms.py", [
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
    ("spamm_torch/calibration/thresholds.py", "calibration/test_thresholds.py", [
        ("torch.stack(taus).mean()", "torch.stack(taus).amax()"),
    ]),
    ("csrc/cpu/norm_map/norm_map.cpp", "products/test_norm_map.py", [
        ("    std::swap(m, k);\n", ""),
    ]),
    ("csrc/cpu/norm_map/scaled_norm.h", "products/test_norm_map.py products/test_threshold.py", [
        ("(x * scale) - excess", "(x * scale)"),
    ]),
    ("csrc/cpu/threshold/threshold.cpp", "products/test_threshold.py", [
        ("target - lower < upper - target", "target - lower > upper - target"),
        ("* (1 + slack)", "* (1 - slack)"),
        ("count = mb_ * nb_ - finite_a * finite_b", "count = 0"),
    ]),
    ("csrc/cpu/threshold/error_search.h", "products/test_threshold.py convolution/test_conv2d.py", [
        ("losses[j] += a * skip_norm_b[j] < tau", "losses[j] += a * b[j] < tau"),
    ]),
    ("csrc/cpu/threshold/histogram.cpp", "products/test_histogram.py", [
        ("key >= bins.low && bin < bins.count", "key > bins.low && bin < bins.count"),
    ]),
    ("csrc/cpu/multiply/valid_masks.h", "products/test_multiply.py", [
        ("norm_b[column] < norms.tau", "norm_b[column] <= norms.tau"),
    ]),
    ("csrc/cpu/multiply/valid_masks.h", "products/test_symmetric.py", [
        ("(i.begin + row - j.begin, 0, j.size)", "(i.begin + row + 1 - j.begin, 0, j.size)"),
    ]),
    ("csrc/cpu/multiply/epilogue.h", "products/test_multiply.py", [
        ("return beta * static_cast", "return static_cast"),
    ]),
    ("csrc/cpu/multiply/multiply.cpp", "products/test_multiply.py products/test_outputs.py", [
        ("input && beta.toDouble() != 0 ?", "input ?"),
    ]),
    ("csrc/cpu/multiply/multiply.cpp", "products/test_outputs.py", [
        (" || may_overlap(out, b) ||", " ||"),
    ]),
    ("csrc/cpu/multiply/multiply.cpp", "products/test_multiply.py products/test_cpu.py", [
        ("padded_depth = kb_ * block_.k", "padded_depth = depth_"),
    ]),
    ("csrc/spamm.cpp", "products/test_multiply.py products/test_outputs.py", [
        ("block.m == block.k && block.k == block.n && is_same_view(a, b)", "is_same_view(a, b)"),
    ]),
    ("csrc/spamm.cpp", "products/test_multiply.py products/test_errors.py", [
        (": norm_map(b, {k, n})};\n}", ": norm_map(b, {n, k})};\n}"),
    ]),
    ("csrc/autograd.cpp", "products/test_gradients.py", [
        ("grad.matmul(b.mT()).mul(alpha)", "grad.matmul(b.mT())"),
    ]),
    ("csrc/conv/conv2d.cpp", "convolution/test_conv2d.py", [
        ("  check_norm_weight(conv);\n", ""),
    ]),
    ("csrc/conv/im2col.cpp", "convolution/test_implicit_conv.py convolution/test_conv2d.py", [
        ("source_.stride(2) * shape_.dilation.width", "source_.stride(2)"),
    ]),
    ("csrc/cpu/conv/seen.h", "convolution/test_implicit_conv.py convolution/test_conv2d.py", [
        ("right_ < 0 ? blocks_of(-right_, stride) : 0", "right_ < 0 ? -right_ / stride : 0"),
    ]),
    ("csrc/cpu/conv/norms.h", "convolution/test_conv2d.py convolution/test_implicit_conv.py", [
        ("partial_block_scale<N>(blocks_.grid, blocks_.edge, block)", "N(1)"),
    ]),
    ("csrc/cpu/conv/epilogue.h", "convolution/test_epilogue.py", [
        ("bias[c] + static_cast<Sum>(widen(add[c])))", "bias[c])"),
    ]),
    ("csrc/cpu/conv/activate.h", "convolution/test_epilogue.py", [
        ("x > 6 ? Sum(6) : x", "x"),
        ("from_0_to_6(x + 3) / 6", "from_0_to_6(x + 3) / 5"),
    ]),
    ("csrc/cpu/conv/deviation.h", "convolution/test_deviation.py", [
        ("(widen(add[c])) + b) - activate(b)", "(widen(add[c])) + b)"),
    ]),
    ("csrc/conv/epilogue.cpp", "convolution/test_deviation.py", [
        ("  output.sub_(of_reference);\n", ""),
    ]),
    ("csrc/cpu/conv/live_tiles.cpp", "convolution/test_deviation.py", [
        ("any |= widen(values[c]) != 0", "any |= widen(values[c]) > 0"),
    ]),
    ("csrc/conv/max_pool.cpp", "convolution/test_max_pool.py", [
        ("pooled(input + reference)", "pooled(input)"),
    ]),
    ("csrc/shards/plan_maps.cpp", "sharding/test_plan.py", [
        ("products.lt(tau.to", "products.le(tau.to"),
        ("kWorkOfAny * norm_b.numel()", "0"),
    ]),
    ("csrc/shards/plan.cpp", "sharding/test_plan.py", [
        ("groups - (parts - part - 1)", "groups - (parts - part)"),
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
        ("std::max(multiply, ", "std::min(multiply, "),
    ]),
] for old, new in changes]
# fmt: on


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def build() -> None:
    built = run(sys.executable, "setup.py", "--quiet", "build_ext", "--inplace")
    if built.returncode != 0:
        raise RuntimeError(f"the build failed:\n{(built.stdout + built.stderr)[-2000:]}")


def needs_build(mutation: Mutation) -> bool:
    return mutation.file.startswith("csrc/") and not mutation.tests.startswith("cpp:")


def is_noticed(mutation: Mutation, options: list[str]) -> bool:
    if mutation.tests.startswith("cpp:"):
        folder = str(ROOT / "build" / "tests-cpp")
        made = run("cmake", "--build", folder)
        if made.returncode != 0:
            raise RuntimeError(f"the build failed:\n{made.stdout[-2000:]}")
        tests = f"--gtest_filter={mutation.tests.removeprefix('cpp:')}"
        return run(f"{folder}/spamm_torch_tests", tests).returncode != 0
    files = [f"tests/{file}" for file in mutation.tests.split()]
    result = run(sys.executable, "-m", "pytest", "-x", "-q", *options, *files)
    if result.returncode not in (0, 1):
        raise RuntimeError(f"pytest failed:\n{(result.stdout + result.stderr)[-2000:]}")
    return result.returncode == 1


def try_out(mutation: Mutation, options: list[str]) -> bool:
    """Whether the tests notice the mutation, which is taken back."""
    file = ROOT / mutation.file
    text = file.read_text()
    if text.count(mutation.old) != 1:
        count = text.count(mutation.old)
        raise ValueError(f"{mutation.file} must hold {mutation.old!r} once; got {count} times")
    try:
        file.write_text(text.replace(mutation.old, mutation.new))
        if needs_build(mutation):
            build()
        return is_noticed(mutation, options)
    finally:
        file.write_text(text)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", default="", help="mutations whose file or new text holds this (default: all)"
    )
    parser.add_argument("--pytest", default="", help="more options of pytest (default: none)")
    arguments = parser.parse_args(given)
    chosen = [m for m in TABLE if arguments.only in m.file or arguments.only in m.new]
    noticed = 0
    try:
        for mutation in chosen:
            found = try_out(mutation, shlex.split(arguments.pytest))
            noticed += found
            print("noticed" if found else "MISSED ", mutation.file, repr(mutation.new), flush=True)
    finally:
        if any(map(needs_build, chosen)):
            build()
    print(f"{noticed} of {len(chosen)} noticed")


if __name__ == "__main__":
    main()
