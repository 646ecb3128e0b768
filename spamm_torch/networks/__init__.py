"""Whole networks: layers that skip, by convert_, and the backend of torch.compile, which fuses."""

from .backend import explain, fuse, refresh_, register
from .config import SpAMMConfig
from .convert import convert_, revert_
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
