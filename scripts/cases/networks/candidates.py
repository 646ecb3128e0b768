"""The ways in which bench.py networks runs a network: dense, compiled, converted."""

import copy
import functools
import time
from collections import Counter

import torch

import spamm_torch

# Of torch.compile's modes the one without CUDA graphs: all candidates are captured by the same
# code, so that their times mean the same.
_MAX_AUTOTUNE = "max-autotune-no-cudagraphs"
HELD_TAU = 1e-30  # skips blocks of zeros at most
HELD_TAU_IMAGES = 32  # the largest batch at which a held tau is measured
_HELD = {"tau": HELD_TAU, "pixel_block": (64, 1, 1)}

CANDIDATES = {
    "dense": "the network as it is, batch norms and all",
    "compiled": "torch.compile's default",
    "max-autotune": f"torch.compile, mode {_MAX_AUTOTUNE}",
    "freezing": f"torch.compile, mode {_MAX_AUTOTUNE}, with torch._inductor.config.freezing set "
    "while it compiles, which folds batch norms into weights",
    "ours": "convert_ with an example input, nothing skipped",
    "ours-compiled": "ours, then torch.compile's default",
    "held-tau": f"convert_ with tau = {HELD_TAU:g} held in pixel blocks (64, 1, 1), without an "
    "example input: every layer that can skip does ask of each block; batches of up to "
    f"{HELD_TAU_IMAGES}",
}

_CONVERTED = ("ours", "ours-compiled", "held-tau")


def names_for(batch, names):
    """Those of the names that are measured at this batch."""
    return [name for name in names if name != "held-tau" or batch <= HELD_TAU_IMAGES]


class Candidates:
    """One network's candidates at one batch.

    Args:
        dense: the network, in eval mode, in the dtype to measure. pictures: the batch.
    """

    def __init__(self, dense, pictures):
        self._dense, self._pictures = dense, pictures

    def prepare(self, name):
        """The candidate as a call, compiled and converted, and the seconds that took."""
        start = time.perf_counter()
        model = self._prepared(name)
        model(self._pictures)
        return model, time.perf_counter() - start

    def actions(self, name):
        """{action: number of layers} that the conversion of a candidate reported, or None."""
        if name not in _CONVERTED:
            return None
        _, report = self._held if name == "held-tau" else self._ours
        return dict(Counter(row.action for row in report))

    def _prepared(self, name):
        if name == "dense":
            return self._dense
        if name == "compiled":
            return _compiled(self._dense)
        if name == "max-autotune":
            return _compiled(self._dense, mode=_MAX_AUTOTUNE)
        if name == "freezing":
            return self._frozen()
        if name == "ours":
            return self._ours[0]
        if name == "ours-compiled":
            return _compiled(self._ours[0], fullgraph=True)
        return self._held[0]

    def _frozen(self):
        """Dynamo and Inductor read the global setting; the option tells this call's code apart
        from that of max-autotune, whose options are equal otherwise."""
        options = torch._inductor.list_mode_options(_MAX_AUTOTUNE) | {"freezing": True}
        compiled = _compiled(self._dense, options=options)
        with torch._inductor.config.patch(freezing=True):
            compiled(self._pictures)
        return compiled

    @functools.cached_property
    def _ours(self):
        return self._converted(example_input=self._pictures)

    @functools.cached_property
    def _held(self):
        return self._converted(spamm_torch.SpAMMConfig(**_HELD))

    def _converted(self, *config, **example):
        model = copy.deepcopy(self._dense)
        report = spamm_torch.convert_(model, *config, **example)
        return model, report


def _compiled(model, **settings):
    return torch.compile(model, dynamic=False, **settings)
