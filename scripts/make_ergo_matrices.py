"""Matrices of a water cluster from the program ergo: S, H_core, F and D of Hartree-Fock.

Molecules stand on a jittered grid 3.1 angstrom apart, turned at random; their functions come in
spatial order. Needs Debian's package ergo. Hartree-Fock takes minutes from 20 molecules on, and
hours from some hundreds; --no-scf writes S and H_core alone. The .npz file holds the upper
triangles as float64, in atomic units; models.water.matrices.read reads it.

    python scripts/make_ergo_matrices.py --waters 80 --basis 6-31G --out results
"""

import sys

from common.console import exit_code, make_console
from common.options import add, add_folder_option, add_numbers, make_parser, natural_number
from models.files import require_writable
from models.water import matrices, program
from models.water.basis import BASES
from models.water.geometry import water_cluster


def parse(arguments):
    parser = make_parser(__doc__)
    add_numbers(parser, "--waters", "number of molecules", 30, "N", nargs=None)
    what = "basis set: 7, 13 or 24 functions a molecule"
    add(parser, "--basis", what, "6-31G", choices=BASES)
    add(parser, "--seed", "of the cluster's random numbers", 0, type=natural_number)
    what = "S and H_core alone, in a small part of the time"
    add(parser, "--no-scf", what, False, "F and D, too", action="store_true")
    add_numbers(parser, "--threads", "threads that ergo uses", 1, None, nargs=None)
    add_folder_option(parser, "the file")
    return parser.parse_args(arguments)


def file_name(waters, basis):
    return f"waters_{waters}_{basis.lower().replace('*', 's')}.npz"


def main(arguments=None):
    options = parse(sys.argv[1:] if arguments is None else arguments)
    console = make_console()
    program.require_ergo()
    require_writable(options.out)
    cluster = water_cluster(options.waters, options.seed)
    run = program.run(
        cluster,
        options.basis,
        scf=not options.no_scf,
        threads=options.threads,
        progress=console.print,
    )
    path = options.out / file_name(options.waters, options.basis)
    matrices.save(matrices.from_run(run, cluster, options.basis), path)
    reached = "no SCF" if options.no_scf else f"converged in {run.cycles} cycles"
    console.print(f"ergo {run.version}, {len(run.overlap)} functions, {reached}: wrote {path}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
