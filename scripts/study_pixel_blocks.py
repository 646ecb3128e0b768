"""Why the default pixel block takes images first: accuracy of VGG13 by pixel block and valid ratio.

One convolution is replaced by SpAMM, with blocks of 64 pixels from 64 images at one position,
from one image's 8 x 8 pixels, and from steps between the two; with the digits centred, with every
image shifted at random, and with shifted images in batches of those that are alike. Uses the
checkpoint of train_vgg13.py (trained first, where there is none). Writes pixel_blocks.md, .json and
.png. If it is interrupted, the same command goes on with the cases that are missing.

    python scripts/study_pixel_blocks.py --out docs/results
"""

import sys

import torch

from common.console import Steps, exit_code, make_console
from common.journal import Journal, model_digest, run_settings
from common.machine import describe_machine
from common.options import add_output_options, make_parser
from common.report_files import finish, run_header
from models.data import draw_shifts, to_pictures
from models.training import validation_pictures
from models.vgg13 import CONVOLUTIONS, fold_batch_norm
from spamm_torch import LikenessBatchSampler
from study import pixel_blocks_report
from study.accuracy import cached_inputs, dense_accuracy, spamm_accuracy
from study.layouts import PixelBlocks
from study.plan import Group
from study.training_options import add_training_options, describe_training, prepare_study

PIXEL_BLOCKS = ((64, 1, 1), (16, 2, 2), (4, 4, 4), (1, 8, 8))
RATIOS = (0.8, 0.6, 0.45, 0.3)
CASES = (  # title, whether images are shifted, whether they come in order of likeness
    ("centred", False, False),
    ("shifted at random", True, False),
    ("shifted, in order of likeness", True, True),
)
_SHIFT_SEED = 1


def measure(model, layer, ratios, validation, batch, *, shifted, ordered, progress):
    """Accuracies with one layer replaced.

    Args:
        model: a plain VGG13 in eval mode.
        layer: name of the convolution. ratios: valid ratios, held in each batch.
        validation: Digits on the model's device. batch: images a batch.
        shifted: whether every image is moved at random first.
        ordered: whether a batch holds images that are alike, of a window of ten blocks.
        progress: called with what was done, after each accuracy.

    Returns:
        {"dense": percent, "settings": [{"pixel_block", "asked_ratio", "valid_ratio", "accuracy"}]}.
    """
    shifts = None
    if shifted:
        shifts = draw_shifts(len(validation), torch.Generator().manual_seed(_SHIFT_SEED))
    if ordered:
        pictures = to_pictures(validation.images, shifts)
        order = torch.cat(list(map(torch.tensor, LikenessBatchSampler(pictures, batch))))
        validation = validation[order.to(pictures.device)]
        shifts = None if shifts is None else shifts[order]
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
    device, model, config, digits = prepare_study(options, console)
    header = run_header(describe_machine(device), "study_pixel_blocks.py", arguments) | {
        "data": digits.description,
        "model": describe_training(config),
    }
    settings = run_settings(
        header,
        layer=options.layer,
        batch=config.batch,
        network=model_digest(model),
        data=digits.fingerprint(),
        plan=[PIXEL_BLOCKS, RATIOS, CASES],
    )
    model = fold_batch_norm(model)
    validation = digits.split(config.seed)[1].to(device)
    jobs = {
        f"{options.layer}, {title}": {"shifted": shifted, "ordered": ordered}
        for title, shifted, ordered in CASES
    }
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

        def study(case):
            return measure(
                model,
                options.layer,
                RATIOS,
                validation,
                config.batch,
                progress=progress,
                **case,
            )

        cases = {
            title: journal.measured(title, lambda case=case: study(case))
            for title, case in jobs.items()
        }
        data = {"header": header, "cases": cases}
        finish(pixel_blocks_report, data, options.out, "pixel_blocks", journal, console)


if __name__ == "__main__":
    sys.exit(exit_code(main))
