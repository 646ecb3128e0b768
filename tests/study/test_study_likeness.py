"""scripts/study_likeness.py: a tiny run, whole; the arrangements and orders that it compares."""

import json

import pytest
import torch
from tiny_study import digits, one_thread, write_part  # noqa: F401  the fixture is automatic

import study_likeness as study
from common.console import exit_code
from study.arrangements import ARRANGEMENTS
from study.orders import ORDERS, _hilbert


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    write_part(root, "t10k", *digits(100))
    given = ["--width", "2", "--epochs", "1", "--batch", "10", "--device", "cpu"]
    given += ["--data", root, "--checkpoint", root / "c.pt", "--window", "15"]
    return [str(option) for option in given]


def test_every_order_is_studied_in_every_arrangement(options, tmp_path):
    study.main([*options, "--images", "20", "--out", str(tmp_path), "--ratio", "0.5"])
    data = json.loads((tmp_path / "likeness.json").read_text())
    assert list(data["cases"]) == list(ARRANGEMENTS)
    text = (tmp_path / "likeness.md").read_text()
    for case in data["cases"].values():
        assert list(case) == [*ORDERS, study.ONE_IMAGE]
        assert len({found["dense"] for found in case.values()}) == 1
        for found in case.values():
            assert 0 <= found["changed"] <= 100
            assert found["error"] >= 0
            change = found["accuracy"] - found["dense"]
            assert abs(change) <= found["changed"] + 1e-9
            assert f"| {found['changed']:.2f} / {change:+.2f} |" in text


def test_nothing_skipped_changes_nothing(options, tmp_path):
    few = ["--arrangements", "shifted", "--orders", *list(ORDERS)[:2]]
    out = ["--images", "20", "--ratio", "1", "--out", str(tmp_path)]
    study.main([*options, *few, *out])
    [case] = json.loads((tmp_path / "likeness.json").read_text())["cases"].values()
    assert [found["changed"] for found in case.values()] == [0, 0]
    assert all(found["error"] < 1e-5 for found in case.values())


def test_more_images_than_there_are(options, tmp_path, capsys):
    assert exit_code(lambda: study.main([*options, "--images", "21", "--out", str(tmp_path)])) == 1
    line = "error: expected --images of at most 20, the validation images; got 21"
    assert capsys.readouterr().err.splitlines() == [line]


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_arrangements_are_pictures_drawn_from_the_generator(name):
    images, _ = digits(30)

    def pictures(seed):
        return ARRANGEMENTS[name](images, torch.Generator().manual_seed(seed))

    one = pictures(0)
    assert (one.shape, one.dtype) == ((30, 3, 32, 32), torch.float32)
    assert one.is_contiguous(memory_format=torch.channels_last)
    assert one.amin() >= 0
    assert one.amax() <= 1
    assert torch.equal(one, pictures(0))
    assert torch.equal(one, pictures(1)) == (name == "centred")


@pytest.mark.parametrize("name", ORDERS)
def test_orders_are_permutations(name):
    images, _ = digits(200)
    pictures = ARRANGEMENTS["shifted"](images, torch.Generator().manual_seed(0))
    assert ORDERS[name](pictures).sort().values.tolist() == list(range(200))


def test_the_curve_goes_from_neighbour_to_neighbour():
    axis = torch.arange(16, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis)
    walked = points[_hilbert(points).argsort()]
    assert torch.equal(walked.diff(dim=0).abs().sum(1), torch.ones(255, dtype=torch.float64))
