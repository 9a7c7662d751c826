"""Tests leave nothing behind: a test that leaks a variable, thread, process or setting of torch fails."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from plait.engine import build, op
from plait.engine.task import Frame, TaskScope, local

GRACE_SECONDS = 2.0
"""How long a thread or process that has been told to end may take."""
KEPT_VARIABLES = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
"""What pytest sets, and what torch sets when its first optimizer steps."""
KEPT_PROCESSES = ("resource_tracker", "forkserver")
"""Processes of multiprocessing that live until Python ends, by a word of their command line."""

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes are not run beside others: the marker `alone` need not stand in their files."""
    for item in items:
        if item.path.stem.endswith("_integration"):
            item.add_marker(pytest.mark.alone)


def pytest_collection_finish() -> None:
    """Ten thousand tests and all of torch need not be looked at whenever garbage is collected."""
    gc.collect()
    gc.freeze()


settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("new", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
"""Made-up inputs are the same in every run, so that a change is judged by itself; `make test-all` draws new ones."""


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Numbers do not depend on how many cores the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_leaked_variables() -> Iterator[None]:
    before = _environment()
    yield
    after = _environment()
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in changed:
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    assert not changed, f"the test changed environment variables {changed}: use monkeypatch.setenv"


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in KEPT_VARIABLES}


KEPT_THREADS = ("GarbageCollectorThread",)
"""Threads of packages that live until Python ends, by their classes: pyzmq's, which frees what was sent."""


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = _still_there(lambda: [thread.name for thread in _threads() if thread not in before])
    assert not left, f"the test left threads running: {left}"


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if type(thread).__name__ not in KEPT_THREADS]


@pytest.fixture(autouse=True)
def no_leaked_processes() -> Iterator[None]:
    before = _children()
    yield
    left = _still_there(lambda: sorted(_children() - before))
    assert not left, f"the test left child processes: {left}"


def _children() -> set[int]:
    """Child processes of any kind where the system lists them, of multiprocessing elsewhere."""
    multiprocessing.active_children()  # takes note of those that have ended
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        try:
            found |= {int(pid) for pid in file.read_text().split()}
        except OSError:  # the thread has ended in between
            continue
    found |= {process.pid for process in multiprocessing.active_children() if process.pid is not None}
    return {pid for pid in found if not any(word in _command(pid) for word in KEPT_PROCESSES)}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _still_there(look: Callable[[], list]) -> list:
    """What `look` finds, once it finds nothing or the time of grace is over."""
    until = time.monotonic() + GRACE_SECONDS
    while (found := look()) and time.monotonic() < until:
        time.sleep(0.01)
    return found


@pytest.fixture(autouse=True)
def no_changed_torch() -> Iterator[None]:
    before = _torch_settings()
    yield
    after = _torch_settings()
    _set_torch(before)
    changed = {name: after[name] for name in before if before[name] != after[name]}
    assert not changed, f"the test changed torch's settings to {changed}: ask for the fixture torch_settings"


@pytest.fixture
def torch_settings() -> Iterator[None]:
    """For tests that change torch's settings: they are put back before anybody looks."""
    before = _torch_settings()
    yield
    _set_torch(before)


def _torch_settings() -> dict[str, object]:
    return {
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
    }


def _set_torch(settings: dict) -> None:
    """Put back what differs, and only that: some of these settings cost a second when they are first set."""
    setters = {
        "default dtype": torch.set_default_dtype,
        "threads": torch.set_num_threads,
        "deterministic": torch.use_deterministic_algorithms,
        "grad mode": torch.set_grad_enabled,
        "matmul precision": torch.set_float32_matmul_precision,
    }
    now = _torch_settings()
    for name, value in settings.items():
        if now[name] != value:
            setters[name](value)


@pytest.fixture(autouse=True)
def fresh_plait() -> Iterator[None]:
    """What plait keeps for the whole process starts anew: its log's set-up, the current scope, step and model."""
    log = logging.getLogger("plait")
    level, handlers, propagate, disabled = log.level, list(log.handlers), log.propagate, log.disabled
    yield
    log.setLevel(level)
    log.handlers[:] = handlers
    log.propagate, log.disabled = propagate, disabled
    local.frame = Frame(TaskScope())
    op._default_step.clear()
    build._compiled.clear()
