"""Whole networks by the backend with nothing skipped, against the dense and the compiled network.

Networks: torchvision's, and VGG13 on 32 x 32 pictures; weights drawn from a seed, images of noise.
Times are medians for one batch, candidates in turns in one process, as one CUDA graph and as Python
launches it; compilation and first calls are not in them. Errors are of the output, relative,
against float32's. Candidates:

dense, as it is; compiled, torch.compile's default; max-autotune, that mode without CUDA graphs;
freezing, the same with torch._inductor.config.freezing, which folds batch norms into weights; ours,
the backend spamm_torch, and nothing else is compiled (inner eager); ours-compiled, with Inductor
behind it; ours-freezing, with that setting on as well.
"""

import copy
import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torchvision
from torch import nn

from common import options as cli
from common.measuring import PRECISIONS, use_precision
from common.timing import interleaved
from models.files import UserError, first_line
from models.vgg13 import VGG13

# torch.compile's mode without CUDA graphs: all candidates are captured by the same
# code, so that their times mean the same.
_MAX_AUTOTUNE = "max-autotune-no-cudagraphs"
CANDIDATES = (
    "dense",
    "compiled",
    "max-autotune",
    "freezing",
    "ours",
    "ours-compiled",
    "ours-freezing",
)
TITLE = "networks by the backend, nothing skipped, against torch.compile"
MODES = ("CUDA graph", "eager")
_PEERS = {"CUDA graph": "compiled", "eager": "dense"}  # of each mode's speedups
_MOST_ERROR = 4  # times the dense network's own error: rounding in another order
_LEAST_ERROR = 1e-6  # below that errors count as equal
_SETTLING_IMAGES = 4


# ---- Networks, with weights drawn from a seed ---------------------------------------------------


@dataclass(frozen=True)
class Network:
    build: Callable[[], nn.Module]
    size: int = 224  # height and width of its pictures
    batches: tuple[int, ...] = (1, 8, 32, 64, 128)


_TORCHVISION = (
    *("resnet18", "resnet50", "vgg11", "vgg13_bn", "densenet121", "squeezenet1_1"),
    *("convnext_tiny", "efficientnet_b0", "mobilenet_v2", "mobilenet_v3_large"),
    *("regnet_y_3_2gf", "resnext50_32x4d"),  # grouped
)
NETWORKS = {
    name: Network(functools.partial(torchvision.models.get_model, name, weights=None))
    for name in _TORCHVISION
} | {
    "inception_v3": Network(
        functools.partial(torchvision.models.inception_v3, init_weights=False), 299
    ),
    "vgg13_32": Network(VGG13, size=32, batches=(1, 8, 32, 128, 512)),
}


def pictures_for(network, batch, device):
    """Noise as a batch of pictures, float32, channels last; the same in each call."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch, 3, network.size, network.size)
    noise = torch.randn(shape, generator=generator, device=device)
    return noise.to(memory_format=torch.channels_last)


def settled_model(network, device):
    """The network in eval mode, float32, channels last, the same in each call. Its batch norms know
    the mean and the variance of what they normalise: at their defaults activations grow from layer
    to layer, in ResNets by powers of two.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = network.build()
    model = model.to(device, memory_format=torch.channels_last).eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.reset_running_stats()
            norm.train().momentum = None  # the average of all batches, here of one
    with torch.no_grad():
        model(pictures_for(network, _SETTLING_IMAGES, device))
    return model.eval()


# ---- Options ------------------------------------------------------------------------------------

DEFAULTS = {
    "cpu": {
        "networks": ("resnet18", "vgg11"),
        "batches": (1, 8, 16),
        "candidates": tuple(name for name in CANDIDATES if name != "max-autotune"),
        "modes": ("eager",),
        "repeats": 7,
    },
    "cuda": {
        "networks": tuple(NETWORKS),
        "batches": None,  # each network's own
        "candidates": CANDIDATES,
        "modes": MODES,
        "repeats": 9,
    },
}
PRECISION = {"cpu": "float32", "cuda": "float16"}


def add_options(parser):
    cli.add_device_option(parser)
    for name, choices in (("network", NETWORKS), ("candidate", CANDIDATES), ("mode", MODES)):
        shown = {"metavar": name.upper()}
        cli.add_choices(parser, f"--{name}s", "some of them", DEFAULTS, choices, **shown)
    what = "images a batch; None: each network's own, 1 to 128"
    cli.add_numbers(parser, "--batches", what, DEFAULTS, "IMAGES")
    what = "of all candidates; by default float16 on CUDA, float32 on a CPU"
    parser.add_argument("--precision", choices=PRECISIONS, help=what)
    cli.add_repeats_option(parser, DEFAULTS)


def choose(options):
    options.candidates = [name for name in CANDIDATES if name in options.candidates]
    options.modes = [mode for mode in MODES if mode in options.modes]
    options.precision = options.precision or PRECISION[options.device.type]
    if options.device.type == "cpu" and options.modes != ["eager"]:
        raise UserError("expected --modes eager on a CPU; got CUDA graph")


def header(options):
    return {"inference": f"{options.precision}, channels last"}


def cells(options):
    """{name: call that measures it}, in the order of the tables."""
    return {
        f"{name}, batch {batch}": functools.partial(measure_network, name, batch, options)
        for name in options.networks
        for batch in options.batches or NETWORKS[name].batches
    }


# ---- Candidates ---------------------------------------------------------------------------------


def prepared(name, dense, pictures):
    """A candidate of a dense network, compiled for these pictures."""
    if name == "dense":
        return dense
    options, freezes = {}, name.endswith("freezing")
    if name in ("max-autotune", "freezing"):
        # Dynamo and Inductor read the global setting; the option tells code of freezing apart.
        options = torch._inductor.list_mode_options(_MAX_AUTOTUNE) | {"freezing": freezes}
    elif name == "ours":
        options = {"inner": "eager"}
    backend = "spamm_torch" if name.startswith("ours") else "inductor"
    own = copy.deepcopy(dense)
    model = torch.compile(own, dynamic=False, backend=backend, options=options)
    with torch._inductor.config.patch(freezing=freezes):
        model(pictures)
    return model


# ---- Measuring ----------------------------------------------------------------------------------


def measure_network(name, batch, options):
    """A row for each mode and candidate; one that cannot be prepared or captured, or computes
    something else than the dense network, is a row that says so.
    """
    try:
        return {"networks": _rows(name, batch, options)}
    finally:
        torch._dynamo.reset()  # compiled code of one batch is of no use to the next
        gc.collect()
        torch.cuda.empty_cache()


def _rows(network, batch, options):
    device, dtype = options.device, PRECISIONS[options.precision][0]
    pictures = pictures_for(NETWORKS[network], batch, device)
    use_precision("float32")
    dense = settled_model(NETWORKS[network], device)
    expected = dense(pictures)
    use_precision(options.precision)
    pictures, dense = pictures.to(dtype), dense.to(dtype)

    def error_of(model):
        return ((model(pictures).float() - expected).norm() / expected.norm()).item()

    def timed(calls, mode, repeats=options.repeats):
        return interleaved(calls, device, repeats, eager=mode == "eager")

    is_usual = options.precision == PRECISION[device.type]
    label = network if is_usual else f"{network}, {options.precision}"
    most = _MOST_ERROR * max(error_of(dense), _LEAST_ERROR)
    calls, rows = {}, {}
    for name in options.candidates:
        row = rows[name] = {"network": label, "batch": batch, "candidate": name}
        try:
            model = prepared(name, dense, pictures)
            call = functools.partial(model, pictures)
            for mode in options.modes:  # what cannot be captured fails here, and alone
                timed({name: call}, mode, repeats=1)
            error = row["error"] = error_of(model)
            if not error <= most:
                raise RuntimeError(
                    f"WRONG RESULT: expected an error of at most {most:.2g}; got {error:.2g}"
                )
            calls[name] = call
        except Exception as error:
            row["absent"] = first_line(error)
    found = []
    for mode in options.modes:
        times = timed(calls, mode)
        peer = times.get(_PEERS[mode])
        found += [rows[name] | {"mode": mode} | own.over(peer) for name, own in times.items()]
    return found + [row for name, row in rows.items() if name not in calls]
