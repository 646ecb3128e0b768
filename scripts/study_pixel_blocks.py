"""Why the default pixel block takes images first: accuracy of VGG13 by pixel block and valid ratio.

One convolution is replaced by SpAMM, with blocks of 64 pixels from 64 images at one position,
from one image's 8 x 8 pixels, and from steps between the two; once with the digits centred, as they
come, and once with every image shifted at random. Uses the checkpoint of train_vgg13.py
(trained first, where there is none). Writes pixel_blocks.md, .json and .png. If it is interrupted,
the same command goes on with the case that is missing.

    python scripts/study_pixel_blocks.py --out docs/results
"""

import sys

import torch

from common.console import Steps, exit_code, make_console
from common.files import require_writable
from common.journal import Journal, model_digest, run_settings
from common.machine import describe_machine
from common.options import add_output_options, choose_device, make_parser
from common.report_files import finish, run_header
from models.data import draw_shifts
from models.training import validation_pictures
from models.vgg13 import CONVOLUTIONS, fold_batch_norm
from study import pixel_blocks_report
from study.accuracy import cached_inputs, dense_accuracy, spamm_accuracy
from study.layouts import PixelBlocks
from study.plan import Group
from study.training_options import add_training_options, train_or_load

PIXEL_BLOCKS = ((64, 1, 1), (16, 2, 2), (4, 4, 4), (1, 8, 8))
RATIOS = (0.8, 0.6, 0.45, 0.3)
_SHIFT_SEED = 1


def measure(model, layer, ratios, validation, batch, *, shifted, progress):
    """Accuracies with one layer replaced.

    Args:
        model: a plain VGG13 in eval mode.
        layer: name of the convolution. ratios: valid ratios, held in each batch.
        validation: Digits on the model's device. batch: images a batch.
        shifted: whether every image is moved at random first.
        progress: called with what was done, after each accuracy.

    Returns:
        {"dense": percent, "settings": [{"pixel_block", "asked_ratio", "valid_ratio", "accuracy"}]}.
    """
    shifts = None
    if shifted:
        shifts = draw_shifts(len(validation), torch.Generator().manual_seed(_SHIFT_SEED))
    group = Group(layer, (layer,), layer, ratios, shifted)
    pictures = validation_pictures(validation, batch, shifts)
    inputs = cached_inputs(model, layer, pictures, model.conv11.weight.dtype)
    settings = []
    for pixel_block in PIXEL_BLOCKS:
        layout = PixelBlocks(f"{pixel_block}", 64, pixel_block)
        for ratio in ratios:
            found = spamm_accuracy(model, group, layout, ratio, inputs)
            settings.append(
                {
                    "pixel_block": pixel_block,
                    "asked_ratio": ratio,
                    "valid_ratio": found.valid_ratio,
                    "accuracy": found.percent,
                }
            )
            progress(f"{pixel_block} at {ratio:.0%}")
    return {"dense": dense_accuracy(model, group, inputs), "settings": settings}


def parse(arguments):
    parser = make_parser(__doc__)
    add_training_options(parser)
    parser.add_argument(
        "--layer",
        choices=CONVOLUTIONS,
        default="conv31",
        help="the convolution to replace (default: %(default)s)",
    )
    add_output_options(parser)
    return parser.parse_args(arguments)


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    console = make_console()
    device = choose_device(options.device)
    require_writable(options.out)
    require_writable(options.checkpoint.parent)
    model, config, digits = train_or_load(options, device, console)
    header = run_header(describe_machine(device), "study_pixel_blocks.py", arguments) | {
        "data": digits.description,
        "model": f"{config.model}, {config.epochs} epochs, batch {config.batch}",
    }
    settings = run_settings(
        header,
        layer=options.layer,
        batch=config.batch,
        network=model_digest(model),
        data=digits.fingerprint(),
        plan=[PIXEL_BLOCKS, RATIOS],
    )
    model = fold_batch_norm(model)
    validation = digits.split(config.seed)[1].to(device)
    jobs = {f"{options.layer}, centred": False, f"{options.layer}, shifted at random": True}
    each = len(PIXEL_BLOCKS) * len(RATIOS)
    with (
        Journal(options.out, "pixel_blocks", settings, fresh=options.fresh) as journal,
        Steps(console, "pixel blocks") as steps,
    ):
        done, total = each * sum(title in journal for title in jobs), each * len(jobs)
        steps.at(done, total, journal.resumed(done, total))

        def progress(what):
            nonlocal done
            done += 1
            steps.at(done, total, what=what)

        def study(shifted):
            return measure(
                model,
                options.layer,
                RATIOS,
                validation,
                config.batch,
                shifted=shifted,
                progress=progress,
            )

        cases = {
            title: journal.measured(title, lambda shifted=shifted: study(shifted))
            for title, shifted in jobs.items()
        }
        data = {"header": header, "cases": cases}
        finish(pixel_blocks_report, data, options.out, "pixel_blocks", journal, console)


if __name__ == "__main__":
    sys.exit(exit_code(main))
