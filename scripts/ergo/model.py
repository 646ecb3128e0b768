"""Clusters of any size without a program: geometry, exact S, and a model of F.

F of a large cluster takes hours of Hartree-Fock. The model takes F of one molecule.
"""

from ergo.geometry import water_cluster
from ergo.overlap import overlap

__all__ = ["overlap", "water_cluster"]
