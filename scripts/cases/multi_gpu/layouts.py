"""The layouts that one process drives: what is called, how long it takes, whether it is right."""

from functools import partial

import torch

import spamm_torch
from common.clock import by_clock, host_time

_OVERHEAD_ROUNDS = 51
_COPIED = 1 << 28  # bytes for each device, to measure the way from the host


def calls_of(layout, product, ratio):
    """The product on one device and on all: {"one": call, "all": call}.

    The second gives C, or its rows in shards.
    """
    mm = partial(spamm_torch.mm, tau=product.tau(ratio))
    a, b, devices = product.a, product.b, product.devices
    one = partial(mm, a, b)
    if layout in ("R", "S"):
        cuts = product.cuts(ratio)
        shards_of_a = product.shards(a, cuts)
        shards_of_b = product.b_everywhere if layout == "R" else product.shards(b, cuts)
        mm_shards = partial(spamm_torch.mm_shards, tau=product.tau(ratio))
        return {"one": one, "all": partial(mm_shards, shards_of_a, shards_of_b)}
    if layout == "0":
        return {"one": one, "all": partial(one, devices=devices)}
    from_host = partial(mm, *product.on_host)
    return {
        "one": partial(from_host, devices=devices[:1]),
        "all": partial(from_host, devices=devices),
    }


def measure(cell, product, repeats, bandwidth):
    """The figures of a cell.

    Args:
        bandwidth: as of host_bandwidth.
    """
    calls = calls_of(cell.what, product, cell.ratio)
    equal = is_same(product, cell.ratio, calls["all"]())
    if cell.what == "R" and cell.ratio < 1:
        calls["search"] = partial(spamm_torch.find_tau, product.norm_a, product.norm_b, cell.ratio)
    times = by_clock(calls, repeats, product.synchronize)
    traffic = {"search_ms": times["search"].median} if "search" in times else {}
    if cell.what in ("R", "S"):
        device_ms = product.device_ms(cell.ratio, repeats)
        traffic |= {
            "device_ms": device_ms,
            "imbalance": max(device_ms) / (sum(device_ms) / len(device_ms)),
            "exposed_ms": times["all"].median - max(device_ms),
        }
    if cell.what == "S":
        traffic |= sent(product, cell.ratio, product.cuts(cell.ratio))
    if cell.what == "H":
        operands_ms = sum(map(size_of, product.on_host)) / bandwidth
        traffic["of_bound"] = operands_ms / times["all"].median
    return figures(product.valid_ratio(cell.ratio), times, equal, **traffic)


def figures(valid_ratio, times, equal, **traffic):
    """A cell's figures from the Timings "one" and "all".

    Args:
        traffic: more of them: "sent", bytes of B that travel over those without skipping;
            "work_imbalance", the largest part's work over the mean; "device_ms" of each device for
            its part, B being there, and their "imbalance"; "exposed_ms", the time of all less the
            slowest device's; "of_bound", the time to bring the operands from the host over that of
            all; "search_ms", of the threshold, from norm maps on one device.
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


def sent(product, ratio, cuts):
    """How much of B travels, by the library's own plan: a share of what would without skipping.

    Also the largest part's work over the mean.

    Args:
        cuts: of the rows of A, and of B.
    """
    from spamm_torch import distributed

    plan = distributed.exchange_plan(
        product.norm_a, product.norm_b, product.tau(ratio), cuts, b_cuts=cuts
    )
    return {"sent": plan.bytes / plan.dense_bytes, "work_imbalance": plan.imbalance}


def is_same(product, ratio, result):
    """Whether C, or its rows in shards, are what one device gives, bit for bit."""
    expected = spamm_torch.mm(product.a, product.b, tau=product.tau(ratio))
    shards = result if isinstance(result, (list, tuple)) else [result]
    expected_shards = expected.split([len(shard) for shard in shards])
    return all(
        torch.equal(shard.to(expected.device), rows)
        for shard, rows in zip(shards, expected_shards, strict=True)
    )


def overhead(layout, product, repeats=_OVERHEAD_ROUNDS):
    """The host's time for a product that is next to none."""
    calls = calls_of(layout, product, 1.0)
    return {
        f"{name}_us": 1e3 * host_time(call, repeats, product.synchronize)
        for name, call in calls.items()
    }


def host_bandwidth(devices, repeats):
    """Bytes a millisecond from pinned host memory into all devices at once."""
    source = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    targets = [torch.empty_like(source, device=device) for device in devices]

    def copy():
        for target in targets:
            target.copy_(source, non_blocking=True)

    def synchronize():
        for device in devices:
            torch.cuda.synchronize(device)

    timing = by_clock({"copy": copy}, repeats, synchronize)["copy"]
    return len(devices) * _COPIED / timing.median


def size_of(tensor):
    return tensor.numel() * tensor.element_size()
