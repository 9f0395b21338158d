"""Programs that tests run without a start of Python: forks of one process that has the library loaded.

    code, out, err = warm.program("tests.shell.killed", "ROOT", "1", "lines=2", OPTIONS="{}")

A start costs four seconds of imports, a fork some milliseconds; shape checks are in none of the two. Each
process of pytest has one such server, started when it is first asked and gone when the process is.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from concurrent import futures
from typing import Any

from tests import disk, paths

# What a small run loads: its libraries, and of transformers what comes with a model and its words.
LOADED = (
    "tests.shell.runs", "shell.jobs", "shell.evaluate", "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip
SERVE = "from tests import warm; warm.serve({})"
PATIENCE = 120.0


def program(module: str, *words: str, ranks: int = 1, **variables: str) -> tuple[int, str, str]:
    """Run a module as `python -m` does; return its status, standard output and standard error.

    Args:
        module, words: the program and its command line; "-c" and then code is a program, too.
        ranks: as many processes, told of each other as torchrun tells them; the worst status counts.
        variables: of the environment, beside those of this process.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    own |= {"OMP_NUM_THREADS": "1", **variables}
    places = [{}] if ranks == 1 else _places(ranks)
    started = [_Started([module, *words], own | place) for place in places]
    codes, outs, errs = zip(*(each.ended() for each in started), strict=True)
    return max(codes, key=abs), "".join(outs), "".join(errs)


def _places(num: int) -> list[dict[str, str]]:
    """Return what a launcher would tell each of some processes on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"WORLD_SIZE": str(num), "LOCAL_WORLD_SIZE": str(num)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num)]


class _Started:
    """A program that runs."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        message = json.dumps({"command": command, "environment": environment}).encode()
        # The connection tells the program's number and its end; two pipes bring what it writes.
        self.connection, its = socket.socketpair()
        pipes = [os.pipe() for _ in range(2)]
        with its:
            given = [its.fileno(), *(write for _, write in pipes)]
            socket.send_fds(_server(), [message], given)
        for _, write in pipes:
            os.close(write)
        self.pool = futures.ThreadPoolExecutor(2)
        self.said = [self.pool.submit(_all, read) for read, _ in pipes]

    def ended(self) -> tuple[int, str, str]:
        """Wait for the end; return the exit status, negative after a signal, and what was written."""
        with self.connection, self.connection.makefile() as lines, self.pool:
            number = int(lines.readline())
            timer = threading.Timer(PATIENCE, os.killpg, (number, signal.SIGKILL))
            timer.start()
            code = int(lines.readline())
            out, err = (each.result() for each in self.said)
            timer.cancel()
        return code, out, err


def _all(descriptor: int) -> str:
    """Return all that comes out of a pipe."""
    with open(descriptor, errors="replace") as stream:
        return stream.read()


@functools.cache
def _server() -> socket.socket:
    """Start the process that forks."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(paths.ROOT)}
    with its:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE.format(its.fileno())],
            cwd=paths.ROOT, env=environment, pass_fds=[its.fileno()],
        )  # fmt: skip
    atexit.register(process.wait)
    atexit.register(mine.close)
    return mine


def serve(descriptor: int) -> None:
    """Load what programs need, then fork for each request until the other side is gone."""
    for name in LOADED:
        importlib.import_module(name)

    disk.hurry()
    gc.freeze()
    with socket.socket(fileno=descriptor) as requests:
        while True:
            message, descriptors, *_ = socket.recv_fds(requests, 1 << 20, 3)
            if not message:
                return
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:  # who waited for a program that has ended
                    pass
            if not os.fork():
                requests.close()
                _attend(json.loads(message), *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)


def _attend(asked: dict[str, Any], descriptor: int, out: int, err: int) -> None:
    """Fork the program, tell its number and then how it ended."""
    with socket.socket(fileno=descriptor) as connection:
        child = os.fork()
        if not child:
            connection.close()
            for number, pipe in ((1, out), (2, err)):
                os.dup2(pipe, number)
                os.close(pipe)
            _become(**asked)
        os.close(out)
        os.close(err)
        connection.sendall(f"{child}\n".encode())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(f"{code}\n".encode())
    os._exit(0)


def _become(command: list[str], environment: dict[str, str]) -> None:
    """Be a program from its start to its end."""
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command[:]
    status = 0
    try:
        if command[0] == "-c":
            sys.argv.remove(command[1])
            exec(command[1], {"__name__": "__main__"})
        else:
            sys.modules.pop(command[0], None)  # it begins again, as the program
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
