"""The comparison of two builds' GPU code, on code recorded in tests/data/gpu_code."""

import struct
from pathlib import Path

import pytest

from scripts import compare_machine_code as tool

RECORDED = Path(__file__).resolve().parents[1] / "data" / "gpu_code"


def recorded(name):
    """The kernels of one recorded build, as cubin and as PTX."""
    cubin = tool.kernels_of_cubin("sm_80", (RECORDED / f"{name}.cubin").read_bytes())
    return cubin + tool.kernels_of_ptx("ptx sm_80", (RECORDED / f"{name}.ptx").read_text())


def test_every_kernel_is_found():
    assert sorted((kernel.target, kernel.name) for kernel in recorded("before")) == [
        ("ptx sm_80", "_Z5clear6Params"),
        ("ptx sm_80", "_Z5halve6Params"),
        ("ptx sm_80", "_Z6scaledf"),
        ("sm_80", "_Z5clear6Params"),
        ("sm_80", "_Z5halve6Params"),
    ]


def test_renamed_kernels_are_equal():
    found = tool.compare_by_target(recorded("before"), recorded("renamed"))
    assert found == {
        "ptx sm_80": tool.Difference(3, [], [], []),
        "sm_80": tool.Difference(2, [], [], []),
    }


def test_a_changed_kernel_is_named():
    found = tool.compare_by_target(recorded("before"), recorded("changed"))
    assert {target: difference.equal for target, difference in found.items()} == {
        "ptx sm_80": 2,
        "sm_80": 1,
    }
    for difference in found.values():
        [(a, b)] = difference.changed
        assert a.name == b.name == "_Z5halve6Params"
        assert difference.only_a == difference.only_b == []
    lines = tool.report(found, everything=False)
    assert "sm_80: 1 equal, 1 changed, 0 only in A, 0 only in B" in lines


def test_equal_kernels_are_matched_as_often_as_they_occur():
    [one, *_] = recorded("before")
    other = one._replace(name="other")
    found = tool.compare([one, other], [one])
    assert (found.equal, len(found.only_a), found.only_b) == (1, 1, [])
    found = tool.compare([one], [one, one, other])
    assert (found.equal, found.only_a, len(found.only_b)) == (1, [], 2)


def test_fat_binaries_are_split():
    def fatbin(payload):
        return struct.pack("<IHHQ", tool.FATBIN_MAGIC, 1, 16, len(payload)) + payload

    data = fatbin(b"12345678") + bytes(8) + fatbin(b"abcd")
    assert tool.split_fatbins(data) == [fatbin(b"12345678"), fatbin(b"abcd")]
    with pytest.raises(tool.CompareError, match="at byte 24"):
        tool.split_fatbins(fatbin(b"12345678") + b"garbage, garbage")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "none", "does not exist"),
        (lambda folder: folder, "it holds none"),
        (lambda folder: RECORDED / "before.ptx", "not a 64-bit little-endian ELF file"),
    ],
)
def test_what_cannot_be_compared_is_one_line(tmp_path, monkeypatch, capsys, make, message):
    monkeypatch.setattr(tool, "find_cuobjdump", lambda: "cuobjdump")
    side = str(make(tmp_path))
    assert tool.main([side, side]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("compare_machine_code: ")
    assert message in line
