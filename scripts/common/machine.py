"""What stands in the header of every result: machine and versions."""

import platform
import re
from importlib import metadata
from pathlib import Path

import torch

import spamm_torch


def describe_machine(device):
    """Device, torch and spamm_torch, for people."""
    return {
        "device": device_name(device),
        "torch": f"{torch.__version__}, Python {platform.python_version()}",
        "spamm_torch": spamm_torch.__version__,
    }


def device_name(device):
    if device.type == "cuda":
        return (
            f"{torch.cuda.get_device_name(device)} (CUDA {torch.version.cuda}, "
            f"cuDNN {torch.backends.cudnn.version()})"
        )
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    name = models[0] if models else platform.machine()
    return f"{name}, {torch.get_num_threads()} threads ({torch.backends.cpu.get_cpu_capability()})"


def peer_libraries(device):
    """Versions of the libraries by which torch multiplies on a device, for people.

    On CUDA those that pip installed with torch; on a CPU those that torch was built with.
    """
    if device.type == "cuda":
        names = re.compile(r"nvidia-(cublas|cudnn|cusparse)(-cu\d+)?")
        installed = {of.name: of.version for of in metadata.distributions()}
        found = [f"{name} {installed[name]}" for name in sorted(installed) if names.fullmatch(name)]
    else:
        built = torch.__config__.show()
        known = {"MKL": r"Math Kernel Library Version ([\d.]+)", "oneDNN": r"MKL-DNN v([\d.]+)"}
        versions = {name: re.search(pattern, built) for name, pattern in known.items()}
        found = [f"{name} {version[1]}" for name, version in versions.items() if version]
    return ", ".join(found) or "unknown"
