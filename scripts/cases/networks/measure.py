"""Measures one network at one batch: all candidates in turns, each checked before."""

import gc

import torch

from cases.networks.candidates import Candidates, names_for
from cases.networks.zoo import NETWORKS, pictures_for, settled_model
from common.precisions import PRECISIONS
from common.timing import interleaved
from models.errors import first_line

_MOST_ERROR = 4  # times the dense network's own error: rounding in another order
_LEAST_ERROR = 1e-6  # below that errors count as equal


_PEERS = {"CUDA graph": "compiled", "eager": "dense"}  # of each mode's speedups


def measure_network(name, batch, options):
    """A row for each mode and candidate.

    A candidate that cannot be prepared or captured, or computes something else than the dense
    network, is a row that says so.
    """
    try:
        return {"networks": _Cell(name, batch, options).rows()}
    finally:
        torch._dynamo.reset()  # compiled code of one batch is of no use to the next
        gc.collect()
        torch.cuda.empty_cache()


class _Cell:
    def __init__(self, name, batch, options):
        self._name, self._batch, self._device = name, batch, options.device
        self._options = options
        device, dtype = options.device, PRECISIONS[options.precision][0]
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
        found = [
            row | self._times(mode, name, of)
            for mode, of in times.items()
            for name, row in rows.items()
            if name in of
        ]
        return found + [row for name, row in rows.items() if name not in calls]

    def _times(self, mode, name, times):
        peer, own = times.get(_PEERS[mode]), times[name]
        return {
            "mode": mode,
            "ms": own.median,
            "speedup": peer and peer.median / own.median,
            "spread": own.spread / own.median,
        }

    def _prepared(self, name, candidates, calls):
        """The candidate's row without times; puts its call into ``calls`` if it has one."""
        row = {"network": self._name, "batch": self._batch, "candidate": name}
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
