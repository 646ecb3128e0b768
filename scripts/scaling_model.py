"""Checks the model of docs/scaling.md against a benchmark, and writes its figures into the page.

Fits the model to the smaller sizes that bench_multi_gpu.py measured, predicts the largest, and
shows both. Measures nothing, and needs neither the library nor a GPU. Without the results of a
benchmark the page says how to get them.

    python scripts/scaling_model.py docs/results/multi_gpu_h200.json
"""

import os
import sys
from pathlib import Path

from bench.multi_gpu import scaling_page
from bench.multi_gpu.scaling_page import RESULTS
from common import REPOSITORY
from common.console import exit_code
from common.errors import UserError
from common.options import make_parser
from common.report_files import table, write_bytes

CONVOLUTIONS = REPOSITORY / "docs" / "results" / "multi_gpu_conv_h200.json"
PAGE = REPOSITORY / "docs" / "scaling.md"


def block(results, convolutions, page):
    """What stands between the page's marks.

    Args:
        results, convolutions: paths of the JSON files. page: the page's, for links to theirs.

    Raises:
        UserError: as of scaling_page.load, or the model cannot be fitted.
    """
    data = scaling_page.load(results, RESULTS)
    of_convolutions = scaling_page.load(convolutions, CONVOLUTIONS)
    if data is None:
        command = "python scripts/bench_multi_gpu.py --out docs/results --name multi_gpu_h200"
        return scaling_page.unmeasured(command)
    link = lambda path: os.path.relpath(path.with_suffix(".md"), page.parent)  # noqa: E731
    text = scaling_page.figures(data, link(results))
    if of_convolutions is not None:
        text += scaling_page.convolutions(of_convolutions, link(convolutions))
    return text


def main(arguments=None):
    parser = make_parser(__doc__)
    parser.add_argument(
        "results",
        nargs="?",
        type=Path,
        metavar="FILE",
        default=RESULTS,
        help="JSON file of bench_multi_gpu.py (default: docs/results/multi_gpu_h200.json)",
    )
    parser.add_argument(
        "--convolutions",
        type=Path,
        metavar="FILE",
        default=CONVOLUTIONS,
        help="JSON file of bench_multi_gpu_conv.py, which the page names where it is there "
        "(default: docs/results/multi_gpu_conv_h200.json)",
    )
    parser.add_argument(
        "--page",
        type=Path,
        default=PAGE,
        help="Markdown page whose figures are written anew (default: docs/scaling.md)",
    )
    options = parser.parse_args(arguments)
    figures = block(options.results, options.convolutions, options.page)
    try:
        text = options.page.read_text()
    except OSError as error:
        raise UserError(f"cannot read {options.page}: {error.strerror}") from error
    write_bytes(options.page, scaling_page.with_figures(text, figures).encode())
    data = scaling_page.load(options.results, RESULTS)
    if data is not None:
        outcome = scaling_page.outcome_of(data)
        print("\n".join(table(*scaling_page.predictions(outcome), left=(0, 1))))
        print(outcome.verdict())
    print(f"wrote {options.page}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
