"""Builds spamm_torch: the library of operators, and the small module that tells how it was built.

The library, spamm_torch/libspamm_torch.so, holds no Python symbol: it loads under any Python, and
LibTorch programs link it. Everything else about the package is in pyproject.toml.

Environment variables
  FORCE_CUDA            1: fail rather than build without CUDA; 0: build without CUDA
  TORCH_CUDA_ARCH_LIST  CUDA targets (default "8.0+PTX 9.0a"); without 9.0a, the kernels for Hopper
                        are left out, and with them the need for CUTLASS's headers
  MAX_JOBS              compilers at a time (default: by cores and free memory)
  SPAMM_TORCH_SANITIZE  address (with undefined behaviour) or thread: a build for the CPU under it
  CUDA_HOME, CC, CXX    as torch.utils.cpp_extension reads them
"""

import importlib.util
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools

# torch logs a warning about a missing GPU, which a build does not need.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
try:
    if int(setuptools.__version__.partition(".")[0]) < 77:  # older ones cannot read pyproject.toml
        raise ImportError(f"setuptools {setuptools.__version__}")
    import torch

    TORCH_MINOR = ".".join(torch.__version__.split(".")[:2])  # "2.11"; one library serves one minor
    if not (2, 11) <= tuple(map(int, TORCH_MINOR.split("."))) < (2, 16):
        raise ImportError(f"torch {torch.__version__}")
    from setuptools.command.bdist_wheel import bdist_wheel
    from torch.utils import cpp_extension
except ImportError as error:
    sys.exit(
        "spamm_torch: building needs setuptools 77 or newer and torch 2.11 to 2.15 in this "
        f"environment; got: {error}. Run `pip install 'setuptools>=77,<82' 'torch>=2.11,<2.16' "
        "ninja`, or build without --no-build-isolation"
    )

VERSION = "0.1.0"
ROOT = Path(__file__).resolve().parent
LIBRARY = "libspamm_torch"
INTROSPECTION = "_build_info"
DEFAULT_CUDA_TARGETS = "8.0+PTX 9.0a"
CUTLASS = "nvidia-cutlass==4.2.0.0"
GIB_PER_JOB = 3  # what one compiler may need at its peak, with room to spare

CXX_FLAGS = ["-std=c++20", "-O3", "-g0", "-fopenmp", "-Wall", "-Wextra", "-Wconversion"]
CXX_FLAGS += ["-Werror=switch"]  # a new activation is forgotten nowhere
NVCC_FLAGS = [
    "-std=c++20",
    "-O1",  # of host code, which launches: -O3 takes a second more a file
    "-lineinfo",
    "-Xfatbin=-compress-all",  # kernels of many variants differ little: a sixth of the size
    "-Xptxas=-warn-spills",
    "-Xcompiler=-Wall,-g0,-fPIC",
    "--expt-relaxed-constexpr",
]
SANITIZERS = {  # ThreadSanitizer does not understand the barriers of OpenMP's library
    "address": ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover"],
    "thread": ["-fsanitize=thread", f"-I{ROOT / 'tests' / 'sanitize'}"],
}
PRECOMPILED = "csrc/precompiled.h"  # relative to this folder and to that of objects
# Host files that are compiled as one, by their paths in csrc/; of two patterns the first counts.
# A file costs 4 s by itself and 1 to 2 s in a unit. Files of no unit take 20 s and more.
HOST_UNITS = {
    "api": r"(api|library|spamm)\.cpp",
    "convolutions": r"conv/",
    "shards": r"shards/",
    "cpu": r"cpu/(norm_map|threshold|sparse/[pt])",
    "cuda_sm90": r"cuda/.*_sm90\.cpp",
    "cuda": r"cuda/.*\.cpp",
}

# ---- What this build is -------------------------------------------------------------------------


def sanitizer() -> str | None:
    """The sanitizer to build with; None for a build without."""
    name = os.environ.get("SPAMM_TORCH_SANITIZE") or None
    if name not in (None, *SANITIZERS):
        sys.exit(f"spamm_torch: SPAMM_TORCH_SANITIZE must be {', '.join(SANITIZERS)}; got {name!r}")
    return name


def cxx_flags() -> list[str]:
    """The host compiler's flags. A sanitizer needs places in the code, and every frame."""
    if not (name := sanitizer()):
        return CXX_FLAGS
    found = [flag for flag in CXX_FLAGS if flag not in ("-O3", "-g0")]
    return [*found, "-O1", "-g", "-fno-omit-frame-pointer", *SANITIZERS[name]]


def nvcc_path() -> Path | None:
    """The CUDA compiler, looked for where torch looks: CUDA_HOME, CUDA_PATH, PATH."""
    if cpp_extension.CUDA_HOME is None:
        return None
    nvcc = Path(cpp_extension.CUDA_HOME, "bin", "nvcc")
    return nvcc if nvcc.exists() else None


def nvcc_version(nvcc: Path) -> str:
    """The CUDA version of a compiler, as in "13.0"."""
    text = subprocess.check_output([nvcc, "--version"], text=True)
    return re.search(r"release (\d+\.\d+)", text)[1]


def reason_for_cpu_only() -> str | None:
    """Why CUDA sources cannot or shall not be built; None where they will be."""
    force = os.environ.get("FORCE_CUDA", "")
    if force not in ("", "0", "1"):
        sys.exit(f"spamm_torch: FORCE_CUDA must be 0 or 1; got {force!r}")
    if force == "0":
        return "FORCE_CUDA=0"
    if name := sanitizer():
        return f"SPAMM_TORCH_SANITIZE={name}"
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is without CUDA"
    elif nvcc_path() is None:
        reason = "no nvcc was found (looked in CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda)"
    else:
        return None
    if force == "1":
        sys.exit(f"spamm_torch: FORCE_CUDA=1 asks for a CUDA build, but {reason}")
    return reason


def check_cuda_matches_torch() -> None:
    """CUDA's major version must be torch's own: the two share one runtime library."""
    found = nvcc_version(nvcc_path())
    if found.split(".")[0] != torch.version.cuda.split(".")[0]:
        sys.exit(
            f"spamm_torch: torch {torch.__version__} needs CUDA {torch.version.cuda} to build; got "
            f"nvcc {found}. FORCE_CUDA=0 builds for the CPU only"
        )


def cuda_targets() -> list[str]:
    """The CUDA architectures to build for, as in "9.0a"."""
    return re.split(r"[\s;]+", os.environ["TORCH_CUDA_ARCH_LIST"].strip())


def check_cuda_targets() -> None:
    """9.0 beside 9.0a is refused: Hopper GPUs run both, and in 9.0 Hopper's kernels are empty."""
    names = {target.removesuffix("+PTX") for target in cuda_targets()}
    if "9.0a" in names and names & {"9.0", "Hopper"}:
        sys.exit(
            "spamm_torch: TORCH_CUDA_ARCH_LIST must hold 9.0a or 9.0, not both (a Hopper GPU could "
            f"run either, and the kernels for Hopper are in 9.0a alone); got {cuda_targets()}"
        )


def builds_for_hopper() -> bool:
    """Tells whether the CUDA targets hold sm_90a, which Hopper's own instructions need."""
    return any(target.removesuffix("+PTX") == "9.0a" for target in cuda_targets())


def flags_of_targets(file: str) -> list[str]:
    """nvcc's flags for the targets on which the kernels of a file run, by the file's name.

    Those of sm90 run on Hopper alone. Those of sm80 use nothing that the oldest target lacks: its
    intermediate code serves all targets, and on Hopper it becomes the same instructions.
    """
    flags = cpp_extension._get_cuda_arch_flags()
    if "sm90" in file:
        return [flag for flag in flags if "90a" in flag]
    if "sm80" in file:
        built = [re.search(r"code=(sm|compute)_(\d+)", flag).groups() for flag in flags]
        oldest = min(int(chip) for _, chip in built)
        code = sorted({f"{kind}_{chip if kind == 'sm' else oldest}" for kind, chip in built})
        return [f"-gencode=arch=compute_{oldest},code=[{','.join(code)}]"]
    return flags


def cutlass_include() -> str:
    """The folder of CUTLASS's headers: its Python package brings them."""
    package = importlib.util.find_spec("cutlass_library")
    if package is None:
        sys.exit(
            f"spamm_torch: building for 9.0a (Hopper) needs CUTLASS's headers in this environment "
            f"(pip install --no-deps {CUTLASS}); found no package cutlass_library"
        )
    return str(Path(package.origin).parent / "source" / "include")


def cuda_runtime() -> str:
    """The folder of torch's CUDA runtime in site-packages."""
    major = (torch.version.cuda or "13").split(".")[0]
    return f"nvidia/cu{major}/lib" if int(major) >= 13 else "nvidia/cuda_runtime/lib"


def free_gib(meminfo: str | None = None) -> float:
    """Memory that new processes can take, in GiB, as the kernel estimates it."""
    text = Path("/proc/meminfo").read_text() if meminfo is None else meminfo
    return int(re.search(r"MemAvailable:\s*(\d+) kB", text)[1]) / 2**20


def default_max_jobs(cores: int, gib: float) -> int:
    """Compilers that run at a time without running out of cores or memory; at least one."""
    return max(1, min(cores, int(gib / GIB_PER_JOB)))


# ---- What is built ------------------------------------------------------------------------------


def sources(*patterns: str) -> list[str]:
    """Files of csrc/, relative to this folder as setuptools wants them, in a fixed order."""
    files = (file for pattern in patterns for file in (ROOT / "csrc").glob(pattern))
    return sorted(str(file.relative_to(ROOT)) for file in files)


def instances() -> dict[str, str]:
    """The files of kernels that csrc/cuda/instances.in lists, without suffix, and their text."""
    files = {}
    text = re.sub(r"^#.*\n", "", (ROOT / "csrc/cuda/instances.in").read_text(), flags=re.MULTILINE)
    for group in re.split(r"^== ", text, flags=re.MULTILINE)[1:]:
        head, *lines = group.splitlines()
        space, headers = head.split(": ")
        includes = [f'#include "{header}"' for header in headers.split()]
        code = [line for line in lines if line and not line.startswith("= ")]
        unit = "\n".join([*includes, f"namespace spamm::{space} {{", *code, "}", ""])
        for line in lines:
            if line.startswith("= "):
                name, *words = line.removeprefix("= ").split()
                text = unit
                for number, word in enumerate(words, start=1):
                    text = text.replace(f"${number}", word)
                files[name] = files.get(name, "") + text
    return files


def written(texts: dict[str, str]) -> list[str]:
    """Files in build/, after writing them. One whose text is as before keeps its object."""
    for name, text in texts.items():
        path = ROOT / "build" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return [str(Path("build", name)) for name in texts]


def in_units(files: list[str]) -> list[str]:
    """The files to compile: those of each of HOST_UNITS are one, which includes them."""
    units, others = {}, []
    for file in files:
        path = Path(file).relative_to("csrc").as_posix()
        for unit, pattern in HOST_UNITS.items():
            if re.match(pattern, path):
                name = f"units/{unit}.cpp"
                units[name] = units.get(name, "") + f'#include "../../{file}"\n'
                break
        else:
            others.append(file)
    return others + written(units)


def operators(cuda: bool) -> setuptools.Extension:
    """The library of operators. torch's and CUDA's headers are system headers: no warnings."""
    kind = cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension
    files = in_units(sources("*.cpp", "conv/*.cpp", "shards/*.cpp", "cpu/**/*.cpp"))
    macros, headers = [], []
    if cuda:
        files += in_units(sources("cuda/**/*.cpp")) + sources("cuda/**/*.cu")
        files += written({f"instances/{name}.cu": text for name, text in instances().items()})
        macros += [("SPAMM_WITH_CUDA", None)]
    if cuda and builds_for_hopper():
        macros += [("SPAMM_WITH_SM90A", None)]
        headers += [cutlass_include()]
    else:
        files = [file for file in files if "sm90" not in file]
    extension = kind(
        f"spamm_torch.{LIBRARY}",
        files,
        define_macros=macros,
        py_limited_api=True,  # so that torch's Python library is not linked
        # The soname: else programs that link the library would record its absolute path.
        extra_link_args=[
            *("-fopenmp", "-Wl,--no-undefined", f"-Wl,-soname,{LIBRARY}.so"),
            *SANITIZERS.get(sanitizer(), [])[:1],
        ],
    )
    headers += extension.include_dirs
    system = [flag for path in headers for flag in ("-isystem", path)]
    extension.include_dirs = [str(ROOT / "csrc"), str(ROOT / "csrc" / "include")]
    extension.extra_compile_args = {"cxx": cxx_flags() + system, "nvcc": NVCC_FLAGS + system}
    return extension


def has_python_header() -> bool:
    return Path(sysconfig.get_path("include"), "Python.h").exists()


def introspection() -> setuptools.Extension:
    """The module behind build_info(): pybind11 from torch's own headers, nothing linked."""
    system = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    return setuptools.Extension(
        f"spamm_torch.{INTROSPECTION}",
        sources("python/*.cpp"),
        language="c++",
        extra_compile_args={"cxx": CXX_FLAGS + system},
    )


# ---- How it is built ----------------------------------------------------------------------------


# torch's builder gives every file the same flags, and knows no precompiled header.
NINJA = """\
ninja_required_version = 1.3

rule host
  command = $cxx -MMD -MF $out.d $more $host_flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = compile $in

rule kernels
  command = $nvcc -MD -MF $out.d $kernel_flags $more -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = compile $in
"""


def ninja_path(path: str | Path) -> str:
    return re.sub(r"([$ :])", r"$\1", os.path.abspath(path))


def ninja_words(words) -> str:
    """Words of a shell command, as a value in a ninja file."""
    return " ".join(shlex.quote(str(word)) for word in words).replace("$", "$$")


class BuildLibrary(cpp_extension.BuildExtension):
    """torch's builder, with objects kept from one build to the next, whoever asks for the build.

    Objects lie in a folder of their own for each torch version and kind of build: ninja does not
    see that torch's headers have changed.
    """

    def finalize_options(self):
        super().finalize_options()
        kind = "-".join(["cpu" if reason_for_cpu_only() else "cuda", *filter(None, [sanitizer()])])
        self.build_temp = str(ROOT / "build" / f"torch-{torch.__version__}-{kind}")

    def run(self):
        self.in_place = self.inplace  # setuptools clears the option while it builds
        if reason := reason_for_cpu_only():
            print(f"spamm_torch: CPU-only build: {reason}", flush=True)
        if not has_python_header():
            print("spamm_torch: no Python.h (Debian: python3-dev): build_info() is left out")
        super().run()
        packages = [Path(self.build_lib, "spamm_torch")]
        built = {
            "version": VERSION,
            "torch": torch.__version__,
            "cuda": None if reason else nvcc_version(nvcc_path()),
            "cuda_targets": [] if reason else cuda_targets(),
            "cxx_flags": " ".join(CXX_FLAGS),
            "nvcc_flags": None if reason else " ".join(NVCC_FLAGS),
        }
        if self.in_place:
            packages.append(ROOT / "spamm_torch")
            built["torch_folder"] = str(Path(torch.__file__).parent)  # an installed one lies beside
        else:
            shutil.copytree(ROOT / "csrc" / "include", packages[0] / "include", dirs_exist_ok=True)
        for package in packages:
            (package / "_built.json").write_text(json.dumps(built) + "\n")

    def build_extension(self, extension):
        if extension.name.endswith(LIBRARY):
            extension.extra_link_args += [f"-Wl,-rpath,{path}" for path in self.library_folders()]
        all_objects, compile_others = self.build_temp, self.compiler.compile
        self.build_temp = str(Path(all_objects, extension.name))  # one ninja file each
        if extension.name.endswith(LIBRARY):
            self.compiler.compile = self.compile_library
        super().build_extension(extension)
        self.build_temp, self.compiler.compile = all_objects, compile_others

    def compile_library(self, sources, output_dir, macros, include_dirs, extra_postargs, **_):
        """Compiles the library's objects, and returns them, for setuptools.

        Host files read a precompiled header. Kernels are compiled for the targets that run them.
        """
        objects = self.compiler.object_filenames(sources, output_dir=output_dir)
        options = [f"-D{name}" for name, _ in macros] + [f"-I{path}" for path in include_dirs]
        host = [*self.compiler.compiler_so[1:], *options, *extra_postargs["cxx"]]
        kernels = [*options, *extra_postargs["nvcc"]]
        if compiler := os.environ.get("CC"):
            kernels += ["-ccbin", compiler]
        lines = [
            NINJA,
            f"cxx = {cpp_extension.get_cxx_compiler()}",
            f"nvcc = {os.environ.get('PYTORCH_NVCC') or ninja_words([nvcc_path()])}",
            f"host_flags = {ninja_words(host)}",
            f"kernel_flags = {ninja_words(kernels)}",
            f"build {PRECOMPILED}.gch: host {ninja_path(PRECOMPILED)}",
            "  more = -x c++-header",
        ]
        # A compiler to which the compiled header does not fit finds the header's text next.
        header = Path(PRECOMPILED)
        with_header = f"-I{header.parent} -include {header.name}"
        # ninja starts with the first ones: units of host files take least.
        edges = zip(sources, objects, strict=True)
        for source, compiled in sorted(edges, key=lambda edge: edge[0].startswith("build/units")):
            edge = f"build {ninja_path(compiled)}:"
            if source.endswith(".cu"):
                lines += [f"{edge} kernels {ninja_path(source)}"]
                lines += [f"  more = {ninja_words(flags_of_targets(source))}"]
            else:
                lines += [f"{edge} host {ninja_path(source)} | {PRECOMPILED}.gch"]
                lines += [f"  more = {with_header}"]
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "build.ninja").write_text("\n".join(lines) + "\n")
        if subprocess.run(["ninja", "-j", os.environ["MAX_JOBS"]], cwd=folder).returncode != 0:
            sys.exit("spamm_torch: compiling failed; the compiler's message is above")
        return objects

    def library_folders(self) -> list[str]:
        """The folders in which the loader looks for torch and CUDA: beside us in site-packages, or,
        for a library built in place, in the torch that it was built with.
        """
        packages = ["$ORIGIN/.."]
        if self.in_place:
            packages.append(str(Path(torch.__file__).parents[1]))
        return [f"{package}/{lib}" for package in packages for lib in ("torch/lib", cuda_runtime())]

    def get_ext_filename(self, name):
        if name.endswith(LIBRARY):
            return str(Path(*name.split("."))) + ".so"
        return super().get_ext_filename(name)


def version_of_wheel(cuda: bool) -> str:
    """The version, and in its local part torch's minor version and CUDA's: "0.1.0+torch2.11.cu130".

    One library serves one minor version of torch: wheels for several need names of their own.
    """
    kind = "cu" + nvcc_version(nvcc_path()).replace(".", "") if cuda else "cpu"
    return f"{VERSION}+torch{TORCH_MINOR}.{kind}"


class PlatformWheel(bdist_wheel):
    """The operators serve any Python of this platform; build_info() serves the one that built."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


def main():
    cuda = reason_for_cpu_only() is None
    # ninja may be installed in this environment without the environment being activated.
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    os.environ["TORCH_CUDA_ARCH_LIST"] = (
        os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_CUDA_TARGETS
    )
    if cuda:
        check_cuda_matches_torch()
        check_cuda_targets()
    os.environ.setdefault(
        "MAX_JOBS", str(default_max_jobs(len(os.sched_getaffinity(0)), free_gib()))
    )
    setuptools.setup(
        version=version_of_wheel(cuda),
        install_requires=[f"torch=={TORCH_MINOR}.*"],
        ext_modules=[operators(cuda)] + ([introspection()] if has_python_header() else []),
        cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
    )


if __name__ == "__main__":
    main()
