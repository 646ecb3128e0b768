"""Sparse approximate matrix multiplication (SpAMM) and convolution for PyTorch.

Products and convolutions skip the block products that cannot matter: those whose blocks' Frobenius
norms multiply to less than a threshold tau.
"""

from ._library import (  # isort: skip  # loads the ops
    VERSION as _VERSION,
    build_info,
    cmake_prefix_path,
    include_path,
    library_path,
)
from . import _fake, _flops, distributed  # noqa: F401  the first two: shapes and flop formulas
from ._info import SkipInfo
from ._plan import row_cuts
from .batch_sampler import LikenessBatchSampler
from .calibration import (
    CalibrationReport,
    CalibrationRow,
    LayerStats,
    ModelStats,
    Outcome,
    calibrate,
    record_stats,
)
from .chain import SpAMMChain
from .functional import (
    addmm,
    backend_for,
    bmm,
    conv2d,
    conv2d_shards,
    error_bound,
    find_tau,
    find_tau_for_error,
    linear,
    mm,
    mm_shards,
    norm_map,
    valid_counts,
    valid_ratio,
)
from .fuse import FuseReport, Fusion, fuse_
from .likeness import likeness_order
from .networks import ConvertReport, SpAMMConfig, convert_, refresh_, revert_
from .nn import SpAMMConv2d, SpAMMLinear, unreached_layers
from .ordered_batch import OrderedBatch
from .spatial import spatial_order

__version__ = _VERSION

__all__ = [
    "CalibrationReport",
    "CalibrationRow",
    "ConvertReport",
    "FuseReport",
    "Fusion",
    "LayerStats",
    "LikenessBatchSampler",
    "ModelStats",
    "OrderedBatch",
    "Outcome",
    "SkipInfo",
    "SpAMMChain",
    "SpAMMConfig",
    "SpAMMConv2d",
    "SpAMMLinear",
    "addmm",
    "backend_for",
    "bmm",
    "build_info",
    "calibrate",
    "cmake_prefix_path",
    "conv2d",
    "conv2d_shards",
    "convert_",
    "distributed",
    "error_bound",
    "find_tau",
    "find_tau_for_error",
    "fuse_",
    "include_path",
    "library_path",
    "likeness_order",
    "linear",
    "mm",
    "mm_shards",
    "norm_map",
    "record_stats",
    "refresh_",
    "revert_",
    "row_cuts",
    "spatial_order",
    "unreached_layers",
    "valid_counts",
    "valid_ratio",
]
