"""Whole networks: convert_ makes a trained model compute with SpAMM, in place."""

from .backend import explain, fuse, register
from .config import SpAMMConfig
from .convert import convert_, refresh_, revert_
from .report import ConvertReport, Row

__all__ = [
    "ConvertReport",
    "Row",
    "SpAMMConfig",
    "convert_",
    "explain",
    "fuse",
    "refresh_",
    "revert_",
]

register()
