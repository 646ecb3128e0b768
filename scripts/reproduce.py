"""The paper's tables, measured on this machine, each figure of the paper's beside ours.

Tables: 1 thresholds, 2 speedup over torch.mm, 3 against sparse products at equal error, 4 matrices
of water clusters, 5 VGG13 on MNIST. Without options all of them at sizes that fit: on a CPU small
ones, in less than a quarter of an hour on two cores; on a GPU the paper's. Writes table_N_NAME.md,
.json and .png for each, and tables.md, which joins all that are in the folder. If it is
interrupted, the same command goes on with the cells that are missing; it tries those again that
failed for want of memory or by an error of the device.

    python scripts/reproduce.py all
    python scripts/reproduce.py 1 2 --out docs/results --name h200
"""

import contextlib
import sys
from pathlib import Path

import torch

import common  # noqa: F401  before the library, which it finds
from bench.run import measure_all
from common.console import Steps, exit_code, make_console
from common.errors import UserError
from common.files import require_writable
from common.journal import Journal, run_settings
from common.machine import describe_machine, peer_libraries
from common.options import (
    add_output_options,
    choose_device,
    file_name,
    make_parser,
    positive_integer,
)
from common.report_files import run_header, write_results
from study.training_options import add_training_options
from tables import reports, table_1, table_2, table_3, table_4, table_5
from tables.frame import Run

TABLES = {1: table_1, 2: table_2, 3: table_3, 4: table_4, 5: table_5}
REPEATS = {"cpu": 3, "cuda": 7}


def parse(arguments):
    parser = make_parser(__doc__)
    parser.add_argument(
        "tables",
        nargs="*",
        metavar="TABLE",
        default=["all"],
        help=f"{', '.join(map(str, TABLES))} or all (default: all)",
    )
    parser.add_argument(
        "--sizes",
        metavar="N",
        type=positive_integer,
        nargs="+",
        help="edges of the square matrices of Tables 1 to 3 (default: each table's own)",
    )
    parser.add_argument(
        "--repeats",
        metavar="ROUNDS",
        type=positive_integer,
        help=f"rounds of each timing (default: {REPEATS['cuda']}; on the CPU {REPEATS['cpu']})",
    )
    parser.add_argument(
        "--matrices",
        metavar="FILE",
        type=Path,
        nargs="+",
        default=[],
        help="files of make_ergo_matrices.py for Table 4 (default: none, but for what comes with "
        "the repository and a model cluster)",
    )
    add_training_options(parser)
    add_output_options(parser)
    parser.add_argument(
        "--name",
        type=file_name,
        help="what the files are called after their table (default: cpu or cuda, the device)",
    )
    options = parser.parse_args(arguments)
    options.tables = chosen_tables(options.tables)
    return options


def chosen_tables(words):
    """Numbers of tables, in order.

    Raises:
        UserError: there is no such table.
    """
    known = {str(number): number for number in TABLES}
    for word in words:
        if word != "all" and word not in known:
            raise UserError(f"expected tables {', '.join(known)} or all; got {word}")
    return list(TABLES) if "all" in words else sorted({known[word] for word in words})


def measure(number, run, about, journal):
    """Measures one table and writes its three files; says what was found and where it is.

    Args:
        about: what stands in its data beside the cells. journal: of the table.

    Returns:
        How many cells failed that another run may measure. The journal has all others.
    """
    of_table = TABLES[number]
    run.console.print(f"table {number}: {reports.REPORTS[number].TITLE}")
    cells = of_table.cells(run)
    with Steps(run.console, f"table {number}") as steps:
        found = measure_all(cells, journal, steps, of_table.said_of, lambda of: not of["may_pass"])
    data = about | {"cells": found}
    files = f"table_{number}_{about['name']}"
    markdown, picture, said = reports.report(data, files)
    paths = write_results(run.options.out, files, data=data, markdown=markdown, picture=picture)
    run.console.print(said)
    for path in paths:
        run.console.print(f"wrote {path}")
    return sum(of.get("may_pass", False) for of in found)


def require_sound(journal, about):
    """Finds a damaged journal before anything is measured.

    Raises:
        UserError: the journal's cells are not of the table that ``about`` is about.
    """
    groups = list(journal.groups().values())
    if groups and not reports.is_sound(about | {"cells": groups}, journal.path.stem):
        raise journal.damaged()


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    console = make_console()
    device = choose_device(options.device)
    require_writable(options.out)
    name = options.name or device.type
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    run = Run(
        device=device,
        gpus=tuple(torch.device("cuda", index) for index in range(count)),
        repeats=options.repeats or REPEATS[device.type],
        options=options,
        console=console,
    )
    machine = describe_machine(device) | {"libraries": peer_libraries(device)}
    header = run_header(machine, "reproduce.py", arguments)
    reports.load(options.out)  # a damaged file is found before an hour's work, not after it
    settings = {number: TABLES[number].settings(run) for number in options.tables}
    with contextlib.ExitStack() as stack:
        journals = {
            number: stack.enter_context(
                Journal(
                    options.out,
                    f"table_{number}_{name}",
                    run_settings(header, repeats=run.repeats, gpus=count, **of_table),
                    fresh=options.fresh,
                )
            )
            for number, of_table in settings.items()
        }
        about = {
            number: {"table": number, "header": header, "name": name, "settings": of_table}
            for number, of_table in settings.items()
        }
        for number, journal in journals.items():
            require_sound(journal, about[number])
        failed = {
            number: measure(number, run, about[number], journal)
            for number, journal in journals.items()
        }
        console.print(f"wrote {reports.write_joined(options.out)}")
        # Only now: were it interrupted before, the tables it has finished would be measured again.
        for number, journal in journals.items():
            if failed[number]:
                console.print(
                    f"table {number}: {failed[number]} cells failed; the same command tries these "
                    "again, --fresh measures all"
                )
            else:
                journal.remove()


if __name__ == "__main__":
    sys.exit(exit_code(main))
