"""The paper's own search for a threshold, kept beside the exact selection.

Bisection between zero and k times the mean product of norms, starting at the mean; k = 1 grows by
one as long as that upper end still keeps too many products. It ends within ``tolerance`` of the
valid ratio, or after ``max_iterations``.

Every step is a tensor operation and all steps always run (a search that has arrived stays where
it is), so that nothing waits for the device and a CUDA graph can hold the search.
"""

import functools

import torch
from torch import Tensor


def mean_product(norm_a: Tensor, norm_b: Tensor) -> Tensor:
    """The mean of norm_a[i, k] * norm_b[k, j] over all blocks, from sums over i and over j."""
    per_k = norm_a.double().sum(-2) * norm_b.double().sum(-1)
    products = norm_a.numel() * norm_b.shape[-1]
    return (per_k.sum() / products).to(norm_a.dtype)


def bisect_tau(
    norm_a: Tensor, norm_b: Tensor, valid_ratio: float, max_iterations: int, tolerance: float
) -> Tensor:
    """A threshold near the one that keeps ``valid_ratio`` of the products, as the paper finds it.

    Args and returns: as :func:`spamm_torch.find_tau`; 0, which keeps every product, where the mean
    is not finite or there are no products. Source: the cuSpAMM paper, section on the valid ratio.
    """
    ratio_at = functools.partial(torch.ops.spamm_torch.valid_ratio, norm_a, norm_b)
    ratio_at(norm_a.new_zeros(()))  # checks the maps
    if norm_a.numel() == 0 or norm_b.numel() == 0:
        return norm_a.new_zeros(())
    mean = mean_product(norm_a, norm_b)
    low, high, tau = torch.zeros_like(mean), mean, mean
    for _ in range(max_iterations):
        ratio = ratio_at(tau)
        too_many = ratio > valid_ratio
        at_end = too_many & (tau >= high)
        low = torch.where(too_many, tau, low)
        high = torch.where(at_end, high + mean, torch.where(too_many, high, tau))
        step = torch.where(at_end, high, (low + high) / 2)
        tau = torch.where((ratio - valid_ratio).abs() <= tolerance, tau, step)
    return torch.where(mean.isfinite(), tau, torch.zeros_like(mean))
