"""Finds, checks and loads the library of operators, and tells how it was built."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

_HERE = Path(__file__).resolve().parent


def _is_built(package: Path) -> bool:
    return (package / "libspamm_torch.so").exists() and (package / "_built.json").exists()


def _python_files(package: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in package.glob("*.py")}


def _find_package() -> Path:
    """The folder with the library: this one, or the installed package that this one hides."""
    if _is_built(_HERE):
        return _HERE
    on_path = [Path(entry, "spamm_torch").resolve() for entry in sys.path]
    hidden = [package for package in on_path if package != _HERE and _is_built(package)]
    if hidden and _python_files(hidden[0]) == _python_files(_HERE):
        return hidden[0]
    other = f", and {hidden[0]} has other Python files" if hidden else ""
    raise ImportError(
        f"spamm_torch: {_HERE} has no library libspamm_torch.so with its _built.json{other}; in "
        "the source folder run `make build`, or `pip install --force-reinstall --no-deps .` and "
        "start Python in another folder"
    )


_PACKAGE = _find_package()
if _PACKAGE != _HERE:
    sys.modules[__package__].__path__.append(str(_PACKAGE))  # where _build_info is


def library_path() -> Path:
    """The shared library of operators, for programs that link it (with ``include_path``)."""
    return _PACKAGE / "libspamm_torch.so"


def include_path() -> Path:
    """The folder that holds ``spamm/spamm.h``, the C++ API."""
    installed = _PACKAGE / "include"
    return installed if installed.exists() else _PACKAGE.parent / "csrc" / "include"


def cmake_prefix_path() -> Path:
    """The folder for ``CMAKE_PREFIX_PATH``, so that ``find_package(spamm_torch)`` succeeds.

    The package defines the target ``spamm_torch::spamm_torch``: library, header and LibTorch.
    """
    return _PACKAGE / "share" / "cmake"


def build_info() -> dict[str, Any]:
    """The record of the library's build.

    Returns a dict. In a CPU-only build ``cuda`` and ``nvcc_flags`` are ``None``:

    ``version``, ``torch``, ``cuda``
        the versions of spamm_torch, of the torch the library was built for, of the CUDA compiler.
    ``arch_list``
        the CUDA targets, as in ``["8.0+PTX", "9.0a"]``.
    ``compiler``, ``cxx_standard``, ``cxx_flags``, ``nvcc_flags``
        the C++ compiler, the standard's date, as in ``202002``, and the compilers' flags.

    Raises RuntimeError where the module that knows this was built for another Python, or left out;
    everything else in the package works without it.
    """
    try:
        from . import _build_info
    except ImportError as error:
        raise RuntimeError(
            "build_info() needs the module _build_info built for this very Python; "
            f"it cannot be loaded: {error}"
        ) from None
    names = ("version", "torch", "cuda", "cxx_flags", "nvcc_flags")
    return {
        **{name: BUILT[name] for name in names},
        "arch_list": BUILT["cuda_targets"],
        "compiler": _build_info.compiler,
        "cxx_standard": _build_info.cxx_standard,
    }


def _minor(version: str) -> str:
    """The minor version, which one library serves: "2.11" of "2.11.0+cu130"."""
    return ".".join(version.split(".")[:2])


def _load() -> dict[str, Any]:
    """Loads the library, which must be built for this torch; returns what the build left beside it:
    versions ("version", "torch", "cuda": None in a CPU-only build) and "cuda_targets".
    """
    built_file = _PACKAGE / "_built.json"
    try:
        built = json.loads(built_file.read_text())
        built["version"], built["torch"], built["cuda"], built["cuda_targets"]
    except (ValueError, TypeError, KeyError) as error:
        raise ImportError(
            f"spamm_torch: {built_file} is damaged ({type(error).__name__}: {error}); build the "
            "library again"
        ) from None
    if _minor(built["torch"]) != _minor(torch.__version__):
        raise ImportError(
            f"spamm_torch was built for torch {built['torch']} but this is torch "
            f"{torch.__version__}; build it for this one, with `pip install --force-reinstall "
            "--no-deps --no-build-isolation .` in the source folder, or `make build` in a clone"
        )
    try:
        torch.ops.load_library(str(library_path()))
    except OSError as error:
        kind = f"CUDA {built['cuda']}" if built["cuda"] else "the CPU only"
        raise ImportError(
            f"spamm_torch, built with torch {built['torch']} for {kind}, cannot be loaded by torch "
            f"{torch.__version__}: {error.__cause__ or error}"  # torch's own text gives no reason
        ) from None
    return built


BUILT = _load()
VERSION: str = BUILT["version"]
