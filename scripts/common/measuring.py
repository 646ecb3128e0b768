"""The machine and its number formats, and cells: each measured by itself, whatever others do."""

import functools
import gc
import json
import platform
import re
from pathlib import Path

import torch

import spamm_torch
from models.files import UserError, first_line

# name -> (dtype, whether CUDA may multiply float32 in TF32)
PRECISIONS = {
    "float16": (torch.float16, False),
    "bfloat16": (torch.bfloat16, False),
    "float32": (torch.float32, False),
    "tf32": (torch.float32, True),
    "float64": (torch.float64, False),
}
# Frobenius error against float64 that rounding explains, relative.
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-5, "tf32": 2e-3, "float64": 1e-12}


def use_precision(name):
    """Sets what CUDA may make of float32, in products and convolutions; returns the dtype."""
    dtype, allow_tf32 = PRECISIONS[name]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allow_tf32
    return dtype


def describe_machine(device):
    """Device, torch and spamm_torch, for people."""
    return {
        "device": _device_name(device),
        "torch": f"{torch.__version__}, Python {platform.python_version()}",
        "spamm_torch": spamm_torch.__version__,
    }


def _device_name(device):
    if device.type == "cuda":
        return (
            f"{torch.cuda.get_device_name(device)} (CUDA {torch.version.cuda}, "
            f"cuDNN {torch.backends.cudnn.version()})"
        )
    found = re.search(r"model name\s*:\s*(.*\S)", Path("/proc/cpuinfo").read_text())
    name = found[1] if found else platform.machine()
    return f"{name}, {torch.get_num_threads()} threads ({torch.backends.cpu.get_cpu_capability()})"


def measure_all(cells, tables):
    """Adds the rows of each cell, {name: call that gives {kind: rows}}, to ``tables``, as plain
    data, as soon as it is measured.
    """
    for done, (name, measure) in enumerate(cells.items(), start=1):
        found = json.loads(json.dumps(measure(), default=str))
        absent = {row["absent"] for rows in found.values() for row in rows if row.get("absent")}
        said = f"not measured: {'; '.join(absent)}" if absent else "measured"
        print(f"{done} of {len(cells)}, {name}: {said}", flush=True)
        for kind, rows in found.items():
            tables.setdefault(kind, []).extend(rows)


def attempt(kind, measure, **place):
    """{kind: rows} of a cell: its place and what ``measure()`` gives, rows or such a dict; if it
    fails, a row with "absent", the error's first line. A UserError ends the run.
    """
    try:
        found = measure()
        tables = found if isinstance(found, dict) else {kind: found}
        return {name: [place | row for row in rows] for name, rows in tables.items()}
    except UserError:
        raise
    except Exception as error:
        failure = {"absent": first_line(error)}
    gc.collect()  # what the failed call held, so that the next one finds memory
    torch.cuda.empty_cache()
    return {kind: [place | failure]}


def cell(kind, measure, **place):
    """The call that measures a cell: ``measure(**place)``, as of attempt."""
    return functools.partial(attempt, kind, functools.partial(measure, **place), **place)


def require_near(error, most, of):
    """Raises UserError where a result is wrong."""
    if not error <= most:
        raise UserError(
            f"wrong result {of}: expected an error of at most {most:.3g}; got {error:.3g}"
        )
