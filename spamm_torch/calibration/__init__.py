"""Statistics of skipping: record_stats observes it, calibrate chooses it."""

from .calibrate import calibrate as calibrate
from .outcome import CalibrationReport as CalibrationReport
from .outcome import CalibrationRow as CalibrationRow
from .outcome import Outcome as Outcome
from .stats import LayerStats as LayerStats
from .stats import ModelStats as ModelStats
from .stats import record_stats as record_stats
