"""Replaces convolutions of VGG13 by SpAMM: accuracy, valid ratio and speed (the paper's Table 5).

Without options: the network that train_vgg13.py left (trained first, where there is none), on a GPU
where there is one, results in results/ as Markdown, JSON and PNG.
"""

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import spamm_torch
from models.errors import StudyError
from models.files import require_writable
from models.vgg13 import fold_batch_norm
from scripts._console import Steps, exit_code, make_console
from scripts._machine import describe_machine
from scripts._precisions import PRECISIONS, use_precision
from scripts._study_groups import steps_of, study_group
from scripts._study_layouts import LAYOUTS
from scripts._study_plan import GROUPS
from scripts._study_report import print_tables, write_report
from scripts._study_results import Results
from scripts._training_options import (
    add_training_options,
    choose_device,
    positive_integer,
    train_or_load,
)

# float64 would show nothing that float32 does not.
_PRECISIONS = [name for name in PRECISIONS if name != "float64"]
_DEFAULT_PRECISIONS = {"cpu": ("float32",), "cuda": ("float32", "float16")}
_DEFAULT_REPEATS = {"cpu": 5, "cuda": 20}


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    console = make_console()
    device = choose_device(options.device)
    precisions = options.dtype or _DEFAULT_PRECISIONS[device.type]
    if "tf32" in precisions and device.type != "cuda":
        raise StudyError(f"expected --device cuda for --dtype tf32; got {device.type}")
    require_writable(options.out)
    require_writable(options.checkpoint.parent)

    model, config, digits = train_or_load(options, device, console)
    _, validation = digits.split(config.seed)
    header = _header(device, digits, config, precisions, arguments)
    groups = _study(
        model,
        precisions,
        validation.to(device),
        config.batch,
        options.repeats or _DEFAULT_REPEATS[device.type],
        console,
    )
    results = Results(header, groups)
    print_tables(results, console)
    for path in write_report(results, options.out, f"study_{device.type}"):
        console.print(f"wrote {path}")


def _parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_training_options(parser)
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=_PRECISIONS,
        help="what to study, one table each (default: float32, on CUDA also float16)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results"), help="folder of the results (default: results)"
    )
    parser.add_argument(
        "--repeats",
        type=positive_integer,
        help="rounds of each timing (default: 5 on the CPU, 20 on CUDA)",
    )
    return parser.parse_args(arguments)


def _study(model, precisions, validation, batch, repeats, console):
    """All groups of the plan in all precisions."""
    results = []
    done, total = 0, len(precisions) * sum(map(steps_of, GROUPS))
    with Steps(console, "study") as steps:

        def progress(what):
            nonlocal done
            done += 1
            steps.at(done, total, what=what)

        for precision in precisions:
            dtype = use_precision(precision)
            torch.backends.cudnn.benchmark = True
            plain = fold_batch_norm(model).to(dtype)
            results += [
                study_group(group, plain, precision, validation, batch, repeats, progress)
                for group in GROUPS
            ]
    return results


def _header(device, digits, config, precisions, arguments):
    """What a reader must know to judge or repeat the results."""
    kernels = {
        f"{spamm_torch.backend_for(device, PRECISIONS[precision][0], layout.block)} "
        f"({precision}, block {layout.block})": None
        for precision in precisions
        for layout in LAYOUTS
    }
    training = (
        f"{config.model}, width {config.width}, {config.epochs} epochs, batch {config.batch}, "
        f"seed {config.seed}"
    )
    if config.model == "vgg13_bn":
        training += "; batch norm folded into the convolutions for the study"
    return {
        **describe_machine(device),
        "kernels": ", ".join(kernels),
        "data": f"{digits.description}; 80% training, 20% validation",
        "model": training,
        "command": shlex.join(["python", "scripts/study_vgg13.py", *arguments]),
    }


if __name__ == "__main__":
    sys.exit(exit_code(main))
