"""Replaces convolutions of VGG13 by SpAMM: accuracy, valid ratio and speed (the paper's Table 5).

Without options: the checkpoint of train_vgg13.py (trained first, where there is none), on a GPU
where there is one, results in results/ as Markdown, JSON and PNG. If it is interrupted, the same
command goes on with the groups of layers that are missing.
"""

import sys
from dataclasses import asdict

import common  # noqa: F401  # isort: skip  before torch, whose import Ctrl-C may stop

import torch

import spamm_torch
from common import results
from common.console import Steps, exit_code, make_console
from common.journal import Journal, model_digest, run_settings
from common.machine import describe_machine
from common.options import add_output_options, choose_device, make_parser, positive_integer
from common.precisions import PRECISIONS, use_precision
from models.errors import UserError
from models.files import require_writable
from models.vgg13 import fold_batch_norm
from study.groups import NOTES, said_of_study, steps_of, study_group
from study.layouts import LAYOUTS
from study.plan import GROUPS
from study.training_options import add_training_options, train_or_load

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
        raise UserError(f"expected --device cuda for --dtype tf32; got {device.type}")
    require_writable(options.out)
    require_writable(options.checkpoint.parent)

    model, config, digits = train_or_load(options, device, console)
    _, validation = digits.split(config.seed)
    header = _header(device, digits, config, precisions, arguments)
    repeats = options.repeats or _DEFAULT_REPEATS[device.type]
    settings = run_settings(
        header,
        dtype=precisions,
        repeats=repeats,
        batch=config.batch,
        network=model_digest(model),
        data=digits.fingerprint(),
        plan=[asdict(group) for group in GROUPS],
    )
    name = f"study_{device.type}"
    with Journal(options.out, name, settings, fresh=options.fresh) as journal:
        tables = _study(
            model, precisions, validation.to(device), config.batch, repeats, journal, console
        )
        for rows in tables.values():
            rows[:] = [{"images": digits.description.partition(" (")[0]} | row for row in rows]
        run = {
            "name": name,
            "said": said_of_study(tables["study"]),
            "header": header,
            "tables": tables,
        }
        title = "VGG13 on MNIST, convolutions replaced by SpAMM"
        results.finish(options.out / name, title, run, console, NOTES)
        journal.remove()


def _parse(arguments):
    parser = make_parser(__doc__)
    add_training_options(parser)
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=_PRECISIONS,
        help="what to study, one table each (default: float32, on CUDA also float16)",
    )
    parser.add_argument(
        "--repeats",
        metavar="ROUNDS",
        type=positive_integer,
        help="rounds of each timing (default: 5 on the CPU, 20 on CUDA)",
    )
    add_output_options(parser)
    return parser.parse_args(arguments)


def _study(model, precisions, validation, batch, repeats, journal, console):
    """The tables of all groups of the plan in all precisions."""
    jobs = {
        f"{group.title}, {precision}": (group, precision)
        for precision in precisions
        for group in GROUPS
    }
    total = sum(steps_of(group) for group, _ in jobs.values())
    done = sum(steps_of(group) for name, (group, _) in jobs.items() if name in journal)
    with Steps(console, "study") as steps:
        steps.at(done, total, journal.resumed(done, total))

        def progress(what):
            nonlocal done
            done += 1
            steps.at(done, total, what=what)

        def measure(group, precision):
            dtype = use_precision(precision)
            torch.backends.cudnn.benchmark = True
            plain = fold_batch_norm(model).to(dtype)
            return study_group(group, plain, precision, validation, batch, repeats, progress)

        tables = {}
        for name, job in jobs.items():
            for kind, rows in journal.measured(name, lambda job=job: measure(*job)).items():
                tables.setdefault(kind, []).extend(rows)
        return tables


def _header(device, digits, config, precisions, arguments):
    """What a reader must know to understand or repeat the results."""
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
    return results.run_header(describe_machine(device), "study_vgg13.py", arguments) | {
        "kernels": ", ".join(kernels),
        "data": f"{digits.description}; 80% training, 20% validation",
        "model": training,
    }


if __name__ == "__main__":
    sys.exit(exit_code(main))
