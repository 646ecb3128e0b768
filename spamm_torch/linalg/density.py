"""The density matrix of a molecule from its Fock and overlap matrices, by products alone."""

import functools
import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import sparse
from .._arguments import check_number, shown
from ..sparse.blocks import is_sparse, read
from ..spatial import spatial_order
from .expansion import (
    BASE,
    REACH,
    ROOM,
    TAIL,
    ZOOMED,
    Expansion,
    Fermi,
    edges,
    expansion_for,
    fermi_window,
    in_factors,
)
from .inverses import inverse_factor
from .matrices import Matrices, NotConverged, Operand, norm_of

BOLTZMANN = 3.166811563455546e-6  # hartree per kelvin (CODATA 2018)
_EPS = torch.finfo(torch.float64).eps
_SMALL = 2048  # functions up to which CUDA takes torch's own products
_MOST_STEPS, _TRIES = 120, 4
_SLOPE = 10  # kT over which a Fermi function changes, as errors of X see it
# Absolute errors of products, in Frobenius norm, over the accuracy: of steps whose errors stay, of
# steps before these times the gap, of H, of D.
_LAST, _EARLY, _OF_H, _OF_D = 0.05, 0.5, 0.01, 0.05


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
    residual: float
    products: int


# ---- Products -----------------------------------------------------------------------------------


class _Products:
    """Products that may each have an absolute error: in Frobenius norm, times a gap.

    Without one they are torch's own, and the host decides nothing: for graphs and derivatives. So
    are those of small matrices on CUDA.
    """

    def __init__(self, of: Matrices, error: float | None):
        self.of, self.error = of, error

    def is_exact(self, a: Tensor) -> bool:
        is_small = a.is_cuda and not self.of.is_sparse and len(a) <= _SMALL
        return is_small or self.error is None

    def operand(self, a: Tensor) -> Operand:
        return Operand(a, norm_of(a)) if self.is_exact(a) else self.of.operand(a)

    def transposed(self, a: Tensor) -> Operand:
        mirrored = self.of.transposed(a)
        return self.operand(mirrored if self.of.is_sparse else mirrored.contiguous())

    def product(
        self,
        x: Operand,
        y: Operand,
        added: Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        gap: float = 1.0,
        symmetric: bool = True,
    ) -> Operand:
        no_loss = self.error is None or self.is_exact(x.matrix)
        loss = None if no_loss else (self.error or 0.0) * gap / abs(alpha)
        options: dict[str, Any] = {"symmetric": symmetric, "alpha": alpha, "beta": beta}
        return self.of.product("X Y", x, y, loss=loss, added=added, **options)

    def shifted(self, a: Tensor, scale: float, shift: float) -> Operand:
        return self.operand(self.of.shifted(a, scale, shift))

    def expand(self, h: Tensor, expansion: Expansion) -> tuple[Tensor, Tensor]:
        """X behind an expansion; the trace and the norm of each V."""
        v, forms, sums = self.shifted(h, *expansion.start()), iter(expansion.forms), []
        while True:
            sums.append(torch.stack((v.matrix.diagonal().sum(), v.norms)))
            if (form := next(forms, None)) is None:
                return self.of.shifted(v.matrix, 1.0, expansion.shifts[-1]), torch.stack(sums)
            v = self.product(v, v, v.matrix, *form)


def _chebyshev(by: _Products, t: Operand, degree: int) -> tuple[list[Operand], list[Operand]]:
    """T_1 ... T_8, and T_8, T_16 ... up to a degree: T_(m + n) = 2 T_m T_n - T_(m - n)."""
    one = by.of.identity(t.matrix)

    def upto(first: Operand, most: int) -> list[Operand]:
        powers = [first]
        for number in range(2, most + 1):
            high, low = powers[(number + 1) // 2 - 1], powers[number // 2 - 1]
            added = one if high is low else first.matrix
            powers.append(by.product(high, low, added, 2.0, -1.0, _LAST / 64))
        return powers

    base = upto(t, BASE)
    return base, upto(base[-1], degree // BASE)


def _weighted_sums(rows: list[list[float]], base: list[Tensor], one: Tensor) -> list[Tensor]:
    """Sums of 1 and matrices, with each row of weights."""
    if not is_sparse(one):
        weights = torch.tensor(rows, dtype=one.dtype, device=one.device)
        return list(torch.tensordot(weights, torch.stack((one, *base)), 1))
    sums = []
    for row in rows:
        total = one * row[0]
        for weight, matrix in zip(row[1:], base, strict=True):
            total = sparse.add(total, matrix, beta=weight)
        sums.append(total)
    return sums


def _polynomial(
    by: _Products, base: list[Operand], giants: list[Operand], coefficients: list[float]
) -> Tensor:
    """The sum of c_k T_k: of T_(8 j) times sums of T_0 ... T_7."""
    one = by.of.identity(base[0].matrix)
    parts = _weighted_sums(in_factors(coefficients), [x.matrix for x in base[:-1]], one)
    total = parts[0]
    for giant, part in zip(giants, parts[1:], strict=True):
        total = by.product(giant, by.shifted(part, 1.0, 0.0), total, 1.0, 1.0, _LAST).matrix
    return total


def _moments(of: Matrices, base: list[Operand], giants: list[Operand]) -> Tensor:
    """The traces of all T_k: 2 tr(T_m T_n) = tr T_(m + n) + tr T_(m - n)."""
    small, large = [x.matrix for x in base[:-1]], [x.matrix for x in giants]
    if of.is_sparse:
        inner = [[float(sparse.inner(x, y)) for y in small] for x in large]
    else:
        inner = (torch.stack(large).flatten(1) @ torch.stack(small).flatten(1).mT).tolist()
    first = torch.stack([of.diagonal(x).sum() for x in (*small, *large)]).tolist()
    traces = [float(of.size), *first[: len(small)]]
    for row, trace in zip(inner, first[len(small) :], strict=True):
        traces.append(trace)
        for i, number in enumerate(row, 1):
            traces.append(2 * number - traces[len(traces) - 2 * i])
    return torch.tensor(traces, dtype=torch.float64, device="cpu")


# ---- One spin -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Target:
    """The occupation of one spin: so many electrons, or a chemical potential; kT; and the accuracy
    of X.

    ``window``: energies between which there is no state, as far as a plan's call before proved.
    """

    count: float | None
    mu: Any  # a number where count is None
    kt: float
    accuracy: float
    window: tuple[float, float]


@dataclass
class _States:
    """The projector on the occupied states, or the Fermi function, in the orthogonal basis.

    Attributes:
        x: the polynomial with these coefficients of 2 X - 1, or X itself, behind the expansion.
        gap: what errors of H are divided by. wrong: how far eigenvalues of x may be from right.
        row: the largest squared norm of a row of Z X. scale: the share of the allowed error of X
            that the products were given.
    """

    x: Tensor
    count: float
    mu: float
    gap: float = math.inf
    wrong: float = 0.0
    entropy: float = 0.0
    homo: Any = None
    lumo: Any = None
    expansion: Expansion | None = None
    coefficients: list[float] | None = None
    row: float = 0.0
    scale: float = 1.0

    @property
    def of_overlap(self) -> float:
        """The errors of X over those of Z^T S Z = 1: e / (e - e') of two states."""
        homo, lumo = (abs(self.mu), 0.0) if self.homo is None else (self.homo, self.lumo)
        return 1 + max(0.0, homo, -lumo) / self.gap if self.gap < math.inf else 1.0


def _expand(
    by: _Products, h: Tensor, target: _Target, plan: Expansion | None, expansion: Expansion
) -> tuple[Tensor, list[float]]:
    """X behind the steps of a plan, or of those that the trace or the chemical potential decides,
    until they separate the states or spread those around it. And tr(X - X^2) before each.
    """
    of, size = by.of, by.of.size
    residuals: list[float] = []
    enough = max(1e-4 * target.accuracy, 8 * _EPS * size)
    gaps = plan.gaps() if plan else [min(1.0, 0.02 * 1.25**k) for k in range(_MOST_STEPS + 1)]
    if plan and by.is_exact(h):
        if plan.graph is None:  # the host does nothing between the steps
            exact = _Products(Matrices(of.function, h, of.block, None, None), None)
            step = functools.partial(exact.expand, expansion=plan)
            usual = torch.inference_mode(False), torch.autocast("cuda", enabled=False)
            with torch.cuda.device(h.device), usual[0], usual[1]:
                plan.graph = torch.cuda.make_graphed_callables(step, (h.clone(),))
        x, sums = plan.graph(h)
        of.steps += [(("a V^2 + b V", h.dtype, None, 0.0), None)] * len(plan.steps)
        for (trace, norm), shift in zip(sums.tolist(), expansion.shifts, strict=True):
            residuals.append(_residual(trace, norm, shift, size)[1])
        return x.clone(), residuals
    v = by.shifted(h, *expansion.start())
    while True:
        number = len(residuals)
        trace, residual = _residual(*of.trace_and_norm(v), expansion.shifts[number], size)
        residuals.append(residual)
        if plan is None and number < _MOST_STEPS:
            last = [abs(x) for x in residuals[-3:]]
            if last[-1] <= enough or (len(last) == 3 and last[0] < 0.01 and last[2] > last[0] / 4):
                return v.matrix, residuals
            if target.kt:
                width = (TAIL + REACH) * target.kt
                middle = max(expansion.energy(0.5, number), expansion.lowest + ROOM * width)
                middle = min(middle, expansion.highest - ROOM * width)
                expansion.window = middle - width, middle + width
                if expansion.gaps()[-1] > ZOOMED:
                    expansion.separates = False
                    return v.matrix, residuals
            if (count := target.count) is None:
                squares = expansion.images(target.mu)[-1] > 0.5
            else:
                squares = abs(trace - residual - count) < abs(trace + residual - count)
            expansion.append(squares)
        if number == len(expansion.steps):
            shift = expansion.shifts[-1]
            return of.shifted(v.matrix, 1.0, shift) if shift else v.matrix, residuals
        # Later steps mend what errors do to occupied states alone, or to empty ones alone.
        gap = _EARLY * gaps[number] if residuals[-1] > 0.05 else _LAST
        v = by.product(v, v, v.matrix, *expansion.forms[number], gap)


def _residual(trace: float, norm: float, shift: float, size: int) -> tuple[float, float]:
    """tr(X) and tr(X - X^2) of X = V + shift * 1, from tr(V) and norm(V)."""
    square = norm**2 + shift * (2 * trace + shift * size)
    trace += shift * size
    return trace, trace - square


def _states(by: _Products, h: Tensor, target: _Target, plan: Expansion | None) -> _States:
    """Occupies states by a plan that a call before makes likely, else by steps found on the way."""
    of, kt, count, mu = by.of, target.kt, target.count, target.mu
    spectrum = _spectrum(of, h)
    is_none, is_all = count == 0, count == of.size
    if not kt and mu is not None:
        is_none, is_all = mu <= spectrum[0], mu >= spectrum[1]
    if is_none or is_all:
        ends = -math.inf if is_none else math.inf
        return _States(of.identity(h) * float(is_all), of.size * is_all, ends if mu is None else mu)
    around, window = fermi_window(kt, spectrum, mu or 0.0) if kt else (spectrum, spectrum)
    if kt and (mu is not None or window == spectrum):
        plan = expansion_for(around, window)
    margin = ROOM * (TAIL + REACH) * kt
    for number in range(8):
        expansion = plan or Expansion(spectrum[0] - margin, spectrum[1] + margin)
        x, residuals = _expand(by, h, target, plan, expansion)
        if expansion.separates:
            states = _projector(by, x, target, plan, expansion, residuals)
            if states is not None and states.gap > 2 * TAIL * kt:
                return states
            if not kt and plan is None:
                where = f"above {count:g} electrons of a spin" if mu is None else f"around {mu:g}"
                raise NotConverged(
                    f"expected a gap {where} that the accuracy resolves; got tr(X - X^2) = "
                    f"{residuals[-1]:.2g} after {len(expansion.steps)} steps"
                )
            middle = expansion.energy(0.5, len(expansion.steps))
        else:
            states = _fermi(by, x, target, expansion)
            if states.wrong < math.inf:
                return states
            middle = states.mu
        was_guessed = number == 0 and plan is not None
        plan = None if was_guessed else expansion_for(*fermi_window(kt, spectrum, middle))
    raise NotConverged(
        f"expected a chemical potential near {middle:.6g} for {count} electrons of a spin; got none"
    )


def _spectrum(of: Matrices, h: Tensor) -> tuple[float, float]:
    low, high = of.gershgorin(h)
    margin = 1e-9 * (1 + abs(low) + abs(high))
    return low - margin, high + margin


def _projector(
    by: _Products,
    x: Tensor,
    target: _Target,
    plan: Expansion | None,
    expansion: Expansion,
    residuals: list[float],
) -> _States | None:
    """The projector; None where the steps have not separated as many states as the target has."""
    of = by.of
    trace = float(of.diagonal(x).sum())
    count = round(trace) if target.count is None else target.count
    if not (abs(residuals[-1]) < 0.01 and abs(trace - count) < 0.01):
        return None
    error = by.error + _EPS * math.sqrt(of.size)
    homo, lumo = edges(expansion, residuals, error * math.sqrt(of.size))
    if plan:  # no state is in its window
        homo, lumo = min(homo, target.window[0]), max(lumo, target.window[1])
    expansion = replace(expansion, window=(homo, lumo))
    wrong = min(1 - expansion.gaps()[-1], abs(residuals[-1])) + 2 * _LAST * error
    mu = (homo + lumo) / 2 if target.mu is None else target.mu
    return _States(x, trace, mu, lumo - homo, wrong, 0.0, homo, lumo, expansion)


def _fermi(by: _Products, x: Tensor, target: _Target, expansion: Expansion) -> _States:
    """The Fermi function. Where the chemical potential is not in the window's middle, the error is
    infinite, and ``mu`` is where it may be instead.
    """
    of, kt = by.of, target.kt
    enough = max(target.accuracy / 10, 2 * math.exp(-TAIL))
    fermi = Fermi(expansion, kt, enough)
    t = by.shifted(x, 2.0, -1.0)
    base, giants = _chebyshev(by, t, fermi.degree)
    moments = _moments(of, base, giants)
    mu = target.mu
    if target.count is not None:
        mu = fermi.potential(moments, target.count)
    coefficients, error = fermi.polynomial(mu)
    count = fermi.electrons(moments, mu)
    if error > enough or (target.count is not None and abs(count - target.count) > 1e-6):
        return _States(x, count, mu, wrong=math.inf)
    x = _polynomial(by, base, giants, coefficients)
    trace, entropy = float(of.diagonal(x).sum()), fermi.entropy(moments, mu)
    return _States(x, trace, mu, _SLOPE * kt, error, entropy, None, None, expansion, coefficients)


# ---- Gradients ----------------------------------------------------------------------------------


def _response(of: Matrices, spin: "_Spin", g: Tensor) -> Tensor:
    """The derivative of X, which is its own adjoint, applied to a symmetric G: the steps of X again
    with their derivatives (A. M. N. Niklasson, M. Challacombe, "Density matrix perturbation
    theory", Phys. Rev. Lett. 92, 193001 (2004)).
    """
    by, x = _Products(of, None), spin.states.x
    expansion, coefficients = spin.states.expansion, spin.states.coefficients
    if expansion is None:
        return torch.zeros_like(g)
    if coefficients is None:
        spectrum = expansion.lowest, expansion.highest
        expansion = expansion_for(spectrum, expansion.window, 1e-13)

    def function(matrix: Tensor) -> Tensor:
        x, _ = by.expand(matrix, expansion)
        if coefficients is None:
            return x
        chebyshev = _chebyshev(by, by.shifted(x, 2.0, -1.0), len(coefficients) - 1)
        return _polynomial(by, *chebyshev, coefficients)

    change: Tensor = torch.func.jvp(function, (spin.h,), (g,))[1]
    if coefficients is not None and not spin.is_fixed:  # mu moves so that the trace does not
        slope = x - x @ x
        change = change - slope * (change.trace() / slope.trace())
    return change


class _Differentiable(torch.autograd.Function):
    """Density matrices and the free energy of dense tensors, in the caller's order."""

    @staticmethod
    def forward(ctx: Any, solver: "DensitySolver", spins: "list[_Spin]", *given: Tensor) -> Any:
        ctx.solver, ctx.spins = solver, spins
        free = torch.tensor(sum(x.free for x in spins), dtype=torch.float64, device=given[0].device)
        return (*(solver.forms.given_back(x.density, given[0]) for x in spins), free)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        solver, spins = ctx.solver, ctx.spins
        of_f, of_s = [], torch.zeros_like(spins[0].h)
        z, zt = (
            (torch.eye(len(of_s)).to(of_s),) * 2 if solver.z is None else (x for x, _ in solver.z)
        )
        for spin, grad in zip(spins, grads[:-1], strict=True):
            g = solver.forms.ordered(grad.to(of_s))
            g = (g + g.mT) / 2
            response = _response(solver.forms.of(spin.h), spin, zt @ g @ z) * spin.occupation
            into_f = z @ response @ zt
            # Z' = (1 - S^-1 dS / 2) Z is an inverse factor of S + dS.
            lost = z @ (zt @ g @ spin.density + response @ spin.h @ zt)
            of_s -= (lost + lost.mT) / 2 + grads[-1] * spin.weighted
            of_f.append(into_f + grads[-1] * spin.density)
        back = [solver.forms.given_back(x, grads[-1]) for x in (*of_f, of_s)]
        return (None, None, *(back if ctx.needs_input_grad[-1] else (*back[:-1], None)))


# ---- Forms of matrices --------------------------------------------------------------------------


@dataclass
class _Forms:
    """Matrices as callers have them, and as they are kept: in an order, dense or block-sparse."""

    size: int
    order: Tensor | None
    block: int
    device: torch.device
    is_sparse: bool

    def __post_init__(self) -> None:
        self.back = None if self.order is None else self.order.argsort()

    def of(self, like: Tensor) -> Matrices:
        size = self.size if is_sparse(like) else None
        return Matrices("DensitySolver", like, self.block, size, None)

    def kept(self, a: Any, name: str) -> Tensor:
        """Its symmetric part: it is checked to be finite and symmetric."""
        matrix = self.ordered(_tensor(a, name, self.block).to(self.device, torch.float64), name)
        matrix = self.of(matrix).kept(matrix, name)
        if self.is_sparse and not is_sparse(matrix):
            matrix = sparse.from_dense(matrix, self.block, drop=_EPS * _largest(matrix))
        return matrix

    def ordered(self, a: Tensor, name: str = "A") -> Tensor:
        edge = a.values().shape[-1] if is_sparse(a) else 1
        shape = tuple(a.shape)
        if len(shape) != 2 or shape[0] != shape[1] or not self.size <= shape[0] < self.size + edge:
            raise RuntimeError(f"{name} must be {self.size} x {self.size}; got shape {shape}")
        if is_sparse(a):
            if self.is_sparse and edge == self.block:
                return a if self.order is None else sparse.permute(a, self.order)
            a = sparse.to_dense(a, (self.size, self.size))
        return a if self.order is None else a[self.order][:, self.order]

    def given_back(self, a: Tensor, like: Any) -> Any:
        """In the order and form of ``like``."""
        if is_sparse(a):
            a = a if self.back is None else sparse.permute(a, self.back)
            if hasattr(like, "tobsr"):
                return sparse.to_scipy(a, (self.size, self.size)).asformat(like.format)
            if is_sparse(like):
                return a.to(like.device)
            a = sparse.to_dense(a, (self.size, self.size))
        elif self.back is not None:
            a = a[self.back][:, self.back]
        if hasattr(like, "tobsr"):
            return type(like)(a.numpy(force=True))
        if is_sparse(like):
            return sparse.from_dense(a, like.values().shape[-1]).to(like.device)
        return a.to(like.device) if isinstance(like, Tensor) else a.numpy(force=True)


def _tensor(a: Any, name: str, block: int) -> Tensor:
    dtype = getattr(a, "dtype", None)
    if getattr(dtype, "is_complex", getattr(dtype, "kind", "") == "c"):  # of torch, else of numpy
        raise TypeError(f"{name} must be real; got {str(dtype).removeprefix('torch.')}")
    if isinstance(a, Tensor):
        if a.layout not in (torch.strided, torch.sparse_bsr):
            raise TypeError(
                f"{name} must be dense, or sparse_bsr (sparse.from_sparse makes it); got {a.layout}"
            )
        return a.detach()
    if hasattr(a, "tobsr"):
        return sparse.from_scipy(a.astype("float64"), block)
    if not hasattr(a, "__array__"):
        raise TypeError(
            f"{name} must be an array of numpy, a sparse matrix of scipy or a tensor; got "
            f"{type(a).__name__}"
        )
    # Any order of bytes and direction of strides will do.
    return torch.tensor(a.__array__().astype("float64", order="C"), device="cpu")


def _permutation(order: Any) -> Tensor:
    """An order of functions as int64, each number once."""
    try:
        numbers = [*map(operator.index, order.tolist() if hasattr(order, "tolist") else order)]
    except TypeError:
        numbers = [-1]
    if sorted(numbers) != [*range(len(numbers))]:
        raise ValueError(f"order must name each function once, 0 to N - 1; got {shown(order)}")
    return torch.tensor(numbers, device="cpu")


# ---- The solver ---------------------------------------------------------------------------------


@dataclass
class _Spin:
    """A density matrix of one spin, or of two that are alike, in the order kept."""

    states: _States
    h: Tensor
    density: Tensor
    weighted: Tensor | None
    energy: float
    error: float
    residual: float
    products: int
    occupation: int
    kt: float
    is_fixed: bool

    @property
    def free(self) -> float:
        states = self.states
        free = self.energy - self.kt * states.entropy * self.occupation
        if self.is_fixed and states.count:
            free -= states.mu * states.count * self.occupation
        return free


class DensitySolver:
    """Density matrices for Fock matrices that share an overlap matrix, by products alone.

    Example:
        >>> solver = DensitySolver(overlap)  # mf.get_ovlp() of pyscf, say
        >>> found = solver(fock, electrons=256)
        >>> print(f"{found.energy:.3f}, gap from {found.homo:.2f} to {found.lumo:.2f}")
        -341.165, gap from -0.87 to 0.89

    Args:
        S: the overlap matrix, (N, N), real: an array of numpy, a sparse matrix of scipy, or a
            tensor, dense or ``torch.sparse_bsr``. None: the functions are orthogonal. Of a sparse S
            (else of a sparse first F) products are of stored blocks alone.
        positions: (N, 3), the nucleus of each function: :func:`sparse.spatial_order` puts what
            is near side by side, those at one place together, and more can be skipped. Of no
            consequence for the result.
        order: (N,), instead of positions: the functions' order.
        block: edge of blocks. None: that of a block-sparse matrix, 32 on CPUs, else 64.
        accuracy: what the largest error of an entry of D may be.
        size: N, where a ``torch.sparse_bsr`` matrix is padded.
        device: on which to compute. None: that of S, or of the first F.

    Raises:
        NotConverged: S is not positive definite.
    """

    def __init__(
        self,
        S: Any = None,
        *,
        positions: Any = None,
        order: Any = None,
        block: int | None = None,
        accuracy: float = 1e-8,
        size: int | None = None,
        device: torch.device | str | None = None,
    ):
        if positions is not None and order is not None:
            raise ValueError("positions or order may be given; got both")
        self.accuracy = _checked_accuracy(accuracy)
        if positions is not None:
            positions = torch.as_tensor(positions, device=getattr(positions, "device", "cpu"))
            order = spatial_order(positions, positions.unique(dim=0, return_inverse=True)[1])
        self._given = block, size, device
        self._order = None if order is None else _permutation(order)
        self._forms: _Forms | None = None
        self._last: dict[int, tuple[Tensor, Any, _States]] = {}
        self._plans: dict[int, Expansion] = {}
        self._overlap = S if isinstance(S, Tensor) and S.requires_grad else None
        self.z: tuple[Operand, Operand] | None = None
        # The largest squared norm of a row of Z, and its norm.
        self._row, self._norm, self._off = 1.0, 1.0, 0.0
        if S is not None:
            self._open(S, "S")
            self._factorize(self.forms.kept(S, "S"))

    @property
    def forms(self) -> _Forms:
        if self._forms is None:
            raise RuntimeError("a solver without S must have been called before")
        return self._forms

    def _open(self, a: Any, name: str) -> None:
        """Takes size, block, storage and device from the first matrix."""
        block, size, device = self._given
        shape = tuple(getattr(a, "shape", ()))
        if len(shape) != 2:
            raise RuntimeError(f"{name} must be a matrix; got shape {shape}")
        order = self._order
        size = size or (shape[0] if order is None else len(order))
        device = torch.device(device or (a.device if isinstance(a, Tensor) else "cpu"))
        if is_sparse(a) and a.layout == torch.sparse_bsr:
            block = block or a.values().shape[-1]
        block = block or (32 if device.type == "cpu" else 64)
        order = None if order is None else order.to(device)
        is_stored = is_sparse(a) or hasattr(a, "tobsr")
        self._forms = _Forms(size, order, block, device, is_stored)

    def _factorize(self, s: Tensor) -> None:
        of = self.forms.of(s)
        options: dict[str, Any] = {"block": of.block, "size": of.size if of.is_sparse else None}
        max_error, by = 1e-3 * self.accuracy, _Products(of, 0.0)
        for _ in range(2):
            try:
                factor = inverse_factor(s, max_error=max_error, **options)
            except NotConverged:  # then what rounding allows: a result's error tells
                factor = inverse_factor(s, max_error=0.0, **options)
            z, self._off = factor.matrix, factor.residual
            self._row, self._norm = float(_row_squares(z).max()), float(norm_of(z))
            max_error = 0.02 * self.accuracy / math.sqrt(self._row)
            if self._off <= 5 * max_error:
                break
        self._s, self.z = by.operand(s), (by.operand(z), by.transposed(z))

    def __call__(
        self,
        F: Any,
        electrons: Any = None,
        *,
        spin: float | None = None,
        mu: Any = None,
        temperature: float = 0.0,
        accuracy: float | None = None,
        energy_weighted: bool = False,
    ) -> Density:
        """The density matrix of the states of F C = S C E.

        A call uses what the one before has learned of the gap: of a similar F it takes about half
        as many products. At a temperature mu is that of each spin by itself.

        Args:
            F: (N, N), of any form that S may have, or one of each spin: (2, N, N) or a list of two.
                The result has its form, order and device, float64.
            electrons: of both spins, from 0 to 2 N, or of each, as a pair. A number of one spin
                that is not whole takes a temperature.
            spin: alpha less beta electrons. None: 0 if ``electrons`` is even, 1 if it is odd.
            mu: the chemical potential, or that of each spin, instead of electrons.
            temperature: of the electrons in kelvin, for F in hartree. (For F in another unit the
                temperature is kT in it over 3.1668e-6: in eV 27.2114 times the kelvin.)
            accuracy: what the largest error of an entry of D may be. None: the solver's.
            energy_weighted: give this density, too: forces need it.

        Raises:
            NotConverged: the accuracy is not reached; at zero temperature as where there is no gap.
        """
        accuracy = self.accuracy if accuracy is None else _checked_accuracy(accuracy)
        check_number(temperature, "temperature")
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature must be from 0 kelvin on; got {temperature}")
        is_pair = isinstance(F, (list, tuple)) or getattr(F, "ndim", 2) == 3
        focks = list(F) if is_pair else [F]
        if is_pair and len(focks) != 2:
            raise ValueError(f"F must be one matrix or two of alpha and beta; got {len(focks)}")
        if self._forms is None:
            self._open(focks[0], "F")
        occupations = _occupations(self.forms.size, electrons, spin, mu, temperature)
        is_open = is_pair or occupations[0] != occupations[1]
        has_gradient = torch.is_grad_enabled() and (
            self._overlap is not None or any(getattr(f, "requires_grad", False) for f in focks)
        )
        if has_gradient and self.forms.is_sparse:
            raise RuntimeError("block-sparse matrices have no gradient: expected dense storage")
        kt, spins = BOLTZMANN * temperature, []
        for number in range(1 + is_open):
            f = self.forms.kept(focks[number % len(focks)], "F")
            given = (*occupations[number], kt)
            occupation = 1 if is_open else 2
            weighted = energy_weighted or has_gradient
            how = accuracy / occupation, number, occupation, weighted
            spins.append(self._solve(f, given, *how))
        density, energy, free = self._outputs(focks, spins, has_gradient)
        weighted_density = None
        if energy_weighted:
            back = [self.forms.given_back(x.weighted, focks[0]) for x in spins]
            weighted_density = _joined(back)

        def each(values: list[Any]) -> Any:
            return tuple(values) if is_open else values[0]

        states = [x.states for x in spins]
        return Density(
            density=_joined(density),
            energy=energy,
            free_energy=free,
            entropy=sum(x.states.entropy * x.occupation for x in spins),
            chemical_potential=each([x.mu for x in states]),
            homo=each([x.homo for x in states]),
            lumo=each([x.lumo for x in states]),
            electrons=sum(x.states.count * x.occupation for x in spins),
            energy_weighted=weighted_density,
            error=max(x.error for x in spins),
            residual=max(x.residual for x in spins),
            products=sum(x.products for x in spins),
        )

    def _outputs(
        self, focks: list[Any], spins: list[_Spin], has_gradient: bool
    ) -> tuple[list[Any], Any, Any]:
        """Density matrices, energy and free energy."""
        energy, free = sum(x.energy for x in spins), sum(x.free for x in spins)
        if not has_gradient:
            return [self.forms.given_back(x.density, focks[0]) for x in spins], energy, free
        pairs = [focks[number % len(focks)] for number in range(len(spins))]
        *densities, free = _Differentiable.apply(self, spins, *pairs, self._overlap)
        energy = free
        if spins[0].kt or spins[0].is_fixed:
            energy = sum((d * f).sum() for d, f in zip(densities, pairs, strict=True))
        return densities, energy, free

    def _solve(
        self,
        f: Tensor,
        given: tuple[float | None, float | None, float],
        accuracy: float,
        number: int,
        occupation: int,
        is_weighted: bool,
    ) -> _Spin:
        """Solves one spin to an accuracy of D / occupation."""
        kt, of = given[2], self.forms.of(f)
        _, given_before, last = self._last.get(number, (None, None, None))
        gap, row = (last.gap, last.row) if last else (_SLOPE * kt or 1.0, min(self._row, 1.0))
        # The scale that met the accuracy in the call before does so again: a whole run less.
        scale = last.scale if last and given_before == given else 0.2 if kt else 1.0
        of_h, h = math.inf, f
        back = _Products(of, _OF_D * accuracy / self._norm)
        for _ in range(_TRIES):
            allowed = accuracy / self._growth(row, kt)  # what an error of X may be
            if of_h > (limit := _OF_H * allowed * min(1.0, 10 * gap)):
                of_h, h = limit, self._in_basis(_Products(of, limit / self._norm), f)
            by = _Products(of, allowed * scale)
            plan, window = self._plan(h, number, given, allowed)
            states = _states(by, h, _Target(*given, allowed, window), plan)
            gap, x = states.gap, by.operand(states.x)
            # X H is symmetric but for what mixes occupied and empty states.
            tight = _Products(of, 2 * _OF_H * allowed * min(gap, 1.0))
            product = tight.product(x, by.operand(h), symmetric=False)
            most = max(_largest(part) for _, part in of.with_mirrored(product[0]))
            half = x if self.z is None else back.product(self.z[0], x, symmetric=False)
            states.row = row = float(_row_squares(half[0]).max())
            states.scale = scale
            self._last[number] = (h, given, states)
            growth, mixed, off = self._growth(row, kt), 2 * most / gap, self._off
            if 2 * growth * states.of_overlap * off > accuracy / 8:
                share = _OF_H * allowed / states.of_overlap / self._norm
                off = self._off_occupied(_Products(of, share), x)
            rest = 2 * (states.wrong + of_h / gap + states.of_overlap * off)
            error = growth * (mixed + rest) + self._row * states.wrong**2 + 3 * _OF_D * accuracy
            if error <= accuracy:
                break
            scale *= min(0.3, 0.3 * allowed / mixed if mixed else 1.0)
        else:
            raise NotConverged(
                f"expected a density matrix to an accuracy of {accuracy * occupation:.2g}; reached "
                f"{error * occupation:.2g}, where the gap is {states.gap:.2g}"
            )
        d, weighted = x[0], of.symmetric_part(product[0]) if is_weighted else None
        if self.z is not None:  # of a projector Z X (Z X)^T: errors of empty states are squared
            right = self.z[1] if kt else back.transposed(half[0])
            d, _ = back.product(half, right)
            if is_weighted:
                weighted, _ = back.product(back.product(self.z[0], product, symmetric=False), right)
        weighted = weighted if weighted is None else weighted * occupation
        energy = float(of.diagonal(product[0]).sum()) * occupation
        numbers = energy, error * occupation, most, len(of.steps), occupation, kt
        return _Spin(states, h, d * occupation, weighted, *numbers, given[1] is not None)

    def _growth(self, row: float, kt: float) -> float:
        """The errors of an entry of D over those of X: the lengths of a row of Z and, but for a
        Fermi function, of Z X.
        """
        return self._row if kt else math.sqrt(self._row * max(row, 1e-4 * self._row))

    def _off_occupied(self, by: _Products, x: Operand) -> float:
        """The norm of (Z^T S Z - 1) X: most of Z^T S Z - 1 is between empty states."""
        assert self.z is not None
        lost = by.product(self._s, by.product(self.z[0], x, symmetric=False), symmetric=False)
        lost = by.product(self.z[1], lost, x[0], beta=-1.0, symmetric=False)
        return float(norm_of(lost[0]))

    def _in_basis(self, by: _Products, a: Tensor) -> Tensor:
        """Z^T A Z."""
        if self.z is None:
            return a
        z, zt = self.z
        return by.product(by.product(zt, by.operand(a), symmetric=False), z)[0]

    def _plan(
        self, h: Tensor, number: int, given: Any, allowed: float
    ) -> tuple[Expansion | None, tuple[float, float]]:
        """Steps for a matrix near the last one, and the window they are for: by Weyl's theorem no
        state, and no chemical potential, has moved farther than the norm of their difference.
        """
        before, given_before, states = self._last.get(number, (h, None, None))
        nothing = None, (math.inf, -math.inf)
        if states is None or states.expansion is None or given_before != given:
            self._plans.pop(number, None)
            return nothing
        of, kt, plan = self.forms.of(h), given[2], self._plans.get(number)
        change = sparse.add(h, before, beta=-1) if of.is_sparse else h - before
        moved, spectrum = max(map(abs, of.gershgorin(change))), _spectrum(of, h)
        margin = 0.02 * (spectrum[1] - spectrum[0])
        around = spectrum[0] - margin, spectrum[1] + margin
        if states.coefficients is not None:
            if moved > REACH * kt:
                return nothing
            window = fermi_window(kt, around, states.mu)[1]
            is_near = plan and abs(plan.window[0] - window[0]) + moved < 2 * kt
            if not (plan and is_near and plan.serves(spectrum, plan.window)):
                plan = expansion_for(*fermi_window(kt, around, states.mu))
        else:
            window = states.homo + moved, states.lumo - moved
            if window[1] - window[0] < 0.2 * states.gap:
                return nothing
            if not (plan and plan.separates and plan.serves(spectrum, window)):
                inner = 0.05 * (window[1] - window[0])
                inside = window[0] + inner, window[1] - inner
                plan = expansion_for(around, inside, max(1e-4 * allowed, 1e-13))
        self._plans[number] = plan
        return plan, window


def _largest(a: Tensor) -> float:
    return float(a.abs().amax()) if a.numel() else 0.0


def _row_squares(a: Tensor) -> Tensor:
    if not is_sparse(a):
        return a.square().sum(1)
    blocks = read(a, "a", "DensitySolver")
    sums = blocks.values.new_zeros(blocks.rows, blocks.edge)
    return sums.index_add_(0, blocks.row_of(), blocks.values.square().sum(2)).flatten()


def _joined(matrices: list[Any]) -> Any:
    """One matrix, or two stacked where their form can be."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    if is_sparse(first) or hasattr(first, "tobsr"):
        return matrices
    stacked = torch.stack([x if isinstance(x, Tensor) else torch.from_numpy(x) for x in matrices])
    return stacked if isinstance(first, Tensor) else stacked.numpy()


def _occupations(
    size: int, electrons: Any, spin: float | None, mu: Any, temperature: float
) -> list[tuple[float | None, float | None]]:
    """Electrons and chemical potential of each spin, one of which is None."""
    if (electrons is None) == (mu is None):
        got = "neither" if mu is None else "both"
        raise ValueError(f"electrons or mu must be given; got {got}")
    given, name = (mu, "mu") if electrons is None else (electrons, "electrons")
    pair = list(given) if isinstance(given, (tuple, list)) else None
    for x in [given] if pair is None else pair:
        check_number(x, name)
    if pair is not None and len(pair) != 2:
        raise ValueError(f"{name} must be one number or two of alpha and beta; got {len(pair)}")
    if electrons is None:
        pair = pair or [mu, mu]
        if spin is not None or not all(map(math.isfinite, pair)):
            raise ValueError(f"mu must be finite, and come without spin; got mu={mu}, spin={spin}")
        return [(None, float(x)) for x in pair]
    if pair is None:
        spin = float(electrons % 2 == 1) if spin is None else spin
        check_number(spin, "spin")
        pair = [(electrons + spin) / 2, (electrons - spin) / 2]
    elif spin is not None:
        raise ValueError("spin may be given with the electrons of both; got those of each")
    got = f"{pair[0]:g} and {pair[1]:g}"
    if not all(0 <= x <= size for x in pair):
        raise ValueError(f"electrons must be from 0 to {size} of each spin; got {got}")
    if not temperature and any(x % 1 for x in pair):
        raise NotConverged(
            f"expected whole numbers of electrons of each spin at zero temperature; got {got}"
        )
    return [(float(x), None) for x in pair]


def _checked_accuracy(accuracy: float) -> float:
    check_number(accuracy, "accuracy")
    if not 0 < accuracy < 0.1:
        raise ValueError(f"accuracy must be above 0 and below 0.1; got {accuracy}")
    return accuracy
