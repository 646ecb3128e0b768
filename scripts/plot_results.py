"""Draws the pages and pictures of results again from their JSON files; measures nothing.

Needs neither the library nor a GPU. Without arguments: all of docs/results, with their index
README.md and the page that joins the paper's tables, where there are any.

    python scripts/plot_results.py docs/results/mm_h200.json
"""

import json
import re
import sys
from pathlib import Path

from bench import conv_report, density_report, mm_report, vgg13_report
from bench.multi_gpu import conv_report as multi_gpu_conv_report
from bench.multi_gpu import report as multi_gpu_report
from bench.networks import report as networks_report
from common import REPOSITORY
from common.console import exit_code
from common.errors import UserError
from common.options import make_parser
from common.report_files import table, write_bytes
from examples.scattered_digits import report as scattered_digits_report
from study import calibration_report, likeness_report, low_ratios_report, pixel_blocks_report
from study import report as study_report
from tables import reports as tables_reports

_FOLDER = REPOSITORY / "docs" / "results"
_REPORTS = {  # the script that measured -> what reports it
    "bench_mm": mm_report,
    "bench_conv": conv_report,
    "bench_vgg13": vgg13_report,
    "bench_networks": networks_report,
    "bench_multi_gpu": multi_gpu_report,
    "bench_multi_gpu_conv": multi_gpu_conv_report,
    "density_matrix": density_report,
    "study_vgg13": study_report,
    "study_pixel_blocks": pixel_blocks_report,
    "reproduce": tables_reports,
    "study_likeness": likeness_report,
    "calibrate_vgg13": calibration_report,
    "study_low_ratios": low_ratios_report,
    "scattered_digits/demo": scattered_digits_report,
}


def redraw(path):
    """Writes the page and the picture beside a JSON file.

    Returns:
        What the index says of it: (page, what it says, device, date, command).

    Raises:
        UserError: the file is not one of results, or a file cannot be written.
    """
    try:
        data = json.loads(path.read_text())
        header = data["header"]
        script = re.search(r"(?:scripts|examples)/([\w/]+)\.py", header["command"])[1]
        markdown, picture, conclusion = _REPORTS[script].report(data, path.stem)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"expected results of {', '.join(_REPORTS)} as JSON; got {path}") from error
    write_bytes(path.with_suffix(".md"), markdown.encode())
    if picture is not None:
        write_bytes(path.with_suffix(".png"), picture)
    link = f"[{path.stem}]({path.stem}.md)"
    return link, conclusion, header["device"], header["date"], f"`{header['command']}`"


def index(entries):
    """A page that names all results."""
    lines = [
        "# Results",
        "",
        "What was measured, in one line each; a page has the tables, a JSON file every number.",
        "`python scripts/plot_results.py` draws pages, pictures and this index from the JSON",
        "files, `python scripts/plot_summary.py` the picture of the README.",
        "",
        "The CPU's results were measured before K was summed in pieces of 128 (float32, float64),",
        "which takes 2 to 6% more time.",
        "",
        *_to_joined(entries),
        *table(("result", "what it says", "device", "date", "command"), entries, left=range(5)),
    ]
    return "\n".join(lines) + "\n"


def _to_joined(entries):
    """The way to the paper's tables on one page, where there are any."""
    if not any(page.startswith("[table_") for page, *_ in entries):
        return []
    return [f"The [paper's tables]({tables_reports.JOINED}) on one page.", ""]


def main(arguments=None):
    parser = make_parser(__doc__)
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="JSON files of results (default: all of docs/results, and its pages for all)",
    )
    files = parser.parse_args(arguments).files
    entries = [redraw(path) for path in files or sorted(_FOLDER.glob("*.json"))]
    if not files:
        write_bytes(_FOLDER / "README.md", index(entries).encode())
        tables_reports.write_joined(_FOLDER)
    for entry in entries:
        print(f"{entry[0]}: {entry[1]}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
