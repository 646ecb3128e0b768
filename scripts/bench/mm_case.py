"""One product against torch.mm: verified, then timed at several valid ratios."""

import functools
from dataclasses import asdict

import torch

import spamm_torch
from bench.mm_report import SEARCHED_ERROR, Row, StageRow
from bench.operands import operands
from common.errors import UserError
from common.precisions import TOLERANCE, use_precision
from common.timing import interleaved


def relative_error(product, a, b, norm_a, norm_b, tau, block):
    """Error of the block rows at a third and at the end, against float64 with the same skips."""
    m, k, n = (block,) * 3 if isinstance(block, int) else block
    rows = norm_a.shape[0]
    error = norm = 0.0
    for i in {rows // 3, rows - 1}:
        valid = ~(norm_a[i][:, None] * norm_b < tau)
        mask = valid.repeat_interleave(k, 0).repeat_interleave(n, 1)
        kept = b.double() * mask[: b.shape[0], : b.shape[1]]
        part = slice(i * m, (i + 1) * m)
        expected = a[part].double() @ kept
        error += (product[part].double() - expected).square().sum().item()
        norm += expected.square().sum().item()
    return (error / norm) ** 0.5 if norm else error**0.5


def copy_bandwidth(device, repeats):
    """Bytes read plus written in a millisecond by a large elementwise kernel.

    A plain copy would become a memcpy node of the CUDA graph, which runs at two thirds of that.
    """
    elements = (1 << 28) if device.type == "cuda" else (1 << 26)
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    timing = interleaved({"copy": lambda: torch.abs(source, out=target)}, device, repeats)["copy"]
    return 8 * elements / timing.median


def bench_operands(case, ratios, bandwidth, device, repeats, cold=False, norms_apart=True):
    """All ratios of one case; the dense product takes turns with all of them.

    Args:
        case: (data, precision, block, n). ratios: valid ratios. bandwidth: as of copy_bandwidth.
        repeats: rounds of each timing. cold: empty the L2 cache before each call.
        norms_apart: time the product without the norms, too.

    Returns:
        {"rows": a Row for each ratio, "stage": the StageRow}, as plain data.

    Raises:
        UserError: a result is wrong.
    """
    data, precision, block, n = case
    dtype = use_precision(precision)
    a, b = operands(data, n, dtype, device)
    norm_maps = functools.partial(torch.ops.spamm_torch.norm_maps, a, b, block)
    norm_a, norm_b = norm_maps()
    taus = {}
    errors = {}
    candidates = {
        "dense": lambda: torch.mm(a, b),
        "norms": norm_maps,
        "search": lambda: spamm_torch.find_tau(norm_a, norm_b, 0.3),
        "error search": lambda: spamm_torch.find_tau_for_error(norm_a, norm_b, SEARCHED_ERROR),
    }
    for ratio in ratios:
        tau = torch.zeros_like(norm_a[0, 0])
        if ratio < 1:
            tau = spamm_torch.find_tau(norm_a, norm_b, ratio)
        product = spamm_torch.mm(a, b, tau=tau, block=block)
        errors[ratio] = relative_error(product, a, b, norm_a, norm_b, tau, block)
        if not errors[ratio] <= TOLERANCE[precision]:
            raise UserError(
                f"wrong result for {case} at ratio {ratio}: expected an error of at most "
                f"{TOLERANCE[precision]}; got {errors[ratio]}"
            )
        taus[ratio] = tau
        candidates[f"mm {ratio}"] = lambda tau=tau: spamm_torch.mm(a, b, tau=tau, block=block)
        if norms_apart:
            candidates[f"multiply {ratio}"] = lambda tau=tau: torch.ops.spamm_torch.multiply(
                a, b, norm_a, norm_b, tau, block
            )
    dense_error = relative_error(torch.mm(a, b), a, b, norm_a, norm_b, 0, block)
    times = interleaved(candidates, device, repeats, cold=cold)
    dense = times["dense"].median
    operand_ms = 2 * n * n * a.element_size() / bandwidth
    backend = spamm_torch.backend_for(device, dtype, block)

    def row(ratio):
        valid = spamm_torch.valid_ratio(norm_a, norm_b, taus[ratio]).item()
        mm, multiply = times[f"mm {ratio}"], times.get(f"multiply {ratio}")
        floor = operand_ms + max(valid * dense, 1.5 * operand_ms)
        return Row(
            *case,
            valid_ratio=valid,
            backend=backend,
            dense_ms=dense,
            multiply_ms=multiply and multiply.median,
            mm_ms=mm.median,
            spread=mm.spread / mm.median,
            speedup=dense / mm.median,
            speedup_multiply=multiply and dense / multiply.median,
            share_of_floor=floor / mm.median,
            error=errors[ratio],
            dense_error=dense_error,
        )

    norms = times["norms"].median
    searches = (times[name].median for name in ("search", "error search"))
    stage = StageRow(*case, norms, operand_ms / norms, *searches)
    return {"rows": [asdict(row(ratio)) for ratio in ratios], "stage": asdict(stage)}
