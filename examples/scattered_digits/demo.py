"""Finds digits that are scattered over large dark canvases, and skips the dark.

A U-Net is trained on canvases of MNIST's digits, unless the checkpoint holds it already. Then its
time is measured by the number of digits, and on a textured background, where nothing is dark: as it
is, compiled, converted by convert_, and in the reference form, convert_ with an empty canvas as
reference. The reference form changes no result beyond rounding. Without options: a small network
(16 to 128 channels) on a CPU, about ten minutes on two cores; 32 to 512 channels on a GPU, measured
in float16 and CUDA graphs. The results are scattered_digits.md, .json and .png.
"""

import copy
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import torch

import common  # noqa: F401  before the library, which it finds
from common.console import Steps, exit_code, make_console
from common.errors import first_line
from common.files import require_writable
from common.machine import describe_machine
from common.options import choose_device, make_parser, number, positive_integer
from common.report_files import run_header, write_results
from common.timing import interleaved
from examples.scattered_digits.canvases import draw_scene
from examples.scattered_digits.network import Config, quality, train
from examples.scattered_digits.report import picture, report
from models.data import load_digits
from spamm_torch import convert_

_CONFIGS = {
    "cpu": Config(width=16, depth=3, size=128, steps=600, batch=16),
    "cuda": Config(width=32, depth=4, size=256, steps=3000, batch=32),
}
_DTYPES = {"cpu": "float32", "cuda": "float16"}  # to measure in
_ROUNDS = {"cpu": 7, "cuda": 20}
_DIGITS = (4, 8, 16, 32, 100)
_TEXTURED = 16  # digits on a textured background
_EXAMPLE = 8  # digits on the canvas with which engines are measured
_CHECK_SEED, _TIME_SEED = 1, 2  # of canvases; training takes others
_CHECKED = 8  # canvases for the quality


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    console = make_console()
    device = choose_device(options.device)
    require_writable(options.out)
    config = _CONFIGS[device.type]
    if options.steps is not None:
        config = Config(**{**vars(config), "steps": options.steps})
    training, held_out = load_digits(options.root).split(config.seed)
    path = options.checkpoint or options.out / f"scattered_digits_{device.type}.pt"
    with Steps(console, "training") as steps:
        model = train(config, training, path, device, steps.at)
    dtype = getattr(torch, options.dtype or _DTYPES[device.type])
    model = model.to(dtype)
    rounds = options.repeats or _ROUNDS[device.type]
    found = _measure(model, held_out, options, device, rounds, console)
    data = {
        "header": run_header(describe_machine(device), "scattered_digits/demo.py", arguments)
        | {"network": f"U-Net, {config.width} to {config.width << config.depth} channels"}
        | {"canvas": f"{options.batch} of {options.size} x {options.size}"}
        | {"type": str(dtype).removeprefix("torch.")},
        **found,
    }
    data["header"]["command"] = data["header"]["command"].replace("scripts/", "examples/")
    shown = _shown(model, held_out, options, device)
    files = "scattered_digits"
    markdown, _, _ = report(data, files)
    paths = write_results(options.out, files, data=data, markdown=markdown, picture=picture(*shown))
    console.print(markdown, markup=False, soft_wrap=True)
    for path in paths:
        console.print(f"wrote {path}")


def _parse(arguments):
    parser = make_parser(__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--root", help="folder that holds MNIST/raw (default: the embedded t10k)")
    parser.add_argument("--checkpoint", type=Path, help="(default: in the folder of the results)")
    parser.add_argument("--out", type=Path, default=Path("results"), help="(default: %(default)s)")
    parser.add_argument("--steps", type=positive_integer, help="of training (default: 600 or 3000)")
    parser.add_argument("--repeats", type=positive_integer, help="rounds of each timing")
    parser.add_argument(
        "--size",
        type=number(int, lambda size: size >= 64 and size % 64 == 0, "a multiple of 64"),
        default=512,
        help="sides of the canvases that are measured (default: %(default)s)",
    )
    parser.add_argument(
        "--batch", type=positive_integer, default=1, help="canvases of a call (default: 1)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="to measure in (default: float32 on a CPU, float16 on a GPU)",
    )
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    return parser.parse_args(arguments)


@torch.no_grad()
def _measure(model, digits, options, device, rounds, console):
    """Quality and times of all forms, by the number of digits."""

    def canvases(digits_each, **rest):
        scene = draw_scene(digits, options.batch, options.size, digits_each, _TIME_SEED, **rest)
        return scene.pictures.to(device, dtype, memory_format=torch.channels_last)

    dtype = next(model.parameters()).dtype
    example, empty = canvases(_EXAMPLE), torch.zeros(1, 1, options.size, options.size)
    forms = {"dense": model}
    if not options.no_compile:
        forms["compiled"] = torch.compile(copy.deepcopy(model))
        try:
            forms["compiled"](example)
        except Exception as error:  # Inductor has no compiler, or none that works here
            console.print(f"torch.compile is left out: {first_line(error)}")
            del forms["compiled"]
    forms["converted"] = copy.deepcopy(model)
    convert_(forms["converted"], example_input=example)
    forms["reference form"] = copy.deepcopy(model)
    report = convert_(forms["reference form"], example_input=example, reference=empty.to(device))
    console.print(str(report), markup=False, soft_wrap=True)
    cases = {f"{many} digits": canvases(many) for many in _DIGITS}
    cases[f"{_TEXTURED} digits, textured"] = canvases(_TEXTURED, textured=True)
    rows = {}
    with Steps(console, "measuring") as steps:
        for place, (name, pictures) in enumerate(cases.items()):
            rows[name] = _row(forms, pictures, device, rounds)
            steps.at(place + 1, len(cases), name)
    scene = draw_scene(digits, _CHECKED, options.size, _TEXTURED, _CHECK_SEED)
    qualities = {
        name: vars(quality(_labels(forms[name], scene, device), scene))
        for name in ("dense", "reference form")
    }
    return {"rows": rows, "quality": qualities, "notes": list(report.notes)}


def _row(forms, pictures, device, rounds):
    calls = {name: lambda form=form: form(pictures) for name, form in forms.items()}
    times = interleaved(calls, device, rounds)
    own, other = (forms[name](pictures) for name in ("dense", "reference form"))
    return {
        "ms": {name: timing.median for name, timing in times.items()},
        "changed pixels": int((own.argmax(1) != other.argmax(1)).sum()),
        "largest difference": float((own - other).abs().max() / own.abs().max()),
        "pixels": own.argmax(1).numel(),
    }


def _labels(model, scene, device):
    dtype = next(model.parameters()).dtype
    return torch.cat([model(one[None].to(device, dtype)).argmax(1) for one in scene.pictures])


@torch.no_grad()
def _shown(model, digits, options, device):
    """A canvas and its labels."""
    scene = draw_scene(digits, 1, options.size, _EXAMPLE, _CHECK_SEED)
    return scene.pictures[0, 0], _labels(model, scene, device)[0].cpu()


if __name__ == "__main__":
    sys.exit(exit_code(main))
