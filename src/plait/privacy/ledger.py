"""`Ledger`: counts what was released, says what it tells of a row, and stops at the budget."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from plait.atomic import write_atomic
from plait.errors import CheckpointError, ConfigError
from plait.privacy.accountant import METHODS, Event, epsilon, gaussian_epsilon, most_steps, rough_epsilon

__all__ = ["FILE", "Ledger"]

FILE = "privacy.json"
"""The file's name, in the directory that the ledger is kept in."""

_VERSION = 1
_BLOCK = 16  # steps that are written down ahead, at least
_AHEAD = 32  # and one in so many of those made: a kill makes epsilon that much larger, and no more


@dataclass
class _Stretch:
    """Steps that follow each other, all alike."""

    event: Event
    returned: float | None
    first: int
    last: int

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    def precision(self, *, peer: bool) -> float:
        """What one step tells of a row in its batch: 1 / noise**2, and a peer sees what is returned, too."""
        seen = [self.event.noise] if self.returned is None or not peer else [self.event.noise, self.returned]
        return sum(1 / noise**2 if noise else math.inf for noise in seen)


@dataclass
class _Run:
    """The steps of one run, and the most often any row was in them. A step's number names one release."""

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    stretches: list[_Stretch] = field(default_factory=list)
    uses: int = 0
    start: int = 1

    @property
    def last(self) -> int:
        return self.stretches[-1].last if self.stretches else self.start - 1

    @property
    def count(self) -> int:
        return sum(stretch.count for stretch in self.stretches)

    @property
    def sampled(self) -> bool:
        """Whether it is hidden, in every step, which rows were in the batch."""
        return all(stretch.event.rate < 1 for stretch in self.stretches)

    def at(self, step: int) -> _Stretch | None:
        return next((found for found in self.stretches if found.first <= step <= found.last), None)

    def worst(self, *, peer: bool) -> float:
        return max((stretch.precision(peer=peer) for stretch in self.stretches), default=0.0)

    def precision(self, *, peer: bool) -> float:
        """What the run tells of a row, at most, to those who know the batches: it was in every one, or in the worst."""
        used = self.uses * self.worst(peer=peer) if self.uses else 0.0
        return min(used, sum(stretch.count * stretch.precision(peer=peer) for stretch in self.stretches))

    def events(self) -> list[tuple[Event, int]]:
        """What the run tells an outsider."""
        if self.sampled:
            return [(stretch.event, stretch.count) for stretch in self.stretches]
        precision = self.precision(peer=False)
        return [(Event(precision**-0.5), 1)] if precision else []


class _Limit(NamedTuple):
    """How far the budget goes: the last step, and the most often that a row may be used."""

    step: float
    uses: float
    final: bool = True
    """Whether it goes no further; it takes longer to find how far it goes than that it goes far."""


_NO_LIMIT = _Limit(math.inf, math.inf)


class Ledger:
    """Counts the releases of a run, and of all runs before it in the same directory.

    Every release is told before it happens. A run is named at random, and the name goes with its checkpoints: steps
    that are made again after a kill use the same rows and the same noise, tell nothing new, and are not counted again.
    A run that begins anew is counted beside the others.

    Args:
        delta: the probability with which the guarantee may fail; far below one over the number of rows.
        budget: the epsilon, against an outsider, that is not to be passed.
        method: the accountant, "pld" or "rdp".
        repeatable: whether a step that is made again after a kill has the same noise; otherwise it counts again.

    """

    def __init__(
        self, delta: float, *, budget: float | None = None, method: str = "pld", repeatable: bool = True
    ) -> None:
        if not 0 < delta < 1:
            raise ConfigError(f"delta={delta}: write a probability far below one over the number of rows, as in 1e-5")
        if budget is not None and not budget > 0:
            raise ConfigError(f"epsilon_budget={budget}: write a number above 0, or None for no budget")
        if method not in METHODS:
            raise ConfigError(f"accountant={method!r}: there are {' and '.join(map(repr, METHODS))}")
        self.delta, self.budget, self.method, self.repeatable = delta, budget, method, repeatable
        self._run = _Run()
        self._others: dict[str, _Run] = {}
        self._path: Path | None = None
        # Nearly every step goes on with `_stretch`, and is within what is written down and allowed.
        self._stretch: _Stretch | None = None
        self._ready = _Limit(0, 0)
        self._limits: dict[tuple[Event, int], _Limit] = {}
        self._known: dict[Any, float] = {}

    # ---- releases

    def keep(self, directory: str | os.PathLike[str]) -> None:
        """Write releases down in this directory before they happen; what is there already counts."""
        path = Path(directory) / FILE
        if path == self._path:
            return
        self._path = path
        if path.exists():
            self._take(self._read(path))
        self._changed()

    def release(self, event: Event, *, step: int, uses: int, returned: float | None = None) -> None:
        """A noised gradient is about to be used, in private step `step` (from 1).

        Args:
            event: its noise, and the sampling of its rows.
            step: one that was told before is the same release again, and tells nothing new.
            uses: the most often that any row was used up to here.
            returned: the noise multiplier of what goes back to a peer in this step; None: nothing does, 0: as it is.

        """
        stretch, ready = self._stretch, self._ready
        if (
            stretch is not None
            and step == stretch.last + 1
            and step <= ready.step
            and uses <= ready.uses
            and event == stretch.event
            and returned == stretch.returned
        ):
            stretch.last = step
            if uses > self._run.uses:
                self._run.uses = uses
            return
        self._release(event, step, uses, returned)

    def affords(self, event: Event, *, step: int, uses: int, returned: float | None = None) -> bool:
        """Whether the budget allows this release; `release` refuses one that it does not."""
        if self.budget is None or self._is_known(event, step, returned):
            return True
        run, stretch = self._run, self._stretch_of(event, returned)
        limit = self._limit_of(stretch, step)
        # A row was in no more batches than there were.
        return step <= limit.step and min(uses, run.count + step - run.last) <= limit.uses

    @property
    def exhausted(self) -> bool:
        """Whether the budget does not allow another release like the last one, should it use a row once more."""
        if self.budget is None:
            return False
        if not self._run.stretches:
            return bool(self._others) and self.epsilon(exact=True) >= self.budget
        stretch = self._run.stretches[-1]
        step, uses = stretch.last + 1, self._run.uses + 1
        return not self.affords(stretch.event, step=step, uses=uses, returned=stretch.returned)

    def close(self) -> None:
        """The run ends in order: what was written down ahead, and not released, is taken back."""
        if self._path is not None and self._run.stretches:
            self._write(self._run.last, self._run.uses)
            self._stretch = None  # the next release is written down anew

    def _release(self, event: Event, step: int, uses: int, returned: float | None) -> None:
        if step < 1:
            raise ConfigError(f"private step {step}: steps are counted from 1")
        if self._is_known(event, step, returned):
            return
        if step <= self._run.last:
            self._branch(step)
        if not self.affords(event, step=step, uses=uses, returned=returned):
            raise ConfigError(
                f"epsilon_budget={self.budget} at delta={self.delta} does not allow private step {step} with noise "
                f"{event.noise:g} and sampling rate {event.rate:g}; stop before it, or give more noise, a larger "
                "budget or smaller batches"
            )
        run, stretch = self._run, self._stretch_of(event, returned)
        before = stretch.last, run.uses
        if not stretch.count:
            run.stretches.append(stretch)
        stretch.last = step  # steps between, that other workers made without this one, count as if they were alike
        run.uses = max(run.uses, uses)
        try:
            self._write_ahead(step, self._limit_of(stretch, step))
        except BaseException:  # it is not written down, so it does not happen, and may be tried again
            stretch.last, run.uses = before
            if not stretch.count:
                run.stretches.pop()
            raise
        self._stretch = stretch

    def _is_known(self, event: Event, step: int, returned: float | None) -> bool:
        known = self._run.at(step)
        return known is not None and (known.event, known.returned) == (event, returned)

    def _branch(self, step: int) -> None:
        """A step made again with other noise is another release: from `step` on, this is another run."""
        if self._run.stretches:
            self._others[self._run.name] = self._run
        self._run = _Run(start=step)
        self._changed()

    def _stretch_of(self, event: Event, returned: float | None) -> _Stretch:
        """The one that a step like this goes on with, or a new one."""
        stretch = self._run.stretches[-1] if self._run.stretches else None
        if stretch is not None and (stretch.event, stretch.returned) == (event, returned):
            return stretch
        return _Stretch(event, returned, self._run.last + 1, self._run.last)

    def _limit_of(self, stretch: _Stretch, step: int) -> _Limit:
        """How far the budget goes, or that it goes far beyond `step`, if the steps to come are like `stretch`."""
        if self.budget is None:
            return _NO_LIMIT
        key = (stretch.event, stretch.first)
        limit = self._limits.get(key)
        if limit is None or (step > limit.step and not limit.final):
            limit = self._find_limit(stretch, step, self.budget)
            self._limits = {key: limit}
        return limit

    def _find_limit(self, stretch: _Stretch, step: int, budget: float) -> _Limit:
        run = self._run
        if run.sampled and stretch.event.rate < 1:
            before = self._counts()
            made = before.pop(stretch.event, 0)
            enough = 2 * (made + step - stretch.last) + 10_000
            most = most_steps(stretch.event, self.delta, budget, list(before.items()), self.method, enough=enough)
            return _Limit(stretch.last + most - made, math.inf, most < enough)
        before = _counted(event for other in self._others.values() for event in other.events())
        worst = max(run.worst(peer=False), stretch.precision(peer=False))
        noise = 0.0 if math.isinf(worst) else worst**-0.5
        return _Limit(math.inf, most_steps(Event(noise), self.delta, budget, list(before.items()), self.method))

    def _write_ahead(self, step: int, limit: _Limit) -> None:
        """Write down this step and some that are to come, so that few steps wait for the disk."""
        if self._path is None:
            self._ready = limit
            return
        uses = self._run.uses
        ahead = _Limit(min(step - 1 + max(_BLOCK, step // _AHEAD), limit.step), min(uses + uses // _AHEAD, limit.uses))
        self._write(int(ahead.step), int(ahead.uses))
        self._ready = ahead

    # ---- epsilons

    def epsilon(self, *, exact: bool = False) -> float:
        """Against an outsider, who sees the model and not which rows were in which batch.

        Without `exact` it is quick, and an upper bound: of the next of few step counts, at most an eighth apart.
        """
        counts = self._counts()
        if not exact and self._run.stretches and self._run.sampled:
            event = self._run.stretches[-1].event
            counts[event] = _round_up(counts[event])
        key = (exact, *sorted(counts.items()))
        if key not in self._known:
            if len(self._known) > 64:
                self._known.clear()
            self._known[key] = (epsilon if exact else rough_epsilon)(list(counts.items()), self.delta, self.method)
        return self._known[key]

    def peer_epsilon(self) -> float:
        """Against a peer, who knows the rows of each batch: no sampling hides a row; infinite if anything is bare."""
        return gaussian_epsilon(sum(run.precision(peer=True) for run in self._runs()), self.delta)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        runs = [_plain(run) for run in self._runs()]
        return {"delta": self.delta, "run": self._run.name, "step": self._run.last, "runs": runs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the run that `state` is of. What was counted here stays counted."""
        self._same_delta(state["delta"], "the checkpoint's ledger")
        if self._run.stretches:
            self._others[self._run.name] = self._run
        self._run = self._others.pop(state["run"], _Run(state["run"], start=state["step"] + 1))
        self._take(state["runs"])
        self._changed()
        if not self.repeatable:
            self._branch(state["step"] + 1)

    def _take(self, runs: Iterable[Mapping[str, Any]]) -> None:
        """Count these runs, too; of a run that is known, what is longer counts."""
        for run in map(_run_of, runs):
            own = self._run if run.name == self._run.name else self._others.setdefault(run.name, run)
            if not own.stretches or run.last > own.last:
                own.stretches = run.stretches
            own.uses = max(own.uses, run.uses)

    def _changed(self) -> None:
        """The next release is to look at everything anew."""
        self._stretch = None
        self._limits.clear()

    def _runs(self) -> Iterator[_Run]:
        yield from self._others.values()
        if self._run.stretches:
            yield self._run

    def _counts(self) -> dict[Event, int]:
        return _counted(event for run in self._runs() for event in run.events())

    def _same_delta(self, delta: float, what: str) -> None:
        if delta != self.delta:
            raise ConfigError(
                f"{what} is kept for delta={delta}, and this run has delta={self.delta}; write delta={delta}"
            )

    # ---- the file

    def _write(self, steps: int, uses: int) -> None:
        assert self._path is not None  # noqa: S101 - asked only where there is one
        own = _plain(self._run)
        own["stretches"][-1][-1] = max(steps, self._run.last)
        own["uses"] = max(uses, self._run.uses)
        runs = [*map(_plain, self._others.values()), own]
        kept = {"kind": "plait's privacy ledger", "version": _VERSION, "delta": self.delta, "runs": runs}
        write_atomic(self._path, json.dumps(kept, indent=1) + "\n")

    def _read(self, path: Path) -> list[dict[str, Any]]:
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            delta, version, runs = kept["delta"], kept["version"], list(kept["runs"])
            for run in runs:
                _run_of(run)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error!r}), so what was released before is not known; bring it back from a "
                "copy, or give another directory and count from nothing there"
            ) from error
        if version != _VERSION:
            raise CheckpointError(f"{path} is of version {version}; this plait reads version {_VERSION}: take a newer")
        self._same_delta(delta, str(path))
        return runs


def _plain(run: _Run) -> dict[str, Any]:
    stretches = [[*stretch.event, stretch.returned, stretch.first, stretch.last] for stretch in run.stretches]
    return {"name": run.name, "uses": run.uses, "stretches": stretches}


def _run_of(plain: Mapping[str, Any]) -> _Run:
    stretches = [
        _Stretch(Event(float(noise), float(rate)), None if back is None else float(back), int(first), int(last))
        for noise, rate, back, first, last in plain["stretches"]
    ]
    if any(not (one.event.noise >= 0 and 0 < one.event.rate <= 1 and 1 <= one.first <= one.last) for one in stretches):
        raise ValueError(f"impossible figures in {plain['stretches']}")
    return _Run(str(plain["name"]), stretches, int(plain["uses"]))


def _counted(events: Iterable[tuple[Event, int]]) -> dict[Event, int]:
    counts: dict[Event, int] = {}
    for event, count in events:
        counts[event] = counts.get(event, 0) + count
    return counts


def _round_up(count: int) -> int:
    """The next number with no more than four binary digits."""
    unit = 1 << max(0, count.bit_length() - 4)
    return -(-count // unit) * unit
