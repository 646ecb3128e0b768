"""Random cases of scripts/fuzz.py: the first that a seed draws, those kept, and the fuzzer."""

import json
from pathlib import Path

import pytest
import torch

import fuzz
from fuzzing import products, space

CASES = list(map(fuzz.from_json, Path(__file__).with_name("cases.jsonl").read_text().splitlines()))

pytestmark = pytest.mark.usefixtures("set_tf32")  # which cases change


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["family"])
def test_cases_that_are_kept(device, case):
    assert fuzz.problem(case, device) is None


@pytest.mark.parametrize("first", range(0, 2000, 50))
def test_drawn_cases(device, first):
    """Cases of seed 0, of every family; thousands more are the fuzzer's own work."""
    for number in range(first, first + 50):
        case = fuzz.drawn(0, number)
        assert fuzz.problem(case, device) is None, json.dumps(case)


BROKEN = {  # what a wrong library could answer
    "one entry": lambda c: c.index_put(
        (torch.tensor(3), torch.tensor(5)), c[3, 5] * (1 + 1e-4) + 1e-3
    ),
    "a block": lambda c: torch.cat((c[:32] * 0, c[32:])),
    "NaN": lambda c: c / 0 * 0,
    "type": lambda c: c.double(),
}


@pytest.mark.parametrize("wrong", BROKEN)
def test_a_wrong_answer_is_found_and_shrunk(monkeypatch, tmp_path, capsys, wrong):
    right = products.spamm_torch.bmm

    def bmm(*operands, **options):
        found, info = right(*operands, **options)
        large = len(found) and min(found.shape[1:]) > 32
        return torch.stack(list(map(BROKEN[wrong], found))) if large else found, info

    monkeypatch.setattr(products.spamm_torch, "bmm", bmm)
    path = tmp_path / "failures.jsonl"
    arguments = ["--cases", "60", "--minutes", "2", "--device", "cpu", "--failures", str(path)]
    settings = products.DENSE | {"form": ("bmm",), "pattern_a": ("normal",)}
    monkeypatch.setattr(fuzz, "FAMILIES", {"dense": (settings, products.dense, 1)})
    with pytest.raises(fuzz.UserError, match=r"expected none of .* cases of seed 0 on cpu to fail"):
        fuzz.main(arguments)
    first, *_ = path.read_text().splitlines()
    assert "Mismatch" in capsys.readouterr().out
    case = fuzz.from_json(first)
    assert fuzz.problem(case, "cpu") is not None
    assert case["layout_a"] == "contiguous"
    assert case["batch"] == 1
    monkeypatch.undo()
    assert fuzz.problem(case, "cpu") is None


def test_a_case_is_the_same_after_json():
    for number in range(50):
        case = fuzz.drawn(3, number)
        settings = fuzz.FAMILIES[case["family"]][0]
        again = fuzz.from_json(json.dumps(case))
        assert again == case == fuzz.drawn(3, number)
        assert all(again[name] in choices for name, choices in settings.items())


def test_norms_are_held_to_the_whole_range():
    tiny = torch.tensor([[2.0**-149]])
    space.expect_norms(tiny, tiny.double().numpy())
    with pytest.raises(space.Mismatch):
        space.expect_norms(tiny * 0, tiny.double().numpy() * 2)
