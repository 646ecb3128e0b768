"""Parts of density_matrix.py: the problem, its orthogonal basis, and the purification."""
