"""Finds, checks and loads the library of operators, and tells how it was built."""

import json
from pathlib import Path

import torch

_PACKAGE = Path(__file__).resolve().parent


def library_path() -> Path:
    """The shared library of operators, for programs that link it (with ``include_path``)."""
    return _PACKAGE / "libspamm_torch.so"


def include_path() -> Path:
    """The folder that holds ``spamm/spamm.h``, the C++ API."""
    installed = _PACKAGE / "include"
    return installed if installed.exists() else _PACKAGE.parent / "csrc" / "include"


def build_info() -> dict:
    """How the library was built.

    Returns a dict:

    ``version``
        of spamm_torch.
    ``torch``
        the torch version the library was built for.
    ``cuda``
        the CUDA compiler's version, ``None`` in a CPU-only build.
    ``arch_list``
        the CUDA targets, as in ``["8.0+PTX", "9.0a"]``; empty in a CPU-only build.
    ``compiler``, ``cxx_standard``
        the C++ compiler with its version, and the standard's date, as in ``202002``.
    ``cxx_flags``, ``nvcc_flags``
        the flags given to the two compilers; ``nvcc_flags`` is ``None`` in a CPU-only build.

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
    return _build_info.build_info()


def _release(version: str) -> str:
    """The release of a version without its local part: "2.11.0" of "2.11.0+cu130"."""
    return version.partition("+")[0]


def _load() -> dict:
    """Loads the library, after making sure that it was built for this torch.

    Returns what the build left beside it: the versions of spamm_torch ("version"), torch ("torch")
    and CUDA ("cuda", None in a CPU-only build), and what CUDA code it holds ("cuda_targets").
    """
    library, built_file = library_path(), _PACKAGE / "_built.json"
    if not library.exists() or not built_file.exists():
        raise ImportError(
            f"spamm_torch is not built: {library} is missing; build it with `make build`, or "
            "install it with `pip install . --no-build-isolation`"
        )
    built = json.loads(built_file.read_text())
    if _release(built["torch"]) != _release(torch.__version__):
        raise ImportError(
            f"spamm_torch was built for torch {built['torch']} but this is torch "
            f"{torch.__version__}; build it again"
        )
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        kind = f"CUDA {built['cuda']}" if built["cuda"] else "the CPU only"
        raise ImportError(
            f"spamm_torch, built with torch {built['torch']} for {kind}, cannot be loaded by torch "
            f"{torch.__version__}: {error}"
        ) from None
    return built


BUILT = _load()
VERSION = BUILT["version"]
