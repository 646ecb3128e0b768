"""The whole VGG13 of Table 5: as it is, under torch.compile, and with SpAMM convolutions, fused."""

import gc

import torch
from torch import nn

import spamm_torch
from cases.networks.candidates import Candidates
from common.timing import interleaved
from models.errors import UserError, first_line
from models.vgg13 import fold_batch_norm
from study.timing import layer_inputs

DENSE, SKIPPED_NOTHING = "dense", 1.0
COMPILED = {"cpu": ("compiled",), "cuda": ("compiled", "max-autotune")}  # of Candidates
_MOST_ERROR = 4  # times the dense network's own error: rounding in another order
_LEAST_ERROR = 1e-5  # below that errors count as equal
_OTHER_SIDE = 1e-3  # error by products that rounding moves to the other side of their threshold


@torch.no_grad()  # not inference mode, in which weights' norms cannot be pinned
def measure(trained, dtype, pictures, group, layout, repeats):
    """Times of the network for one batch, candidates in turns, on CUDA as graphs.

    Args:
        trained: a VGG13, float32. dtype: to measure. pictures: a batch, float32. group: of the
            study's plan, whose layers are replaced. layout: of the study. repeats: rounds.

    Returns:
        A row for each candidate, as plain data: "candidate": DENSE, a name of bench.networks, or
        "SpAMM" with its "ratio" (SKIPPED_NOTHING: all products); "ms"; "absent": None, or why there
        is no time.

    Raises:
        UserError: a network of ours computes something else than its layers one by one.
    """
    try:
        return _Networks(trained, dtype, pictures).rows(group, layout, repeats)
    finally:
        torch._dynamo.reset()  # what it compiled would hold the networks
        gc.collect()
        torch.cuda.empty_cache()


class _Networks:
    def __init__(self, trained, dtype, pictures):
        plain = fold_batch_norm(trained)
        self._expected = plain(pictures)
        self._dense, self._pictures = plain.to(dtype), pictures.to(dtype)
        self._rounding = _MOST_ERROR * max(_LEAST_ERROR, self._error(self._dense, self._expected))

    def rows(self, group, layout, repeats):
        device = self._pictures.device
        networks, rows = {}, []
        for name in (DENSE, *COMPILED[device.type]):
            row = {"candidate": name, "ratio": None, "ms": None, "absent": None}
            try:
                networks[name] = self._compiled(name)
                interleaved(self._calls({name: networks[name]}), device, 1)  # alone, if it fails
            except Exception as error:  # of a compiler of which nothing is known
                networks.pop(name, None)
                row["absent"] = first_line(error)
            rows.append(row)
        for ratio in (SKIPPED_NOTHING, *group.ratios):
            networks[ratio] = self._ours(group, layout, ratio)
            rows.append({"candidate": "SpAMM", "ratio": ratio, "ms": None, "absent": None})
        times = interleaved(self._calls(networks), device, repeats)
        for row in rows:
            if not row["absent"]:
                row["ms"] = times[row["ratio"] or row["candidate"]].median
        return rows

    def _calls(self, networks):
        return {name: lambda net=net: net(self._pictures) for name, net in networks.items()}

    def _compiled(self, name):
        """A candidate without SpAMM; what it computes is compared.

        Raises:
            RuntimeError: it is wrong.
        """
        network, _ = Candidates(self._dense, self._pictures).prepare(name)
        error = self._error(network, self._expected)
        if not error <= self._rounding:
            raise RuntimeError(
                f"wrong result: expected an error of at most {self._rounding:.2g}; got {error:.2g}"
            )
        return network

    def _ours(self, group, layout, ratio):
        """The network with SpAMM in a group's layers, thresholds held, fused."""
        skips = ratio != SKIPPED_NOTHING
        inputs = layer_inputs(self._dense, group.layers, self._pictures)
        layers = dict(self._dense.named_children())
        for name, x in inputs.items():
            conv, tau = layers[name], 0.0
            if skips:
                tau = spamm_torch.find_tau(*layout.norm_maps(conv, x), ratio).item()
            layers[name] = layout.module(conv, tau)
        one_by_one = nn.Sequential(*layers.values())(self._pictures).float()
        network = nn.Sequential(*layers.values()).eval()
        spamm_torch.convert_(network)
        most = max(self._rounding, _OTHER_SIDE) if skips else self._rounding
        error = self._error(network, one_by_one)
        if not error <= most:
            raise UserError(
                f"wrong result of the fused network at ratio {ratio}: expected an error of at most "
                f"{most:.2g}; got {error:.2g}"
            )
        return network

    def _error(self, network, expected):
        output = network(self._pictures).float()
        return ((output - expected).norm() / expected.norm()).item()
