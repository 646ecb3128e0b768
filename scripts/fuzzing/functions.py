"""Functions of matrices against eigenvectors: answers judged by what was asked."""

import functools
import math
from unittest import mock

import torch

from fuzzing import space
from fuzzing.space import expect
from spamm_torch import linalg, sparse
from spamm_torch.linalg import inverses

_REFUSED = ("NaN", "infinity", "asymmetric", "one triangle", "no size")
FUNCTION = {
    "form": ("inverse_factor", "inverse_sqrt", "purify", "sign", "matrix_power"),
    "storage": ("dense", "block-sparse"),
    "dtype": ("float64", "float64", "float32"),
    "size": (40, 64, 33, 97, 130, 200),
    "condition": (1, 2, 0, 3, 4, 5, 6, 7, 8),
    "gap": (0, 1, 2, 3, 4, 5, 6),
    "levels": ("even", "one", "two"),
    "max_error": (1e-8, 0.0, 1e-6, 1e-10, 1e-12),
    "scale": (0, 0, 3, -5, 60, -60),
    "leaves": (False, True),
    "fault": (None,) * 8 + (*_REFUSED, "singular", "indefinite"),
    "seed": space.SEEDS,
}


def function(case, device):
    """A call of ``linalg``, and what is wrong with its answer."""
    dtype, size, name = space.DTYPES[case["dtype"]], case["size"], case["form"]
    dtype = torch.float64 if name == "purify" else dtype
    torch.backends.cuda.matmul.allow_tf32 = False  # cases of products change it
    spread = _spectrum(case)
    generator = torch.Generator().manual_seed(case["seed"])
    q = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    a = (q * spread) @ q.mT * 10.0 ** (case["scale"] / (6 if dtype == torch.float32 else 1))
    a = _spoilt((a + a.mT) / 2, case).to(dtype)
    exact, options, seen = a.double(), {"block": 32}, []
    given = a.to(device)
    if case["storage"] == "block-sparse":
        given = sparse.from_dense(given, 32)
        options = {} if case["fault"] == "no size" else {"size": size}
    options |= {"max_error": case["max_error"], "callback": lambda *of: seen.append(of)}
    more = {"purify": (2 * (size // 2),), "matrix_power": (3,)}.get(name, ())
    call = functools.partial(getattr(linalg, name), given, *more, **options)
    needs_symmetry = name != "matrix_power"
    refused = {"NaN", "infinity"} | ({"asymmetric", "one triangle"} if needs_symmetry else set())
    refused |= {"no size"} if needs_symmetry and case["storage"] != "dense" else set()
    try:
        with mock.patch.object(inverses, "_WHOLE", 0 if case["leaves"] else inverses._WHOLE):
            found = call()
    except linalg.NotConverged as error:
        return expect(not _is_within_reach(case, exact, dtype), f"NotConverged: {error}")
    except ValueError as error:
        return expect(case["fault"] in refused and not seen, f"{len(seen)} products, {error}")
    expect(case["fault"] not in refused, f"{case['fault']} is answered")
    x = (
        found.matrix
        if given.layout == torch.strided
        else sparse.to_dense(found.matrix, (size,) * 2)
    )
    _JUDGES[name](case, exact, x.double().cpu(), found, dtype)


def _spectrum(case):
    """Eigenvalues from 1 down to the condition or the gap; of half the states below 0."""
    size, is_positive = case["size"], case["form"].startswith("inverse")
    least = 10.0 ** -case["condition" if is_positive else "gap"]
    count = size if is_positive else size // 2
    levels = {
        "even": torch.logspace(0, math.log10(least), count, dtype=torch.float64),
        "one": torch.cat((torch.ones(count - 1), torch.tensor([least]))).double(),
        "two": torch.where(torch.arange(count) % 2 == 0, 1.0, least).double(),
    }[case["levels"]]
    if is_positive:
        return levels
    above = levels.flip(0)
    return torch.cat((-levels, above, above[-1:].expand(size - 2 * count)))


def _spoilt(a, case):
    """With the fault of a case."""
    fault = case["fault"]
    if fault in ("NaN", "infinity"):
        a[3, 5] = a[5, 3] = math.nan if fault == "NaN" else math.inf
    elif fault == "asymmetric":
        a[0, 1] += 0.1 * a.abs().max()
    elif fault == "one triangle":
        a = a.tril() + a.abs().max() * torch.ones_like(a).tril()
    elif fault in ("singular", "no size"):
        row = 5 if fault == "singular" else -1
        a[row], a[:, row] = 0, 0
    elif fault == "indefinite":
        a[5, 5] = -a[5, 5].abs()
    return a


def _is_within_reach(case, a, dtype):
    """Tells whether the asked error is well above rounding, so that it must be reached."""
    if case["fault"] is not None or case["form"] == "matrix_power":
        return False
    eps, size = torch.finfo(dtype).eps, case["size"]
    if case["form"].startswith("inverse"):
        least = 300 * _own(a, dtype)
        return least < 0.1 and (case["max_error"] == 0 or case["max_error"] > least)
    least = 1e3 * eps * size * 10 ** case["gap"]
    return least < 0.1 and (case["max_error"] == 0 or case["max_error"] > least)


def _own(a, dtype):
    """norm(Z S Z - 1) by eigenvectors, in a type; of a condition that it has."""
    values, vectors = torch.linalg.eigh(a.to(dtype))
    z = (vectors * values.clamp(min=torch.finfo(dtype).tiny).rsqrt()).double() @ vectors.mT.double()
    return _off(z, a) + torch.finfo(dtype).eps * math.sqrt(len(a))


def _off(z, s):
    return torch.linalg.vector_norm(z.mT @ s @ z - torch.eye(len(s), dtype=s.dtype)).item()


def _inverse(case, s, z, found, dtype):
    off, own = _off(z, s), _own(s, dtype)  # own: of the check's own rounding, too
    most = 10 * case["max_error"] + own if case["max_error"] else 100 * own
    least = 4 * torch.finfo(dtype).eps * math.sqrt(len(s))
    expect(off <= most * 1.01 + least, f"norm(Z^T S Z - 1) = {off:.2g}; at most {most:.2g}")
    expect(off <= found.total_bound, f"{off:.2g} is above the bound {found.total_bound:.2g}")
    least = off - 10 * own
    expect(found.residual >= least, f"residual {found.residual:.2g} beside {off:.2g}")
    if case["form"] == "inverse_sqrt":
        expect(torch.equal(z, z.mT), "a root that is not symmetric")


def _projector(case, h, x, found, _):
    states = len(h) // 2
    values, vectors = torch.linalg.eigh(h)
    p = vectors[:, :states] @ vectors[:, :states].mT
    gap, width = (values[states] - values[states - 1]).item(), (values[-1] - values[0]).item()
    expect(gap > 1e-14 * width, "a projector where there is no gap")
    noise = 1e2 * 2.0**-52 * len(h) * width / gap
    off = torch.linalg.vector_norm(x - p).item() / math.sqrt(states)
    expect(off <= case["max_error"] + noise, f"D is off by {off:.2g}")
    commutator = torch.linalg.vector_norm(x @ h - h @ x).item()
    least = commutator - 1e2 * 2.0**-52 * len(h) * width
    expect(found.residual >= least, f"residual {found.residual:.2g} beside {commutator:.2g}")


def _signs(case, a, x, found, dtype):
    values, vectors = torch.linalg.eigh(a)
    right, largest = (vectors * values.sign()) @ vectors.mT, values.abs().max().item()
    gap, root = values.abs().min().item() / largest, math.sqrt(len(a))
    noise = 1e3 * torch.finfo(dtype).eps * len(a) / max(gap, 1e-300)
    off = torch.linalg.vector_norm(x - right).item()
    expect(off <= 30 * case["max_error"] * root / gap + noise, f"sign is off by {off:.2g}")


def _power(case, a, x, found, dtype):
    right = a @ a @ a
    largest = right.abs().max()
    off = (torch.linalg.vector_norm((x - right) / largest) * largest).item()  # squares overflow
    rounding = len(a) * torch.finfo(dtype).eps * a.norm().item() ** 3
    expect(not math.isnan(found.error_bound), "a bound that is NaN")
    expect(not off > found.error_bound + rounding, f"{off:.2g}")


_JUDGES = {"inverse_factor": _inverse, "inverse_sqrt": _inverse, "purify": _projector}
_JUDGES |= {"sign": _signs, "matrix_power": _power}
