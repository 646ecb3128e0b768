"""scripts/study_pixel_blocks.py: a tiny run, whole."""

import json

import pytest
from tiny_study import digits, one_thread, write_part  # noqa: F401  the fixture is automatic

import study_pixel_blocks as study
from study.pixel_blocks_report import cell


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of the results."""
    root = tmp_path_factory.mktemp("data")
    write_part(root, "t10k", *digits(100))
    options = ["--width", "2", "--epochs", "1", "--batch", "10", "--device", "cpu"]
    options += ["--data", root, "--checkpoint", root / "c.pt", "--out", root / "out"]
    study.main([str(option) for option in options])
    return root / "out"


def test_every_block_is_studied_at_every_ratio_in_every_case(finished):
    cases = json.loads((finished / "pixel_blocks.json").read_text())["cases"]
    assert list(cases) == [
        "conv31, centred",
        "conv31, shifted at random",
        "conv31, shifted, in order of likeness",
    ]
    # The same images in other batches.
    assert (
        cases["conv31, shifted at random"]["dense"]
        == (cases["conv31, shifted, in order of likeness"]["dense"])
    )
    for case in cases.values():
        studied = [(tuple(s["pixel_block"]), s["asked_ratio"]) for s in case["settings"]]
        assert studied == [(block, ratio) for block in study.PIXEL_BLOCKS for ratio in study.RATIOS]
        assert all(
            0 <= s["accuracy"] <= 100 and 0 < s["valid_ratio"] <= 1 for s in case["settings"]
        )


def test_the_tables_give_the_change_from_dense(finished):
    cases = json.loads((finished / "pixel_blocks.json").read_text())["cases"]
    text = (finished / "pixel_blocks.md").read_text()
    for title, case in cases.items():
        assert f"## {title}: dense {case['dense']:.2f}%" in text
        first = case["settings"][0]
        assert f"| (64, 1, 1) | {first['accuracy'] - case['dense']:+.2f}" in text
    assert (finished / "pixel_blocks.png").read_bytes().startswith(b"\x89PNG")


def test_a_share_that_ties_move_stands_beside_the_change():
    setting = {"accuracy": 97.0, "asked_ratio": 0.6, "valid_ratio": 0.65}
    assert cell(98.0, setting) == "-1.00 (65.0%)"
    assert cell(98.0, setting | {"valid_ratio": 0.601}) == "-1.00"
