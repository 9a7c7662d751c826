"""Runs the demo: common ids, both parties, then all data in one place; draws the curves and says what came of it."""

from __future__ import annotations

import logging
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from plait.demo import agreed, alignment, curve
from plait.demo.centralised import train_alone, train_centralised
from plait.errors import ConfigError
from plait.federal.run import federate
from plait.variables.checkpoint import CheckpointDir

__all__ = ["difference", "remove_finished_run", "run", "summary"]

PARTIES = ("leader", "follower")
RUNS = {
    "two parties": "left halves and labels at one, right halves at the other",
    "centralised": "all of it in one place",
    "leader alone": "left halves only",
}
"""Who trained, and on what."""
_WIRE = re.compile(r"on the wire: (.*)")


def run(output: Path = Path("demo-output"), *, passes: int = agreed.PASSES) -> dict[str, float]:
    """Align, train, compare, draw the curves into `output`, say what came of it; return each run's test accuracy.

    A training of the two parties that was cut off goes on where it was; one that had ended is removed and done again.
    """
    output = Path(output)
    remove_finished_run(output, passes)
    with _quiet():
        _say(alignment.align_parties(output))
    _train_parties(output, passes)
    _say("\nthe same without parties, to compare ...")
    with _quiet():
        centralised, alone = train_centralised(passes), train_alone(passes)
    leader, follower = (_newest(output / party) for party in PARTIES)
    apart = difference(leader["variables"] | follower["variables"], centralised.variables())
    histories = dict(zip(RUNS, (leader["history"], centralised.history, alone.history), strict=True))
    accuracies = {name: float(history[-1]["metrics"]["accuracy"]) for name, history in histories.items()}
    drawn = curve.draw(histories, output / "curve.png")
    _say(summary(accuracies, apart, output, drawn=drawn))
    return accuracies


def _train_parties(output: Path, passes: int) -> None:
    """Two processes that meet over mutual TLS, with certificates for this run alone, and a view of both."""
    scripts = [Path(__file__).with_name(f"{party}.py") for party in PARTIES]
    code = federate(*scripts, args=[str(output), str(passes)], log_dir=output / "logs")
    if code != 0:  # federate has said why
        raise SystemExit(code)


def remove_finished_run(output: Path, passes: int) -> None:
    """Make room for a new run, without touching what is not the demo's own."""
    directories = [CheckpointDir(output / party) for party in PARTIES]
    states = [found[1] for directory in directories if (found := directory.read_latest()) is not None]
    for state in states:
        project = (state.get("journal") or {}).get("project")
        if project != agreed.PROJECT:
            raise ConfigError(
                f"{output} holds checkpoints of project {project!r}, which the demo would overwrite: "
                "name another directory, `plait demo --output DIR`"
            )
    if [len(state["history"]) for state in states] != [passes] * len(PARTIES):
        return
    for directory in directories:
        for checkpoint in directory.list():
            shutil.rmtree(checkpoint.path)
    for name in (*(f"logs/{party}.log" for party in PARTIES), "curve.png"):
        (output / name).unlink(missing_ok=True)
    alignment.remove(output)


def _newest(path: Path) -> dict[str, Any]:
    """What a party has trained: its last checkpoint."""
    found = CheckpointDir(path).read_latest()
    assert found is not None  # noqa: S101 - its training has just ended well
    state: dict[str, Any] = found[1]
    return state


def difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """How far apart two models' variables are, at most; 0.0: they are the same to the last bit."""
    assert one.keys() == other.keys()  # noqa: S101 - both are made of the same functions
    return max(
        0.0 if torch.equal(one[name], other[name]) else float((one[name] - other[name]).abs().max()) for name in one
    )


def summary(accuracies: Mapping[str, float], apart: float, output: Path, *, drawn: bool) -> str:
    weights = "the same weights, to the last bit" if apart == 0 else f"weights that differ by at most {apart:.1g}"
    notes = RUNS | {"centralised": f"{RUNS['centralised']}: {weights}"}
    lines = ["", "test accuracy"]
    lines += [f"  {name:<16}{accuracy:.4f}  {notes[name]}" for name, accuracy in accuracies.items()]
    lines += [f"on the wire       {wire}, at the leader"] if (wire := _travelled(output)) else []
    lines += [f"curve             {output / 'curve.png'}"] if drawn else []
    lines += [f"checkpoints       {', '.join(str(output / party) for party in PARTIES)}"]
    # as it was called, which need not be on the PATH
    command = sys.argv[0] if Path(sys.argv[0]).name == "plait" else "plait"
    return "\n".join([*lines, f"look inside with  {command} inspect {output / 'leader'}"])


def _travelled(output: Path) -> str:
    """The leader's last word on it; of a run that was cut off, what has travelled since."""
    log = output / "logs" / "leader.log"
    found = _WIRE.findall(log.read_text(encoding="utf-8", errors="replace")) if log.exists() else []
    return found[-1] if found else ""


@contextmanager
def _quiet() -> Iterator[None]:
    """Only warnings: the parties have said it all already."""
    log = logging.getLogger("plait")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - what a command has to say
