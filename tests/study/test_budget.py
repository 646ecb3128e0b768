"""scripts/check_budget.py and mutate.py: what is counted and refused, and what is broken."""

import pytest

import check_budget
import mutate
from models.errors import UserError

BUDGET = {"lines": {"csrc": {"most": 10, "goal": 5}}, "files": {"all": {"most": 3, "goal": 2}}}


def test_rooms_within_their_budget():
    found = check_budget.check(BUDGET, lambda room: 10, lambda: 3)
    assert found == [
        "csrc             10 of     10, goal 5",
        "files             3 of      3, goal 2",
    ]


@pytest.mark.parametrize(
    ("lines", "files", "words"),
    [(11, 3, "csrc has 11, at most 10$"), (10, 4, "files has 4, at most 3$")],
)
def test_more_is_refused(lines, files, words):
    with pytest.raises(UserError, match=words):
        check_budget.check(BUDGET, lambda room: lines, lambda: files)


def test_text_is_counted_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("1\n2\n")
    (tmp_path / "b.json").write_text("1\n")
    monkeypatch.setattr(check_budget, "files", lambda room: sorted(tmp_path.iterdir()))
    assert check_budget.lines("room") == 2


def test_every_text_that_is_broken_stands_once_in_its_file():
    counts = {
        (of.file, of.old): (mutate.ROOT / of.file).read_text().count(of.old) for of in mutate.TABLE
    }
    assert len(mutate.TABLE) > 100
    assert {key: count for key, count in counts.items() if count != 1} == {}
