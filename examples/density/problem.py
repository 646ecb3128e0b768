"""What is to be purified: F, S and how many electrons, checked."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from density.basis import is_sparse
from models.errors import UserError

_SYMMETRY = 1e-8  # of the largest entry


@dataclass(frozen=True)
class Problem:
    """A closed shell: every occupied state holds two electrons.

    Attributes:
        name: as a report calls it.
        fock: (N, N), symmetric, float64, hartree; block-sparse ones are padded.
        electrons: even, from 2 to 2 N - 2.
        atoms: by which energies are divided.
        overlap: (N, N), symmetric, float64; None for orthogonal functions.
        density: to compare with; None where there is none. Its trace with S is the electrons.
        functions: N.
    """

    name: str
    fock: Tensor
    electrons: int
    atoms: int
    overlap: Tensor | None = None
    density: Tensor | None = None
    functions: int = 0

    def __post_init__(self) -> None:
        n = self.functions
        if not n:
            _check_symmetric(self.fock, "fock")
            n = len(self.fock)
            object.__setattr__(self, "functions", n)
        for name in ("overlap", "density"):
            matrix = getattr(self, name)
            if matrix is None or is_sparse(matrix):
                continue
            _check_symmetric(matrix, name)
            if len(matrix) != n:
                raise UserError(
                    f"expected fock and {name} of one size; got {n} x {n} and "
                    f"{len(matrix)} x {len(matrix)}"
                )
        if self.electrons % 2 or not 2 <= self.electrons <= 2 * n - 2:
            raise UserError(
                f"expected an even number of electrons from 2 to {2 * n - 2}, for {n} functions; "
                f"got {self.electrons}"
            )
        if self.atoms < 1:
            raise UserError(f"expected 1 atom or more; got {self.atoms}")

    @property
    def occupied(self) -> int:
        return self.electrons // 2


def _check_symmetric(matrix: Tensor, name: str) -> None:
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        shape = " x ".join(map(str, matrix.shape)) or "a number"
        raise UserError(f"expected {name} as a square matrix; got {shape}")
    if not len(matrix):
        raise UserError(f"expected {name} with a row or more; got 0 x 0")
    if not matrix.isfinite().all():
        raise UserError(f"expected finite entries of {name}; got NaN or infinity")
    difference, largest = (matrix - matrix.mT).abs().max().item(), matrix.abs().max().item()
    if difference > _SYMMETRY * largest:
        raise UserError(
            f"expected {name} to be symmetric; got entries that differ by {difference:.2g} from "
            f"those across the diagonal, the largest being {largest:.2g}"
        )
