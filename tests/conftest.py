"""Parts that all tests share: devices to run on, hypothesis's profiles, times that are made up."""

import collections
import gc
import itertools
import os
import sys

import matrices
import pytest
import torch
from hypothesis import settings
from torch._inductor import config as inductor
from torch._inductor import cpu_vec_isa

pytest.register_assert_rewrite("golden", "study_tools")  # so that differences are shown

# No deadlines: an example's time says more about the machine than about the code. Every run draws
# the same examples, "ci" more of them; "explore" looks for new ones.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=200)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "same"))

# Else Inductor tries each kind of vector instruction by a program of its own, which takes as long
# as a small network does. The compilers that build the library know all of them.
cpu_vec_isa.VecISA.check_build = lambda *_: True
# Nor are there so many files that compiling their headers before them pays.
inductor.cpp_cache_precompile_headers = False
inductor.aot_inductor.precompile_headers = False

if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a core of its own
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items):
    """Keeps those of a test's combinations of settings in which every two settings meet.

    The others become ``thorough``. The mark ``strength`` says how many settings are to meet.
    """
    tests = collections.defaultdict(list)  # of each test on each kind of machine
    for item in items:
        needs = [mark for mark in ("cuda", "multi_gpu") if item.get_closest_marker(mark)]
        tests[item.nodeid.partition("[")[0], str(needs)].append(item)
    for cases in tests.values():
        for case in set(cases) - set(_covering(cases)):
            case.add_marker(pytest.mark.thorough)


def _settings(item):
    """The value of each parametrization, as something that can be compared."""
    values = {name: id(value) for name, value in item.callspec.params.items()}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        values[tuple(names)] = tuple(values.pop(name.strip()) for name in names)
    return values.items()


def _covering(cases):
    """Few cases that hold all combinations of so many settings, by a greedy choice."""
    if len(cases) == 1:
        return cases
    mark = cases[0].get_closest_marker("strength")
    strength = mark.args[0] if mark else 2
    settings = {case: sorted(_settings(case), key=str) for case in cases}
    if len(settings[cases[0]]) <= strength:
        return cases
    held = {case: set(itertools.combinations(settings[case], strength)) for case in cases}
    missing, chosen = set().union(*held.values()), []
    while missing:
        chosen.append(max(cases, key=lambda case: len(held[case] & missing)))
        missing -= held[chosen[-1]]
    return chosen


def pytest_runtest_setup(item):
    torch.manual_seed(0)
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("multi_gpu") and torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices; found {torch.cuda.device_count()}")
    if item.get_closest_marker("inductor") and " " in torch.__file__:
        pytest.skip("Inductor's C++ needs a path of torch without a space")


def pytest_collection_finish(session):
    """A run of nothing but tests for CUDA must not pass by skipping them all.

    Modules stay as long as the run does: no collection of garbage walks through them again.
    """
    gc.freeze()
    asked = session.config.option.markexpr
    alone = all(item.get_closest_marker("cuda") for item in session.items)
    if asked and session.items and alone and not torch.cuda.is_available():
        raise pytest.UsageError(f"expected a CUDA device for -m {asked!r}; torch finds none")


@pytest.fixture(autouse=True, scope="session")
def calls_are_timed_a_few_times():
    """Conversions measure each candidate as few times as they may: no test asks for more."""
    if timing := sys.modules.get("spamm_torch._timing"):
        timing._CPU_SECONDS = 0


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    """Runs a test on the CPU and, marked ``cuda``, on the first CUDA device."""
    return torch.device(request.param)


@pytest.fixture(params=matrices.DTYPES, ids=str)
def dtype(request):
    """Every type of operands, where a test does not name its own."""
    return request.param


@pytest.fixture
def hopper():
    """Skips a test where Hopper's kernels do not run."""
    from support import hopper_kernels_run

    if not hopper_kernels_run():
        pytest.skip("needs the Hopper kernels")


@pytest.fixture
def exact_reference(monkeypatch):
    """cuDNN, which dense references use, may round to TF32 by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def set_tf32():
    """Says for a test whether products of float32 on CUDA may round to TF32.

    monkeypatch of pytest 9.2 would delete the setting, which torch answers for in __getattr__.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32

    def set_it(allowed):
        matmul.allow_tf32 = allowed

    yield set_it
    matmul.allow_tf32 = before


@pytest.fixture
def force(monkeypatch):
    """Forces a number of segments, and other variables of the library by their names' ends, until
    the end of the test; None: none is forced.
    """

    def set_variables(segments=None, **others):
        for name, value in {"SEGMENTS": segments, **others}.items():
            monkeypatch.delenv(f"SPAMM_TORCH_{name}", raising=False)
            if value is not None:
                monkeypatch.setenv(f"SPAMM_TORCH_{name}", str(value))

    set_variables()
    return set_variables


@pytest.fixture(params=[0, 1])
def either_gpu_is_current(request, monkeypatch):
    """Runs a test with the first GPU as the current one, and with the second.

    All devices that a call names share its work, however little it is.
    """
    monkeypatch.setenv("SPAMM_TORCH_ALL_DEVICES", "1")
    with torch.cuda.device(request.param):
        yield


@pytest.fixture
def new_memory_holds_nan(monkeypatch):
    """So that a block that is read but was not copied shows."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def timed(monkeypatch):
    """Replaces what is measured by a function of the trial: microseconds, or a Timing."""
    from support import linear_time, made_up

    def replace(time_of):
        monkeypatch.setattr("spamm_torch.calibration.options.times_of_parts", made_up(time_of))

    replace(linear_time)
    return replace
