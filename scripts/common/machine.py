"""Machine and versions, as the header of every result has them, and the number formats measured."""

import platform
import re
from pathlib import Path

import torch

import spamm_torch

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
