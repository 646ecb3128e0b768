"""Products with operands on several devices: how they are called, timed and compared with one."""

import itertools
from functools import cached_property, partial

import torch

import spamm_torch
from cases.block_sparse import overlap_of
from common.machine import use_precision
from common.operands import operands
from common.timing import by_clock, host_time

_BLOCK = 64
_OVERHEAD_ROUNDS = 51
_COPIED = 1 << 28  # bytes for each device, to measure the way from the host


def equal_cuts(rows, parts, block=_BLOCK):
    """parts + 1 numbers of rows, or of images, of parts equal to a block."""
    blocks = -(-rows // block)
    return [min(rows, block * (blocks * part // parts)) for part in range(parts + 1)]


def split(matrix, cuts, devices):
    """The rows between the cuts, each on its part's device."""
    pairs = zip(itertools.pairwise(cuts), devices, strict=True)
    return [matrix[first:last].to(device) for (first, last), device in pairs]


class Product:
    """A @ B of operands, or S S for "water"; a layout makes what it needs at its first use."""

    def __init__(self, data, precision, n, devices):
        self.devices = devices
        dtype = use_precision(precision)
        if data == "water":  # block-sparse
            self.a = self.b = overlap_of(n, dtype, devices[0])
        else:
            self.a, self.b = operands(data, n, dtype, devices[0])
        self.norm_a = self.norm_b = spamm_torch.norm_map(self.a)
        if self.b is not self.a:
            self.norm_b = spamm_torch.norm_map(self.b)
        self._taus = {1: 0.0}

    def tau(self, ratio):
        """The threshold of a valid ratio as a number, which calls take on any device."""
        if ratio not in self._taus:
            self._taus[ratio] = spamm_torch.find_tau(self.norm_a, self.norm_b, ratio).item()
        return self._taus[ratio]

    def valid_ratio(self, ratio):
        """The valid ratio that the threshold found for ``ratio`` gives."""
        return spamm_torch.valid_ratio(self.norm_a, self.norm_b, self.tau(ratio)).item()

    def cuts(self, ratio):
        """parts + 1 row numbers that cut A by work; B is cut at the same numbers."""
        return spamm_torch.row_cuts(self.norm_a, self.norm_b, self.tau(ratio), len(self.devices))

    @cached_property
    def b_everywhere(self):
        """The whole of B on each device."""
        return [self.b.to(device) for device in self.devices]

    @cached_property
    def on_host(self):
        """A and B in pinned host memory."""
        return [
            torch.empty_like(matrix, device="cpu", pin_memory=True).copy_(matrix)
            for matrix in (self.a, self.b)
        ]


# ---- Layouts that one process drives ------------------------------------------------------------


def calls_of(layout, product, ratio):
    """The product on one device and on all, as C or its rows: {"one": call, "all": call}."""
    mm = partial(spamm_torch.mm, tau=product.tau(ratio))
    a, b, devices = product.a, product.b, product.devices
    one = partial(mm, a, b)
    if layout in ("R", "S"):
        cuts = product.cuts(ratio)
        shards_of_a = split(a, cuts, devices)
        shards_of_b = product.b_everywhere if layout == "R" else split(b, cuts, devices)
        mm_shards = partial(spamm_torch.mm_shards, tau=product.tau(ratio))
        return {"one": one, "all": partial(mm_shards, shards_of_a, shards_of_b)}
    if layout == "0":
        return {"one": one, "all": partial(one, devices=devices)}
    from_host = partial(mm, *product.on_host)
    return {
        "one": partial(from_host, devices=devices[:1]),
        "all": partial(from_host, devices=devices),
    }


def measure(layout, product, ratio, repeats, bandwidth):
    """The figures of a layout; ``bandwidth``: as of host_bandwidth."""
    calls = calls_of(layout, product, ratio)
    equal = is_same(product, ratio, calls["all"]())
    if layout == "R" and ratio < 1:
        calls["search"] = partial(spamm_torch.find_tau, product.norm_a, product.norm_b, ratio)
    times = by_clock(calls, repeats, product.devices)
    traffic = {"search_ms": times["search"].median} if "search" in times else {}
    if layout == "S":
        traffic |= sent(product.norm_a, product.norm_b, product.tau(ratio), product.cuts(ratio))
    if layout == "H":
        operands_ms = sum(x.numel() * x.element_size() for x in product.on_host) / bandwidth
        traffic["of_bound"] = operands_ms / times["all"].median
    return figures(product.valid_ratio(ratio), times, equal, **traffic)


def figures(valid_ratio, times, equal, **traffic):
    """A cell's figures from the Timings "one" and "all", with more of them: "sent", bytes of B that
    travel over those without skipping; "work_imbalance", the largest part's work over the mean;
    "of_bound", the time to bring the operands from the host over that of all; "search_ms", of the
    threshold.
    """
    one, every = times["one"], times["all"]
    return {
        "valid_ratio": valid_ratio,
        "one_ms": one.median,
        "all_ms": every.median,
        "spread": every.spread / every.median,
        "speedup": one.median / every.median,
        "equal": equal,
        **traffic,
    }


def sent(norm_a, norm_b, tau, cuts):
    """The share of B that travels, by the library's own plan: a share of what would without
    skipping; and the largest part's work over the mean. ``cuts``: of the rows of A, and of B.
    """
    from spamm_torch import distributed

    plan = distributed.exchange_plan(norm_a, norm_b, tau, cuts, b_cuts=cuts)
    return {"sent": plan.bytes / plan.dense_bytes, "work_imbalance": plan.imbalance}


def is_same(product, ratio, result):
    """Tells whether C, or its rows in shards, are what one device gives, bit for bit."""
    expected = spamm_torch.mm(product.a, product.b, tau=product.tau(ratio))
    shards = result if isinstance(result, (list, tuple)) else [result]
    expected_shards = expected.split([len(shard) for shard in shards])
    return all(
        torch.equal(shard.to(expected.device), rows)
        for shard, rows in zip(shards, expected_shards, strict=True)
    )


def overhead(layout, product):
    """The host's microseconds for a product that is next to none."""
    calls = calls_of(layout, product, 1.0)
    return {
        f"{name}_us": 1e3 * host_time(call, _OVERHEAD_ROUNDS, product.devices)
        for name, call in calls.items()
    }


def host_bandwidth(devices, repeats):
    """Bytes a millisecond from pinned host memory into all devices at once."""
    source = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    targets = [torch.empty_like(source, device=device) for device in devices]

    def copy():
        for target in targets:
            target.copy_(source, non_blocking=True)

    timing = by_clock({"copy": copy}, repeats, devices)["copy"]
    return len(devices) * _COPIED / timing.median


def torch_mm(product, repeats):
    """The Timing of torch.mm on all devices at once: rows of A, and the whole of B on each."""
    cuts = equal_cuts(len(product.a), len(product.devices))
    pairs = list(zip(split(product.a, cuts, product.devices), product.b_everywhere, strict=True))
    call = lambda: [torch.mm(*pair) for pair in pairs]  # noqa: E731
    return by_clock({"call": call}, repeats, product.devices)["call"]
