"""The density matrix of a molecule from its Fock and overlap matrices, by products alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import sparse
from .._arguments import check_number
from ..sparse.blocks import is_sparse
from ..spatial import spatial_order
from .expansion import (
    BASE,
    REACH,
    TAIL,
    ZOOMED,
    Expansion,
    Fermi,
    edges,
    in_factors,
    planned,
    wide,
)
from .matrices import Matrices, NotConverged, norm_of

BOLTZMANN = 3.166811563455546e-6  # hartree per kelvin (CODATA 2018)
_EPS = torch.finfo(torch.float64).eps
_LARGE, _FEW = 4096, 0.1  # functions, and the share of stored blocks, for block-sparse storage
_SMALL = 2048  # functions up to which CUDA takes torch's own products
_MOST_STEPS = 120
_TRIES = 3


@dataclass(frozen=True)
class Density:
    """A density matrix and what belongs to it. Energies are in the units of F.

    Where F has two spins, or ``spin`` is not 0, what each spin has is a pair, alpha first.

    Attributes:
        density: (N, N) of both spins, or stacked as (2, N, N), of sparse ones a list of two.
        energy: tr(D F), the sum of the occupied states' energies.
        free_energy: energy - kT * entropy, and less mu * electrons where mu was given.
        entropy: in units of Boltzmann's constant.
        chemical_potential: at zero temperature the middle of the gap.
        homo, lumo: a bound of each that is near it: no state is between the two. None where there
            is no such state, or a Fermi function that is not 0 or 1.
        electrons: tr(D S).
        energy_weighted: of the form of ``density``: occupied states times their energies; or None.
        error: an estimate of the largest error of an entry of ``density``.
        bound: a bound of the Frobenius norm of its error, given the gap.
        residual: the largest entry of F D - D F in the orthogonal basis.
        products: their number.
    """

    density: Any
    energy: Any
    free_energy: Any
    entropy: float
    chemical_potential: Any
    homo: Any
    lumo: Any
    electrons: float
    energy_weighted: Any
    error: float
    bound: float
    residual: float
    products: int


# ---- Products -----------------------------------------------------------------------------------

_Operand = tuple[Tensor, Any]  # a matrix and its norm map


class _Torch:
    """Dense products of torch's own, without a decision of the host: for graphs, derivatives."""

    def product(
        self, x: _Operand, y: _Operand, added: Tensor, alpha: float, beta: float, gap: float = 1.0
    ) -> _Operand:
        return torch.addmm(added, x[0], y[0], beta=beta, alpha=alpha), None

    def shifted(self, a: Tensor, scale: float, shift: float) -> _Operand:
        return a * scale + shift * self.identity(a), None

    def identity(self, a: Tensor) -> Tensor:
        return torch.eye(len(a), dtype=a.dtype, device=a.device)

    def expanded(self, h: Tensor, of: Expansion, sums: list[Tensor]) -> Tensor:
        """X behind an expansion. Adds tr(V) and norm(V)^2 of each V to ``sums``."""
        v, _ = self.shifted(h, *of.start())
        for a, b in of.forms:
            sums.append(torch.stack((v.diagonal().sum(), (v * v).sum())))
            v, _ = self.product((v, None), (v, None), v, a, b)
        sums.append(torch.stack((v.diagonal().sum(), (v * v).sum())))
        return self.shifted(v, 1.0, of.shifts[-1])[0]


class _Skipping:
    """Products that may each have an absolute error: in Frobenius norm, times a gap."""

    def __init__(self, of: Matrices, error: float):
        self.of, self.error = of, error

    def operand(self, a: Tensor) -> _Operand:
        return a, norm_of(a) if self.is_exact(a) else self.of.norms(a)

    def is_exact(self, a: Tensor) -> bool:
        return a.is_cuda and not self.of.is_sparse and len(a) <= _SMALL

    def product(
        self,
        x: _Operand,
        y: _Operand,
        added: Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        gap: float = 1.0,
        symmetric: bool = True,
    ) -> _Operand:
        share = None
        if not self.is_exact(x[0]):
            size = (norm_of(x[1]) * norm_of(y[1])).item() * abs(alpha)
            share = self.error * gap / size if size > 0 else 0.0
        maps = (x[1], y[1])
        options: dict[str, Any] = {"symmetric": symmetric, "alpha": alpha, "beta": beta}
        return self.of.product("X Y", x[0], y[0], maps, share, added=added, **options)

    def shifted(self, a: Tensor, scale: float, shift: float) -> _Operand:
        return self.operand(self.of.shifted(a, scale, shift))

    def identity(self, a: Tensor) -> Tensor:
        return self.of.identity(a)


def _chebyshev(
    by: _Torch | _Skipping, t: _Operand, degree: int
) -> tuple[list[_Operand], list[_Operand]]:
    """T_1 ... T_8, and T_8, T_16 ... up to a degree: T_(m + n) = 2 T_m T_n - T_(m - n)."""
    one = by.identity(t[0])

    def upto(first: _Operand, most: int) -> list[_Operand]:
        found = [first]
        for number in range(2, most + 1):
            low, high = number // 2, (number + 1) // 2
            added = one if low == high else first[0]
            found.append(by.product(found[high - 1], found[low - 1], added, 2.0, -1.0, 1 / 64))
        return found

    base = upto(t, BASE)
    return base, upto(base[-1], degree // BASE)


def _combined(rows: list[list[float]], base: list[Tensor], one: Tensor) -> list[Tensor]:
    """Sums of 1 and matrices with these weights."""
    if not is_sparse(one):
        weights = torch.tensor(rows, dtype=one.dtype, device=one.device)
        return list(torch.tensordot(weights, torch.stack((one, *base)), 1))
    found = []
    for row in rows:
        total = one * row[0]
        for weight, matrix in zip(row[1:], base, strict=True):
            total = sparse.add(total, matrix, beta=weight)
        found.append(total)
    return found


def _polynomial(
    by: _Torch | _Skipping,
    base: list[_Operand],
    giants: list[_Operand],
    coefficients: list[float],
) -> Tensor:
    """The sum of c_k T_k: of T_(8 j) times sums of T_0 ... T_7."""
    one = by.identity(base[0][0])
    parts = _combined(in_factors(coefficients), [x for x, _ in base[:-1]], one)
    found = parts[0]
    for giant, part in zip(giants, parts[1:], strict=True):
        right = by.shifted(part, 1.0, 0.0)
        found, _ = by.product(giant, right, found, 1.0, 1.0)
    return found


def _moments(of: Matrices, base: list[_Operand], giants: list[_Operand]) -> Tensor:
    """The traces of all T_k: 2 tr(T_m T_n) = tr T_(m + n) + tr T_(m - n)."""
    small, large = [x for x, _ in base[:-1]], [x for x, _ in giants]
    if of.is_sparse:
        inner = [[float(sparse.inner(x, y)) for y in small] for x in large]
    else:
        inner = (torch.stack(large).flatten(1) @ torch.stack(small).flatten(1).mT).tolist()
    traces = [of.diagonal(x).sum() for x in (*small, *large)]
    first = torch.stack(traces).tolist()
    found = [float(of.size), *first[: len(small)]]
    for row, trace in zip(inner, first[len(small) :], strict=True):
        found.append(trace)
        for i, number in enumerate(row, 1):
            found.append(2 * number - found[len(found) - 2 * i])
    return torch.tensor(found, dtype=torch.float64)


# ---- One spin -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wanted:
    """So many electrons, or a chemical potential; kT; and the accuracy of X."""

    count: float | None
    mu: float | None
    kt: float
    accuracy: float


@dataclass
class _States:
    """The projector on the occupied states, or the Fermi function, in the orthogonal basis.

    Attributes:
        x: the polynomial with these coefficients of 2 X - 1, or X itself, behind the expansion.
        gap: what errors of H are divided by. wrong: how far eigenvalues of x may be from right.
    """

    x: Tensor
    count: float
    mu: float
    gap: float = math.inf
    wrong: float = 0.0
    entropy: float = 0.0
    homo: float | None = None
    lumo: float | None = None
    expansion: Expansion | None = None
    coefficients: list[float] | None = None


def _expanded(
    by: _Skipping, h: Tensor, wanted: _Wanted, plan: Expansion | None, made: Expansion
) -> tuple[Tensor, list[float]]:
    """V behind the steps of a plan, or of those that the trace or the chemical potential decides,
    until they separate the states or spread those around it. And tr(X - X^2) before each.
    """
    of, size = by.of, by.of.size
    residuals: list[float] = []
    enough = max(wanted.accuracy / 100, 8 * _EPS * size)
    gaps = plan.gaps() if plan else [min(1.0, 0.02 * 1.25**k) for k in range(_MOST_STEPS + 1)]
    v, norms = by.shifted(h, *made.start())
    while True:
        number = len(residuals)
        shift = made.shifts[number]
        trace, norm = of.trace_and_norm(v, norms)
        square = norm**2 + shift * (2 * trace + shift * size)
        trace += shift * size
        residuals.append(trace - square)
        if plan is None and number < _MOST_STEPS:
            last = [abs(x) for x in residuals[-3:]]
            if last[-1] <= enough or (len(last) == 3 and last[0] < 0.01 and last[2] > last[0] / 4):
                return v, residuals
            if wanted.kt:
                spectrum, middle = (made.lowest, made.highest), made.energy(0.5, number)
                made.window = wide(wanted.kt, spectrum, middle)
                if made.gaps()[-1] > ZOOMED:
                    made.separates = False
                    return v, residuals
            if (count := wanted.count) is None:
                squares = made.images(wanted.mu)[-1] > 0.5
            else:
                squares = abs(square - count) < abs(2 * trace - square - count)
            made.append(squares)
        if number == len(made.steps):
            return v, residuals
        a, b = made.forms[number]
        # Later steps mend what errors do to occupied states alone, or to empty ones alone.
        share = _EARLY if residuals[-1] > 0.05 else 1.0
        v, norms = by.product((v, norms), (v, norms), v, a, b, gaps[number] * share)


def _states(by: _Skipping, h: Tensor, wanted: _Wanted, plan: Expansion | None) -> _States:
    """By a plan that a call before makes likely, else by steps that are found on the way."""
    of, kt, count, mu = by.of, wanted.kt, wanted.count, wanted.mu
    spectrum = _spectrum(of, h)
    is_none, is_all = count == 0, count == of.size
    if not kt and mu is not None:
        is_none, is_all = mu <= spectrum[0], mu >= spectrum[1]
    if is_none or is_all:
        ends = -math.inf if is_none else math.inf
        return _States(of.identity(h) * float(is_all), of.size * is_all, ends if mu is None else mu)
    if kt and mu is not None:
        plan = planned(spectrum, wide(kt, spectrum, mu))
    for number in range(8):
        made = plan or Expansion(*spectrum)
        v, residuals = _expanded(by, h, wanted, plan, made)
        if made.separates:
            found = _projector(by, v, wanted, plan, made, residuals)
            if found is not None and found.gap > 2 * TAIL * kt:
                return found
            if not kt and plan is None:
                where = f"above {count:g} electrons of a spin" if mu is None else f"around {mu:g}"
                raise NotConverged(
                    f"expected a gap {where} that the accuracy resolves; got tr(X - X^2) = "
                    f"{residuals[-1]:.2g} after {len(made.steps)} steps"
                )
            middle = made.energy(0.5, len(made.steps))
        else:
            found = _fermi(by, v, wanted, made)
            if found.wrong < math.inf:
                return found
            middle = found.mu
        was_guessed = number == 0 and plan is not None
        plan = None if was_guessed else planned(spectrum, wide(kt, spectrum, middle))
    raise NotConverged(
        f"expected a chemical potential near {middle:.6g} for {count} electrons of a spin; got none"
    )


def _spectrum(of: Matrices, h: Tensor) -> tuple[float, float]:
    low, high = of.gershgorin(h)
    margin = 1e-9 * (1 + abs(low) + abs(high))
    return low - margin, high + margin


def _projector(
    by: _Skipping,
    v: Tensor,
    wanted: _Wanted,
    plan: Expansion | None,
    made: Expansion,
    residuals: list[float],
) -> _States | None:
    """None where the steps have not separated as many states as wanted."""
    of = by.of
    x = of.shifted(v, 1.0, made.shifts[-1]) if made.shifts[-1] else v
    trace = float(of.diagonal(x).sum())
    count = round(trace) if wanted.count is None else wanted.count
    if not (abs(residuals[-1]) < 0.01 and abs(trace - count) < 0.01):
        return None
    error = by.error + _EPS * math.sqrt(of.size)
    homo, lumo = edges(made, residuals, _EARLY * error * math.sqrt(of.size))
    if plan:  # made so that no state is in its window
        homo, lumo = min(homo, plan.window[0]), max(lumo, plan.window[1])
    made = replace(made, window=(homo, lumo))
    wrong = min(1 - made.gaps()[-1], abs(residuals[-1])) + 2 * error
    mu = (homo + lumo) / 2 if wanted.mu is None else wanted.mu
    return _States(x, trace, mu, lumo - homo, wrong, 0.0, homo, lumo, made)


def _fermi(by: _Skipping, v: Tensor, wanted: _Wanted, made: Expansion) -> _States:
    """With an infinite error where the chemical potential is not in the window's middle: where it
    may be instead.
    """
    of, kt = by.of, wanted.kt
    enough = wanted.accuracy / 10
    fermi = Fermi(made, kt, enough)
    t = by.shifted(v, 2.0, 2 * made.shifts[-1] - 1)
    base, giants = _chebyshev(by, t, fermi.degree)
    moments = _moments(of, base, giants)
    mu = fermi.potential(moments, wanted.count) if wanted.mu is None else wanted.mu
    coefficients, error = fermi.polynomial(mu)
    count = fermi.electrons(moments, mu)
    if DEBUG: print("   fermi", made.window, "steps", len(made.steps), made.gaps()[-1], "deg", fermi.degree, "mu", mu, fermi.range, "N", count, wanted.count, error)
    if error > enough or (wanted.mu is None and abs(count - wanted.count) > 1e-6):
        return _States(v, count, mu, wrong=math.inf)
    x = _polynomial(by, base, giants, coefficients)
    trace, entropy = float(of.diagonal(x).sum()), fermi.entropy(moments, mu)
    return _States(x, trace, mu, 4 * kt, error, entropy, None, None, made, coefficients)


# ---- Forms of matrices --------------------------------------------------------------------------


class _Forms:
    """Matrices as a caller has them, and as they are kept: in an order, dense or block-sparse."""

    def __init__(self, size: int, order: Tensor | None, block: int, device: Any, is_sparse: bool):
        self.size, self.block, self.device, self.is_sparse = size, block, device, is_sparse
        self.order = order
        self.back = None if order is None else order.argsort()

    def kept(self, a: Any, name: str) -> Tensor:
        """Checked: finite, symmetric but for rounding, of which the symmetric part is taken."""
        found = _tensor(a, name, self.block if self.is_sparse else 32)
        shape, size = tuple(found.shape), self.size
        edge = found.values().shape[-1] if is_sparse(found) else 1
        if len(shape) != 2 or shape[0] != shape[1] or not size <= shape[0] < size + edge:
            raise RuntimeError(f"{name} must be {size} x {size}; got shape {shape}")
        found = found.to(self.device, torch.float64)
        if is_sparse(found) and not (self.is_sparse and edge == self.block):
            found = sparse.to_dense(found, (size, size))
        if is_sparse(found):
            found = found if self.order is None else sparse.permute(found, self.order)
            mirror = sparse.transpose(found)
            off = sparse.add(found, mirror, beta=-1).values()
            most, off = found.values().abs().amax(), off.abs().amax()
            found = sparse.add(found, mirror, alpha=0.5, beta=0.5)
        else:
            found = found if self.order is None else found[self.order][:, self.order]
            most, off = found.abs().amax(), (found - found.mT).abs().amax()
            found = (found + found.mT) / 2
        largest, wrong = torch.stack((most, off)).tolist()
        if not math.isfinite(largest):
            raise ValueError(f"{name} must be finite; got an entry of {largest}")
        if wrong > _ASYMMETRY * largest:
            raise ValueError(
                f"{name} must be symmetric to {_ASYMMETRY:.0e} of its largest entry, "
                f"{largest:.3g}; got entries that differ by {wrong:.3g}"
            )
        if self.is_sparse and not is_sparse(found):
            found = sparse.from_dense(found, self.block, drop=_DROP * largest)
        return found

    def given_back(self, a: Tensor, like: Any) -> Any:
        """In the order and form of ``like``."""
        if self.is_sparse:
            a = a if self.back is None else sparse.permute(a, self.back)
            if hasattr(like, "tobsr"):
                return sparse.to_scipy(a, (self.size, self.size)).asformat(like.format)
            if is_sparse(like):
                return a.to(like.device)
            a = sparse.to_dense(a, (self.size, self.size))
        else:
            a = a if self.back is None else a[self.back][:, self.back]
        if hasattr(like, "tobsr"):
            return type(like)(a.numpy(force=True))
        if is_sparse(like):
            return sparse.from_dense(a, like.values().shape[-1]).to(like.device)
        return a.to(like.device) if isinstance(like, Tensor) else a.numpy(force=True)


def _tensor(a: Any, name: str, block: int) -> Tensor:
    if isinstance(a, Tensor):
        return a.detach()
    if hasattr(a, "tobsr"):
        return sparse.from_scipy(a.astype("float64"), block)
    if not hasattr(a, "__array__"):
        raise TypeError(
            f"{name} must be an array of numpy, a sparse matrix of scipy or a tensor; got "
            f"{type(a).__name__}"
        )
    return torch.tensor(a, dtype=torch.float64)


_ASYMMETRY = 1e-9
_DROP = 1e-14


# ---- The solver ---------------------------------------------------------------------------------


class DensitySolver:
    """Density matrices of Fock matrices that share an overlap matrix.

    Example::

        solver = DensitySolver(S, positions=mol.atom_coords()[atom_of_function])
        found = solver(F, electrons=mol.nelectron)
        found.density, found.energy, found.homo, found.lumo

    Args:
        S: the overlap matrix, (N, N): an array of numpy, a sparse matrix of scipy, a tensor, dense
            or ``torch.sparse_bsr``, real. None: the basis is orthogonal.
        positions: (N, 3), the nucleus of each function, for :func:`spamm_torch.spatial_order`: what
            is near is kept side by side, so that more can be skipped.
        groups: (N,) labels that stay together. None: functions at one place.
        order: instead of positions: an order of the functions.
        block: edge of blocks; None: 32 on CPUs, 64 else, or that of a block-sparse ``S``.
        accuracy: the error that an entry of D may have.
        storage: "dense", "sparse" (blocks alone), or "auto": sparse from 4096 functions on of which
            a tenth of the blocks of ``S`` hold anything.
        size: N, where a ``torch.sparse_bsr`` matrix has rows of padding.
        device: None: that of S, or of the first F.
    """

    def __init__(
        self,
        S: Any = None,
        *,
        positions: Any = None,
        groups: Any = None,
        order: Any = None,
        block: int | None = None,
        accuracy: float = 1e-8,
        storage: str = "auto",
        size: int | None = None,
        device: torch.device | str | None = None,
    ):
        if storage not in ("auto", "dense", "sparse"):
            raise ValueError(f'storage must be "auto", "dense" or "sparse"; got {storage!r}')
        if positions is not None and order is not None:
            raise ValueError("order or positions may be given; got both")
        _check_accuracy(accuracy)
        self.accuracy = accuracy
        if positions is not None:
            positions = torch.as_tensor(positions, dtype=torch.float64)
            if groups is None:
                groups = positions.unique(dim=0, return_inverse=True)[1]
            order = spatial_order(positions, torch.as_tensor(groups))
        self._order = None if order is None else torch.as_tensor(order)
        self._given = block, storage, size, device
        self._forms: _Forms | None = None
        self._z: tuple[_Operand, _Operand] | None = None
        self._spread = 1.0
        self._plans: dict[Any, tuple[Tensor, _States]] = {}
        self._overlap = S
        if S is not None:
            self._factor(S)

    def _opened(self, a: Any, name: str) -> _Forms:
        """The forms, which the first matrix decides."""
        if self._forms is None:
            block, storage, size, device = self._given
            if not hasattr(a, "shape") or len(a.shape) != 2:
                raise TypeError(f"{name} must be a matrix; got {type(a).__name__}")
            order = self._order
            size = size or (a.shape[0] if order is None else len(order))
            device = device or (a.device if isinstance(a, Tensor) else "cpu")
            on_cpu = torch.device(device).type == "cpu"
            of_a = a.values().shape[-1] if is_sparse(a) and a.layout == torch.sparse_bsr else None
            block = block or of_a or (32 if on_cpu else 64)
            order = None if order is None else order.to(device)
            forms = _Forms(size, order, block, device, storage == "sparse")
            if storage == "auto" and size >= _LARGE:
                forms.is_sparse = True
                stored = forms.kept(a, name).values().shape[0]
                forms.is_sparse = stored <= _FEW * -(-size // block) ** 2
            self._forms = forms
        return self._forms

    def _factor(self, overlap: Any) -> None:
        forms = self._opened(overlap, "S")
        s = forms.kept(overlap, "S")
        self._s = s
        z = _inverse_factor(s)
        zt = sparse.transpose(z) if forms.is_sparse else z.mT.contiguous()
        by = _Skipping(self._matrices(z), 0.0)
        self._z = by.operand(z), by.operand(zt)
        self._spread = float(_row_norms(z).max())
        self._size_of_z = float(norm_of(z))

    def _matrices(self, like: Tensor) -> Matrices:
        forms = self._forms
        size = forms.size if forms.is_sparse else None
        return Matrices("DensitySolver", like, forms.block, size, None)

    def __call__(
        self,
        F: Any,
        electrons: Any = None,
        *,
        spin: int | None = None,
        chemical_potential: Any = None,
        temperature: float = 0.0,
        accuracy: float | None = None,
        energy_weighted: bool = False,
    ) -> Density:
        """The density matrix of the states of F C = S C E.

        Args:
            F: (N, N), as ``S`` any form; or one of each spin, as (2, N, N) or a list of two. What
                is returned has its form, order and device.
            electrons: of both spins together, from 0 to 2 N, or a pair. Not a whole number only at
                a temperature.
            spin: alpha less beta electrons. None: 0 or 1.
            chemical_potential: instead of electrons, a number or a pair.
            temperature: in kelvin, for F in hartree (in eV: 27.2114 times as much). Each spin has a
                chemical potential of its own.
            accuracy: the error that an entry of D may have. None: the solver's.
            energy_weighted: return this density, too, which forces take.

        Raises:
            NotConverged: the accuracy is not met, as where no gap is above the occupied states at
                zero temperature.
        """
        accuracy = self.accuracy if accuracy is None else accuracy
        _check_accuracy(accuracy)
        check_number(temperature, "temperature")
        if not temperature >= 0:
            raise ValueError(f"temperature must be at least 0 (kelvin); got {temperature}")
        is_pair = isinstance(F, (list, tuple)) or (hasattr(F, "ndim") and F.ndim == 3)
        focks = list(F) if is_pair else [F]
        if is_pair and len(focks) != 2:
            raise ValueError(f"F must be one matrix or two, alpha and beta; got {len(focks)}")
        forms = self._opened(focks[0], "F")
        counts, mus = _occupations(forms.size, electrons, spin, chemical_potential, temperature)
        is_open = is_pair or counts[0] != counts[1] or mus[0] != mus[1]
        kt = BOLTZMANN * temperature
        spins = []
        for number in range(2 if is_open else 1):
            h = forms.kept(focks[number % len(focks)], "F")
            wanted = (counts[number], mus[number], kt)
            spins.append(self._spin(h, wanted, accuracy, number, 1 if is_open else 2, energy_weighted))
        return self._put_together(spins, focks, F, is_open, energy_weighted, mus, kt)

    def _spin(
        self, f: Tensor, given: Any, accuracy: float, number: int, occupation: int, weighted: bool
    ) -> dict[str, Any]:
        """One spin's density matrix and numbers, in the order kept."""
        count, mu, kt = given
        of = self._matrices(f)
        # An error e of X is one of at most e times the largest row of Z squared in an entry of D.
        allowed = accuracy / (occupation * self._spread)
        for attempt in range(_TRIES):
            by = _Skipping(of, allowed * _SHARE / 30**attempt)
            bases = _BASES * allowed * (min(1.0, 40 * kt) if kt else 1.0)
            h = self._transformed(_Skipping(of, bases / self._size_of_z), f, 0)
            wanted = _Wanted(count, mu, kt, allowed)
            states = _states(by, h, wanted, self._plan(h, number, given))
            x, hx = states.x, by.operand(h)
            # X H is symmetric but for what mixes occupied and empty states.
            tight = _Skipping(of, 0.02 * allowed * min(states.gap, 1.0))
            product, _ = tight.product(by.operand(x), hx, symmetric=False)
            off, weighted_x = self._parts(product)
            most, norm = float(_largest(off)), float(norm_of(off))
            error = occupation * self._spread * (2 * most / states.gap + states.wrong)
            error += occupation * self._spread * 2 * bases / states.gap + 2 * _BACK * accuracy
            if DEBUG: print("   attempt", attempt, "mix", occupation*self._spread*2*most/states.gap, "wrong", occupation*self._spread*states.wrong, "gap", states.gap, "products", len(of.steps))
            if error <= accuracy:
                break
            self._plans[number] = (h, given, states)
        else:
            raise NotConverged(
                f"expected an accuracy of {accuracy:.2g} of the density matrix; reached "
                f"{error:.2g}, with a gap of {states.gap:.2g}"
            )
        self._plans[number] = (h, given, states)
        energy = float(of.diagonal(product).sum())
        back = _Skipping(of, _BACK * accuracy / (occupation * self._size_of_z))
        d = self._transformed(back, x, 1)
        weighted_d = self._transformed(back, weighted_x, 1) if weighted else None
        bound = occupation * self._spread * (norm / states.gap + states.wrong)
        return {
            "density": d, "weighted": weighted_d, "states": states, "energy": energy * occupation,
            "error": error, "bound": bound, "residual": most, "products": len(of.steps),
            "occupation": occupation,
        }

    def _plan(self, h: Tensor, number: int, given: Any) -> Expansion | None:
        """Steps for a matrix near that of the call before: by Weyl's theorem no state has moved
        farther than a norm of the difference.
        """
        before, wanted_before, states = self._plans.get(number, (h, None, None))
        if states is None or states.expansion is None or wanted_before != given:
            return None
        of, kt = self._matrices(h), given[2]
        change = sparse.add(h, before, beta=-1) if is_sparse(h) else h - before
        moved = max(abs(x) for x in of.gershgorin(change))
        spectrum = _spectrum(of, h)
        if states.coefficients is not None:
            return planned(spectrum, wide(kt, spectrum, states.mu)) if moved < REACH * kt else None
        window = states.homo + moved, states.lumo - moved
        if window[1] - window[0] < 0.2 * states.gap:
            return None
        return planned(spectrum, window, max(1e-2 * self.accuracy, 1e-13))

    def _transformed(self, by: "_Skipping", a: Tensor, number: int) -> Tensor:
        """Z^T A Z, or with ``number`` 1 Z A Z^T."""
        if self._z is None:
            return a
        z, zt = self._z if number == 0 else self._z[::-1]
        half = by.product(zt, by.operand(a), symmetric=False)
        return by.product(half, z)[0]

    def _parts(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """A - A^T and (A + A^T) / 2."""
        if is_sparse(a):
            mirror = sparse.transpose(a)
            return sparse.add(a, mirror, beta=-1), sparse.add(a, mirror, alpha=0.5, beta=0.5)
        return a - a.mT, (a + a.mT) / 2

    def _put_together(self, spins, focks, F, is_open, weighted, mus, kt) -> Density:
        forms = self._forms

        def back(name):
            found = [forms.given_back(x[name], f) for x, f in zip(spins, focks * 2)]
            if not is_open:
                return found[0]
            if isinstance(found[0], Tensor) and not is_sparse(found[0]):
                return torch.stack(found)
            if hasattr(found[0], "tobsr") or is_sparse(found[0]):
                return found
            import numpy

            return numpy.stack(found)

        for x in spins:
            if self._z is not None:
                pass
        density = [x["density"] for x in spins]
        scale = spins[0]["occupation"]
        states = [x["states"] for x in spins]
        pick = (lambda values: tuple(values)) if is_open else (lambda values: next(iter(values)))
        electrons = sum(x["states"].count for x in spins) * scale
        energy = sum(x["energy"] for x in spins)
        entropy = sum(x.entropy for x in states) * scale
        free = energy - kt * entropy
        out = back("density")
        return Density(
            density=_times(out, scale), energy=energy, free_energy=free, entropy=entropy,
            chemical_potential=pick(x.mu for x in states), homo=pick(x.homo for x in states),
            lumo=pick(x.lumo for x in states), electrons=electrons,
            energy_weighted=_times(back("weighted"), scale) if weighted else None,
            error=max(x["error"] for x in spins), bound=max(x["bound"] for x in spins),
            residual=max(x["residual"] for x in spins), products=sum(x["products"] for x in spins),
        )


_SHARE, _EARLY, _BASES, _BACK = 0.1, 10.0, 0.01, 0.05


def _times(a, scale):
    return [x * scale for x in a] if isinstance(a, list) else a * scale


def _largest(a: Tensor) -> Tensor:
    return (a.values() if is_sparse(a) else a).abs().amax()


def _row_norms(a: Tensor) -> Tensor:
    """Sums of squares of rows."""
    if not is_sparse(a):
        return a.square().sum(1)
    from ..sparse.blocks import read
    blocks = read(a, "a", "linalg")
    sums = blocks.values.new_zeros(blocks.rows, blocks.edge)
    return sums.index_add_(0, blocks.row_of(), blocks.values.square().sum(2)).flatten()


def _inverse_factor(s: Tensor) -> Tensor:
    """Stand-in: Z with Z^T S Z = 1 by Cholesky."""
    dense = s if not is_sparse(s) else sparse.to_dense(s)
    pad = dense.diagonal() == 0
    dense = dense + torch.diag(pad.double())
    low = torch.linalg.cholesky(dense)
    z = torch.linalg.solve_triangular(low.mT, torch.eye(len(dense), dtype=dense.dtype, device=dense.device), upper=True)
    z = z - torch.diag(pad.double())
    return z.contiguous() if not is_sparse(s) else sparse.from_dense(z, s.values().shape[-1], drop=1e-13)


def _occupations(size, electrons, spin, mu, temperature):
    """Electrons and chemical potentials of alpha and beta."""
    if (electrons is None) == (mu is None):
        raise ValueError(f"electrons or chemical_potential must be given; got {'neither' if mu is None else 'both'}")
    if mu is not None:
        mus = tuple(mu) if isinstance(mu, (tuple, list)) else (mu, mu)
        for x in mus:
            check_number(x, "chemical_potential")
        return (None, None), tuple(float(x) for x in mus)
    if isinstance(electrons, (tuple, list)):
        counts = tuple(float(x) for x in electrons)
    else:
        total = float(electrons)
        if spin is None:
            spin = total % 2 if total == int(total) else 0
        counts = (total + spin) / 2, (total - spin) / 2
    for x in counts:
        if not 0 <= x <= size:
            raise ValueError(f"electrons must be from 0 to {size} of each spin; got {counts[0]:g} and {counts[1]:g}")
        if not temperature and x != int(x):
            raise NotConverged(f"expected whole numbers of electrons of each spin at zero temperature; got {counts[0]:g} and {counts[1]:g}")
    return counts, (None, None)


def _check_accuracy(accuracy: float) -> None:
    check_number(accuracy, "accuracy")
    if not 0 < accuracy < 0.1:
        raise ValueError(f"accuracy must be above 0 and below 0.1; got {accuracy}")

DEBUG=False
