"""Which order of a batch lets SpAMM skip most: VGG13's answers by arrangement of digits and order.

All convolutions but the first are replaced by SpAMM at one valid ratio, in blocks of 64 images at
one position. Windows of images come in several orders, and once in blocks of one image's pixels,
for which no order matters. Digits are centred, shifted, scaled, rotated and scattered. Uses the
checkpoint of train_vgg13.py (trained first, where there is none). Writes likeness.md and .json. If
it is interrupted, the same command goes on with the cases that are missing.

    python scripts/study_likeness.py --out docs/results
"""

import sys

import torch

from common.console import Steps, exit_code, make_console
from common.errors import UserError
from common.journal import Journal, model_digest, run_settings
from common.machine import describe_machine
from common.options import (
    add_output_options,
    make_parser,
    positive_integer,
    valid_ratio,
)
from common.report_files import finish, run_header
from models.vgg13 import CONVOLUTIONS, fold_batch_norm
from study import likeness_report
from study.accuracy import with_spamm
from study.arrangements import ARRANGEMENTS
from study.layouts import PixelBlocks
from study.likeness_report import ONE_IMAGE
from study.orders import ORDERS, as_they_come
from study.plan import Group
from study.training_options import add_training_options, describe_training, prepare_study

_SEED = 1  # of shifts, scales, angles and places
_GROUP = Group("all but the first", CONVOLUTIONS[1:], "conv11", ())
_BY_POSITION = PixelBlocks("by position", 64, (64, 1, 1))
_BY_IMAGE = PixelBlocks("image by image", 64, (1, 8, 8))


def measure(model, pictures, labels, order, layout, window, ratio):
    """What skipping does to the answers.

    Args:
        model: a plain VGG13 in eval mode. pictures, labels: on its device.
        order: one of study.orders. layout: how pixels make blocks.
        window: images that are ordered together; one tau is found for them.
        ratio: valid ratio.

    Returns:
        {"dense": accuracy in percent, "accuracy": the same with SpAMM, "changed": percentage of
        other answers, "error": of the outputs, relative}.
    """
    with torch.inference_mode():
        parts = pictures.split(window)
        dense = torch.cat([model(part) for part in parts])
        found = torch.cat([_answers(model, part, order, layout, ratio) for part in parts])

    def percentage(which):
        return 100 * which.double().mean().item()

    return {
        "dense": percentage(dense.argmax(1) == labels),
        "accuracy": percentage(found.argmax(1) == labels),
        "changed": percentage(found.argmax(1) != dense.argmax(1)),
        "error": ((found - dense).norm() / dense.norm()).item(),
    }


def _answers(model, pictures, order, layout, ratio):
    """Outputs of a window, in its own order."""
    network, _ = with_spamm(model, _GROUP, layout, ratio)
    places = order(pictures)
    outputs = network(pictures[places])
    return torch.empty_like(outputs).index_copy(0, places, outputs)


def parse(arguments):
    parser = make_parser(__doc__)
    add_training_options(parser)
    parser.add_argument(
        "--images",
        metavar="NUMBER",
        type=positive_integer,
        default=1280,
        help="validation images, the first so many (default: %(default)s)",
    )
    parser.add_argument(
        "--window",
        metavar="NUMBER",
        type=positive_integer,
        default=640,
        help="images that are ordered together (default: %(default)s)",
    )
    parser.add_argument(
        "--ratio",
        type=valid_ratio,
        default=0.57,
        help="share of block products to keep, in (0, 1] (default: %(default)s)",
    )
    for name, known in (("arrangements", ARRANGEMENTS), ("orders", (*ORDERS, ONE_IMAGE))):
        parser.add_argument(
            f"--{name}",
            nargs="+",
            choices=tuple(known),
            default=tuple(known),
            metavar="NAME",
            help=f"some of: {', '.join(known)} (default: all)",
        )
    add_output_options(parser, "likeness")
    return parser.parse_args(arguments)


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    console = make_console()
    device, model, config, digits = prepare_study(options, console)
    validation = digits.split(config.seed)[1]
    if options.images > len(validation):
        raise UserError(
            f"expected --images of at most {len(validation)}, the validation images; got "
            f"{options.images}"
        )
    header = run_header(describe_machine(device), "study_likeness.py", arguments) | {
        "data": f"{digits.description}; {options.images} validation images",
        "model": describe_training(config),
    }
    study = {"window": options.window, "ratio": options.ratio}
    settings = run_settings(
        header,
        images=options.images,
        network=model_digest(model),
        data=digits.fingerprint(),
        **study,
    )
    with (
        Journal(options.out, options.name, settings, fresh=options.fresh) as journal,
        Steps(console, "orders") as steps,
    ):
        cases = _study(fold_batch_norm(model), validation, options, device, journal, steps)
        data = {"header": header, **study, "cases": cases}
        finish(likeness_report, data, options.out, options.name, journal, console)


def _study(model, validation, options, device, journal, steps):
    """{arrangement: {order: what :func:`measure` gives}}."""
    jobs = [(place, order) for place in options.arrangements for order in options.orders]
    done = sum(_key(*job) in journal for job in jobs)
    steps.at(done, len(jobs), journal.resumed(done, len(jobs)))
    images = validation.images[: options.images]
    labels = validation.labels[: options.images].long().to(device)
    cases = {place: {} for place in options.arrangements}
    for place, order in jobs:
        key = _key(place, order)
        if key not in journal:
            generator = torch.Generator().manual_seed(_SEED)
            pictures = ARRANGEMENTS[place](images, generator).to(device)
            layout = _BY_IMAGE if order == ONE_IMAGE else _BY_POSITION
            setting = ORDERS.get(order, as_they_come), layout, options.window, options.ratio
            found = measure(model, pictures, labels, *setting)
            journal.measured(key, lambda found=found: found)
            done += 1
            steps.at(done, len(jobs), what=key)
        cases[place][order] = journal.measured(key, dict)
    return cases


def _key(arrangement, order):
    return f"{arrangement}, {order}"


if __name__ == "__main__":
    sys.exit(exit_code(main))
