#!/usr/bin/env python
"""The density matrix of a molecule or a chain, by products that skip what cannot matter.

    python examples/density_matrix.py                  # a chain of 2000 sites
    python examples/density_matrix.py --ergo           # F and S of a water cluster, from data/ergo
    python examples/density_matrix.py --waters 300     # a larger cluster, with a model of F
    python examples/density_matrix.py --waters 2000    # from 10,000 functions on block-sparse
    torchrun --nproc-per-node 2 examples/density_matrix.py --waters 300 --sparse --device cpu

SP2 purification turns F into the projector on the occupied states by some 25 products, all of them
spamm_torch's. Only the last four need accuracy: those before may lose a hundred times more, and be
in float32, because later ones mend it. Compares that with torch.mm and with eigenvectors. Shows a
table and writes a page, all numbers and a picture.
docs/density_matrix.md explains the method.
"""

import argparse
import functools
import math
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))  # common

import common  # noqa: F401  # isort: skip  finds models and the library

import torch

from common import options as cli
from common import results
from common.measuring import describe_machine
from common.options import exit_code
from density import sources
from density.measuring import DENSE, EIGH, STORED, measure, methods, said, tables
from density.ranks import group, is_first, on_ranks, part, started, whole
from models.files import UserError, require_writable, write_atomically
from spamm_torch import linalg, sparse

_PEERS = (EIGH, DENSE, STORED)
_LARGE = 10_000  # functions from which on matrices are block-sparse
_NOTES = """\
Seconds are medians of the whole iteration, norms and the choice of each step included. The energy
error is that of 2 tr(X F) against the sum over eigenvalues, or against torch.mm's iteration where
no eigenvalues were computed. The JSON file has every iteration."""


def parse(arguments):
    parser = cli.make_parser(__doc__)
    add = functools.partial(cli.add, parser)
    group = parser.add_argument_group("what is computed (one of)").add_mutually_exclusive_group()
    source = functools.partial(cli.add, group)
    is_even = lambda value: value >= 4 and value % 2 == 0  # noqa: E731
    even = cli.number(int, is_even, "an even integer of 4 or more")
    what = "a tight-binding chain of so many sites"
    source("--chain", what, None, "2000", metavar="N", type=even)
    what = "matrices of a water cluster in data/ergo, by name"
    source("--ergo", what, None, "default", metavar="NAME", nargs="?", const="default")
    what = "a cluster of so many water molecules, with exact overlaps and a model of F"
    source("--waters", what, None, "none", metavar="N", type=cli.positive_integer)
    positive = cli.number(float, lambda value: 0 < value < math.inf, "a number above 0")
    add("--gap", "of the chain, hopping 1/2", 0.2, type=positive)
    add("--basis", "basis set of --waters", sources.BASES[0], choices=sources.BASES)
    add("--seed", "of --waters", 0, type=cli.natural_number)
    cli.add_device_option(parser)
    what, said = "edge of the blocks; 32 suits molecules", "32, of block-sparse matrices 64"
    add("--block", what, None, said, type=int, choices=(32, 64, 128))
    what = "keep only blocks that count, in place of whole matrices; --ergo is whole at first"
    said = f"from {_LARGE} functions on"
    add("--sparse", what, None, said, action=argparse.BooleanOptionalAction)
    what = (
        "what each of the last products may lose, relative to norm(X)^2; about the energy error "
        "in hartree an atom"
    )
    small = cli.number(float, lambda value: 0 < value < 1, "a number above 0 and below 1")
    add("--max-errors", what, (1e-7, 3e-8, 1e-9), metavar="ERROR", type=small, nargs="+")
    cli.add_repeats_option(parser, 3)
    what = (
        "leave these out, which take long for large matrices; of whole matrices one of eigh and "
        "torch.mm stays"
    )
    said = f"none; from {_LARGE} functions on, block-sparse, all"
    cli.add_choices(parser, "--without", what, None, _PEERS, said)
    cli.add_folder_option(parser, "the page, the numbers and the picture")
    add("--name", "of these files", "density_matrix", type=cli.file_name)
    what = (
        "write the density matrix of the most accurate schedule there, in the given basis, as the "
        "array density of an .npz file"
    )
    add("--density", what, None, "none", metavar="FILE", type=Path)
    options = parser.parse_args(arguments)
    if {EIGH, DENSE} <= set(options.without or ()) and not options.sparse:
        parser.error("argument --without: expected one of eigh and torch.mm to stay")
    options.chain = options.chain or 2000
    options.device = cli.choose_device(options.device)
    return options


def decide(options, functions):
    """Fills in what depends on the number of functions."""
    if options.sparse is None:
        options.sparse = functions >= _LARGE
    if options.block is None:
        options.block = 64 if options.sparse else 32
    if options.without is None:
        options.without = _PEERS if options.sparse and functions >= _LARGE else ()


def load(options):
    """The problem that the options name."""
    if options.ergo:
        problem = sources.embedded(options.ergo)
        decide(options, problem.functions)
    elif options.waters:
        decide(options, sources.functions_of_waters(options.waters, options.basis))
        made = {"block": options.block, "drop": min(options.max_errors) / 10}
        made |= {"device": options.device, "molecules": part(options.waters, options.block)}
        made = made if options.sparse else None
        problem = sources.waters(options.waters, options.basis, options.seed, made)
    else:
        decide(options, options.chain)
        block = options.block if options.sparse else None
        problem = sources.chain(options.chain, options.gap, block)
    if options.sparse:
        problem = sources.as_blocks(problem, options.block, are_whole=not options.waters)
    return problem


def orthogonal(problem, options):
    """F in the basis of Z with Z^T S Z = 1, on the device, and a function that takes a matrix
    back; None where S is 1.

    Block-sparse products with Z may lose a hundredth of the smallest --max-errors.
    """
    fock, size = problem.fock.to(options.device), problem.functions
    if not options.sparse:
        fock = (fock + fock.mT) / 2  # exactly, which products rely on
    if problem.overlap is None:
        return fock, None
    start = time.perf_counter()
    max_error = min(options.max_errors) / 100 if options.sparse else 1e-13
    given = {"block": options.block, "size": size, "group": group(fock)}
    overlap = problem.overlap.to(options.device)
    z = linalg.inverse_factor(overlap, max_error=max_error * size, **given)
    in_basis = functools.partial(linalg.in_basis, z=z.matrix, max_error=max_error, **given)
    fock = in_basis(fock).matrix
    seconds = time.perf_counter() - start
    print(f"Z and Z^T F Z: {seconds:.3g} s; norm(Z^T S Z - 1) = {z.residual:.1e}")
    return fock, lambda x: in_basis(x, transposed=True).matrix


@torch.inference_mode()
def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    problem = load(options)
    if started() > 1 and not (options.sparse and str(options.device) == "cpu"):
        stored = "--sparse" if options.sparse else "--no-sparse"
        raise UserError(
            f"expected --sparse and --device cpu under torchrun; got {stored} and {options.device}"
        )
    require_writable(options.out)
    if options.density:
        sources.require_numpy()
        if options.density.is_dir():
            raise UserError(f"expected a file for --density; got the folder {options.density}")
        require_writable(options.density.parent)
    print(f"{problem.name}: N = {problem.functions}, {problem.electrons} electrons")
    compared = methods(options.max_errors, options.without, options.sparse)
    say = functools.partial(print, flush=True)  # as it happens, into a file too
    how = {"repeats": options.repeats, "block": options.block, "progress": say}
    try:
        fock, to_given = orthogonal(problem, options)
        rows, projector = measure(fock, problem, compared, **how)
    except linalg.NotConverged as error:
        raise UserError(str(error)) from error
    wants_density = problem.density is not None or options.density
    if wants_density and to_given is not None:
        projector = to_given(projector)
    if wants_density and options.sparse:
        projector = sparse.to_dense(whole(projector), (problem.functions,) * 2)
    if not is_first():
        return
    machine = describe_machine(options.device)
    header = results.run_header(machine, "density_matrix.py", arguments, folder="examples")
    header |= {
        "functions": problem.functions,
        "electrons": problem.electrons,
        "atoms": problem.atoms,
        "block": options.block,
        "storage": "block-sparse" if options.sparse else None,
        "processes": started(),
    }
    found = tables(problem.name, rows)
    run = {
        "name": options.name,
        "said": said(found["density matrix"]),
        "header": header,
        "tables": found,
    }
    title = "The density matrix by purification"
    results.finish(options.out / options.name, title, run, _NOTES)

    if not wants_density:
        return
    density = 2 * projector.cpu()  # of the eigenvalues 2 and 0 against S
    if problem.density is not None:
        off = torch.linalg.vector_norm(density - problem.density)
        off = (off / torch.linalg.vector_norm(problem.density)).item()
        print(f"the given density matrix differs by {off:.1e} of its norm")
    if options.density:
        np = sources.require_numpy()
        arrays = {"density": density.numpy()}
        write_atomically(options.density, lambda file: np.savez_compressed(file, **arrays))
        print(f"wrote {options.density}")


if __name__ == "__main__":
    torch.set_flush_denormal(True)  # else far entries, of 1e-310, slow torch.mm down, and it alone
    sys.exit(exit_code(lambda: on_ranks(main)))
