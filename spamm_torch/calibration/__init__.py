"""What layers skip: record_stats observes it, calibrate chooses it."""

from .stats import LayerStats, ModelStats, record_stats

__all__ = ["LayerStats", "ModelStats", "record_stats"]
