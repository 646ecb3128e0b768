"""Why the default pixel block takes images first: accuracy of VGG13 by pixel block and valid ratio.

One convolution is replaced by SpAMM, with blocks of 64 pixels taken from 64 images at one position,
from one image's 8 x 8 pixels, and from steps between the two; once with the digits centred, as they
come, and once with every image shifted at random. Uses the network that train_vgg13.py left
(trained first, where there is none). Writes pixel_blocks.md, .json and .png.

    python scripts/study_pixel_blocks.py --out docs/results
"""

import argparse
import io
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from models.data import draw_shifts
from models.files import require_writable
from models.training import validation_pictures
from models.vgg13 import CONVOLUTIONS, fold_batch_norm
from scripts._console import Steps, exit_code, make_console
from scripts._machine import describe_machine
from scripts._report_files import write_results
from scripts._study_accuracy import cached_inputs, dense_accuracy, spamm_accuracy
from scripts._study_layouts import PixelBlocks
from scripts._study_plan import Group
from scripts._training_options import add_training_options, choose_device, train_or_load

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


def markdown(header, cases, picture):
    lines = ["# Accuracy by pixel block", "", "| | |", "| --- | --- |"]
    lines += [f"| {key} | {value} |" for key, value in header.items()]
    lines += [
        "",
        "Change of accuracy in percentage points where one convolution multiplies only this share",
        "of its block products. Pixel blocks are (images, rows, columns), all of 64 pixels; in",
        "brackets the share where ties move it by half a point or more.",
        "",
        f"![accuracy by pixel block and valid ratio]({picture})",
    ]
    for title, case in cases.items():
        ratios = sorted({s["asked_ratio"] for s in case["settings"]}, reverse=True)
        lines += ["", f"## {title}: dense {case['dense']:.2f}%", ""]
        lines.append("| pixel block | " + " | ".join(f"{ratio:.0%}" for ratio in ratios) + " |")
        lines.append("| --- |" + " ---: |" * len(ratios))
        for pixel_block in PIXEL_BLOCKS:
            cells = [
                cell(case["dense"], s) for s in case["settings"] if s["pixel_block"] == pixel_block
            ]
            lines.append(f"| {pixel_block} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cell(dense, setting):
    moved = abs(setting["valid_ratio"] - setting["asked_ratio"]) >= 0.005
    suffix = f" ({setting['valid_ratio']:.1%})" if moved else ""
    return f"{setting['accuracy'] - dense:+.2f}{suffix}"


def picture_of(header, cases):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(cases), figsize=(6 * len(cases), 4.5), squeeze=False, layout="constrained"
    )
    for axes, (title, case) in zip(panels[0], cases.items(), strict=True):
        for pixel_block in PIXEL_BLOCKS:
            chosen = [s for s in case["settings"] if s["pixel_block"] == pixel_block]
            ratios = [100 * s["valid_ratio"] for s in chosen]
            axes.plot(ratios, [s["accuracy"] for s in chosen], marker="o", label=f"{pixel_block}")
        axes.axhline(case["dense"], color="grey", linewidth=0.8)
        axes.set(title=title, xlabel="valid ratio (%)", ylabel="accuracy (%)")
        axes.invert_xaxis()
        axes.grid(alpha=0.3)
    panels[0][-1].legend(title="images, rows, columns")
    figure.suptitle(f"VGG13 on MNIST, {header['device']}")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    pyplot.close(figure)
    return buffer.getvalue()


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_training_options(parser)
    parser.add_argument("--layer", choices=CONVOLUTIONS, default="conv31")
    parser.add_argument("--out", type=Path, default=Path("results"))
    return parser.parse_args(arguments)


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    console = make_console()
    device = choose_device(options.device)
    require_writable(options.out)
    require_writable(options.checkpoint.parent)
    model, config, digits = train_or_load(options, device, console)
    model = fold_batch_norm(model)
    validation = digits.split(config.seed)[1].to(device)
    command = shlex.join(["python", "scripts/study_pixel_blocks.py", *arguments])
    header = describe_machine(device) | {
        "data": digits.description,
        "model": f"{config.model}, {config.epochs} epochs, batch {config.batch}",
        "command": f"`{command}`",
    }
    cases = {}
    with Steps(console, "pixel blocks") as steps:
        done, total = 0, 2 * len(PIXEL_BLOCKS) * len(RATIOS)

        def progress(what):
            nonlocal done
            done += 1
            steps.at(done, total, what=what)

        for title, shifted in (("centred", False), ("shifted at random", True)):
            cases[f"{options.layer}, {title}"] = measure(
                model,
                options.layer,
                RATIOS,
                validation,
                config.batch,
                shifted=shifted,
                progress=progress,
            )
    paths = write_results(
        options.out,
        "pixel_blocks",
        data={"header": header, "cases": cases},
        markdown=markdown(header, cases, "pixel_blocks.png"),
        picture=picture_of(header, cases),
    )
    for path in paths:
        console.print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
