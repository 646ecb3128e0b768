"""What stands in the header of every result: machine and versions."""

import platform
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
