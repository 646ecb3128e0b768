"""The build and what it leaves: the library, the checks made before it is loaded, setup.py."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import spamm_torch
from spamm_torch import _library

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(spamm_torch.__file__).parent


def tool(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def needed_libraries(path):
    lines = tool("readelf", "--dynamic", "--wide", path).splitlines()
    return [line.split("[")[1].rstrip("]") for line in lines if "(NEEDED)" in line]


# ---- The library --------------------------------------------------------------------------------


def test_library_holds_no_python_symbol():
    lines = tool("nm", "--dynamic", "--format=posix", _library.library_path()).splitlines()
    symbols = [line.split()[0] for line in lines]
    assert any(symbol.startswith("_ZN5spamm") for symbol in symbols)  # the C++ API is exported
    assert [symbol for symbol in symbols if symbol.lstrip("_").startswith("Py")] == []


def test_library_links_torch_but_not_python():
    needed = needed_libraries(_library.library_path())
    assert "libtorch_cpu.so" in needed
    assert [name for name in needed if "python" in name] == []


def cuobjdump():
    """The CUDA toolkit's, or the one that Triton brings."""
    spec = importlib.util.find_spec("triton")
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")]
    if spec is not None:
        places.append(Path(spec.origin).parent / "backends" / "nvidia" / "bin")
    return shutil.which("cuobjdump", path=os.pathsep.join(map(str, places)))


def test_code_of_other_targets_traps_in_place_of_hopper_kernels():
    """An empty kernel would leave its output unwritten, silently."""
    built = _library.BUILT["cuda_targets"]
    if not {"8.0+PTX", "9.0a"} <= set(built) or cuobjdump() is None:
        pytest.skip("needs a library built for 8.0+PTX and 9.0a, and cuobjdump")
    ptx = tool(cuobjdump(), "-ptx", _library.library_path())
    kernels = {}
    for text in re.split(r"^\.visible \.entry ", ptx, flags=re.M)[1:]:
        kernels[text.split("(")[0]] = text
    ours = ("sm90IN", "5splitI")  # mangled names; kernels without wgmma run on other chips too
    hopper = {name: text for name, text in kernels.items() if any(part in name for part in ours)}
    assert len(hopper) > 100
    assert [name for name, text in hopper.items() if "trap;" not in text] == []


def test_include_path_holds_the_header():
    assert (_library.include_path() / "spamm" / "spamm.h").is_file()


# ---- build_info ---------------------------------------------------------------------------------


def test_build_info_module_links_no_torch():
    from spamm_torch import _build_info

    needed = needed_libraries(_build_info.__file__)
    assert [name for name in needed if "torch" in name or "c10" in name] == []


def test_build_info():
    info = spamm_torch.build_info()
    assert info["version"] == spamm_torch.__version__
    assert info["torch"] == torch.__version__
    assert info["cuda"] == _library.BUILT["cuda"]
    assert info["cxx_standard"] >= 202002
    assert "-std=c++20" in info["cxx_flags"]
    assert info["compiler"].split()[0] in ("GCC", "Clang")
    assert (info["cuda"] is None) == (info["arch_list"] == []) == (info["nvcc_flags"] is None)


def test_build_info_of_another_python(monkeypatch):
    monkeypatch.delattr(spamm_torch, "_build_info", raising=False)
    monkeypatch.setitem(sys.modules, "spamm_torch._build_info", None)
    with pytest.raises(RuntimeError, match=r"build_info.*this very Python") as error:
        spamm_torch.build_info()
    assert "\n" not in str(error.value)
    a = torch.ones(32, 32)
    assert torch.equal(spamm_torch.mm(a, a, tau=0.0, block=32), a @ a)


# ---- Import -------------------------------------------------------------------------------------


@pytest.fixture
def copy_of_package(tmp_path):
    """The package as installed, in a folder of its own, free to be spoiled."""
    copy = tmp_path / "site with a space" / "spamm_torch"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def import_it(package):
    return subprocess.run(
        [sys.executable, "-c", "import spamm_torch; print(spamm_torch.__file__)"],
        cwd=package.parent,
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
    )


def import_error(package):
    """The last line of the traceback, which must be an ImportError's only line."""
    result = import_it(package)
    assert result.returncode != 0
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: spamm_torch"), result.stderr
    return last


def mark_as_built_for(package, version):
    file = package / "_built.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "torch": version}))


def test_library_for_another_torch_is_refused(copy_of_package):
    mark_as_built_for(copy_of_package, "2.10.3+cu126")
    line = import_error(copy_of_package)
    assert "2.10.3+cu126" in line
    assert torch.__version__ in line


def test_only_the_release_of_torch_counts(copy_of_package):
    mark_as_built_for(copy_of_package, torch.__version__.partition("+")[0] + "+elsewhere")
    result = import_it(copy_of_package)
    assert result.stdout.strip() == str(copy_of_package / "__init__.py"), result.stderr


@pytest.mark.parametrize("missing", ["libspamm_torch.so", "_built.json"])
def test_missing_library_says_how_to_build(copy_of_package, missing):
    (copy_of_package / missing).unlink()
    line = import_error(copy_of_package)
    assert "make build" in line
    assert str(copy_of_package) in line


def test_damaged_library_is_one_line(copy_of_package):
    (copy_of_package / "libspamm_torch.so").write_bytes(b"not a library")
    assert "cannot be loaded" in import_error(copy_of_package)


# ---- setup.py -----------------------------------------------------------------------------------


@pytest.fixture
def setup_module():
    spec = importlib.util.spec_from_file_location("spamm_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_setup_without_nvcc(tmp_path, **environment):
    return subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT,
        env={**os.environ, "CUDA_HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
    )


def test_forced_cuda_without_nvcc_is_an_error(tmp_path):
    result = run_setup_without_nvcc(tmp_path, FORCE_CUDA="1")
    assert result.returncode != 0
    [line] = result.stderr.splitlines()
    assert "FORCE_CUDA=1" in line


def test_force_cuda_takes_0_and_1(tmp_path):
    result = run_setup_without_nvcc(tmp_path, FORCE_CUDA="yes")
    assert result.returncode != 0
    [line] = result.stderr.splitlines()
    assert "0 or 1" in line
    assert "'yes'" in line


def test_no_nvcc_is_a_cpu_only_build(tmp_path):
    result = run_setup_without_nvcc(tmp_path, FORCE_CUDA="")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == spamm_torch.__version__


def test_reasons_for_a_cpu_only_build(setup_module, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setattr(setup_module.cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("FORCE_CUDA", "1")
    assert setup_module.reason_for_cpu_only() is None
    monkeypatch.setenv("FORCE_CUDA", "0")
    assert "FORCE_CUDA" in setup_module.reason_for_cpu_only()
    monkeypatch.delenv("FORCE_CUDA")
    assert setup_module.reason_for_cpu_only() is None
    monkeypatch.setattr(setup_module.cpp_extension, "CUDA_HOME", None)
    assert "no nvcc" in setup_module.reason_for_cpu_only()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in setup_module.reason_for_cpu_only()


@pytest.mark.parametrize(
    ("cores", "gib", "jobs"),
    [(2, 64.0, 2), (16, 24.0, 8), (16, 1.0, 1), (1, 0.0, 1)],
)
def test_default_max_jobs(setup_module, cores, gib, jobs):
    assert setup_module.default_max_jobs(cores, gib) == jobs


@pytest.mark.parametrize(
    ("targets", "hopper"),
    [("8.0+PTX 9.0a", True), ("8.0;9.0a+PTX", True), ("9.0", False), ("8.0+PTX", False)],
)
def test_hopper_kernels_are_built_for_their_target_alone(
    setup_module, monkeypatch, targets, hopper
):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", targets)
    assert setup_module.builds_for_hopper() == hopper


def test_missing_cutlass_is_one_line(setup_module, monkeypatch):
    monkeypatch.setattr(setup_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as error:
        setup_module.cutlass_include()
    [line] = str(error.value).splitlines()
    assert "pip install --no-deps nvidia-cutlass==" in line


def test_one_version_of_cutlass(setup_module):
    for file in ("pyproject.toml", "requirements-headers.txt"):
        assert setup_module.CUTLASS in (ROOT / file).read_text()


def test_every_source_has_an_object_of_its_own(setup_module):
    """Objects are named after sources without their suffix: a .cu beside a .cpp would hide it."""
    sources = setup_module.sources("**/*.cpp", "**/*.cu")
    assert sources
    assert len({Path(source).with_suffix("") for source in sources}) == len(sources)


def test_free_memory_is_what_the_kernel_calls_available(setup_module):
    text = "MemTotal: 33554432 kB\nMemFree: 1 kB\nMemAvailable:   12582912 kB\n"
    assert setup_module.free_gib(text) == 12.0
    assert setup_module.free_gib() > 0
