"""Whole-network inference: VGG13 with SpAMM convolutions against the dense network.

Trains VGG13 on MNIST, or uses the checkpoint of train_vgg13.py. Chooses by layer, on the training
images and half of the validation images, the tau that saves the most time while few answers change.
Then measures accuracy and times of the network so converted on the other half.
"""

from collections import OrderedDict

import torch
from torch import nn

import spamm_torch
from common.journal import model_digest
from common.options import choose_device, number, positive_integer
from common.timing import interleaved
from models.files import require_writable
from models.training import accuracy, validation_pictures
from models.vgg13 import CONVOLUTIONS, fold_batch_norm
from study.layouts import PixelBlocks
from study.training_options import add_training_options, train_or_load

TITLE = "VGG13 as served against the dense network"
NOTES = """\
The accuracy is that on images that took no part in the choice of thresholds. Times are medians for
one batch, all networks in turns. Dense: batch norm folded; on CUDA, convolution, bias and ReLU in
one call of cuDNN. Nothing skipped: all convolutions with SpAMM at a threshold of 0, which shows
what fusing alone brings. Layers by themselves: input norms are precomputed where a layer of ours or
a max pool comes before."""
MODE = torch.inference_mode
# What is counted is changed answers and not lost accuracy: no more can be lost than changes, no
# labels are needed, and answers that become right by chance do not hide others that become wrong.
# Layers that no threshold makes faster are dense: in cuDNN, or, where the whole network is faster
# so, as SpAMM layers that skip nothing and keep the chain whole, as the first convolution always
# is. The dense network has its batch norms folded, and on CUDA convolution, bias and ReLU in one
# cuDNN call each.
LAYOUT = PixelBlocks("by position", 64, (64, 1, 1))
RATIOS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25)
_NOTHING_SKIPPED = 1.0  # the ratio at a threshold of 0
_NO_LOSS = 0.02  # points: below that losses count as equal
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class CudnnConvReLU(nn.Module):
    """Convolution, bias and ReLU in one call of cuDNN."""

    def __init__(self, conv):
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        self.geometry = conv.stride, conv.padding, conv.dilation, conv.groups

    def forward(self, input):
        return torch.cudnn_convolution_relu(input, self.weight, self.bias, *self.geometry)


def network(model, taus, cudnn):
    """The plain VGG13 with SpAMM in the layers that ``taus`` names, converted; the rest dense."""
    layers = OrderedDict()
    for name, layer in model.named_children():
        conv = name.replace("relu", "conv")
        if name in taus:
            layers[name] = spamm_torch.SpAMMConv2d.from_dense(
                layer, tau=taus[name], block=LAYOUT.block, pixel_block=LAYOUT.pixel_block
            )
        elif cudnn and name in CONVOLUTIONS:
            layers[name] = CudnnConvReLU(layer)
        elif not cudnn or conv in taus or conv not in CONVOLUTIONS:
            layers[name] = layer
    found = nn.Sequential(layers).eval()
    if taus:
        spamm_torch.convert_(found)
    return found


class Thresholds:
    """For each layer and valid ratio the threshold, the mean of the batches'."""

    def __init__(self, model, batches):
        self._found = {}
        for name in CONVOLUTIONS[1:]:
            before, _ = model.split(name)
            conv = getattr(model, name)
            maps = [LAYOUT.norm_maps(conv, before(pictures)) for pictures, _ in batches]
            for ratio in RATIOS:
                taus = [spamm_torch.find_tau(*both, ratio) for both in maps]
                self._found[name, ratio] = torch.stack(taus).mean().item()

    def of_layer(self, name):
        return {ratio: self._found[name, ratio] for ratio in RATIOS}

    def of(self, ratios):
        return {name: self._found[name, ratio] for name, ratio in ratios.items() if ratio}


class Answers:
    """How many of a network's answers differ from the dense one's, on several sets of images."""

    def __init__(self, dense, sets):
        self._sets = [
            (batches, [self._of(dense, pictures) for pictures, _ in batches]) for batches in sets
        ]

    @staticmethod
    def _of(net, pictures):
        return net(pictures).argmax(1)

    def changed_by(self, net):
        """In points, on the set where that is most."""
        return max(self._share(net, *of_set) for of_set in self._sets)

    def _share(self, net, batches, expected):
        changed = sum(
            (self._of(net, pictures) != answers).sum()
            for (pictures, _), answers in zip(batches, expected, strict=True)
        )
        return 100 * int(changed) / sum(len(answers) for answers in expected)


def time_layers(model, thresholds, pictures, options, journal):
    """{layer: {ratio or None: ms}} of the layer with its bias and ReLU, input norms precomputed."""
    times = {}
    for name in CONVOLUTIONS[1:]:
        of_layer = journal.measured(
            f"times of {name}",
            lambda name=name: time_layer(model, name, thresholds, pictures, options),
        )
        times[name] = {None: of_layer[0], **{float(ratio): ms for ratio, ms in of_layer[1].items()}}
    return times


def time_layer(model, name, thresholds, pictures, options):
    """The dense layer's milliseconds, and {ratio: ms}."""
    before, _ = model.split(name)
    input, conv = before(pictures), getattr(model, name)
    dense = CudnnConvReLU(conv) if options.cuda else nn.Sequential(conv, nn.ReLU())
    _, norms = torch.ops.spamm_torch.max_pool2d_with_norms(input, 1)
    setting = {
        "block": LAYOUT.block,
        "pixel_block": LAYOUT.pixel_block,
        "norm_weight": torch.ops.spamm_torch.conv2d_weight_norm(conv.weight),
        "norm_input": norms if name != CONVOLUTIONS[1] else None,
        "relu": True,
    }
    candidates = {None: lambda: dense(input)}
    for ratio, tau in {_NOTHING_SKIPPED: 0.0, **thresholds.of_layer(name)}.items():
        candidates[ratio] = lambda tau=tau: spamm_torch.conv2d(
            input, conv.weight, conv.bias, 1, 1, tau=tau, **setting
        )
    measured = interleaved(candidates, pictures.device, options.repeats)
    ms = {ratio: timing.median for ratio, timing in measured.items()}
    return ms.pop(None), ms


def chosen_ratios(times, loss_of, max_loss, progress):
    """The valid ratio of each layer, or None for a dense one.

    Lowers ratios one by one, those first that save the most time for what they lose by themselves,
    as long as the network loses no more than ``max_loss`` points.
    """
    dense = dict.fromkeys(times)
    worth = {}
    for name, of_layer in times.items():
        for ratio in RATIOS:
            saved = of_layer[None] - of_layer[ratio]
            if saved > 0:
                loss = loss_of(dense | {name: ratio})
                worth[name, ratio] = saved / (loss + _NO_LOSS)
                progress(f"{name} at {ratio:.0%}: {loss:.2f} points")
    chosen = dense
    for name, ratio in sorted(worth, key=worth.get, reverse=True):
        tried = chosen | {name: ratio}
        if times[name][ratio] < times[name][chosen[name]] and loss_of(tried) <= max_loss:
            chosen = tried
    return chosen


def time_networks(networks, pictures, options, modes):
    """{mode: {network: ms}}."""
    calls = {name: lambda net=net: net(pictures) for name, net in networks.items()}
    return {
        mode: {
            name: timing.median
            for name, timing in interleaved(
                calls, pictures.device, options.repeats, eager=mode == "eager"
            ).items()
        }
        for mode in modes
    }


def fastest_dense(model, taus, pictures, options):
    """``taus`` and zeros for those dense layers that are better off without a break.

    None of them, the first, those with a SpAMM layer behind or all are measured in the whole
    network, eager and as a graph: what a dense layer costs between others, its neighbours pay for,
    and the host.
    """
    last = max((CONVOLUTIONS.index(name) for name in taus), default=-1)
    candidates = [
        dict.fromkeys(in_chain, 0.0) | taus
        for in_chain in ((), CONVOLUTIONS[:1], CONVOLUTIONS[: last + 1], CONVOLUTIONS)
    ]
    networks = {i: network(model, of, options.cuda) for i, of in enumerate(candidates)}
    times = time_networks(networks, pictures, options, options.modes).values()
    return candidates[min(networks, key=lambda i: sum(of[i] for of in times))]


def add_options(parser):
    add_training_options(parser)
    parser.add_argument(
        "--images",
        type=positive_integer,
        default=128,
        help="images in a batch that is timed (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="number format of the network (default: float16; on the CPU float32)",
    )
    parser.add_argument(
        "--max-loss",
        metavar="PERCENT",
        type=number(float, lambda value: value >= 0, "a number of points, 0 or more"),
        default=0.3,
        help="answers that may change where thresholds are chosen, %% (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats",
        metavar="ROUNDS",
        type=positive_integer,
        default=15,
        help="rounds of each timing (default: %(default)s)",
    )


def choose(options):
    options.device = choose_device(options.device)
    options.cuda = options.device.type == "cuda"
    options.modes = ["eager", "CUDA graph"] if options.cuda else ["eager"]
    options.dtype = options.dtype or ("float16" if options.cuda else "float32")


def prepare(options, console):
    """Trains, or loads what was trained."""
    require_writable(options.checkpoint.parent)
    options.trained, options.config, options.digits = train_or_load(
        options, options.device, console
    )


def header(options):
    return {
        "data": options.digits.description,
        "model": f"{options.config.model}, {options.config.epochs} epochs",
        "inference": f"{options.dtype}, batch {options.images}, channels last",
    }


def settings(options):
    return {
        **{name: getattr(options, name) for name in ("images", "dtype", "max_loss", "repeats")},
        "network": model_digest(options.trained),
        "data": options.digits.fingerprint(),
    }


def measure(measuring, options):
    # Norms of weights that were made in inference mode cannot be pinned.
    with torch.inference_mode(False), torch.no_grad():
        model = fold_batch_norm(options.trained).to(DTYPES[options.dtype])
    parts = [part.to(options.device) for part in options.digits.split(options.config.seed)]
    if len(measuring.journal):
        measuring.console.print(f"vgg13: resumed from {measuring.journal.path}")
    done = 0

    def progress(what):
        nonlocal done
        done += 1
        measuring.steps.at(done, len(RATIOS) * len(CONVOLUTIONS[1:]), what=what)

    return bench(model, parts, options, measuring.journal, progress)


def said(tables, options):
    """What was found, in one line."""
    times = {(row["mode"], row["network"]): row["speedup"] for row in tables["served"]}
    [quality] = tables["served, quality"]
    speeds = ", ".join(
        f"{times[mode, 'SpAMM']:.2f}x as fast {'in one ' * (mode != 'eager')}{mode} "
        f"({times[mode, 'nothing skipped']:.2f}x with nothing skipped)"
        for mode in options.modes
    )
    change = quality["accuracy"] - quality["dense_accuracy"]
    return (
        f"Against the dense network, {options.config.model} with SpAMM ({options.dtype}, batch "
        f"{options.images}) is {speeds}; accuracy {change:+.2f} points."
    )


def bench(model, digits, options, journal, progress):
    """The tables of a plain VGG13 in eval mode.

    ``digits`` are the images to train and to validate on. What the journal holds is not measured
    again.
    """
    dtype = next(model.parameters()).dtype
    training, validation = digits

    def batches(digits):
        pictures = validation_pictures(digits, options.images)
        return [(batch.to(dtype), labels) for batch, labels in pictures]

    half = len(validation) // 2
    chosen_on, tested_on = batches(validation[:half]), batches(validation[half:])
    pictures = tested_on[0][0]
    thresholds = Thresholds(model, chosen_on)
    times = time_layers(model, thresholds, pictures, options, journal)
    dense = network(model, {}, options.cuda)
    answers = Answers(dense, [chosen_on, batches(training)])

    def loss_of(ratios):
        chosen = {name: ratio for name, ratio in ratios.items() if ratio}
        return journal.measured(
            f"answers changed by {chosen}",
            lambda: answers.changed_by(network(model, thresholds.of(ratios), options.cuda)),
        )

    ratios = chosen_ratios(times, loss_of, options.max_loss, progress)
    taus = fastest_dense(model, thresholds.of(ratios), pictures, options)
    ours = network(model, taus, options.cuda)
    networks = {
        "dense": dense,
        "nothing skipped": network(model, dict.fromkeys(CONVOLUTIONS, 0.0), options.cuda),
        "SpAMM": ours,
    }
    times_of_networks = time_networks(networks, pictures, options, options.modes)
    place = {"model": options.config.model}
    served = [
        place | {"mode": mode, "network": name, "ms": ms, "speedup": of["dense"] / ms}
        for mode, of in times_of_networks.items()
        for name, ms in of.items()
    ]
    layers = [
        place
        | {
            "layer": name,
            "ratio": ratio,
            "tau": taus[name] if ratio else None,
            "dense": "skips nothing" if name in taus else "dense",
            "dense_ms": times[name][None],
            "spamm_ms": times[name][ratio or _NOTHING_SKIPPED],
        }
        for name, ratio in ratios.items()
    ]
    by_ratio = [
        place | {"layer": name, "ratio": ratio, "ms": ms}
        for name, of_layer in times.items()
        for ratio, ms in of_layer.items()
        if ratio is not None
    ]
    quality = {
        **place,
        "dense_accuracy": accuracy(dense, tested_on),
        "accuracy": accuracy(ours, tested_on),
        "changed": Answers(dense, [tested_on]).changed_by(ours),
    }
    return {
        "served": served,
        "served, quality": [quality],
        "served layers": layers,
        "served layers by ratio": by_ratio,
    }
