"""One call of each pipeline, by name, of any type, in small sizes and in large ones."""

import matrices
import torch
from support import is_torchs
from torch import nn

import spamm_torch
from spamm_torch import linalg, sparse

OPS = torch.ops.spamm_torch
# cuDNN takes another algorithm where its workspace does not fit; products of blocks are made in
# strips then, whose sums are rounded in another order.
BY_MEMORY = {"torch's own": 1e-3, "purify": 1e-7}  # the tolerance


def products(device, dtype, is_large):
    m, k, n = (3000, 2600, 3400) if is_large else (300, 260, 330)
    given = {"dtype": dtype, "device": device}
    a, b = matrices.normal(m, k, **given), matrices.normal(k, n, **given)
    square = matrices.normal(m, m, **given)
    square = square + square.mT
    norm_a, norm_b = spamm_torch.norm_map(a, 32), spamm_torch.norm_map(b, 32)
    return {
        "tau": lambda: spamm_torch.mm(a, b, tau=4096.0),
        "valid ratio": lambda: spamm_torch.mm(a, b, valid_ratio=0.5, return_norms=True),
        "max error": lambda: spamm_torch.mm(a, b, max_error=0.1, return_info=True),
        "copied operands": lambda: spamm_torch.mm(
            a[:, 1:], b[1:, ::2], tau=2900.0, block=(128, 32, 64)
        ),
        "symmetric": lambda: spamm_torch.mm(square, square, tau=8190.0, symmetric=True),
        "in place": lambda: spamm_torch.addmm(
            y := square.clone(), y, y, beta=2, alpha=-1, tau=8190.0, out=y
        ),
        "batches": lambda: spamm_torch.bmm(
            a.expand(3, -1, -1), b.expand(3, -1, -1), valid_ratio=0.5
        ),
        "counts": lambda: spamm_torch.valid_counts(norm_a, norm_b, 1024.0),
        "bound": lambda: spamm_torch.error_bound(norm_a, norm_b, 1024.0),
    }


def convolutions(device, dtype, is_large):
    images, channels, outs, size = (140, 72, 136, 30) if is_large else (5, 40, 72, 12)
    x = matrices.normal(images, channels, size, size, dtype=dtype, device=device)
    weight = matrices.normal(outs, channels, 3, 3, seed=1, dtype=dtype, device=device)
    last = x.contiguous(memory_format=torch.channels_last)
    unskipped, tau = {"padding": 1, "tau": 0.0}, 500.0 if is_large else 60.0
    name = "torch's own" if is_torchs(last, weight, **unskipped) else "nothing skipped"
    return {
        name: lambda: spamm_torch.conv2d(last, weight, **unskipped, relu=True),
        "tau": lambda: spamm_torch.conv2d(last, weight, padding=1, tau=tau, return_norms=True),
        "other layouts": lambda: spamm_torch.conv2d(x, weight, padding=1, valid_ratio=0.5),
        "images": lambda: spamm_torch.conv2d(x, weight, pixel_block=(1, 8, 8), valid_ratio=0.6),
        "an im2col matrix": lambda: spamm_torch.conv2d(
            x[:, :6], weight[:, :3], groups=2, valid_ratio=0.5
        ),
        "info": lambda: spamm_torch.conv2d(
            last, weight, padding=1, max_error=0.1, return_info=True
        ),
        "pool": lambda: OPS.max_pool2d(last, 3, 2, 1, norms=True),
        "pooled convolution": lambda: OPS.conv2d_max_pool(last, weight, activation="relu"),
    }


def block_sparse(device, dtype, is_large):
    size = 2048 if is_large else 320
    distance = (torch.arange(size)[:, None] - torch.arange(size)).abs()
    a = sparse.from_dense(torch.exp(-distance / 50.0).to(dtype), 64, drop=1e-6).to(device)
    levels = torch.diag(2.0 * (-1.0) ** torch.arange(size)).double()  # with a gap in the middle
    h = sparse.from_dense(levels + 0.1 * torch.exp(-distance / 5.0), 64, drop=1e-9).to(device)
    dense = matrices.normal(size, 1000, dtype=dtype, device=device)
    return {
        "blocks": lambda: spamm_torch.mm(
            a, a, max_error=1e-3, drop=1e-4, return_norms=True, return_info=True
        ),
        "sum of blocks": lambda: spamm_torch.addmm(a, a, a, tau=1e-3, symmetric=True),
        "blocks times dense": lambda: spamm_torch.mm(a, dense, tau=1e-3),
        "add": lambda: sparse.add(a, sparse.transpose(a)),
        "purify": lambda: sparse.to_dense(linalg.purify(h, size, max_error=1e-8).matrix),
    }


def network(device, dtype, is_large):
    torch.manual_seed(0)
    layers = [nn.Conv2d(72, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Conv2d(64, 136, 3), nn.ReLU()).to(device, dtype).eval()
    spamm_torch.convert_(model, spamm_torch.SpAMMConfig(tau=0.01))
    images, size = (140, 30) if is_large else (5, 12)
    x = matrices.normal(images, 72, size, size, dtype=dtype, device=device)
    x = x.contiguous(memory_format=torch.channels_last)

    def call():
        with torch.no_grad():
            return model(x)

    return {"network": call}


FAMILIES = [products, convolutions, block_sparse, network]


def bits(result):
    """Copies on the CPU of all tensors in a result."""
    if isinstance(result, torch.Tensor):
        found = result.values() if result.layout != torch.strided else result
        return [found.cpu()]
    return [
        x for part in result if isinstance(part, (torch.Tensor, tuple, list)) for x in bits(part)
    ]
