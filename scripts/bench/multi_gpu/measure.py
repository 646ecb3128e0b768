"""Measures cells one by one."""

import functools

from bench.multi_gpu import layouts, peers
from bench.multi_gpu.cells import NEED_CUDA
from bench.multi_gpu.product import Product
from bench.multi_gpu.rows import Overhead, PeerRow, Row
from bench.run import attempt

_TINY = ("decay", "float16", 256)  # a product that takes next to no time by itself


class Bench:
    """Measures cells on some devices; keeps the operands of the last product."""

    def __init__(self, devices, repeats, ranks, bandwidth):
        """
        Args:
            ranks: Ranks on the same devices. bandwidth: gives that of the host, as of
                layouts.host_bandwidth.
        """
        self._kind = devices[0].type
        self._repeats, self._ranks, self._bandwidth = repeats, ranks, bandwidth
        self._product = functools.lru_cache(maxsize=1)(lambda *product: Product(*product, devices))

    def measure(self, cell):
        """The Row or PeerRow of a cell.

        Raises:
            RuntimeError: it needs GPUs and there are none. Other errors come from what is measured.
        """
        if cell.what in NEED_CUDA and self._kind != "cuda":
            raise RuntimeError(f"{cell.what} needs CUDA devices; got {self._kind}")
        return self._peer(cell) if cell.is_peer else self._row(cell)

    def _row(self, cell):
        if cell.what == "ranks":
            return self._ranks.do("multiply", cell, self._repeats)
        bandwidth = self._bandwidth() if cell.what == "H" else None
        return layouts.measure(cell, self._product(*cell.product), self._repeats, bandwidth)

    def _peer(self, cell):
        if cell.what in ("symm_mem", "DTensor"):
            timing = self._ranks.do(cell.what.lower(), cell, self._repeats)
        else:
            measure = {"torch.mm": peers.torch_mm, "cublasXt": peers.cublas_xt}[cell.what]
            timing = measure(self._product(*cell.product), self._repeats)
        return PeerRow(
            cell.what, *cell.product, ms=timing.median, spread=timing.spread / timing.median
        )

    def overhead(self, layout):
        """The Overhead of a layout."""
        return layouts.overhead(layout, self._product(*_TINY))


def measure_cell(cell, bench):
    """The row of a cell as plain data: figures, or why there are none."""
    without = PeerRow(cell.what, *cell.product) if cell.is_peer else Row(**layouts.place(cell))
    return attempt(bench.measure, cell, without)


def measure_overhead(layout, bench):
    """The Overhead of a layout as plain data, in the same way."""
    return attempt(bench.overhead, layout, Overhead(layout, _TINY[-1]))
