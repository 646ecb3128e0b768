"""One product with its operands where each layout needs them, made when they are asked for."""

import itertools
from functools import cached_property

import torch

import spamm_torch
from common.clock import side_by_side
from common.operands import operands
from common.precisions import use_precision

_BLOCK = 64


def equal_cuts(rows, parts):
    """parts + 1 row numbers, of parts equal to a block row."""
    block_rows = -(-rows // _BLOCK)
    return [min(rows, _BLOCK * (block_rows * part // parts)) for part in range(parts + 1)]


class Product:
    """A @ B, its norm maps on the first device, thresholds and shards."""

    def __init__(self, data, precision, n, devices):
        """
        Args:
            data, n: as of operands. precision: a key of PRECISIONS. devices: of the parts.
        """
        self.devices = devices
        self.dtype = use_precision(precision)
        self.a, self.b = operands(data, n, self.dtype, devices[0])
        self.norm_a, self.norm_b = spamm_torch.norm_map(self.a), spamm_torch.norm_map(self.b)
        self._taus, self._device_ms = {}, {}

    def tau(self, ratio):
        """The threshold of a valid ratio as a number, which calls take on any device."""
        if ratio not in self._taus:
            found = 0.0
            if ratio < 1:
                found = spamm_torch.find_tau(self.norm_a, self.norm_b, ratio).item()
            self._taus[ratio] = found
        return self._taus[ratio]

    def valid_ratio(self, ratio):
        """The valid ratio that the threshold found for ``ratio`` gives."""
        return spamm_torch.valid_ratio(self.norm_a, self.norm_b, self.tau(ratio)).item()

    def cuts(self, ratio):
        """parts + 1 row numbers that cut A by work; B is cut at the same numbers."""
        return spamm_torch.row_cuts(self.norm_a, self.norm_b, self.tau(ratio), len(self.devices))

    def shards(self, matrix, cuts):
        """The rows between the cuts, each on its part's device."""
        return [
            matrix[first:last].to(device)
            for (first, last), device in zip(itertools.pairwise(cuts), self.devices, strict=True)
        ]

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

    def device_ms(self, ratio, repeats):
        """What each device needs for its part with B at hand: norms of its shards and multiply."""
        if ratio not in self._device_ms:
            calls = self._calls_of_parts(ratio)
            self._device_ms[ratio] = side_by_side(calls, self.devices, repeats)
        return self._device_ms[ratio]

    def _calls_of_parts(self, ratio):
        cuts, tau = self.cuts(ratio), torch.tensor(self.tau(ratio), dtype=self.norm_a.dtype)
        whole = (len(self.a), self.b.shape[1])

        def call_of(a, own_b, b, norm_b):
            norm_a, out = spamm_torch.norm_map(a), a.new_empty(len(a), whole[1])

            def call():
                spamm_torch.norm_map(a)
                spamm_torch.norm_map(own_b)
                torch.ops.spamm_torch.multiply_part(
                    a, b, norm_a, norm_b, tau, (_BLOCK,) * 3, out, whole=whole
                )

            return call

        shards = zip(
            self.shards(self.a, cuts), self.shards(self.b, cuts), self.b_everywhere, strict=True
        )
        return [call_of(a, own_b, b, self.norm_b.to(b.device)) for a, own_b, b in shards]

    def synchronize(self):
        """Waits for all devices."""
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
