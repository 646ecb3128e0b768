"""Finds digits that are scattered over large dark canvases, and skips the dark.

A U-Net is trained on canvases of MNIST's digits, unless the checkpoint holds it already. Then its
time is measured by the number of digits, and on a textured background, where nothing is dark: as it
is, compiled, converted by convert_, in the reference form, convert_ with an empty canvas as
reference, and calibrated, where that form skips small deviations, too. The reference form changes
no result beyond rounding; calibration may cost half a point of the mean IoU. Without options: a
small network (16 to 128 channels) on a CPU, about ten minutes on two cores; 32 to 512 channels on a
GPU, measured in float16 and CUDA graphs. The results are NAME.md, .json and .png, and the settings
of the calibration.
"""

import copy
import functools
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import common  # noqa: F401  # isort: skip  before torch, whose import Ctrl-C may stop

import torch

from common import options as cli
from common import results
from common.console import Steps, exit_code, make_console
from common.machine import describe_machine
from common.measuring import compiled
from common.timing import interleaved
from examples.scattered_digits.network import Config, Scene, draw_scene, quality, train
from models.data import load_digits
from models.files import UserError, first_line, require_writable
from spamm_torch import calibrate, convert_

_CONFIGS = {
    "cpu": Config(width=16, depth=3, size=128, steps=600, batch=16),
    "cuda": Config(width=32, depth=4, size=256, steps=3000, batch=32),
}
_DTYPES = {"cpu": "float32", "cuda": "float16"}  # to measure in
_ROUNDS = {"cpu": 7, "cuda": 20}
_DIGITS = (4, 8, 16, 32, 100)
_TEXTURED = 16  # digits on a textured background
_EXAMPLE = 8  # digits on the canvas with which engines are measured
_CHECK_SEED, _TIME_SEED, _CALIBRATION_SEED = 1, 2, 3  # of canvases; training takes others
_CHECKED = 8  # canvases for the quality
_CALIBRATED = 4  # canvases of a calibration, each with so many digits:
_CALIBRATED_DIGITS = (4, 32)
_SPARSE, _REFERENCE = "8 digits", "reference form"  # the row of the conclusion
_NOTES = """\
Changed: pixels whose label differs from dense's; in half types that is rounding of both.
Calibrated: small deviations are skipped, too."""
_EVALUATIONS = 8  # of a calibration


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    console = make_console()
    device = cli.choose_device(options.device)
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
    try:
        found = _measure(model, held_out, options, device, rounds, console)
    except ValueError as error:
        raise UserError(first_line(error)) from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"the training is kept in {path}; the same command measures all again"
        ) from None
    header = results.run_header(
        describe_machine(device), "scattered_digits/demo.py", arguments, folder="examples"
    )
    header |= {
        "network": f"U-Net, {config.width} to {config.width << config.depth} channels",
        "canvas": f"{options.batch} of {options.size} x {options.size}",
        "type": str(dtype).removeprefix("torch."),
    }
    run = {
        "name": options.name,
        "said": _said(found["canvases"]),
        "header": header | found.pop("calibration"),
        "tables": found,
    }
    results.finish(options.out / options.name, "Scattered digits", run, console, _NOTES)


def _said(rows):
    """The speed on a canvas of few digits."""
    [row] = [row for row in rows if (row["canvas"], row["form"]) == (_SPARSE, _REFERENCE)]
    return (
        f"With {_SPARSE} on a canvas the reference form is {row['speedup']:.2f} times as fast as "
        f"{row['over']}, and {row['changed']} of {row['pixels']} pixels change their label."
    )


def _parse(arguments):
    parser = cli.make_parser(__doc__)
    add = functools.partial(cli.add, parser)
    count = {"type": cli.positive_integer}
    cli.add_device_option(parser)
    add("--root", "folder that holds MNIST/raw", None, "the embedded t10k")
    what, said = "where the training is kept and resumed from", "in the folder of the results"
    add("--checkpoint", what, None, said, type=Path)
    cli.add_folder_option(parser, "the results")
    what = "what the files of the results are called"
    add("--name", what, "scattered_digits", type=cli.file_name)
    add("--steps", "of training", None, "600 or 3000", **count)
    what = "points of mean IoU that calibration may cost"
    points = cli.number(float, lambda value: 0 <= value < 100, "points from 0 to below 100")
    add("--max-drop", what, 0.5, metavar="POINTS", type=points)
    add("--repeats", "of timings", None, "7 or 20", **count)
    sides = cli.number(int, lambda size: size >= 64 and size % 64 == 0, "a multiple of 64")
    add("--size", "sides of the canvases that are measured", 512, type=sides)
    add("--batch", "canvases of a call", 1, **count)
    said = "float32 on a CPU, float16 on a GPU"
    dtypes = ("float32", "float16", "bfloat16")
    cli.add_choices(parser, "--dtype", "to measure in", None, dtypes, said, nargs=None)
    add("--no-compile", "leave torch.compile out", False, "measure it", action="store_true")
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
    peer = None if options.no_compile else compiled(model, example, console)
    if peer is not None:
        forms["compiled"] = peer
    forms["converted"] = copy.deepcopy(model)
    convert_(forms["converted"], example_input=example)
    forms[_REFERENCE] = copy.deepcopy(model)
    report = convert_(forms[_REFERENCE], example_input=example, reference=empty.to(device))
    console.print(str(report), markup=False, soft_wrap=True)
    calibrated = _calibrate(model, digits, options, device, example, empty)
    console.print(str(calibrated), markup=False, soft_wrap=True)
    settings = options.out / f"scattered_digits_calibrated_{device.type}.json"
    calibrated.save(settings)
    forms["calibrated"] = copy.deepcopy(model)
    convert_(forms["calibrated"], settings, reference=empty)
    cases = {f"{many} digits": canvases(many) for many in _DIGITS}
    cases[f"{_TEXTURED} digits, textured"] = canvases(_TEXTURED, textured=True)
    rows = []
    with Steps(console, "measuring") as steps:
        for place, (name, pictures) in enumerate(cases.items()):
            rows += _rows(name, forms, pictures, device, rounds)
            steps.at(place + 1, len(cases), name)
    scene = draw_scene(digits, _CHECKED, options.size, _TEXTURED, _CHECK_SEED)
    qualities = [
        {"form": name} | vars(quality(_labels(forms[name], scene, device), scene))
        for name in ("dense", _REFERENCE, "calibrated")
    ]
    return {
        "canvases": rows,
        "quality": qualities,
        "calibration": vars(calibrated.outcome) | {"notes": list(report.notes)},
    }


def _calibrate(model, digits, options, device, example, empty):
    """What skips small deviations from an empty canvas, too, within a drop of the mean IoU."""
    dtype = next(model.parameters()).dtype
    loader = []
    for canvas in range(_CALIBRATED):
        seed = _CALIBRATION_SEED + 1000 * canvas
        scene = draw_scene(digits, 1, options.size, _CALIBRATED_DIGITS, seed)
        pictures = scene.pictures.to(device, dtype, memory_format=torch.channels_last)
        loader.append((pictures, scene))
    given = {"example_input": example, "reference": empty, "evaluations": _EVALUATIONS}
    return calibrate(model, loader, _mean_iou, options.max_drop, **given)


def _mean_iou(model, batches):
    """In points, over all pixels of some canvases."""
    labels, scenes = zip(*((model(x).argmax(1).cpu(), scene) for x, scene in batches), strict=True)
    joined = (torch.cat(parts) for parts in zip(*(vars(s).values() for s in scenes), strict=True))
    return 100 * quality(torch.cat(labels), Scene(*joined)).mean_iou


def _rows(canvas, forms, pictures, device, rounds):
    """A row for each form. Changed: pixels whose label differs from dense's."""
    calls = {name: lambda form=form: form(pictures) for name, form in forms.items()}
    times = interleaved(calls, device, rounds)
    over = "compiled" if "compiled" in forms else "dense"
    own = forms["dense"](pictures)
    found = []
    for name, timing in times.items():
        output = forms[name](pictures)
        found.append(
            {
                "canvas": canvas,
                "form": name,
                "over": over,
                **timing.over(times[over]),
                "changed": int((own.argmax(1) != output.argmax(1)).sum()),
                "largest_difference": float((own - output).abs().max() / own.abs().max()),
                "pixels": own.argmax(1).numel(),
            }
        )
    return found


def _labels(model, scene, device):
    dtype = next(model.parameters()).dtype
    return torch.cat([model(one[None].to(device, dtype)).argmax(1) for one in scene.pictures])


if __name__ == "__main__":
    sys.exit(exit_code(main))
