"""Statistics of skipping: record_stats observes it, calibrate chooses it."""

from .calibrate import CalibrationReport as CalibrationReport
from .calibrate import CalibrationRow as CalibrationRow
from .calibrate import Outcome as Outcome
from .calibrate import calibrate as calibrate
from .stats import LayerStats as LayerStats
from .stats import ModelStats as ModelStats
from .stats import record_stats as record_stats
