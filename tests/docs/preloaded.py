"""``toast`` commands in forks of a process that has imported TOAST already.

Half the time of a short command is that of its imports.  A :class:`Server` imports everything once;
the program that it writes for ``toast`` sends it arguments, environment, working directory and open
files, and ends with the status of the fork that runs the command with them.  The server computes
nothing itself and so has no threads, which a fork would lose.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pathlib
import pkgutil
import socket
import subprocess
import sys
import tempfile
from typing import Any

import toast

_PROGRAM = """\
#!{python} -IS
import json, os, socket, sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    request = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(request).to_bytes(8)], [0, 1, 2])
    server.sendall(request)
    sys.exit(int(server.recv(16) or b"70"))
"""
#: A request: the lengths of its parts, and how many files come with it.
_LENGTH_BYTES, _FILES = 8, 3


@functools.cache
def server() -> Server:
    """The server of this process."""
    started = Server()
    atexit.register(started.close)
    return started


class Server:
    """Runs commands until it is closed, or the process that started it ends."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._address = os.path.join(self._folder.name, "socket")
        self._times = pathlib.Path(self._folder.name, "times")
        self._times.touch()
        arguments = [sys.executable, "-m", __name__, self._address, self._times]
        environment = {key: os.environ[key] for key in os.environ if key != "XLA_FLAGS"}
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
            cwd=pathlib.Path(__file__).parents[2],
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), "the server of commands did not start"

    def program(self) -> str:
        """The text of an executable ``toast``."""
        return _PROGRAM.format(python=sys.executable, address=self._address)

    def user_cpu_seconds(self) -> float:
        """What the commands took so far; they are no children of this process."""
        return sum(map(float, self._times.read_text().split()))

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._folder.cleanup()


def _serve(address: str, times: str) -> int:
    """Fork for each connection, until standard input ends; in a fork, the command's status."""
    _import_all()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        if os.fork() == 0:
            # Ends the server when whoever started it has ended.
            sys.stdin.read()
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            os._exit(0)
        print("ready", flush=True)
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return 0
            if os.fork() == 0:
                # This process waits for the one that runs the command, and answers.
                if os.fork() == 0:
                    break
                _, status, used = os.wait4(-1, 0)
                with open(times, "a") as file:
                    file.write(f"{used.ru_utime}\n")
                connection.sendall(b"%d" % _exit_status(status))
                os._exit(0)
            connection.close()
            _reap()
    status = _run(connection)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # at once: not after tearing down all that was imported


def _reap() -> None:
    """Forget the processes that have answered."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _exit_status(status: int) -> int:
    """As a shell says it."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _run(connection: socket.socket) -> int:
    """Take over what a command has, and run it."""
    length, files, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, _FILES)
    request = b""
    while len(request) < int.from_bytes(length):
        request += connection.recv(2**16)
    sys.argv, folder, environment = json.loads(request)
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    from toast.__main__ import main

    try:
        main()
    except SystemExit as end:
        return _status(end.code)
    return 0


def _status(code: Any) -> int:
    if isinstance(code, str):
        print(code, file=sys.stderr)
        return 1
    return int(code or 0)


def _import_all() -> None:
    for module in pkgutil.walk_packages(toast.__path__, "toast."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    gc.freeze()  # forks need not look for garbage in it


if __name__ == "__main__":
    sys.exit(_serve(*sys.argv[1:]))
