"""Compares the GPU code of two builds, kernel by kernel, whatever the kernels are called.

    python scripts/compare_machine_code.py before/libspamm_torch.so after/libspamm_torch.so
    python scripts/compare_machine_code.py --ptx build-before build-after

Each side is a library, an object file, or a build folder (its object files; libraries where it has
none). Kernels are matched by code alone, whatever their names: the instructions of `cuobjdump
-sass`, constants, the size of static shared memory, and the places that the loader fills in. Exit
code: 0 equal, 1 different, 2 error. It needs cuobjdump, of CUDA's toolkit or of triton's package.
"""

import argparse
import collections
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

FATBIN_MAGIC = 0xBA55ED50
NAMES_SHOWN = 20


class CompareError(Exception):
    """Something that keeps the two sides from being compared, in one line."""


class Kernel(NamedTuple):
    target: str  # "sm_80", or "ptx sm_80"
    name: str  # mangled
    code: bytes  # equal for two kernels exactly where they do the same


# ---- Files --------------------------------------------------------------------------------------


class Section(NamedTuple):
    name: str
    size: int
    data: bytes  # empty where the file holds none


def elf_sections(data: bytes) -> list[Section]:
    """The sections of a 64-bit little-endian ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise CompareError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 58)
    if count == 0 and table:  # too many for the header: the first section tells
        (count,) = struct.unpack_from("<Q", data, table + 32)
    headers = [
        struct.unpack_from("<IIQQQQ", data, table + entry_size * index) for index in range(count)
    ]
    names = headers[names_index][4] if headers else 0
    sections = []
    for name, kind, _, _, offset, size in headers:
        start = names + name
        text = data[start : data.index(b"\0", start)].decode()
        has_data = kind != 8  # SHT_NOBITS
        sections.append(Section(text, size, data[offset : offset + size] if has_data else b""))
    return sections


def split_fatbins(data: bytes) -> list[bytes]:
    """The fat binaries that lie one behind the other in a ``.nv_fatbin`` section."""
    fatbins, at = [], 0
    while at + 16 <= len(data):
        magic, _, header_size, size = struct.unpack_from("<IHHQ", data, at)
        if magic == FATBIN_MAGIC:
            fatbins.append(data[at : at + header_size + size])
            at += header_size + size
        elif magic == 0:  # padding
            at += 4
        else:
            raise CompareError(f"expected a fat binary at byte {at} of .nv_fatbin; got {magic:#x}")
    return fatbins


def binaries(side: Path) -> list[Path]:
    """The files of one side of the comparison."""
    if side.is_file():
        return [side]
    if not side.is_dir():
        raise CompareError(f"expected a file or a folder; {side} does not exist")
    found = sorted(side.rglob("*.o")) or sorted(side.rglob("*.so"))
    if not found:
        raise CompareError(f"expected object files or libraries in {side}; it holds none")
    return found


# ---- Code ---------------------------------------------------------------------------------------


def kernels_of_cubin(target: str, data: bytes) -> list[Kernel]:
    """The kernels of one cubin: all that decides what they do, and no names."""
    sections = {section.name: section for section in elf_sections(data)}
    kernels = []
    for text in sections.values():
        if not text.name.startswith(".text."):
            continue
        name = text.name.removeprefix(".text.")
        parts = [b"instructions", text.data]
        for bank in range(1, 8):  # bank 0 holds the parameters
            if constants := sections.get(f".nv.constant{bank}.{name}"):
                parts += [b"constants %d" % bank, constants.data]
        if shared := sections.get(f".nv.shared.{name}"):
            parts += [b"shared memory %d" % shared.size]
        if places := sections.get(f".rela.text.{name}"):
            for offset, info, addend in sorted(struct.iter_unpack("<QQq", places.data)):
                kind = info & 0xFFFFFFFF  # the other half names what is filled in
                parts += [b"filled in %d %d %d" % (offset, kind, addend)]
        if places := sections.get(f".rel.text.{name}"):
            for offset, info in sorted(struct.iter_unpack("<QQ", places.data)):
                parts += [b"filled in %d %d" % (offset, info & 0xFFFFFFFF)]
        kernels.append(Kernel(target, name, b"\0".join(parts)))
    return kernels


def ptx_functions(text: str) -> list[str]:
    """The functions of a PTX module that have a body, without comments and source lines."""
    functions, lines, depth = [], [], 0
    for line in text.splitlines():
        line = line.partition("//")[0].strip()
        if not line or line.startswith((".loc", ".file")):
            continue
        if not lines and not re.search(r"\.(entry|func)\b", line):
            continue
        lines.append(line)
        depth += line.count("{") - line.count("}")
        if depth == 0 and line.endswith("}"):
            functions.append("\n".join(lines))
            lines = []
        elif depth == 0 and line.endswith(";"):
            lines = []  # a declaration
    return functions


def kernels_of_ptx(target: str, text: str) -> list[Kernel]:
    """The functions of one PTX module, their names and labels numbered by first use."""
    kernels = []
    for function in ptx_functions(text):
        name = re.search(r"\.(?:entry|func)\s*(?:\([^)]*\)\s*)?([\w$]+)", function)[1]
        numbers: dict[str, str] = {}
        code = re.sub(
            r"\$L__BB\d+_|__local_depot\d+|\bprototype_\d+|\b_Z[\w$]+",
            lambda found, numbers=numbers: numbers.setdefault(found[0], f"name_{len(numbers)}_"),
            function,
        )
        kernels.append(Kernel(target, name, code.encode()))
    return kernels


def extract(cuobjdump: str, fatbin: bytes, kind: str) -> list[tuple[str, bytes]]:
    """The "elf" or "ptx" files of a fat binary: the target of each, as in "sm_80", and its data."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "input.fatbin")
        file.write_bytes(fatbin)
        out = Path(folder, "out")
        out.mkdir()
        run = subprocess.run(
            [cuobjdump, f"-x{kind}", "all", file], cwd=out, capture_output=True, text=True
        )
        extracted = sorted(out.iterdir())
        if run.stdout.count("Extracting") != len(extracted) or (run.returncode and extracted):
            raise CompareError(f"{cuobjdump} could not extract all code: {run.stderr.strip()}")
        return [(file.name.split(".")[-2], file.read_bytes()) for file in extracted]


def kernels_of(side: Path, cuobjdump: str, ptx: bool) -> list[Kernel]:
    """Every kernel of one side."""
    kernels = []
    for file in binaries(side):
        try:
            sections = elf_sections(file.read_bytes())
            fatbins = [s.data for s in sections if s.name == ".nv_fatbin"]
            for fatbin in (one for data in fatbins for one in split_fatbins(data)):
                for target, data in extract(cuobjdump, fatbin, "elf"):
                    kernels += kernels_of_cubin(target, data)
                for target, data in extract(cuobjdump, fatbin, "ptx") if ptx else ():
                    kernels += kernels_of_ptx(f"ptx {target}", data.decode())
        except CompareError as error:
            raise CompareError(f"{file}: {error}") from None
    if not kernels:
        raise CompareError(f"expected GPU code in {side}; it holds none")
    return kernels


# ---- Comparison ---------------------------------------------------------------------------------


class Difference(NamedTuple):
    equal: int
    changed: list[tuple[Kernel, Kernel]]  # the same name on both sides, other code
    only_a: list[Kernel]
    only_b: list[Kernel]


def compare(a: list[Kernel], b: list[Kernel]) -> Difference:
    """Matches kernels by code, each as often as it occurs; what is left, by name."""
    by_code, by_name = collections.defaultdict(list), collections.defaultdict(list)
    for kernel in b:
        by_code[kernel.code].append(kernel)
    unmatched_a = []
    for kernel in a:
        if candidates := by_code[kernel.code]:
            candidates.pop()
        else:
            unmatched_a.append(kernel)
    for kernel in (kernel for left in by_code.values() for kernel in left):
        by_name[kernel.name].append(kernel)
    changed, only_a = [], []
    for kernel in unmatched_a:
        if namesakes := by_name[kernel.name]:
            changed.append((kernel, namesakes.pop()))
        else:
            only_a.append(kernel)
    only_b = [kernel for left in by_name.values() for kernel in left]
    return Difference(len(a) - len(unmatched_a), changed, only_a, only_b)


def compare_by_target(a: list[Kernel], b: list[Kernel]) -> dict[str, Difference]:
    return {
        target: compare([k for k in a if k.target == target], [k for k in b if k.target == target])
        for target in sorted({kernel.target for kernel in a + b})
    }


def shown(title: str, lines: list[str], everything: bool) -> list[str]:
    lines = sorted(lines)
    hidden = 0 if everything else max(0, len(lines) - NAMES_SHOWN)
    text = [f"  {title}:", *(f"    {line}" for line in lines[: len(lines) - hidden])]
    return text + ([f"    and {hidden} more (--all shows them)"] if hidden else [])


def report(differences: dict[str, Difference], everything: bool) -> list[str]:
    """A line for each target, and below it the kernels that are not equal."""
    lines = []
    for target, found in differences.items():
        lines.append(
            f"{target}: {found.equal} equal, {len(found.changed)} changed, "
            f"{len(found.only_a)} only in A, {len(found.only_b)} only in B"
        )
        if found.changed:
            names = [f"{a.name} ({len(a.code)} and {len(b.code)} bytes)" for a, b in found.changed]
            lines += shown("changed", names, everything)
        for title, kernels in (("only in A", found.only_a), ("only in B", found.only_b)):
            if kernels:
                names = [f"{kernel.name} ({len(kernel.code)} bytes)" for kernel in kernels]
                lines += shown(title, names, everything)
    return lines


def find_cuobjdump() -> str:
    """cuobjdump of PATH, of CUDA's toolkit, or of triton's package, which torch brings."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    triton = importlib.util.find_spec("triton")
    if triton and triton.origin:
        homes.append(str(Path(triton.origin).parent / "backends" / "nvidia"))
    folders = [os.environ.get("PATH", ""), *(str(Path(home, "bin")) for home in homes if home)]
    found = shutil.which("cuobjdump", path=os.pathsep.join(folders))
    if found is None:
        raise CompareError("cuobjdump was not found in PATH, CUDA_HOME, /usr/local/cuda or triton")
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", type=Path, metavar="A", help="library, object file or build folder")
    parser.add_argument("b", type=Path, metavar="B", help="what to compare it with")
    parser.add_argument(
        "--ptx", action="store_true", help="compare the PTX too (default: the machine code alone)"
    )
    parser.add_argument(
        "--all", action="store_true", help=f"show all names (default: {NAMES_SHOWN} of each kind)"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        cuobjdump = find_cuobjdump()
        sides = [kernels_of(side, cuobjdump, options.ptx) for side in (options.a, options.b)]
    except (CompareError, OSError) as error:
        print(f"compare_machine_code: {error}", file=sys.stderr)
        return 2
    differences = compare_by_target(*sides)
    print("\n".join(report(differences, options.all)))
    return int(any(d.changed or d.only_a or d.only_b for d in differences.values()))


if __name__ == "__main__":
    sys.exit(main())
