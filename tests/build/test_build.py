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
from processes import forked, python
from support import raises_line

import spamm_torch
from spamm_torch import _library

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(spamm_torch.__file__).parent


def tool(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def dynamic(path, kind="NEEDED"):
    """The names of this kind in a library's dynamic section."""
    lines = tool("readelf", "--dynamic", "--wide", path).splitlines()
    return [line.split("[")[1].rstrip("]") for line in lines if f"({kind})" in line]


# ---- The library --------------------------------------------------------------------------------


def test_what_the_library_and_the_module_beside_it_link():
    """Without a soname, programs that link it record the absolute path it had when it was built."""
    from spamm_torch import _build_info

    lines = tool("nm", "--dynamic", "--format=posix", _library.library_path()).splitlines()
    symbols = [line.split()[0] for line in lines]
    assert any(symbol.startswith("_ZN5spamm") for symbol in symbols)  # the C++ API is exported
    assert [symbol for symbol in symbols if symbol.lstrip("_").startswith("Py")] == []
    needed = dynamic(_library.library_path())
    assert "libtorch_cpu.so" in needed
    assert [name for name in needed if "python" in name] == []
    assert dynamic(_library.library_path(), "SONAME") == ["libspamm_torch.so"]
    of_module = dynamic(_build_info.__file__)
    assert [name for name in of_module if "torch" in name or "c10" in name] == []
    assert (_library.include_path() / "spamm" / "spamm.h").is_file()


def cuobjdump():
    """The CUDA toolkit's, or the one that Triton brings."""
    spec = importlib.util.find_spec("triton")
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")]
    if spec is not None:
        places.append(Path(spec.origin).parent / "backends" / "nvidia" / "bin")
    return shutil.which("cuobjdump", path=os.pathsep.join(map(str, places)))


def test_kernels_are_built_for_the_chips_that_run_them(setup_module):
    """Targets of each file: code for both chips and PTX for others, but Hopper's kernels alone."""
    if _library.BUILT["cuda_targets"] != ["8.0+PTX", "9.0a"] or cuobjdump() is None:
        pytest.skip("needs a library built for 8.0+PTX and 9.0a, and cuobjdump")
    found = {}
    for kind, option in (("cubin", "--list-elf"), ("ptx", "--list-ptx")):
        listed = tool(cuobjdump(), option, _library.library_path())
        found[kind] = sorted(re.findall(rf"(\w+)\.(sm_\w+)\.{kind}", listed))
    names = [Path(source).stem for source in setup_module.sources("cuda/**/*.cu")]
    names += setup_module.instances()
    others = [name for name in names if "sm90" not in name]
    assert len(others) < len(names)
    assert found["ptx"] == sorted((name, "sm_80") for name in others)
    of_hopper = [(name, "sm_90") for name in names]
    assert found["cubin"] == sorted([(name, "sm_80") for name in others] + of_hopper)


# ---- build_info ---------------------------------------------------------------------------------


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
    with raises_line(RuntimeError, r"build_info.*this very Python"):
        spamm_torch.build_info()
    a = torch.ones(32, 32)
    assert torch.equal(spamm_torch.mm(a, a, tau=0.0, block=32), a @ a)


# ---- Import -------------------------------------------------------------------------------------


@pytest.fixture
def copy_of_package(tmp_path):
    """The package as installed, in a folder of its own, free to be spoiled."""
    copy = tmp_path / "site with a space" / "spamm_torch"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def import_error(package, *path):
    """The one line of the ImportError with which this process cannot import the package, too."""
    name, init = "another_spamm_torch", package / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        name, init, submodule_search_locations=[str(package)]
    )
    with pytest.MonkeyPatch.context() as patch, raises_line(ImportError, "^spamm_torch") as caught:
        patch.setattr(sys, "path", [str(package.parent), *map(str, path)])
        patch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))
        spec.loader.exec_module(sys.modules[name])
    return str(caught.value)


def built_with(package, torch_version):
    """Has the package say that it was built with another torch."""
    file = package / "_built.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "torch": torch_version}))


def test_what_cannot_be_loaded_is_one_line(copy_of_package):
    """Another minor version of torch; files that are damaged (with the loader's reason) or gone."""
    library, facts = copy_of_package / "libspamm_torch.so", copy_of_package / "_built.json"
    whole, damaged = facts.read_bytes(), (str(facts), "is damaged")
    missing = ("pip install --force-reinstall", str(copy_of_package))
    built_with(copy_of_package, "2.10.3+cu126")
    other = facts.read_bytes()
    for file, content, words in (
        (facts, other, ("2.10.3+cu126", torch.__version__, "--no-build-isolation")),
        *((facts, x, damaged) for x in (b"", b"{", b"[]", b"null", b'{"version": "0.1.0"}')),
        (facts, None, missing),
        (library, b"", ("cannot be loaded", "file too short")),
        (library, b"not a library" * 100, ("cannot be loaded", "invalid ELF header")),
        (library, None, missing),
    ):
        facts.write_bytes(whole)
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        line = import_error(copy_of_package)
        assert all(word in line for word in words), line


# ---- Import in a clone --------------------------------------------------------------------------


@pytest.fixture
def clone(tmp_path):
    """A source folder in which nothing is built."""
    clone = tmp_path / "a clone"
    (clone / "csrc").mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "_built.json", "include")
    return Path(shutil.copytree(PACKAGE, clone / "spamm_torch", ignore=ignored))


def test_clone_finds_the_installed_library_that_it_hides(clone, copy_of_package):
    """Built with a torch of the same minor version."""
    minor = re.match(r"\d+\.\d+", torch.__version__)[0]
    built_with(copy_of_package, f"{minor}.99+elsewhere")
    code = "import spamm_torch as s; print(s.paths.library_path(), s.build_info()['version'])"
    path = os.pathsep.join((str(clone.parent), str(copy_of_package.parent)))
    result = forked("-c", code, cwd=clone.parent, PYTHONPATH=path)
    library = copy_of_package / "libspamm_torch.so"
    assert result.stdout.strip() == f"{library} {spamm_torch.__version__}", result.stderr


def test_clone_without_a_library_of_its_sources_says_how_to_build(clone, copy_of_package):
    """Without an installed one, and with one of other sources."""
    build = "run `make build`"
    assert build in import_error(clone)
    with (clone / "nn.py").open("a") as file:
        file.write("# changed\n")
    line = import_error(clone, copy_of_package.parent)
    assert str(copy_of_package) in line
    assert build in line


# ---- setup.py -----------------------------------------------------------------------------------


@pytest.fixture
def setup_module():
    spec = importlib.util.spec_from_file_location("spamm_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_setup(run=python, **environment):
    return run("setup.py", "--version", cwd=ROOT, **environment)


def test_no_nvcc_is_a_cpu_only_build(setup_module, tmp_path):
    result = run_setup(forked, CUDA_HOME=str(tmp_path), FORCE_CUDA="")
    assert result.returncode == 0, result.stderr
    minor = re.match(r"\d+\.\d+", torch.__version__)[0]
    assert result.stdout.splitlines()[-1] == f"{spamm_torch.__version__}+torch{minor}.cpu"


def test_reasons_for_a_cpu_only_build(setup_module, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    for forced, home, cuda, reason in (
        *(("1", str(tmp_path), "13.0", None), ("", str(tmp_path), "13.0", None)),
        *(("0", str(tmp_path), "13.0", "FORCE_CUDA"), ("", None, "13.0", "no nvcc")),
        ("", str(tmp_path), None, "without CUDA"),
    ):
        monkeypatch.setattr(setup_module.cpp_extension, "CUDA_HOME", home)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setenv("FORCE_CUDA", forced)
        found = setup_module.reason_for_cpu_only()
        assert reason in found if reason else found is None
    for forced, line in (
        ("yes", "0 or 1; got 'yes'"),
        ("1", "FORCE_CUDA=1 asks for a CUDA build, but"),
    ):
        monkeypatch.setenv("FORCE_CUDA", forced)
        with raises_line(SystemExit, line):
            setup_module.reason_for_cpu_only()


def test_default_max_jobs(setup_module):
    """By cores and the memory that the kernel calls available."""
    for cores, gib, jobs in ((2, 64.0, 2), (16, 24.0, 8), (16, 1.0, 1), (1, 0.0, 1)):
        text = f"MemTotal: 33554432 kB\nMemFree: 1 kB\nMemAvailable:   {int(gib * 2**20)} kB\n"
        assert setup_module.default_max_jobs(cores, setup_module.free_gib(text)) == jobs
    assert setup_module.free_gib() > 0


@pytest.mark.parametrize(
    ("targets", "file", "expected"),
    [
        ("8.0+PTX 9.0a", "sm80_f16.cu", ["80,code=[compute_80,sm_80,sm_90]"]),
        ("9.0a", "sm80_f16.cu", ["90,code=[sm_90]"]),
        ("8.6;8.0;9.0a+PTX", "sm80_f16.cu", ["80,code=[compute_80,sm_80,sm_86,sm_90]"]),
        ("8.0+PTX 9.0a", "sm90_f16.cu", ["90a,code=sm_90a"]),
        ("8.0;9.0a+PTX", "sm90_f16.cu", ["90a,code=compute_90a", "90a,code=sm_90a"]),
        ("8.0 9.0a", "launch.cu", ["80,code=sm_80", "90a,code=sm_90a"]),
    ],
)
def test_targets_of_a_files_kernels(setup_module, monkeypatch, targets, file, expected):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", targets)
    flags = [f"-gencode=arch=compute_{flag}" for flag in expected]
    assert setup_module.flags_of_targets(file) == flags


def test_plain_hopper_beside_its_own_target_is_refused(setup_module, monkeypatch):
    for targets in ("8.0+PTX 9.0a", "8.0;9.0a+PTX", "9.0a+PTX", "9.0a 10.0", "9.0", "8.0;9.0+PTX"):
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", targets)
        setup_module.check_cuda_targets()
        assert setup_module.builds_for_hopper() == ("9.0a" in targets), targets
    for targets in ("9.0 9.0a", "8.0+PTX;9.0+PTX;9.0a", "Hopper 9.0a"):
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", targets)
        with raises_line(SystemExit, "TORCH_CUDA_ARCH_LIST must hold"):
            setup_module.check_cuda_targets()


@pytest.mark.parametrize(
    ("module", "text", "found"),
    [
        ("setuptools.py", "__version__ = '65.5.0'", "setuptools 65.5.0"),
        ("torch.py", "__version__ = '2.16.0+cpu'", "torch 2.16.0+cpu"),
        ("torch.py", "raise ImportError(\"No module named 'torch'\")", "No module named 'torch'"),
    ],
)
def test_build_without_its_requirements_is_one_line(tmp_path, module, text, found):
    (tmp_path / module).write_text(text)
    result = run_setup(PYTHONPATH=str(tmp_path))
    assert result.returncode != 0
    [line] = result.stderr.splitlines()
    assert "setuptools 77 or newer and torch 2.11 to 2.15" in line
    assert f"got: {found}" in line
    assert "pip install 'setuptools>=77,<82' 'torch>=2.11,<2.16' ninja" in line


def test_requirements_that_setup_names_are_those_of_the_package(setup_module):
    named = re.findall(r"'([a-z]+>=[^']*)'", (ROOT / "setup.py").read_text())
    required = (ROOT / "pyproject.toml").read_text()
    assert len(named) == 2
    assert [requirement for requirement in named if f'"{requirement}"' not in required] == []
    for file in ("pyproject.toml", "requirements-headers.txt"):
        assert setup_module.CUTLASS in (ROOT / file).read_text()


def test_missing_cutlass_is_one_line(setup_module, monkeypatch):
    monkeypatch.setattr(setup_module.importlib.util, "find_spec", lambda name: None)
    with raises_line(SystemExit, "pip install --no-deps nvidia-cutlass=="):
        setup_module.cutlass_include()


def test_every_source_is_compiled_once(setup_module):
    """Host files by themselves or in one unit, which is for Hopper alone or for any chip. Objects
    are named after sources without their suffix: a .cu beside a .cpp would hide it.
    """
    sources = setup_module.sources("**/*.cpp", "**/*.cu")
    assert len({Path(source).with_suffix("") for source in sources}) == len(sources) > 0
    files = setup_module.sources("cpu/**/*.cpp", "cuda/**/*.cpp", "shards/*.cpp")
    compiled = []
    for source in setup_module.in_units(files):
        found = re.findall(r'#include "(?:\.\./)+(csrc/.*\.cpp)"', (ROOT / source).read_text())
        compiled += found or [source]
        assert len({"sm90" in file for file in found}) <= 1, source
    assert sorted(compiled) == files


# ---- What a run of tests says on a machine without a GPU ----------------------------------------


def test_a_run_without_a_gpu(tmp_path):
    """One of nothing but tests for CUDA fails; in others they are skipped."""
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    test = "import pytest\n@pytest.mark.cuda\ndef test_on_a_gpu(): assert 0\ndef test_2(): pass\n"
    (tmp_path / "test_two.py").write_text(test)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = cuda\n")
    (tmp_path / "matrices.py").write_text("DTYPES = [1]")
    code = "import pytest; print([int(pytest.main(of)) for of in (['-m', 'cuda'], [])])"
    result = forked("-c", code, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    line = "ERROR: expected a CUDA device for -m 'cuda'; torch finds none"
    assert line in result.stderr.splitlines()
    assert "1 passed, 1 skipped" in result.stdout
    assert result.stdout.endswith("[4, 0]\n")
