"""Processes that own a part each, and what they measure together.

They live as long as jobs succeed. A job that fails, or does not end in time, ends them, for they
may be waiting for each other; the next job starts new ones.
"""

import contextlib
import multiprocessing
import signal
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

from cases.multi_gpu import rank_jobs
from models.errors import first_line

_START_S = 180  # a cold machine reads torch from disk
_JOB_S = 60
_MOST_FAILURES = 2  # of one job: then it is not tried again, for each takes up to _JOB_S


class Ranks:
    """As a context manager: the processes, which start with the first job."""

    def __init__(self, devices):
        self._devices = devices
        self._running = None  # [(process, pipe)]
        self._folder = None
        self._failures = {}  # job -> [what it said]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stop()

    def do(self, job, *arguments):
        """What the first rank returns from a job that all do.

        Args:
            job: the name of a function of rank_jobs. arguments: what it takes, beside its place.

        Raises:
            RuntimeError: a rank failed, ended or did not answer in time; or the job has failed so
                before.
        """
        failures = self._failures.setdefault(job, [])
        if len(failures) >= _MOST_FAILURES:
            raise RuntimeError(f"not tried again after: {failures[-1]}")
        try:
            if self._running is None:
                self._start()
            return self._answers((job, arguments), _JOB_S)[0]
        except RuntimeError as error:
            failures.append(first_line(error))
            self._stop()
            raise
        except BaseException:
            self._stop()
            raise

    def _start(self):
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name, "store")
        self._running = []
        for rank in range(len(self._devices)):
            here, there = context.Pipe()
            place = (rank, [str(device) for device in self._devices], str(store))
            process = context.Process(target=_serve, args=(there, *place), daemon=True)
            process.start()
            there.close()
            self._running.append((process, here))
        self._answers(None, _START_S)

    def _answers(self, request, seconds):
        """Asks all ranks, and gives what they say in their order."""
        for rank, (_, pipe) in enumerate(self._running):
            if request is not None:
                with _alive(rank):
                    pipe.send(request)
        answers = {}
        deadline = time.monotonic() + seconds
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._running)}
        while len(answers) < len(pipes):
            waiting = [pipe for pipe, rank in pipes.items() if rank not in answers]
            ready = wait(waiting, max(0, deadline - time.monotonic()))
            if not ready:
                raise RuntimeError(f"the ranks did not answer in {seconds} s")
            for pipe in ready:
                answers[pipes[pipe]] = _answer(pipe, pipes[pipe])
        return [answers[rank] for rank in range(len(pipes))]

    def _stop(self):
        for process, pipe in self._running or ():
            pipe.close()
            process.kill()
            process.join()
        self._running = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


@contextlib.contextmanager
def _alive(rank):
    """A RuntimeError where a rank's pipe has no other end any more."""
    try:
        yield
    except (EOFError, ConnectionError):
        raise RuntimeError(f"rank {rank} ended") from None


def _answer(pipe, rank):
    with _alive(rank):
        succeeded, answer = pipe.recv()
    if not succeeded:
        raise RuntimeError(f"rank {rank}: {answer}")
    return answer


def _serve(pipe, rank, devices, store):
    """A rank: joins the others, says so, then does jobs until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    with contextlib.suppress(EOFError, ConnectionError):
        place, error = _tried(rank_jobs.join, rank, devices, store)
        pipe.send((error is None, error))
        while error is None:
            job, arguments = pipe.recv()
            answer, failure = _tried(getattr(rank_jobs, job), place, *arguments)
            pipe.send((failure is None, failure or answer))


def _tried(call, *arguments):
    """What a call returns, and what it says where it fails."""
    try:
        return call(*arguments), None
    except Exception as error:
        return None, first_line(error)
