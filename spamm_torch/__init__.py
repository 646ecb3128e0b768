"""Sparse approximate matrix multiplication (SpAMM) and convolution for PyTorch.

Products and convolutions skip the block products that cannot matter: those whose blocks' Frobenius
norms multiply to less than a threshold tau.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ._library import VERSION as _VERSION, build_info  # isort: skip  # loads the ops
from . import _rules  # noqa: F401  isort: skip  rules of the ops
from . import distributed, linalg, paths, sparse
from ._hints import hints_of as _hints_of
from .calibration import calibrate, record_stats
from .distributed.plan import row_cuts
from .functional import (
    addmm,
    backend_for,
    bmm,
    conv2d,
    error_bound,
    find_tau,
    linear,
    mm,
    mm_shards,
    norm_map,
    valid_counts,
    valid_ratio,
)
from .networks import SpAMMConfig, convert_, explain, fuse, refresh_, revert_
from .nn import SpAMMConv2d, SpAMMLinear

__version__ = _VERSION

__all__ = [
    "SpAMMConfig",
    "SpAMMConv2d",
    "SpAMMLinear",
    "addmm",
    "backend_for",
    "bmm",
    "build_info",
    "calibrate",
    "conv2d",
    "convert_",
    "distributed",
    "error_bound",
    "explain",
    "find_tau",
    "fuse",
    "linalg",
    "linear",
    "mm",
    "mm_shards",
    "norm_map",
    "paths",
    "record_stats",
    "refresh_",
    "revert_",
    "row_cuts",
    "sparse",
    "valid_counts",
    "valid_ratio",
]

if not _TYPE_CHECKING:  # else any name would pass
    __getattr__ = _hints_of(__name__)
