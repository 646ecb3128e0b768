"""A batch's convolution on several devices against one."""

import itertools
from functools import partial

import torch

import spamm_torch
from bench.conv_case import Case
from bench.multi_gpu.conv_report import Row
from common.clock import by_clock

_BLOCK = (64, 64, 64)  # the last is the images of a pixel block, too


def measure(layer, batch, ratio, dtype, devices, repeats):
    """The Row of a layer."""
    case = Case(layer, batch, dtype, "even", _BLOCK, devices[0])
    tau, valid = case.threshold(ratio)
    setting = case.shape | case.setting | {"tau": float(tau)}
    weights = [case.weight.to(device) for device in devices]
    cuts = image_cuts(batch, len(devices))
    shards = [
        case.input[first:last].to(device)
        for (first, last), device in zip(itertools.pairwise(cuts), devices, strict=True)
    ]
    calls = {
        "one": partial(spamm_torch.conv2d, case.input, case.weight, **setting),
        "all": partial(spamm_torch.conv2d_shards, shards, weights, **setting),
    }
    expected, results = calls["one"](), calls["all"]()
    equal = torch.equal(torch.cat([result.to(devices[0]) for result in results]), expected)

    def synchronize():
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    times = by_clock(calls, repeats, synchronize)
    one, every = times["one"], times["all"]
    return Row(
        layer.name,
        batch,
        ratio,
        valid_ratio=valid,
        one_ms=one.median,
        all_ms=every.median,
        spread=every.spread / every.median,
        speedup=one.median / every.median,
        equal=equal,
    )


def image_cuts(batch, parts):
    """parts + 1 numbers of images, of parts equal to a pixel block."""
    images = _BLOCK[2]
    blocks = -(-batch // images)
    return [min(batch, images * (blocks * part // parts)) for part in range(parts + 1)]
