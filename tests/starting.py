"""Programs in processes of their own that need not import torch first: they are copies of a process that has."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from plait.launch.environment import Layout, free_ports

PRELOADED = ["__main__", "plait", "torch._dynamo", "torch.distributed.fsdp"]
"""What takes seconds to import: the first step of an optimizer brings torch._dynamo."""

CLUSTER_SECONDS = 100.0
"""No cluster of a test takes longer, on a busy machine."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


class Program:
    """A Python file that runs as `python FILE ARGUMENTS` would; it is ended with the block.

    Its output goes to the end of the file `out`, its errors too unless `errors` names another. It leads a session of
    its own, so that `os.killpg` reaches whatever it starts. Warnings of the classes in `strict` are errors.
    """

    def __init__(
        self,
        file: Path,
        *arguments: object,
        out: Path,
        errors: Path | None = None,
        environ: Mapping[str, str] | None = None,
        strict: Sequence[type[Warning]] = (),
    ) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
        given = (str(file), [str(argument) for argument in arguments], environment, strict, out, errors or out)
        # not `_run` itself: a process that is started does not find this file by its module's name
        self._process = _context.Process(target=runpy.run_path, args=(__file__, {"GIVEN": given}, "__started__"))
        self._process.start()
        self.pid: int = self._process.pid

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def poll(self) -> int | None:
        """Its exit code, minus a signal's number; None: it runs."""
        return self._process.exitcode

    def wait(self, seconds: float) -> int:
        self._process.join(seconds)
        code = self.poll()
        assert code is not None, f"still running after {seconds:g} s"
        return code

    def kill(self) -> None:
        self._process.kill()
        self.wait(10)


def run_cluster(file: Path, *arguments: object, folder: Path, workers: int = 2, servers: int = 0) -> None:
    """Run a program as the processes of a cluster, as `plait launch` does, and see that all end well."""
    ports = [f"127.0.0.1:{port}" for port in free_ports(workers + servers, "127.0.0.1")]
    roles = [("worker", index) for index in range(workers)] + [("server", index) for index in range(servers)]
    logs = [folder / f"{kind}-{index}.log" for kind, index in roles]
    with contextlib.ExitStack() as stack:
        sockets = stack.enter_context(tempfile.TemporaryDirectory())  # a socket's path has to be short
        layout = Layout(workers=tuple(ports[:workers]), servers=tuple(ports[workers:]), sockets=sockets)
        environs = [layout.environment(kind, index, os.environ) for kind, index in roles]
        programs = [
            stack.enter_context(Program(file, *arguments, out=log, environ=environ))
            for log, environ in zip(logs, environs, strict=True)
        ]
        codes = [program.wait(CLUSTER_SECONDS) for program in programs]
    assert codes == [0] * len(roles), "\n".join(log.read_text()[-2000:] for log in logs)


def _run(
    file: str,
    arguments: list[str],
    environ: dict[str, str],
    strict: Sequence[type[Warning]],
    out: Path,
    errors: Path,
) -> None:
    os.setsid()
    for number, path in ((1, out), (2, errors)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv, sys.path[:0] = [file, *arguments], [str(Path(file).parent)]
    for kind in strict:
        warnings.simplefilter("error", kind)
    try:
        runpy.run_path(file, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # as the interpreter does at its end


if __name__ == "__started__":
    _run(*GIVEN)  # noqa: F821 - `Program` gives it
