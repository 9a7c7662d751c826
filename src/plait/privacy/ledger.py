"""`Ledger`: counts what was released, says what it tells of a row, and stops at the budget."""

from __future__ import annotations

import base64
import json
import math
import os
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from plait.atomic import write_atomic
from plait.errors import CheckpointError, ConfigError
from plait.privacy.accountant import (
    METHODS,
    Event,
    epsilon,
    gaussian_epsilon,
    most_rounds,
    most_steps,
    rough_epsilon,
    together,
)

__all__ = ["FILE", "Ledger"]

FILE = "privacy.json"
"""The file's name, in the directory that the ledger is kept in."""

_VERSION = 1
_BLOCK = 16  # steps that are written down ahead, at least
_AHEAD = 32  # and one in so many of those made: a kill makes epsilon that much larger, and no more
_ANY = 255  # in an order of kinds: it was written down ahead, for each kind, or there are more kinds than numbers


class _Kind(NamedTuple):
    """Releases that are all alike."""

    event: Event
    returned: float | None
    task: str
    draws: str
    """Names what decides which rows are in which batch; nothing: nobody else has these batches."""

    def precision(self, *, peer: bool) -> float:
        """What one tells of a row in its batch: 1 / noise**2, and a peer sees what is returned, too."""
        seen = [self.event.noise] if self.returned is None or not peer else [self.event.noise, self.returned]
        return sum(1 / noise**2 if noise else math.inf for noise in seen)


@dataclass
class _Run:
    """The steps of one run, and the most often any row was in them. A step's number names one release."""

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    start: int = 1
    counts: dict[_Kind, int] = field(default_factory=dict)
    order: bytearray = field(default_factory=bytearray)
    """The kind of each step from `start` on, by its number in `counts`."""
    uses: int = 0

    @property
    def last(self) -> int:
        return self.start - 1 + len(self.order)

    @property
    def sampled(self) -> bool:
        """Whether it is hidden, in every step, which rows were in the batch."""
        return all(kind.event.rate < 1 for kind in self.counts)

    def knows(self, kind: _Kind, step: int) -> bool:
        """Whether this release was told before."""
        if not self.start <= step <= self.last or kind not in self.counts:
            return False
        number = self.order[step - self.start]
        return number == _ANY or list(self.counts)[number] == kind

    def add(self, kind: _Kind, steps: int) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + steps
        self.order += bytes([min(list(self.counts).index(kind), _ANY)]) * steps

    def worst(self, *, peer: bool) -> float:
        return max((kind.precision(peer=peer) for kind in self.counts), default=0.0)

    def precision(self, *, peer: bool) -> float:
        """What the run tells of a row, at most, to those who know the batches: it was in every one, or in the worst."""
        used = self.uses * self.worst(peer=peer) if self.uses else 0.0
        return min(used, sum(count * kind.precision(peer=peer) for kind, count in self.counts.items()))


class _Limit(NamedTuple):
    """How far the budget goes: the last step, and the most often that a row may be used."""

    step: float
    uses: float
    final: bool = True
    """Whether it goes no further; it takes longer to find how far it goes than that it goes far."""


_NO_LIMIT = _Limit(math.inf, math.inf)
_NOTHING = _Limit(0, 0)


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
        branched: is called where a step that was made before comes again as another: it must not have the same noise.

    """

    def __init__(
        self,
        delta: float,
        *,
        budget: float | None = None,
        method: str = "pld",
        repeatable: bool = True,
        branched: Callable[[], None] | None = None,
    ) -> None:
        if not 0 < delta < 1:
            raise ConfigError(f"delta={delta}: write a probability far below one over the number of rows, as in 1e-5")
        if budget is not None and not budget > 0:
            raise ConfigError(f"epsilon_budget={budget}: write a number above 0, or None for no budget")
        if method not in METHODS:
            raise ConfigError(f"accountant={method!r}: there are {' and '.join(map(repr, METHODS))}")
        self.delta, self.budget, self.method, self.repeatable = delta, budget, method, repeatable
        self._branched = branched
        self._run = _Run()
        self._others: dict[str, _Run] = {}
        self._path: Path | None = None
        self._ready = _NOTHING
        """What is written down and allowed: nearly every step is within it."""
        self._limits: dict[frozenset[_Kind], _Limit] = {}
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

    def release(
        self, event: Event, *, step: int, uses: int, returned: float | None = None, task: str = "", draws: str = ""
    ) -> None:
        """A noised gradient is about to be used, in private step `step` (from 1).

        Args:
            event: its noise, and the sampling of its rows.
            step: one that was told before is the same release again, and tells nothing new.
            uses: the most often that any row was used up to here.
            returned: the noise multiplier of what goes back to a peer in this step; None: nothing does, 0: as it is.
            task: whose release it is.
            draws: a name for what decides which rows are in which batch. Two tasks, or runs, of one name draw the
                same rows, and tell more of them than two that draw by themselves.

        """
        kind, run, ready = _Kind(event, returned, task, draws), self._run, self._ready
        if step == run.last + 1 and step <= ready.step and uses <= ready.uses and kind in run.counts:
            run.add(kind, 1)
            if uses > run.uses:
                run.uses = uses
            return
        self._release(kind, step, uses)

    def affords(
        self, event: Event, *, step: int, uses: int, returned: float | None = None, task: str = "", draws: str = ""
    ) -> bool:
        """Whether the budget allows this release; `release` refuses one that it does not."""
        return self._affords(_Kind(event, returned, task, draws), step, uses)

    @property
    def exhausted(self) -> bool:
        """Whether the budget does not allow another release like those before, should it use a row once more."""
        run = self._run
        if self.budget is None:
            return False
        if not run.counts:
            return bool(self._others) and self.epsilon(exact=True) >= self.budget
        return not all(self._affords(kind, run.last + 1, run.uses + 1) for kind in run.counts)

    def close(self) -> None:
        """The run ends in order: what was written down ahead, and not released, is taken back."""
        if self._path is not None and self._run.counts:
            self._write(0, self._run.uses)
            self._ready = _NOTHING  # the next release is written down anew

    def _affords(self, kind: _Kind, step: int, uses: int) -> bool:
        run = self._run
        if self.budget is None or run.knows(kind, step):
            return True
        limit = self._limit_of(kind, step)
        # A row was in no more batches than there were.
        return step <= limit.step and min(uses, sum(run.counts.values()) + step - run.last) <= limit.uses

    def _release(self, kind: _Kind, step: int, uses: int) -> None:
        if step < 1:
            raise ConfigError(f"private step {step}: steps are counted from 1")
        if self._run.knows(kind, step):
            return
        if step <= self._run.last:
            self._branch(step)
        if not self._affords(kind, step, uses):
            raise ConfigError(
                f"epsilon_budget={self.budget} at delta={self.delta} does not allow private step {step} with noise "
                f"{kind.event.noise:g} and sampling rate {kind.event.rate:g}; stop before it, or give more noise, a "
                "larger budget or smaller batches"
            )
        limit = self._limit_of(kind, step)
        before = self._run
        run = self._run = replace(before, counts=dict(before.counts), order=bytearray(before.order))
        run.add(kind, step - run.last)  # steps between, that other workers made without this one, count as if alike
        run.uses = max(run.uses, uses)
        try:
            self._write_ahead(limit)
        except BaseException:  # it is not written down, so it does not happen, and may be tried again
            self._run = before
            raise

    def _branch(self, step: int) -> None:
        """A step made again with other noise is another release: from `step` on, this is another run."""
        if self._run.counts:
            self._others[self._run.name] = self._run
        self._run = _Run(start=step)
        self._changed()
        if self._branched is not None:
            self._branched()

    def _limit_of(self, kind: _Kind, step: int) -> _Limit:
        """How far the budget goes, or that it goes far beyond `step`, if the steps to come are of the kinds so far."""
        if self.budget is None:
            return _NO_LIMIT
        key = frozenset([*self._run.counts, kind])
        limit = self._limits.get(key)
        if limit is None or (step > limit.step and not limit.final):
            limit = self._limits[key] = self._find_limit(key, step, self.budget)
        return limit

    def _find_limit(self, kinds: Collection[_Kind], step: int, budget: float) -> _Limit:
        run = self._run
        if not all(kind.event.rate < 1 for kind in kinds):
            before = list(self._counts(of=self._others.values()).items())
            worst = max(kind.precision(peer=False) for kind in kinds)
            noise = 0.0 if math.isinf(worst) else worst**-0.5
            return _Limit(math.inf, most_steps(Event(noise), self.delta, budget, before, self.method))
        enough = 2 * (len(run.order) + step - run.last) + 10_000
        others = {kind.draws for other in self._others.values() for kind in other.counts}
        (first, *more) = kinds
        if not more and (first.draws not in others or not first.draws):
            made = run.counts.get(first, 0)
            before = [*self._counts(of=self._others.values()).items()]
            most = most_steps(first.event, self.delta, budget, before, self.method, enough=made + enough)
            return _Limit(run.last + most - made, math.inf, most < made + enough)

        def rounds(count: int) -> list[tuple[Event, int]]:
            """If steps of each kind follow: of any kinds, so many can."""
            ahead = replace(run, counts={kind: run.counts.get(kind, 0) + count for kind in kinds})
            return list(self._counts(of=[*self._others.values(), ahead]).items())

        most = most_rounds(rounds, self.delta, budget, self.method, enough=enough)
        return _Limit(run.last + most, math.inf, most == 0)

    def _write_ahead(self, limit: _Limit) -> None:
        """Write down this step and some that are to come, so that few steps wait for the disk."""
        if self._path is None:
            self._ready = limit
            return
        last, uses = self._run.last, self._run.uses
        ahead = _Limit(min(last - 1 + max(_BLOCK, last // _AHEAD), limit.step), min(uses + uses // _AHEAD, limit.uses))
        self._write(max(0, int(ahead.step) - last), int(ahead.uses))
        self._ready = ahead

    # ---- epsilons

    def epsilon(self, *, exact: bool = False) -> float:
        """Against an outsider, who sees the model and not which rows were in which batch.

        Without `exact` it is quick, and an upper bound: of the next of few step counts, at most an eighth apart.
        """
        counts = self._counts(rounded=not exact)
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
        if self._run.counts:
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
            longer, shorter = (run, own) if not own.counts or run.last > own.last else (own, run)
            kinds = [*longer.counts, *shorter.counts]
            own.counts = {kind: max(own.counts.get(kind, 0), run.counts.get(kind, 0)) for kind in kinds}
            own.start, own.order, own.uses = longer.start, longer.order, max(own.uses, run.uses)

    def _changed(self) -> None:
        """The next release is to look at everything anew."""
        self._ready = _NOTHING
        self._limits.clear()

    def _runs(self) -> Iterator[_Run]:
        yield from self._others.values()
        if self._run.counts:
            yield self._run

    def _counts(self, *, of: Iterable[_Run] | None = None, rounded: bool = False) -> dict[Event, int]:
        """How often each event was seen by an outsider; `rounded`: or a little oftener, as of this run's kinds."""
        counts: dict[Event, int] = {}
        drawn: dict[tuple[str, float], dict[str, dict[Event, int]]] = {}
        for run in self._runs() if of is None else of:
            if not run.sampled:
                precision = run.precision(peer=False)
                _count(counts, Event(_noise(precision)), 1 if precision else 0)
                continue
            for kind, made in run.counts.items():
                count = _round_up(made) if rounded and run is self._run else made
                if kind.draws:
                    same = drawn.setdefault((kind.draws, kind.event.rate), {})
                    _count(same.setdefault(f"{run.name} {kind.task}", {}), kind.event, count)
                else:
                    _count(counts, kind.event, count)
        for sequences in drawn.values():
            for event, count in _overlaid(list(sequences.values())):
                _count(counts, event, count)
        return counts

    def _same_delta(self, delta: float, what: str) -> None:
        if delta != self.delta:
            raise ConfigError(
                f"{what} is kept for delta={delta}, and this run has delta={self.delta}; write delta={delta}"
            )

    # ---- the file

    def _write(self, ahead: int, uses: int) -> None:
        """With `ahead` steps more, which may be of any kind."""
        assert self._path is not None  # noqa: S101 - asked only where there is one
        run = self._run
        counts = {kind: count + ahead for kind, count in run.counts.items()}
        only = 0 if len(counts) == 1 else _ANY
        own = replace(run, counts=counts, order=run.order + bytes([only]) * ahead, uses=max(uses, run.uses))
        runs = [*map(_plain, self._others.values()), _plain(own)]
        kept = {"kind": "plait's privacy ledger", "version": _VERSION, "delta": self.delta, "runs": runs}
        write_atomic(self._path, json.dumps(kept, indent=1) + "\n")

    def _read(self, path: Path) -> list[dict[str, Any]]:
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            delta, version, runs = kept["delta"], kept["version"], list(kept["runs"])
            for run in runs:
                _run_of(run)
        except (OSError, ValueError, KeyError, TypeError, IndexError, zlib.error) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error!r}), so what was released before is not known; bring it back from a "
                "copy, or give another directory and count from nothing there"
            ) from error
        if version != _VERSION:
            raise CheckpointError(f"{path} is of version {version}; this plait reads version {_VERSION}: take a newer")
        self._same_delta(delta, str(path))
        return runs


def _plain(run: _Run) -> dict[str, Any]:
    kinds = [[*kind.event, *kind[1:], count] for kind, count in run.counts.items()]
    order = base64.b64encode(zlib.compress(bytes(run.order), 1)).decode()
    return {"name": run.name, "uses": run.uses, "kinds": kinds, "first": run.start, "order": order}


def _run_of(plain: Mapping[str, Any]) -> _Run:
    counts = {
        _Kind(Event(float(noise), float(rate)), None if back is None else float(back), str(task), str(draws)): count
        for noise, rate, back, task, draws, count in plain["kinds"]
    }
    order = bytearray(zlib.decompress(base64.b64decode(plain["order"], validate=True)))
    run = _Run(str(plain["name"]), int(plain["first"]), counts, order, int(plain["uses"]))
    possible = all(kind.event.noise >= 0 and 0 < kind.event.rate <= 1 and count > 0 for kind, count in counts.items())
    if not possible or run.start < 1 or any(number >= len(counts) for number in set(order) - {_ANY}):
        raise ValueError(f"impossible figures in {plain['kinds']}")
    return run


def _count(counts: dict[Event, int], event: Event, count: int) -> None:
    if count:
        counts[event] = counts.get(event, 0) + count


def _noise(precision: float) -> float:
    return precision**-0.5 if precision else math.inf


def _overlaid(sequences: list[dict[Event, int]]) -> Iterator[tuple[Event, int]]:
    """Releases over the same draws: those of one sequence add to those of the next. Dear ones meet dear ones."""
    if len(sequences) == 1:
        yield from sequences[0].items()
        return
    left = [sorted(one.items()) for one in sequences if one]
    while left:
        heads, count = [one[0][0] for one in left], min(one[0][1] for one in left)
        yield Event(together(*(event.noise for event in heads)), heads[0].rate), count
        left = [[(one[0][0], one[0][1] - count), *one[1:]] if one[0][1] > count else one[1:] for one in left]
        left = [one for one in left if one]


def _round_up(count: int) -> int:
    """The next number with no more than four binary digits."""
    unit = 1 << max(0, count.bit_length() - 4)
    return -(-count // unit) * unit
