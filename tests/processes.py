"""Processes of their own: of a new Python, or forked from one that has imported torch."""

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def python(*arguments, cwd=None, check=False, **environment):
    """Runs this Python in a process of its own, with some more environment variables."""
    command, env = [sys.executable, *map(str, arguments)], os.environ | environment
    return subprocess.run(command, cwd=cwd, env=env, check=check, capture_output=True, text=True)


# Its processes are copies of one that has imported torch, which takes seconds.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch._dynamo", "torch.distributed.tensor"])


def forked(*arguments, cwd=None, ranks=None, seconds=600, context=FORKS, **environment):
    """The same, of a process that has torch already: the result of one rank of so many, as under
    torchrun, of one that failed if one did, and what all wrote to stderr. It begins without options
    of Python, by -c or a script. ``context``: of multiprocessing; what has met CUDA cannot fork.
    """
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    met = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with tempfile.TemporaryDirectory() as folder:
        processes, logs = [], []
        for rank in map(str, range(ranks or 1)):
            own = met | {"RANK": rank, "LOCAL_RANK": rank} if ranks else {}
            logs.append([f"{folder}/{kind}{rank}" for kind in ("out", "error")])
            given = list(map(str, arguments)), cwd or ".", environment | own, logs[-1]
            processes.append(context.Process(target=_as_python, args=given, daemon=True))
            processes[-1].start()
        deadline = time.monotonic() + seconds
        for process in processes:
            process.join(max(0, deadline - time.monotonic()))
            process.kill()
            process.join()
        codes = [process.exitcode for process in processes]
        shown = next((rank for rank, code in enumerate(codes) if code), 0)
        errors = "".join(Path(error).read_text() for _, error in logs if Path(error).exists())
        output = Path(logs[shown][0]).read_text()
    return subprocess.CompletedProcess(arguments, codes[shown], output, errors)


def _as_python(arguments, cwd, environment, logs):
    for number, path in enumerate(logs, start=1):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
    os.environ.update(environment)
    os.chdir(cwd)
    script, *sys.argv = arguments
    first = "" if script == "-c" else str(Path(script).resolve().parent)
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    sys.path = [first, *given, *installed]
    if script == "-c":
        code, sys.argv[0] = sys.argv[0], script
        exec(code, {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(script, run_name="__main__")
