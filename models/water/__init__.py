"""Matrices of quantum chemistry: water clusters, their overlaps, and Debian's program ergo."""
