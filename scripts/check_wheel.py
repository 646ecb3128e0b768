"""Installs a wheel where no compiler is, runs the README's examples with it, and lists its files.

The environment is new and empty but for torch and pytest, which it reads from the one that runs
this program: python scripts/check_wheel.py dist/NAME.whl
"""

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ["README.md", "tests/build/test_docs.py", "docs/api.md"]
NEEDED += [f"examples/{name}.py" for name in ("distributed_mm", "from_scipy", "my_resnet")]


def run_examples(wheel: Path, folder: Path) -> int:
    """The exit status of the README's examples, run with the wheel in an environment there."""
    venv.create(folder / "env", symlinks=True)
    python = folder / "env/bin/python"
    base = {"base": str(folder / "env"), "platbase": str(folder / "env")}
    site = Path(sysconfig.get_path("purelib", vars=base))
    # Path files there are not followed: an editable spamm_torch of that environment stays unseen.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    subprocess.run([*install, str(wheel)], check=True)
    for name in NEEDED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    pytest = [python, "-m", "pytest", "-q", "tests/build/test_docs.py"]
    nothing = {"PATH": str(python.parent), "PYTHONPATH": str(folder / "examples")}
    readme = ["-k", "examples_run and README"]
    return subprocess.run([*pytest, *readme], cwd=folder, env=nothing).returncode


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path, help="the wheel to check")
    wheel = parser.parse_args(given).wheel.resolve()
    with zipfile.ZipFile(wheel) as files:
        for file in files.infolist():
            print(f"{file.file_size:12,}  {file.filename}")
    print(f"{wheel.stat().st_size:12,}  {wheel.name}")
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(run_examples(wheel, Path(folder)))


if __name__ == "__main__":
    main()
