"""Measures one network at one batch: all candidates in turns, each checked before."""

import gc
from dataclasses import asdict

import torch

from bench.networks.candidates import Candidates, names_for
from bench.networks.rows import NetworkRow
from bench.networks.zoo import NETWORKS, pictures_for, settled_model
from common.errors import first_line
from common.timing import interleaved

_MOST_ERROR = 4  # times the dense network's own error: rounding in another order
_LEAST_ERROR = 1e-6  # below that errors count as equal


def measure_network(name, batch, options, dtype, device):
    """A NetworkRow for each candidate, as plain data.

    A candidate that cannot be prepared or captured, or computes something else than the dense
    network, is a row that says so.
    """
    try:
        return _Cell(name, batch, options, dtype, device).rows()
    finally:
        torch._dynamo.reset()  # compiled code of one batch is of no use to the next
        gc.collect()
        torch.cuda.empty_cache()


class _Cell:
    def __init__(self, name, batch, options, dtype, device):
        self._name, self._batch, self._device = name, batch, device
        self._options = options
        network = NETWORKS[name]
        pictures = pictures_for(network, batch, device)
        model = settled_model(network, device)
        self._expected = model(pictures)
        self._pictures = pictures.to(dtype)
        self._dense = model.to(dtype)
        self._most_error = _MOST_ERROR * max(self._error(self._dense), _LEAST_ERROR)

    def rows(self):
        candidates = Candidates(self._dense, self._pictures)
        names = names_for(self._batch, self._options.candidates)
        calls, rows = {}, {}
        for name in names:
            rows[name] = self._prepared(name, candidates, calls)
        times = {mode: self._timed(calls, mode) for mode in self._options.modes}
        for name in calls:
            rows[name] |= {
                "ms": {mode: of[name].median for mode, of in times.items()},
                "spread": {mode: of[name].spread / of[name].median for mode, of in times.items()},
            }
        return list(rows.values())

    def _prepared(self, name, candidates, calls):
        """The candidate's row without times; puts its call into ``calls`` if it has one."""
        row = asdict(NetworkRow(self._name, self._batch, name))
        try:
            model, seconds = candidates.prepare(name)
            call = lambda: model(self._pictures)  # noqa: E731
            for mode in self._options.modes:  # what cannot be captured fails here, and alone
                self._timed({name: call}, mode, repeats=1)
        except Exception as error:
            return row | {"absent": first_line(error)}
        error = self._error(model)
        if not error <= self._most_error:
            most = f"expected an error of at most {self._most_error:.2g}"
            return row | {"error": error, "absent": f"WRONG RESULT: {most}; got {error:.2g}"}
        calls[name] = call
        return row | {
            "error": error,
            "prepare_s": seconds,
            "actions": candidates.actions(name),
        }

    def _timed(self, calls, mode, repeats=None):
        return interleaved(
            calls, self._device, repeats or self._options.repeats, eager=mode == "eager"
        )

    def _error(self, model):
        output = model(self._pictures).float()
        return ((output - self._expected).norm() / self._expected.norm()).item()
