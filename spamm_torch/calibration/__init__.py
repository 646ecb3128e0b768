"""Statistics of skipping: record_stats observes it, calibrate chooses it."""

from .calibrate import calibrate
from .outcome import CalibrationReport, CalibrationRow, Outcome
from .stats import LayerStats, ModelStats, record_stats

__all__ = [
    "CalibrationReport",
    "CalibrationRow",
    "LayerStats",
    "ModelStats",
    "Outcome",
    "calibrate",
    "record_stats",
]
