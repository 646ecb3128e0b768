"""The journal of a long measurement: what it keeps, and what it refuses to go on with."""

import pytest

from common.journal import Journal, run_settings
from models.errors import UserError

SETTINGS = {"device": "a machine", "repeats": 3}


def never():
    raise AssertionError("measured again")


def test_a_group_is_on_disk_at_once_and_not_measured_again(tmp_path):
    first = Journal(tmp_path, "mm", SETTINGS)
    assert first.measured("a", lambda: {"block": (64, 32), 0.5: 1.25}) == {
        "block": [64, 32],
        "0.5": 1.25,
    }
    second = Journal(tmp_path, "mm", SETTINGS)
    assert "a" in second
    assert "b" not in second
    assert second.measured("a", never) == {"block": [64, 32], "0.5": 1.25}


def test_fresh_forgets(tmp_path):
    Journal(tmp_path, "mm", SETTINGS).measured("a", lambda: 1)
    assert Journal(tmp_path, "mm", SETTINGS, fresh=True).measured("a", lambda: 2) == 2
    assert Journal(tmp_path, "mm", SETTINGS).measured("a", never) == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (SETTINGS | {"repeats": 4}, "expected repeats 3, as in .*; got 4: give the same options"),
        (SETTINGS | {"device": "b"}, 'expected device "a machine", .*; got "b"'),
        (SETTINGS | {"cold": True}, "expected cold null, .*; got true"),
        ({"device": "a machine"}, "expected repeats 3, .*; got null"),
    ],
)
def test_other_settings_are_refused(tmp_path, settings, words):
    journal = Journal(tmp_path, "mm", SETTINGS)
    journal.measured("a", lambda: 1)
    with pytest.raises(UserError, match=words):
        Journal(tmp_path, "mm", settings)
    assert Journal(tmp_path, "mm", SETTINGS).measured("a", never) == 1


def test_a_group_that_is_not_to_be_kept(tmp_path):
    journal = Journal(tmp_path, "mm", SETTINGS)
    assert journal.measured("a", lambda: (1, 2), keep=lambda group: False) == [1, 2]
    assert journal.measured("a", lambda: (3,), keep=lambda group: group == [3]) == [3]
    assert Journal(tmp_path, "mm", SETTINGS).measured("a", never) == [3]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"settings": {}, "groups": [1]}'])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    path = tmp_path / "mm.partial.json"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        Journal(tmp_path, "mm", SETTINGS)
    assert str(caught.value) == (
        f"expected groups of an unfinished run; got something else in {path}: measure anew with "
        "--fresh"
    )


def test_an_interrupt_says_what_is_kept_and_how_to_go_on(tmp_path):
    def interrupted(finished):
        with Journal(tmp_path, "mm", SETTINGS) as journal:
            for key in finished:
                journal.measured(key, lambda: 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted([])
    assert str(caught.value).startswith("no group of measurements was finished; the same command")
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted(["a"])
    assert str(caught.value) == (
        f"finished groups are in {tmp_path / 'mm.partial.json'}; the same command goes on from "
        "there"
    )


def test_settings_tell_machines_libraries_and_forced_kernels_apart(monkeypatch):
    header = {"device": "d", "torch": "t", "spamm_torch": "s", "command": "c", "date": "today"}
    monkeypatch.delenv("SPAMM_TORCH_FORCE_SM80", raising=False)
    plain = run_settings(header, repeats=3)
    assert plain == run_settings(header | {"command": "e", "date": "tomorrow"}, repeats=3)
    assert plain != run_settings(header | {"torch": "u"}, repeats=3)
    assert plain != run_settings(header, repeats=4)
    monkeypatch.setenv("SPAMM_TORCH_FORCE_SM80", "1")
    assert plain != run_settings(header, repeats=3)
