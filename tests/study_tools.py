"""Parts that the tests of the study share: tiny data, what a benchmark leaves."""

import gzip
import struct

import torch

import bench
from common import results
from common.measuring import TOLERANCE
from common.options import exit_code
from common.results import KINDS

PEERS = ("peer_ms", "rival_ms", "one_ms")  # where the dense product is not the peer


def assert_rows(tables):
    """Each row has a place of its own, and figures or the reason why it has none; times are above
    zero, speeds are a peer's time over the own one, and errors are within what rounding explains.
    """
    for kind, rows in tables.items():
        places = [str([row.get(name) for name in (*KINDS[kind].key, "case")]) for row in rows]
        assert len(set(places)) == len(rows) > 0, kind
        for row in (row for row in rows if not row.get("absent")):
            of = kind, row
            figures = (row[name] for name in row.keys() - {*KINDS[kind].key})
            assert any(isinstance(value, (int, float)) for value in figures), of
            times = {name: row[name] for name in row if name.endswith("_ms") or name == "ms"}
            assert all(value is None or value > 0 for value in times.values()), of
            own, peer = (
                next((times[name] for name in names if times.get(name)), None)
                for names in (("ms", "mm_ms", "all_ms"), (*PEERS, "dense_ms"))
            )
            if own and peer and row.get("speedup"):
                assert abs(row["speedup"] * own / peer - 1) < 1e-6, of
            if kind in ("products", "convolutions", "speedups"):
                assert 0 <= row["error"] <= TOLERANCE[row["precision"]], of
                assert row["spread"] >= 0, of


# ---- Tiny data sets, in MNIST's own file format -------------------------------------------------


def silent(message):
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
