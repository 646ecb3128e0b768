#!/usr/bin/env python3
"""Breaks the code in one place after another, and shows which of these the tests notice.

mutations.txt has the places: texts of files, what replaces them, and the tests that should fail
then. Of the library, all texts are built at once, each behind a number that a run picks. Such a
text is an expression, or a statement with its semicolon. Files are put back at any end.

    python scripts/mutate.py                     # all of them: half an hour on two cores
    python scripts/mutate.py --only cpu/conv     # those whose file or new text holds this
    python scripts/mutate.py --pytest="-m 'not thorough'"
    python scripts/mutate.py --only csrc/kernels --pytest="-m 'cuda and not thorough'" --jobs 14
"""

import argparse
import collections
import ctypes
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LONGEST_S = 3600  # that a build or a run of tests may take


class Mutation(NamedTuple):
    """One text of a file, what replaces it, and the tests that should notice."""

    file: str
    old: str
    new: str
    tests: str


def read_table(text: str) -> list[Mutation]:
    found, place, tests = [], "", ""
    for line in text.splitlines():
        if line.startswith("  "):
            old, new = line[2:].replace(r"\n", "\n").split(" =>")
            found.append(Mutation(file_with(place, old), old, new.removeprefix(" "), tests))
        elif not line.startswith("#"):
            place, tests = line.split(": ")
    return found


def file_with(place: str, text: str) -> str:
    """The file that a place is, or the one of this folder that holds a text, while it is whole."""
    folder = ROOT / place
    inside = (path for path in folder.glob("*.[chp]*") if text.encode() in path.read_bytes())
    return str(next(inside, folder).relative_to(ROOT))


TABLE = read_table(Path(__file__).with_name("mutations.txt").read_text())
# In kernels a variable of each file's own holds the number; pytest_sessionstart() sets all of them.
PICK = """\
#ifndef SPAMM_MUTANT
#define SPAMM_MUTANT
#include <cstdlib>
static const int spamm_mutant = std::getenv("MUTANT") ? std::atoi(std::getenv("MUTANT")) : -1;
#ifdef __CUDACC__
#include <cuda_runtime.h>
#include <vector>
static __device__ int spamm_mutant_there = -1;
inline std::vector<void (*)()>& spamm_setters() {
  static std::vector<void (*)()> setters;
  return setters;
}
static void spamm_set_own() { cudaMemcpyToSymbol(spamm_mutant_there, &spamm_mutant, sizeof(int)); }
static const bool spamm_listed = (spamm_setters().push_back(&spamm_set_own), true);
extern "C" inline __attribute__((visibility("default"), used)) void spamm_set_mutant() {
  for (const auto set : spamm_setters()) set();
}
#define SPAMM_ANYWHERE __host__ __device__
#else
#define SPAMM_ANYWHERE
#endif
SPAMM_ANYWHERE static inline bool spamm_is(int mutation) {
#ifdef __CUDA_ARCH__
  return spamm_mutant_there == mutation;
#else
  return spamm_mutant == mutation;
#endif
}
#endif
"""


def pytest_sessionstart() -> None:
    """As a plugin of pytest: tells kernels which mutation is picked."""
    import spamm_torch

    library = ctypes.CDLL(str(Path(spamm_torch.__file__).with_name("libspamm_torch.so")))
    if hasattr(library, "spamm_set_mutant"):
        library.spamm_set_mutant()


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "HYPOTHESIS_PROFILE": "ci", "PYTHONPATH": path, **variables}
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=env, timeout=LONGEST_S
    )


def build() -> None:
    built = run(sys.executable, "setup.py", "--quiet", "build_ext", "--inplace")
    if built.returncode != 0:
        raise RuntimeError(f"the build failed:\n{(built.stdout + built.stderr)[-2000:]}")


def is_of_library(mutation: Mutation) -> bool:
    return mutation.file.startswith("csrc/") and mutation.file != "csrc/cuda/heuristics.h"


def guarded(text: str, mutations: list[Mutation]) -> str:
    """A file's text in which the variable MUTANT picks one of the mutations, by place in TABLE."""
    news = collections.defaultdict(dict)
    for mutation in mutations:
        news[mutation.old][TABLE.index(mutation)] = mutation.new

    def guard(found: re.Match[str]) -> str:
        old = found[0]
        if old.endswith(";"):
            chain = (f"if (spamm_is({i})) {{ {new} }} else " for i, new in news[old].items())
            return f"{{ {''.join(chain)}{{ {old} }} }}"
        chain = (f"spamm_is({i}) ? ({new}) : " for i, new in news[old].items())
        return f"({''.join(chain)}({old}))"

    return PICK + re.sub("|".join(map(re.escape, news)), guard, text)


def failure(mutation: Mutation, options: list[str]) -> str:
    """Returns the end of the tests' output where one fails, or "". Not in TABLE: no mutation."""
    number = TABLE.index(mutation) if mutation in TABLE else len(TABLE)
    picked = {"MUTANT": str(number)}
    if mutation.tests.startswith("cpp:"):
        folder = str(ROOT / "build" / "tests-cpp")
        made = run("cmake", "--build", folder)
        if made.returncode != 0:
            raise RuntimeError(f"the build failed:\n{made.stdout[-2000:]}")
        tests = f"--gtest_filter={mutation.tests.removeprefix('cpp:')}"
        result = run(f"{folder}/spamm_torch_tests", tests, **picked)
        return (result.stdout[-2000:] or "no output") if result.returncode != 0 else ""
    files = [f"tests/{file}" for file in mutation.tests.split()]
    command = (sys.executable, "-m", "pytest", "-p", "mutate", "-x", "-q", *options, *files)
    try:
        result = run(*command, **picked)
    except subprocess.TimeoutExpired:  # a barrier that waits for ever
        return f"more than {LONGEST_S} s"
    if result.returncode > 1:
        raise RuntimeError(f"pytest failed:\n{(result.stdout + result.stderr)[-2000:]}")
    # The code is negative after a crash.
    return (result.stdout[-2000:] or "no output") if result.returncode != 0 else ""


def try_out(mutations: list[Mutation], options: list[str], jobs: int) -> int:
    """Makes the mutations, undoes them, and returns how many of them the tests notice. Several, of
    the library, are made together, of which a run picks one; without any, all tests must pass.
    """
    texts = {mutation.file: (ROOT / mutation.file).read_text() for mutation in mutations}
    for mutation in mutations:
        count = texts[mutation.file].count(mutation.old)
        if count != 1:
            raise ValueError(f"{mutation.file} must hold {mutation.old!r} once; got {count} times")
    together = is_of_library(mutations[0])
    noticed = 0
    try:
        for file, text in texts.items():
            of_file = [mutation for mutation in mutations if mutation.file == file]
            old, new = of_file[0].old, of_file[0].new
            (ROOT / file).write_text(guarded(text, of_file) if together else text.replace(old, new))
        tried = mutations
        if together:
            build()
            tried = [Mutation("", "", "", tests) for tests in dict.fromkeys(m.tests for m in tried)]
            tried += mutations
        with ThreadPoolExecutor(jobs if together else 1) as pool:
            results = pool.map(lambda mutation: failure(mutation, options), tried)
            for mutation, found in zip(tried, results, strict=True):
                if not mutation.file:
                    if found:
                        raise RuntimeError(f"{mutation.tests} fail without a mutation:\n{found}")
                    continue
                noticed += found != ""
                word = "noticed" if found else "MISSED "
                print(word, mutation.file, repr(mutation.new), flush=True)
    finally:
        for file, text in texts.items():
            (ROOT / file).write_text(text)
        if together:
            build()
    return noticed


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", default="", help="mutations whose file or new text holds this (default: all)"
    )
    parser.add_argument("--pytest", default="", help="more options of pytest (default: none)")
    parser.add_argument("--jobs", type=int, default=1, help="runs of tests at a time (default: 1)")
    arguments = parser.parse_args(given)
    chosen = [m for m in TABLE if arguments.only in m.file or arguments.only in m.new]
    together = [mutation for mutation in chosen if is_of_library(mutation)]
    groups = [[mutation] for mutation in chosen if not is_of_library(mutation)]
    groups += [together] if together else []
    options = shlex.split(arguments.pytest)
    noticed = sum(try_out(group, options, arguments.jobs) for group in groups)
    print(f"{noticed} of {len(chosen)} noticed")


if __name__ == "__main__":
    main()
