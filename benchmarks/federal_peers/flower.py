"""Run `flower_app.py` with Flower's deployment engine as it comes: a SuperLink, a SuperNode, a process for each message.

`python flower.py SHAPE STEPS FOLDER` in an environment with torch and flwr 1.41; the figures are in FOLDER/steps.json.
Plain text: its HTTPS would only add to what is there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = """[project]
name = "split"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "plait"
[tool.flwr.app.components]
serverapp = "flower_app:server"
clientapp = "flower_app:client"
[tool.flwr.app.config]
shape = "{shape}"
steps = {steps}
result = "{result}"
"""
HOME = """[superlink]
default = "here"
[superlink.here]
address = "127.0.0.1:{port}"
insecure = true
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def wait_for(port: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise SystemExit(f"nothing listens at port {port} after {seconds:.0f} s")


def prepare(shape: str, steps: int, folder: Path, port: int) -> Path:
    app, home = folder / "app", folder / "home"
    for one in (app, home):
        one.mkdir(parents=True, exist_ok=True)
    for name in ("flower_app.py", "split.py"):
        shutil.copy(HERE / name, app)
    (app / "pyproject.toml").write_text(PROJECT.format(shape=shape, steps=steps, result=folder / "steps.json"))
    (home / "config.toml").write_text(HOME.format(port=port))
    return app


def main(shape: str, steps: int, folder: Path) -> None:
    port, other = free_port(), free_port()
    app = prepare(shape, steps, folder, port)
    bin = Path(sys.executable).parent
    environment = {
        **os.environ,
        "FLWR_HOME": str(folder / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{bin}:{os.environ['PATH']}",
    }
    link = [bin / "flower-superlink", "--insecure", "--port", str(port), "--disable-runtime-dependency-installation"]
    node = [bin / "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", "--port", str(other)]
    started = []
    try:
        with (folder / "log.txt").open("w") as log:
            for command in (link, node):
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
                wait_for(port, 60)
            subprocess.run(
                [bin / "flwr", "run", str(app)], env=environment, check=True, timeout=120, stdout=log, stderr=log
            )
        end = time.monotonic() + 120 + 60 * steps
        while not (folder / "steps.json").exists() and time.monotonic() < end:
            time.sleep(0.5)
    finally:
        for process in reversed(started):
            stop(process)


def descendants(root: int) -> list[int]:
    """The processes that it has started, and theirs: some lead sessions of their own and outlive it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
    found = [root]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def stop(process: subprocess.Popen) -> None:
    """End it, and all that it has started."""
    left = descendants(process.pid)
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]).resolve())
