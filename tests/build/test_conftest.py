"""What a test run says on a machine without a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.cuda
def test_on_a_gpu():
    raise AssertionError("ran without a GPU")

def test_anywhere():
    pass
"""


@pytest.fixture
def run(tmp_path):
    """Runs pytest, for which there is no GPU, on one test that needs one and one that does not."""
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    (tmp_path / "test_two.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = cuda\n")

    def run(*options):
        return subprocess.run(
            [sys.executable, "-m", "pytest", *options],
            cwd=tmp_path,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
        )

    return run


def test_only_tests_for_cuda_without_a_gpu_fail(run):
    result = run("-m", "cuda")
    assert result.returncode != 0
    line = "ERROR: expected a CUDA device for -m 'cuda'; torch finds none"
    assert line in result.stderr.splitlines()


@pytest.mark.parametrize("options", [(), ("-m", "cuda or not cuda")])
def test_among_others_they_are_skipped(run, options):
    result = run(*options)
    assert result.returncode == 0, result.stdout
    assert "1 passed, 1 skipped" in result.stdout


def test_without_them_the_others_run(run):
    result = run("-m", "not cuda")
    assert result.returncode == 0, result.stdout
    assert "1 passed, 1 deselected" in result.stdout
