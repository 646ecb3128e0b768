"""Parts that the tests of the study share: tiny data, what a benchmark leaves, kept texts."""

import gzip
import json
import os
import struct
from pathlib import Path

import torch

import bench
from common import results
from common.console import exit_code
from common.results import KINDS

# ---- Kept texts: GOLDEN=write writes those of the tests that run ---------------------------------

GOLDEN = Path(__file__).parent / "study" / "golden.json"


def golden(name):
    """The data kept under a name."""
    return json.loads(GOLDEN.read_text())[name]


def assert_golden(name, found):
    """Holds plain data against what is kept under a name; read the difference before you commit."""
    found = json.loads(json.dumps(found))
    if os.environ.get("GOLDEN") == "write":
        kept = json.loads(GOLDEN.read_text()) | {name: found}
        GOLDEN.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
    else:
        assert found == golden(name)


def outline(tables):
    """Tables without their figures: the place of each row, with why it has none, and the columns
    that have figures in all rows, or in some.
    """
    found = {}
    for kind, rows in tables.items():
        key = KINDS[kind].key
        at = [tuple(str(row.get(name)) for name in (*key, "absent")) for row in rows]
        measured = [row for row in rows if not row.get("absent")]
        names = {name for row in rows for name in row} - {"absent", *key}
        held = [{name for name in names if row.get(name) is not None} for row in measured]
        every, some = set.intersection(*held or [set()]), set().union(*held)
        found[kind] = {"rows": folded(at), "in all": " ".join(sorted(every))}
        found[kind] |= {"in some": " ".join(sorted(some - every))} if some - every else {}
    return found


def folded(rows):
    """Rows that follow each other and differ in one column as one, from the last column on."""
    for column in reversed(range(len(rows[0]))):
        joined = []
        for *row, of in ((*row[:column], *row[column + 1 :], row[column]) for row in rows):
            if joined and joined[-1][0] == row:
                joined[-1][1].append(of)
            else:
                joined.append((row, [of]))
        rows = [(*row[:column], "|".join(of), *row[column:]) for row, of in joined]
    return [" ".join(row).removesuffix(" None") for row in rows]


def assert_consistent(rows, **ratios):
    """Times are above zero, and each column of ``ratios``, "a/b", is a over b."""
    for row in rows:
        for name, value in row.items():
            assert not name.endswith(("ms", "_us")) or not isinstance(value, float) or value > 0, (
                name
            )
        for name, of in ratios.items():
            over, under = of.split("/")
            if row.get(name) is not None:
                assert abs(row[name] / (row[over] / row[under]) - 1) < 1e-6, name


# ---- Tiny data sets, in MNIST's own file format -------------------------------------------------


def silent(step, steps, message):
    """Progress that nobody sees."""


def same_parameters(a, b):
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def run_script(main, capsys, *arguments):
    """Exit code, output and error lines of a script."""
    code = exit_code(lambda: main([str(argument) for argument in arguments]))
    captured = capsys.readouterr()
    return code, captured.out, captured.err.splitlines()


def idx_bytes(tensor):
    """A uint8 tensor as the content of an IDX file."""
    header = struct.pack(f">BBBB{tensor.dim()}I", 0, 0, 8, tensor.dim(), *tensor.shape)
    return header + tensor.numpy().tobytes()


def digits(count, seed=0):
    """Images (count, 28, 28) and labels: a bar whose place tells the label, on noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count, dtype=torch.uint8) % 10
    images = torch.randint(0, 40, (count, 28, 28), dtype=torch.uint8, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[6:22, 4 + 2 * label : 6 + 2 * label] = 255
    return images, labels


def write_part(root, part, images, labels, packed=True):
    """Writes one part ("train", "t10k") below ROOT/MNIST/raw, as torchvision lays it out."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for kind, tensor in {"images-idx3-ubyte": images, "labels-idx1-ubyte": labels}.items():
        content = idx_bytes(tensor)
        path = raw / f"{part}-{kind}"
        if packed:
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))
        else:
            path.write_bytes(content)
    return raw


# ---- Benchmarks ---------------------------------------------------------------------------------


def assert_three_files(folder):
    """JSON, markdown and a picture, and nothing half-written beside them."""
    names = sorted(path.name for path in folder.iterdir())
    assert names in (["small.json", "small.md", "small.png"], ["small.json", "small.md"])
    drawn = "(small.png)" in (folder / "small.md").read_text()
    assert drawn == ("small.png" in names)
    assert not drawn or (folder / "small.png").read_bytes().startswith(b"\x89PNG")


def run_bench(case, folder, *arguments, device="cpu"):
    """The tables of a benchmark's run."""
    options = (case, "--device", device, "--out", folder, "--name", "small", *arguments)
    bench.main([str(option) for option in options])
    assert_three_files(folder)
    return tables_of(folder / "small.json")


def tables_of(path):
    """The tables of the only run on a page."""
    [run] = results.load(path)["runs"]
    return run["tables"]
