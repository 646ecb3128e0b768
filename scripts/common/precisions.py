"""The number formats that scripts measure."""

import torch

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
