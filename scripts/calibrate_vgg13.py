"""Calibrates the study's VGG13: the settings that save the most time within an accuracy drop.

Without options: the checkpoint of train_vgg13.py (trained first, where there is none), half a point
of accuracy, the settings in results/calibrated_DEVICE.json, what was found in NAME.md and
NAME.json. If it is interrupted, the same command goes on from there. inspect_model.py draws what
the settings skip. With --shifted digits are not centred.
"""

import contextlib
import copy
import functools
import sys
from dataclasses import asdict

import common  # noqa: F401  # isort: skip  before torch, whose import Ctrl-C may stop

import torch

import spamm_torch
from common import results
from common.compiled import compiled
from common.console import exit_code, make_console
from common.machine import describe_machine
from common.options import (
    add_output_options,
    make_parser,
    number,
    positive_integer,
)
from common.precisions import use_precision
from common.timing import interleaved
from models.data import MAX_SHIFT, draw_shifts
from models.errors import UserError, first_line
from models.training import validation_pictures
from study.training_options import add_training_options, describe_training, prepare_study

_PRECISIONS = ("float32", "float16", "bfloat16")
_SHIFT_SEED = 1
_ROUNDS = 20  # of times beside torch.compile
_NOTES = """\
Thresholds are found on some 512 images of one half of the validation images, and chosen by accuracy
on that half. The drop is that on the other half. Valid: the share of block products multiplied,
over all layers weighted by multiplications. Times of layers are medians in us, of a layer in the
model with bias and ReLU; dense is the faster of torch's convolution and the library's with nothing
skipped, chosen is on a line by valid ratio through three of them. Error: of a layer's output,
relative, with nothing skipped before it."""
_points = number(float, lambda value: 0 <= value < 100, "points from 0 to below 100")


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    console = make_console()
    device, model, config, digits = prepare_study(options, console)
    _, validation = digits.split(config.seed)
    dtype = use_precision(options.dtype)
    model = model.to(dtype)
    batch = options.images or config.batch
    shifts = None
    if options.shifted:
        shifts = draw_shifts(len(validation), torch.Generator().manual_seed(_SHIFT_SEED))
    batches = [
        (pictures.to(dtype), labels)
        for pictures, labels in validation_pictures(validation.to(device), batch, shifts)
    ]
    path = options.out / f"calibrated_{device.type}.json"
    journal = path.with_suffix(".partial.json")
    if options.fresh:
        journal.unlink(missing_ok=True)
    with _kept(journal):
        try:
            report = spamm_torch.calibrate(
                model,
                batches,
                score_and_answers,
                options.max_drop,
                evaluations=options.evaluations,
                journal=journal,
            )
        except ValueError as error:
            raise UserError(first_line(error)) from error
        header = results.run_header(describe_machine(device), "calibrate_vgg13.py", arguments) | {
            "data": f"{digits.description}; {len(validation):,} validation images"
            + (f", each shifted by up to {MAX_SHIFT} pixels" if options.shifted else ""),
            "model": describe_training(config),
            "inference": f"{options.dtype}, batch {batch}",
        }
        report.save(path)
        times = _times(options, model, batches[0][0], path, console)
        console.print(str(report), soft_wrap=True)
        _write(options, header, model, batches, report, times, console)
    journal.unlink()
    console.print(f"settings: {path}")


@contextlib.contextmanager
def _kept(journal):
    """Says how to go on if what happens inside is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        if not journal.exists():
            raise
        raise KeyboardInterrupt(
            f"what is finished is in {journal}; the same command goes on from there"
        ) from None


@torch.no_grad()
def _times(options, model, pictures, settings, console):
    """Milliseconds of a batch as it is served, beside torch.compile; empty without that."""
    peer = None if options.no_compile else compiled(model, pictures, console)
    if peer is None:
        return {}
    served = {"converted": copy.deepcopy(model), "calibrated": copy.deepcopy(model)}
    spamm_torch.convert_(served["converted"], example_input=pictures)
    spamm_torch.convert_(served["calibrated"], settings)
    forms = {"dense": model, "compiled": peer, **served}
    calls = {name: functools.partial(form, pictures) for name, form in forms.items()}
    times = interleaved(calls, pictures.device, _ROUNDS)
    return {name: timing.median for name, timing in times.items()}


def _write(options, header, model, batches, report, times, console):
    """Writes what was found as a page and as JSON."""
    with torch.no_grad():
        accuracy = score_and_answers(model, batches)[0]
    found = asdict(report.outcome)
    case = f"{header['model'].partition(',')[0]}, {header['inference']}"
    case += ", shifted" if options.shifted else ""
    layers = [
        {"case": case}
        | (row.pop("setting") or {})
        | row
        | {"speedup": row["dense_us"] / row["chosen_us"]}
        for row in map(asdict, report)
    ]
    forms = [
        {"case": case, "form": form, "ms": ms, "speedup": times["compiled"] / ms}
        for form, ms in times.items()
    ]
    said = (
        f"At most {found['max_drop']:g} points: {found['valid_ratio']:.1%} of the products valid, "
        f"{-found['drop']:+.2f} points on unseen images, {found['changed'] or 0:.2f}% of the "
        f"answers changed; {found['before_us'] / found['after_us']:.2f}x as fast as it was "
        f"({found['before_us'] / found['exact_us']:.2f}x with nothing skipped)"
    )
    if times:
        said += f", {times['compiled'] / times['calibrated']:.2f}x as fast as torch.compile"
    run = {
        "name": options.name,
        "said": said + ".",
        "header": header | {"accuracy": accuracy} | found,
        "tables": {"calibrated layers": layers, "calibrated": forms},
    }
    results.finish(options.out / options.name, "Calibration of VGG13", run, console, _NOTES)


def score_and_answers(model, batches):
    """Percentage of right answers, and the answers: what calibrate asks of an evaluation."""
    answers, labels = zip(*((model(x).argmax(1), y) for x, y in batches), strict=True)
    answers, labels = torch.cat(answers), torch.cat(labels)
    return 100 * (answers == labels).double().mean().item(), answers


def _parse(arguments):
    parser = make_parser(__doc__)
    add_training_options(parser)
    parser.add_argument(
        "--max-drop",
        metavar="POINTS",
        type=_points,
        default=0.5,
        help="percentage points of accuracy that may be lost (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=_PRECISIONS, default="float32", help="default: %(default)s"
    )
    parser.add_argument(
        "--images",
        metavar="COUNT",
        type=positive_integer,
        help="images a batch in the calibration and its times (default: those of the training)",
    )
    parser.add_argument(
        "--evaluations",
        metavar="COUNT",
        type=number(int, lambda value: value >= 5, "an integer of 5 or more"),
        default=12,
        help="the most evaluations, each on half of the images (default: %(default)s)",
    )
    parser.add_argument(
        "--shifted",
        action="store_true",
        help=f"validation images are shifted at random by up to {MAX_SHIFT} pixels "
        "(default: as they are)",
    )
    parser.add_argument(
        "--no-compile",
        action="store_true",
        help="leave torch.compile out (default: it is measured)",
    )
    add_output_options(parser, "calibration_vgg13")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(exit_code(main))
