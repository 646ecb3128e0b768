"""What the tests of products on CUDA share."""

import os

import matrices
import torch

import spamm_torch
from spamm_torch import _library


def operands(dtype=torch.float32, seed=0, m=300, k=400, n=200, device="cuda"):
    a = matrices.normal(m, k, dtype=dtype, device=device, seed=seed)
    return a, matrices.normal(k, n, dtype=dtype, device=device, seed=seed + 1)


def norm_maps(a, b, block=64):
    return spamm_torch.norm_map(a, block), spamm_torch.norm_map(b, block)


def hopper_kernels_run():
    built = {"9.0a", "9.0a+PTX"} & set(_library.BUILT["cuda_targets"])
    forced = os.environ.get("SPAMM_TORCH_FORCE_SM80") == "1"
    return bool(built) and not forced and torch.cuda.get_device_capability() == (9, 0)
