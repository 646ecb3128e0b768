"""Whole networks: convert_ makes a trained model compute with SpAMM, in place."""

from .config import SpAMMConfig
from .convert import convert_, refresh_, revert_
from .report import ConvertReport, Row

__all__ = ["ConvertReport", "Row", "SpAMMConfig", "convert_", "refresh_", "revert_"]
