"""What every benchmark's run must leave behind, and how it must refuse."""

import json

import pytest

from common.console import exit_code


def assert_three_files(folder):
    """JSON, markdown and a picture, and nothing half-written beside them."""
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["small.json", "small.md", "small.png"]
    assert (folder / "small.png").read_bytes().startswith(b"\x89PNG")


def assert_refused(main, arguments, words, out, capsys):
    """One line that names the option and says `words`, exit status 2, and no folder `out`."""
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--out", str(out)])
    assert caught.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert arguments[0] in line
    assert words in line
    assert not out.exists()


def assert_resumes(module, measuring, arguments, folder, cases, capsys, monkeypatch):
    """A run stopped in its second case leaves the first; the same command measures the others.

    Args:
        module: the benchmark. measuring: the name of its function that measures a case.
        arguments: of a run over ``cases`` cases, without --out and --name.
    """
    arguments = [str(argument) for argument in (*arguments, "--out", folder, "--name", "small")]
    whole, calls = getattr(module, measuring), []

    def run(interrupted_at, *more):
        def measure(*of_case):
            if len(calls) == interrupted_at:
                raise KeyboardInterrupt
            calls.append(of_case)
            return whole(*of_case)

        calls.clear()
        monkeypatch.setattr(module, measuring, measure)
        code = exit_code(lambda: module.main([*arguments, *more]))
        return code, capsys.readouterr()

    journal = folder / "small.partial.json"
    code, printed = run(1)
    assert code == 130
    assert printed.err == (
        f"interrupted: finished groups are in {journal}; the same command goes on from there\n"
    )
    assert [path.name for path in folder.iterdir()] == [journal.name]
    first = json.loads(journal.read_text())["groups"]

    code, printed = run(None, "--repeats", "9")
    assert code == 1
    assert "error: expected repeats" in printed.err
    assert json.loads(journal.read_text())["groups"] == first

    code, printed = run(None)
    assert code == 0
    assert f"resumed from {journal} at 1 of {cases}" in printed.out.replace("\n", "")
    assert len(calls) == cases - 1
    assert_three_files(folder)

    run(1)
    code, _ = run(None, "--fresh")
    assert code == 0
    assert len(calls) == cases
    assert_three_files(folder)
