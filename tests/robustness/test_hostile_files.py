"""Files that lie, damage or attack: one line, no code run, no memory for what is not there."""

import gzip
import io
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch
from support import refuses
from torch import nn

import spamm_torch
from common import results
from models import data, training
from models.files import UserError, read_arrays
from models.water import matrices


class Attack:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def npy(shape, dtype="<f8", rest=b"\0" * 64):
    """An array's file whose header says this shape."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    return file.getvalue() + rest


def zipped(content, path, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, text in content.items():
            archive.writestr(name, text)


def spoiled(path):
    """The file with other bytes in its middle."""
    content = bytearray(path.read_bytes())
    half = len(content) // 2
    content[half : half + 8] = b"\xff" * 8
    path.write_bytes(content)


HEADERS = {  # of an array that lies about itself
    "more than memory": npy((2**40,)),
    "more than 64 bits": npy((2**70, 2**70)),
    "negative": npy((-5, 7)),
    "less than it says": npy((100, 100)),
    "code": npy("__import__('os').abort()"),
    "too deep": npy((4,)).replace(b"(4,)", b"(" * 90),
}


def archives(path, attack):
    """.npz files that are none: name -> what writes it."""
    kinds = {name: lambda of=of: zipped({"fock.npy": of}, path) for name, of in HEADERS.items()}
    return kinds | {
        "a pickle": lambda: zipped({"fock.npy": npy((1,), "|O", pickle.dumps([attack]))}, path),
        "a bare pickle": lambda: path.write_bytes(pickle.dumps(attack)),
        "a damaged stream": lambda: (
            np.savez_compressed(path, fock=np.arange(2500.0) ** 0.5),
            spoiled(path),
        ),
        "an unknown method": lambda: (
            zipped({"fock.npy": npy((8,))}, path),
            path.write_bytes(path.read_bytes().replace(b"\x14\0\0\0\x08\0", b"\x14\0\0\0\x63\0")),
        ),
        "an array": lambda: np.save(open(path, "wb"), np.eye(4)),
        "nothing": lambda: path.write_bytes(b""),
        "a folder": lambda: path.mkdir(),
    }


@pytest.mark.parametrize("kind", archives(None, None))
def test_archives_of_arrays(tmp_path, kind):
    path, made = tmp_path / "file.npz", tmp_path / "made"
    archives(path, Attack(made))[kind]()
    for read in (read_arrays, matrices.read):
        refuses(UserError, lambda read=read: read(path), str(path))
    assert not made.exists()


def test_names_in_an_archive_are_no_paths(tmp_path):
    """Nothing is unpacked, wherever a name in it points to."""
    path = tmp_path / "in" / "file.npz"
    path.parent.mkdir()
    zipped({"../../fock.npy": npy((8,)), "/tmp/fock.npy": npy((8,))}, path)
    refuses(UserError, lambda: matrices.read(path), "data/ergo")
    assert [file.name for file in tmp_path.rglob("*")] == ["in", "file.npz"]


def idx(shape, kind=8, rest=b"\0" * 64):
    return bytes((0, 0, kind, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + rest


@pytest.mark.parametrize("shape", [(2**31,) * 3, (2**30 + 1,), (1,) * 255, (4, 28, 28)], ids=str)
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_idx(tmp_path, shape, pack):
    path = tmp_path / ("file.gz" if pack is gzip.compress else "file")
    path.write_bytes(pack(idx(shape)))
    refuses(UserError, lambda: data.read_idx(path), str(path))


def test_a_packed_file_is_not_unpacked_beyond_its_header(tmp_path):
    """A gigabyte of zeros in a megabyte."""
    path, zeros = tmp_path / "file.gz", gzip.compress(bytes(2**24))
    path.write_bytes(gzip.compress(idx((4, 28, 28), rest=b"")) + 64 * zeros)
    refuses(UserError, lambda: data.read_idx(path), "expected 3136 bytes", "got more")


def checkpoints(path, attack):
    """Checkpoints that are none."""
    good = {"format": "spamm_torch training 1", "config": {}, "data": "", "step": 0}
    good |= {"model": {}, "optimizer": {}}

    def with_data(change):
        torch.save({**good, "model": {"w": torch.ones(8)}}, path)
        with zipfile.ZipFile(path) as archive:
            content = {name: change(name, archive.read(name)) for name in archive.namelist()}
        zipped(content, path, zipfile.ZIP_STORED)

    def spoil():
        torch.save({**good, "model": {"w": torch.ones(999)}}, path)
        spoiled(path)

    contents = {  # that torch.save writes
        "a pickle": attack,
        "a pickle inside": {**good, "model": {"w": attack}},
        "other keys": {**good, "more": 1},
        "a list": [1],
        "a list as config": {**good, "config": []},
        "other content": {"model": {}},
    }
    kinds = {name: lambda of=of: torch.save(of, path) for name, of in contents.items()}
    return kinds | {
        "a bare pickle": lambda: path.write_bytes(pickle.dumps(attack)),
        "no weights": lambda: with_data(lambda name, text: b"" if "/data/" in name else text),
        "a size that lies": lambda: with_data(
            lambda name, text: text.replace(b"K\x08\x85", b"J\xff\xff\xff\x7f\x85")
        ),
        "other names": lambda: zipped({"../../made/data.pkl": b"1"}, path),
        "a text": lambda: path.write_text("hello\n"),
        "nothing": lambda: path.write_bytes(b""),
        "flipped": spoil,
    }


@pytest.mark.parametrize("kind", checkpoints(None, None))
def test_checkpoints(tmp_path, kind):
    path, made = tmp_path / "file.pt", tmp_path / "made"
    checkpoints(path, Attack(made))[kind]()
    expected = "expected a checkpoint"
    refuses(UserError, lambda: training.load_checkpoint(path), str(path), expected)
    assert not made.exists()


DEEP, LONG = "[" * 100_000 + "]" * 100_000, f'{{"settings": {"9" * 5000}}}'
TEXTS = {
    "deep": DEEP,
    "long number": LONG,
    "no text": b"\xff\xfe\0",
    "list": "[]",
    "cut": '{"settings": {',
    "null": "null",
    "nothing": "",
    "no object": '{"settings": {}, "groups": [1]}',
}


@pytest.mark.parametrize("text", TEXTS)
def test_json(tmp_path, text):
    """Settings and results: Python's readers of JSON raise more than ValueError."""
    path = tmp_path / "file.json"
    content = TEXTS[text]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    refuses(ValueError, lambda: spamm_torch.convert_(model, path), str(path))
    assert type(model[0]) is nn.Conv2d
    refuses(UserError, lambda: results.load(path), str(path))
