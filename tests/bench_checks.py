"""What every benchmark's run must leave behind, and how it must refuse."""

import json

import pytest

import bench
from common import results
from common.console import exit_code


def assert_three_files(folder):
    """JSON, markdown and a picture, and nothing half-written beside them."""
    names = sorted(path.name for path in folder.iterdir() if ".partial" not in path.name)
    assert names in (["small.json", "small.md", "small.png"], ["small.json", "small.md"])
    drawn = "(small.png)" in (folder / "small.md").read_text()
    assert drawn == ("small.png" in names)
    assert not drawn or (folder / "small.png").read_bytes().startswith(b"\x89PNG")


def run_bench(case, folder, *arguments):
    """The tables of a benchmark's run on the CPU."""
    options = (case, "--device", "cpu", "--out", folder, "--name", "small", *arguments)
    bench.main([str(option) for option in options])
    assert_three_files(folder)
    return tables_of(folder / "small.json")


def tables_of(path):
    """The tables of the only run on a page."""
    [run] = results.load(path)["runs"]
    return run["tables"]


def assert_refused(main, arguments, words, out, capsys, case=()):
    """One line that names the option and says `words`, exit status 2, and no folder `out`."""
    with pytest.raises(SystemExit) as caught:
        main([*case, *arguments, "--out", str(out)])
    assert caught.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert arguments[0] in line
    assert words in line
    assert not out.exists()


def assert_resumes(case, module, measuring, arguments, folder, cases, capsys, monkeypatch):
    """A run stopped in its second case leaves the first; the same command measures the others.

    Args:
        case: the benchmark's name. module: its module. measuring: the name of its function that
            measures a case.
        arguments: of a run over ``cases`` cases, without --out and --name.
    """
    arguments = (case, "--device", "cpu", *arguments, "--out", folder, "--name", "small")
    arguments = [str(argument) for argument in arguments]
    whole, calls = getattr(module, measuring), []

    def run(interrupted_at, *more):
        def measure(*of_case, **rest):
            if len(calls) == interrupted_at:
                raise KeyboardInterrupt
            calls.append(of_case)
            return whole(*of_case, **rest)

        calls.clear()
        monkeypatch.setattr(module, measuring, measure)
        code = exit_code(lambda: bench.main([*arguments, *more]))
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
