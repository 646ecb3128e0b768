"""The matrices that products are measured with."""

import torch


def operands(data, n, dtype, device):
    """The paper's decay matrix for both operands, or two of N(0, 1).

    Args:
        data: "decay" or "normal". n: rows and columns.
    """
    if data == "decay":
        i = torch.arange(n, device=device, dtype=torch.float32)
        a = (0.1 / ((i[:, None] - i).abs().pow_(0.1).add_(1))).to(dtype)
        return a, a.clone()
    generator = torch.Generator(device).manual_seed(0)
    make = lambda: torch.randn(n, n, device=device, generator=generator).to(dtype)  # noqa: E731
    return make(), make()
