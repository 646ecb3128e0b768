"""Benchmarks: what products, convolutions and networks take beside their peers.

Each result is verified before it is timed, and all candidates of a cell take turns. Writes rows as
NAME.json, and a page and a picture of them as NAME.md and NAME.png; plot_results.py --add puts the
rows into docs/results. If it is interrupted, the same command goes on with the cells that are
missing. The options of a benchmark: python scripts/bench.py BENCHMARK --help

    python scripts/bench.py mm --sizes 4096 8192 --ratios 1 0.3 0.05
"""

import sys

import common  # noqa: F401  # isort: skip  before torch, whose import Ctrl-C may stop

import torch

from cases import block_sparse, conv, mm, multi_gpu, networks, shapes, vgg13
from common import options as cli
from common import results
from common.console import Steps, exit_code, make_console
from common.journal import Journal, run_settings
from common.machine import describe_machine
from common.measuring import tables_of
from models.files import require_writable

# A case has TITLE, MODE (inference_mode or no_grad), DEFAULTS by kind of device,
# add_options(parser) and cells(options), {name: call that measures it}, as of common.measuring. It
# may have choose(options), which completes options and raises UserError; prepare(options), where
# something must be made first; header(options); settings(options), what decides its figures beside
# the options. Its docstring is on its pages.
_CASES = (mm, conv, shapes, block_sparse, networks, vgg13, multi_gpu)
CASES = {case.__name__.removeprefix("cases."): case for case in _CASES}


def parse(arguments):
    parser = cli.make_parser(__doc__)
    as_it_is = {"formatter_class": parser.formatter_class, "allow_abbrev": False}
    kinds = parser.add_subparsers(dest="case", metavar="BENCHMARK", required=True)
    for name, case in CASES.items():
        of_case = kinds.add_parser(name, help=case.TITLE, description=case.__doc__, **as_it_is)
        case.add_options(of_case)
        cli.add_output_options(of_case, name)
    options = parser.parse_args(arguments)
    cli.fill_in(options, CASES[options.case].DEFAULTS)
    _if_it_has(CASES[options.case], "choose", options)
    return options


def _if_it_has(case, name, *arguments):
    """Calls a case's function of this name; {} where there is none."""
    return getattr(case, name, lambda *_: {})(*arguments)


def _decisive(options):
    """The options that decide figures, as they were given or filled in."""
    free = ("case", "out", "name", "fresh", "device", "devices")
    plain = (str, int, float, bool, list, tuple)
    return {
        name: value
        for name, value in vars(options).items()
        if name not in free and isinstance(value, plain)
    }


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    case, console = CASES[options.case], make_console()
    require_writable(options.out)
    decisive = _decisive(options)
    _if_it_has(case, "prepare", options)
    torch.backends.cudnn.benchmark = True
    with case.MODE():
        header = results.run_header(describe_machine(options.device), "bench.py", arguments)
        if hasattr(options, "parts"):
            header["parts"] = options.parts
        header |= _if_it_has(case, "header", options)
        more = decisive | _if_it_has(case, "settings", options)
        settings = run_settings(header, case=options.case, **more)
        with (
            Journal(options.out, options.name, settings, fresh=options.fresh) as journal,
            Steps(console, options.case) as steps,
        ):
            tables = tables_of(case.cells(options), journal, steps)
            run = {"name": options.name, "said": results.said(tables)}
            run |= {"header": header, "tables": tables}
            results.finish(options.out / options.name, case.TITLE, run, console, case.__doc__)
            journal.remove()


if __name__ == "__main__":
    sys.exit(exit_code(main))
