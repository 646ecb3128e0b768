"""Table 5: VGG13 on MNIST, its convolutions replaced, by layer and valid ratio."""

from dataclasses import asdict
from functools import partial

import torch

import spamm_torch
from common.clock import by_clock
from common.journal import model_digest
from common.measuring import cell, not_measured
from common.precisions import use_precision
from models.errors import UserError
from models.training import validation_pictures
from models.vgg13 import CONVOLUTIONS, fold_batch_norm
from study.groups import said_of_study, study_group
from study.layouts import LAYOUTS
from study.plan import PAPER, Group
from study.timing import layer_inputs
from study.training_options import chosen_training, train_or_load
from tables import paper, whole_network

TITLE = "VGG13 on MNIST"
PRECISIONS = {"cpu": ("float32",), "cuda": ("float32", "float16")}
_BY_POSITION = LAYOUTS[2]
_PAPERS = {layer: tuple(ratio for of, ratio in PAPER if of == layer) for layer, _ in PAPER}
_ALL, _SHIFTED = "conv12 to conv52", "images shifted"
_ALL_RATIOS = (0.85, 0.70, 0.50)
_SHIFTED_RATIOS = {"conv21": (0.85, 0.6341), "conv31": (0.7436, 0.4338), _ALL: (0.85, 0.50)}


def _groups():
    groups = [Group(layer, (layer,), layer, ratios) for layer, ratios in _PAPERS.items()]
    groups.append(Group(_ALL, CONVOLUTIONS[1:], "conv11", _ALL_RATIOS))
    shifted = [
        Group(f"{of.title}, {_SHIFTED}", of.layers, of.start, ratios, shifted=True)
        for of in groups
        if (ratios := _SHIFTED_RATIOS.get(of.title))
    ]
    return {group.title: group for group in groups + shifted}


GROUPS = _groups()


def settings(run):
    config, digits = chosen_training(run.options)
    return {
        "training": asdict(config),
        "images": digits.description,
        "fingerprint": digits.fingerprint(),
        "plan": [asdict(group) for group in GROUPS.values()],
    }


def cells(run):
    trained, config, digits = train_or_load(run.options, run.device, run.console)
    _, validation = digits.split(config.seed)
    study = _Study(run, trained, validation.to(run.device), config.batch)
    network = f"network {model_digest(trained)[:6]}"  # another one's cells are not taken
    precisions, images = PRECISIONS[run.device.type], digits.description.partition(" (")[0]
    found = {}
    for precision in precisions:
        for title in GROUPS:
            found[f"{title}, {precision}, {network}"] = cell(
                "study", study.group, title=title, precision=precision, images=images
            )
        for layer in _PAPERS:
            found[f"{layer}, {precision}, 2 GPUs, {network}"] = cell(
                "study, two GPUs", study.two, title=layer, precision=precision, images=images
            )
    for precision in precisions:  # last, for compiling takes long
        for title in _networks():
            found[f"network with {title}, {precision}, {network}"] = cell(
                *("study, whole network", study.network),
                **{"title": title, "precision": precision, "images": images},
            )
    return found


def _networks():
    """Titles of the groups that are timed within the whole network, too."""
    return [of.title for of in GROUPS.values() if len(of.layers) > 1 and not of.shifted]


def said_of(found):
    kind, rows = next(iter(found.items()))
    if rows[0].get("absent"):
        return not_measured(rows[0])
    if kind == "study":
        return ", ".join(
            f"{row['ratio']:.0%}: {row['accuracy_change']:+.2f}"
            for row in rows
            if row["layout"] == _BY_POSITION.label
        )
    if kind == "study, two GPUs":
        return ", ".join(f"{row['ratio']:.2%}: {row['speedup']:.2f}x" for row in rows)
    return ", ".join(
        f"{row['candidate']}{'' if row['ratio'] is None else format(row['ratio'], ' .0%')} "
        + (row["absent"] or f"{row['ms']:.4g} ms")
        for row in rows
    )


def said(tables):
    """What all layers together lose and gain."""
    return said_of_study([row for row in tables["study"] if not row.get("absent")])


class _Study:
    """The trained network and the images that judge it."""

    def __init__(self, run, trained, validation, batch):
        self._run, self._trained = run, trained
        self._validation, self._batch = validation, batch

    def group(self, title, precision, images):
        """The study's tables of some convolutions."""
        return study_group(
            *(GROUPS[title], self._model(precision), precision, self._validation, self._batch),
            *(self._run.repeats, lambda what: None),
        )

    def network(self, title, precision, images):
        """The whole network, dense and with some convolutions by position: whole_network's rows."""
        dtype = use_precision(precision)
        torch.backends.cudnn.benchmark = True
        return whole_network.measure(
            *(self._trained, dtype, self._pictures(), GROUPS[title], _BY_POSITION),
            self._run.repeats,
        )

    @torch.inference_mode()
    def two(self, title, precision, images):
        """One convolution by position on two GPUs against torch's on one; all lies on the first."""
        gpus = self._run.gpus[:2]
        if len(gpus) < 2:
            raise RuntimeError(f"needs 2 GPUs; got {len(gpus)}")
        model = self._model(precision)
        conv, x = getattr(model, title), self._activations(model, title)
        taus = {
            ratio: spamm_torch.find_tau(*_BY_POSITION.norm_maps(conv, x), ratio).item()
            for ratio in _PAPERS[title]
        }
        rows = on_devices(conv, x, taus, gpus, self._run)
        for row in rows:
            papers = paper.CONVOLUTION_ON_GPUS[title, row["ratio"]]
            row |= dict(zip(("paper_2", "paper_4"), papers, strict=True))
        return rows

    def _model(self, precision):
        """The plain network in a precision."""
        dtype = use_precision(precision)
        torch.backends.cudnn.benchmark = True
        return fold_batch_norm(self._trained).to(dtype)

    def _pictures(self):
        """The first batch."""
        pictures, _ = next(validation_pictures(self._validation[: self._batch], self._batch))
        return pictures

    def _activations(self, model, layer):
        pictures = self._pictures().to(model.conv11.weight.dtype)
        return layer_inputs(model, (layer,), pictures)[layer]


def on_devices(conv, x, taus, devices, run):
    """A row for each valid ratio: time on several devices over torch's on one, norms included.

    Args:
        conv: 3 x 3, padding 1. x: a batch. taus: {valid ratio: tau}.
    """
    layout = _BY_POSITION
    setting = {"padding": 1, "block": layout.block, "pixel_block": layout.pixel_block}
    calls = {"dense": partial(conv, x)}
    for ratio, tau in taus.items():
        one = partial(spamm_torch.conv2d, x, conv.weight, conv.bias, tau=tau, **setting)
        calls[ratio] = partial(one, devices=devices)
        if not torch.equal(calls[ratio](), one()):
            raise UserError(
                f"wrong result on several devices at ratio {ratio}: expected the bits of one"
            )
    times = by_clock(calls, run.repeats, run.synchronize)
    dense = times["dense"].median
    return [
        {"ratio": ratio, "ms": times[ratio].median, "speedup": dense / times[ratio].median}
        for ratio in taus
    ]
