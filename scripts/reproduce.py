"""The paper's tables, measured on this machine, each figure of the paper's beside ours.

Tables: 1 thresholds, 2 speedup over torch.mm, 3 against sparse products at equal error, 4 matrices
of water clusters, 5 VGG13 on MNIST. Without options all of them at sizes that fit: on a CPU small
ones, in less than a quarter of an hour on two cores; on a GPU the paper's. Puts each table into
tables.json, tables.md and tables.png, beside those that are there, as soon as it is whole.

The paper's figures are from a Tesla V100 with CUDA 10, its errors of 46340 the root of 2^31. Errors
of Table 4 are Frobenius norms against torch.mm's product in float64. Table 5: layouts are the
paper's, blocks of 32 on an explicit im2col matrix, and pixel blocks of 64, image by image (1, 8, 8)
or by position (64, 1, 1); tau is found for each batch, and held for its time.

    python scripts/reproduce.py all
    python scripts/reproduce.py 1 2 --out docs/results --name h200
"""

import sys

import common  # noqa: F401  # isort: skip  finds models and the library

import torch

from common import options as cli
from common import results
from common.console import exit_code
from common.measuring import describe_machine, measure_all
from models.files import require_writable
from tables import table_1, table_2, table_3, table_4, table_5
from train_vgg13 import add_training_options, chosen_training

TABLES = {1: table_1, 2: table_2, 3: table_3, 4: table_4, 5: table_5}
DEFAULTS = {"cpu": {"repeats": 3}, "cuda": {"repeats": 7}}
HEADLINE = "Each figure beside the paper's, which are from a Tesla V100 with CUDA 10."


def parse(arguments):
    parser = cli.make_parser(__doc__)
    known = [*map(str, TABLES), "all"]
    what = f"{', '.join(known)} (default: all)"
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE", default="all", choices=known, help=what
    )
    what = "edges of the square matrices of Tables 1 to 3"
    cli.add_numbers(parser, "--sizes", what, None, "N", said="each table's own")
    cli.add_repeats_option(parser, DEFAULTS)
    add_training_options(parser)
    cli.add_folder_option(parser, "the results")
    what = "what the runs are called after their table"
    cli.add(parser, "--name", what, None, "cpu or cuda, the device", type=cli.file_name)
    options = parser.parse_args(arguments)
    chosen = TABLES if "all" in options.tables else map(int, options.tables)
    options.tables = sorted(set(chosen))
    return options


def page_at(path):
    """The page of tables in a file; an empty one where there is none."""
    if path.exists():
        return results.load(path)
    return {
        "title": "The paper's tables",
        "headline": HEADLINE,
        "notes": __doc__.partition("    python")[0],
        "runs": [],
    }


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    cli.fill_in(options, DEFAULTS)
    device = options.device
    require_writable(options.out)
    path = options.out / "tables.json"
    page_at(path)  # a damaged file is found before an hour's work, not after it
    name = options.name or device.type
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    options.gpus = tuple(torch.device("cuda", index) for index in range(count))
    header = results.run_header(describe_machine(device), "reproduce.py", arguments)
    if 5 in options.tables:
        chosen_training(options)  # so is bad input
    for number in options.tables:
        of_table, tables = TABLES[number], {}
        print(f"table {number}: {of_table.TITLE}", flush=True)
        measure_all(of_table.cells(options), tables)
        said = getattr(of_table, "said", results.said)(tables)
        run = {"name": f"table_{number}_{name}", "said": said, "header": header}
        page = page_at(path)
        results.add(page, run | {"tables": tables})
        print(said, *(f"wrote {written}" for written in results.write(path, page)), sep="\n")


if __name__ == "__main__":
    sys.exit(exit_code(main))
