"""VGG13's accuracy at low valid ratios: as it is, with channels in order, and fine-tuned.

All convolutions but the first keep the same share of their block products. The network computes as
convert_ makes it: as it is, with its channels in the order of their norms (reorder=True), and
fine-tuned for one epoch with skipping on, as train_vgg13.py --spamm does. Uses the checkpoint of
train_vgg13.py (trained first, where there is none). Writes low_ratios.md and .json. If it is
interrupted, the same command goes on with the cases that are missing.

    python scripts/study_low_ratios.py --full --out docs/results
"""

import sys

import torch

from common.console import Steps, exit_code, make_console
from common.journal import Journal, model_digest, run_settings
from common.machine import describe_machine
from common.options import add_output_options, make_parser, show, valid_ratio
from common.report_files import finish, run_header
from models.data import to_pictures
from models.finetuning import STATISTICS, FineTuneConfig, fine_tune, skip_all, with_skipping
from models.training import accuracy, validation_pictures
from spamm_torch import revert_
from study import low_ratios_report
from study.fine_tuning import add_rate_option, share_kept
from study.training_options import add_training_options, describe_training, prepare_study

_RATIOS = (0.5, 0.42, 0.35, 0.3, 0.25)
_TUNED = (0.35, 0.3, 0.25)


@torch.no_grad()
def measure(model, ratio, batches, **options):
    """What a network comes to with skipping on.

    Args:
        model: a VGG13 in eval mode; it stays as it is.
        ratio: valid ratio, searched for in each batch.
        batches: [(pictures, labels)] to validate.
        options: of convert_.

    Returns:
        {"accuracy": percent, "valid": share of the multiplications that are kept}.
    """
    network = with_skipping(model, skip_all(ratio), **options)
    return {"accuracy": accuracy(network, batches), "valid": share_kept(network, batches[0][0])}


def parse(arguments):
    parser = make_parser(__doc__)
    add_training_options(parser)
    for name, default, what in (
        ("ratios", _RATIOS, "to study without fine-tuning"),
        ("tuned", _TUNED, "to fine-tune for and to study"),
    ):
        parser.add_argument(
            f"--{name}",
            metavar="RATIO",
            type=valid_ratio,
            nargs="+",
            default=default,
            help=f"valid ratios in (0, 1] {what} (default: {show(default)})",
        )
    add_rate_option(parser)
    add_output_options(parser, "low_ratios")
    return parser.parse_args(arguments)


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    console = make_console()
    device, model, config, digits = prepare_study(options, console)
    header = run_header(describe_machine(device), "study_low_ratios.py", arguments) | {
        "data": f"{digits.description}; 80% training, 20% validation",
        "model": describe_training(config),
    }
    settings = run_settings(
        header,
        network=model_digest(model),
        data=digits.fingerprint(),
        ratios=options.ratios,
        tuned=options.tuned,
        rate=options.spamm_rate,
    )
    with Journal(options.out, options.name, settings, fresh=options.fresh) as journal:
        data = {
            "header": header,
            **_study(model, config, digits, options, device, journal, console),
        }
        finish(low_ratios_report, data, options.out, options.name, journal, console)


def _study(model, config, digits, options, device, journal, console):
    """{"dense": accuracy, "cases": {title: [what :func:`measure` gives, with the ratio]}}."""
    training, validation = digits.split(config.seed)
    batches = list(validation_pictures(validation.to(device), config.batch))
    example = to_pictures(training.images[:STATISTICS].to(device))
    forms = {low_ratios_report.AS_IT_IS: {"fuse": True}}
    forms[low_ratios_report.ORDERED] = {"fuse": True, "reorder": True, "example_input": example}
    tuned_forms = {low_ratios_report.TUNED: {"fuse": True}}
    if config.model == "vgg13_bn":
        tuned_forms[low_ratios_report.TUNED_OWN] = {"fuse": False}
    jobs = {(title, ratio): form for title, form in forms.items() for ratio in options.ratios}
    jobs |= {(title, ratio): form for ratio in options.tuned for title, form in tuned_forms.items()}
    done = sum(_key(*job) in journal for job in jobs)
    cases = {title: [] for title in (*forms, *tuned_forms)}
    networks = {}
    with Steps(console, "low ratios") as steps:
        steps.at(done, len(jobs), journal.resumed(done, len(jobs)))
        for (title, ratio), form in jobs.items():
            key = _key(title, ratio)
            if key not in journal:
                if title in tuned_forms and ratio not in networks:
                    networks = {ratio: _tuned(ratio, (model, config, digits), options, device)}
                network = networks[ratio] if title in tuned_forms else model
                found = measure(network, ratio, batches, **form)
                journal.measured(key, lambda found=found: found)
                done += 1
                steps.at(done, len(jobs), what=key)
            cases[title].append({"asked_ratio": ratio, **journal.measured(key, dict)})
    dense = journal.measured("dense", lambda: accuracy(model, batches))
    return {"dense": dense, "cases": cases}


def _tuned(ratio, trained, options, device):
    """The network fine-tuned for a ratio, without what makes it skip."""
    path = options.checkpoint.with_suffix(f".spamm-{ratio:g}-{options.spamm_rate:g}.pt")
    model, config, digits = trained
    tuning = FineTuneConfig(skip_all(ratio), model_digest(model), config, peak=options.spamm_rate)
    return revert_(fine_tune(tuning, model, digits, path, device, lambda *_: None))


def _key(title, ratio):
    return f"{title}, {ratio}"


if __name__ == "__main__":
    sys.exit(exit_code(main))
