"""Benchmarks: what products, convolutions and networks take beside their peers; the paper's tables.

Each result is verified before it is timed, and all candidates of a cell take turns. Writes rows as
NAME.json, and a page and a picture of them as NAME.md and NAME.png; plot_results.py --add puts the
rows into docs/results. If it is interrupted, it writes the cells that it has measured. The options
of a benchmark: python scripts/bench.py BENCHMARK --help

    python scripts/bench.py mm --sizes 4096 8192 --ratios 1 0.3 0.05
"""

import sys

import common  # noqa: F401  # isort: skip  finds models and the library

import torch

from cases import block_sparse, conv, mm, multi_gpu, networks, shapes, vgg13
from common import options as cli
from common import results
from common.console import exit_code
from common.measuring import describe_machine, measure_all
from models.files import require_writable
from tables import table_1, table_2, table_3, table_4, table_5

# A case has TITLE, DEFAULTS by kind of device, add_options(parser) and cells(options), {name: call
# that measures it}, as of common.measuring. It may have choose(options), which completes options
# and raises UserError; prepare(options), where something must be made first; header(options);
# said(tables), what was found in a line. Its docstring is on its pages.
_CASES = (mm, conv, shapes, block_sparse, networks, vgg13, multi_gpu)
_TABLES = (table_1, table_2, table_3, table_4, table_5)
CASES = {case.__name__.partition(".")[2]: case for case in _CASES + _TABLES}


def parse(arguments):
    parser = cli.make_parser(__doc__)
    as_it_is = {"formatter_class": parser.formatter_class, "allow_abbrev": False}
    kinds = parser.add_subparsers(dest="case", metavar="BENCHMARK", required=True)
    for name, case in CASES.items():
        of_case = kinds.add_parser(name, help=case.TITLE, description=case.__doc__, **as_it_is)
        case.add_options(of_case)
        cli.add_folder_option(of_case, "the results")
        what = "name of the result files, without a suffix"
        cli.add(of_case, "--name", what, name, type=cli.file_name)
    options = parser.parse_args(arguments)
    cli.fill_in(options, CASES[options.case].DEFAULTS)
    _if_it_has(CASES[options.case], "choose", options)
    return options


def _if_it_has(case, name, *arguments):
    """Calls a case's function of this name; {} where there is none."""
    return getattr(case, name, lambda *_: {})(*arguments)


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    case = CASES[options.case]
    require_writable(options.out)
    _if_it_has(case, "prepare", options)
    torch.backends.cudnn.benchmark = True
    with torch.no_grad():  # not inference mode, whose tensors count no versions
        header = results.run_header(describe_machine(options.device), "bench.py", arguments)
        if hasattr(options, "parts"):
            header["parts"] = options.parts
        header |= _if_it_has(case, "header", options)
        tables = {}
        try:
            measure_all(case.cells(options), tables)
        finally:  # after Ctrl-C, too
            if tables:
                said = getattr(case, "said", results.said)(tables)
                run = {"name": options.name, "said": said}
                run |= {"header": header, "tables": tables}
                results.finish(options.out / options.name, case.TITLE, run, case.__doc__)


if __name__ == "__main__":
    sys.exit(exit_code(main))
