"""What every benchmark's run must leave behind, and how it must refuse."""

import pytest


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
