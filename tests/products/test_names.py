"""What the package exports: few names, each with a purpose, and results by their modules."""

import spamm_torch
from spamm_torch.calibration import (
    CalibrationReport,
    CalibrationRow,
    LayerStats,
    ModelStats,
    Outcome,
)
from spamm_torch.networks import ConvertReport

NAMES = """
OrderedBatch SkipInfo SpAMMConfig SpAMMConv2d SpAMMLinear addmm backend_for bmm
build_info calibrate cmake_prefix_path conv2d convert_ distributed error_bound find_tau
include_path library_path likeness_order linear mm mm_shards norm_map record_stats refresh_ revert_
row_cuts spatial_order valid_counts valid_ratio
"""


def test_the_names():
    assert NAMES.split() == spamm_torch.__all__
    assert len(spamm_torch.__all__) <= 32
    assert all(hasattr(spamm_torch, name) for name in spamm_torch.__all__)


def test_results_stay_in_their_modules():
    """Nobody makes one; annotations and isinstance name them."""
    results = (CalibrationReport, CalibrationRow, LayerStats, ModelStats, Outcome)
    for result in (*results, ConvertReport):
        assert result.__doc__
        assert not hasattr(spamm_torch, result.__name__)
