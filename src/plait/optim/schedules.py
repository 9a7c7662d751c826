"""Learning-rate schedules: small functions of the training step that know how to show themselves."""

from __future__ import annotations

import importlib.util
import io
import logging
import math
import os
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from plait.atomic import write_atomic
from plait.errors import ConfigError

__all__ = ["Schedule", "draw", "linear_cosine_decay", "piecewise_lr", "polynomial_decay", "warmup"]

Schedule = Callable[[int], float]
"""A function that gives the learning rate of a step; the first step is 0."""

EXAMPLE = "5:0.1->0.4,10:0.4=>0.8,15:0.8,20:0.08"
BLUE, INK, FAINT = "#2563a8", "#30363d", "#d8dee4"
POINTS = 2000


@dataclass(frozen=True)
class _Stage:
    start: float
    end: float
    first: float
    last: float
    exponential: bool

    def rate(self, epoch: float) -> float:
        done = (epoch - self.start) / (self.end - self.start)
        if self.exponential:
            return math.pow(self.first, 1 - done) * math.pow(self.last, done)
        return self.first + (self.last - self.first) * done


@dataclass(frozen=True, repr=False)
class _Piecewise:
    strategy: str
    num_samples: int
    global_batch_size: int
    stages: tuple[_Stage, ...]

    @property
    def steps(self) -> int:
        """How many steps the stages take; after them the last rate holds."""
        return math.ceil(self.stages[-1].end * self.num_samples / self.global_batch_size)

    def __call__(self, step: int) -> float:
        epoch = step * self.global_batch_size / self.num_samples
        for stage in self.stages:
            if epoch < stage.end:
                return stage.rate(epoch)
        return self.stages[-1].last

    def __repr__(self) -> str:
        sizes = f"num_samples={self.num_samples}, global_batch_size={self.global_batch_size}"
        return f"piecewise_lr({self.strategy!r}, {sizes})"


def piecewise_lr(lr_strategy: str, num_samples: int, global_batch_size: int) -> _Piecewise:
    """A schedule written as stages, such as `"5:0.1->0.4,10:0.4=>0.8,15:0.8,20:0.08"`.

    A stage is `end_epoch:rate`, and lasts from the end of the one before until `end_epoch`. `a->b` goes from `a` to
    `b` in a straight line, `a=>b` by equal factors. After the last stage its last rate holds.

    >>> schedule = piecewise_lr("5:0.1->0.4,10:0.4=>0.8,15:0.8,20:0.08", num_samples=3200, global_batch_size=32)
    >>> [round(schedule(step), 3) for step in (0, 250, 500, 750, 1000, 1499, 1500, 9999)]
    [0.1, 0.25, 0.4, 0.566, 0.8, 0.8, 0.08, 0.08]
    """
    if not isinstance(lr_strategy, str):
        raise ConfigError(f"lr_strategy is {lr_strategy!r}: write a string such as {EXAMPLE!r}")
    for name, value in (("num_samples", num_samples), ("global_batch_size", global_batch_size)):
        if not value > 0:
            raise ConfigError(f"{name} is {value}: epochs are counted with it; write a number above 0")
    return _Piecewise(lr_strategy, num_samples, global_batch_size, tuple(_Parser(lr_strategy).stages()))


class _Parser:
    """Reads stages from left to right; at the first thing that does not fit, it points there."""

    NUMBER = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
    SPACE = re.compile(r"\s*")

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.arrow = ""
        """That of the stage read last."""

    def stages(self) -> list[_Stage]:
        found = [self._stage(0.0)]
        while self._take(","):
            found.append(self._stage(found[-1].end))
        if self.at < len(self.text):
            arrows = "" if self.arrow else "'->', '=>', "
            self._fail(self.at, f"{arrows}',' or the end")
        return found

    def _stage(self, start: float) -> _Stage:
        end_at, end = self._number("the epoch where a stage ends, such as 5")
        if end <= start:
            self._fail(end_at, f"an epoch after {start:g}")
        if not self._take(":"):
            self._fail(self.at, "':' and a learning rate")
        first_at, first = self._number("a learning rate, such as 0.1")
        self.arrow = arrow = self._take("->") or self._take("=>")
        last_at, last = self._number("a learning rate, such as 0.1") if arrow else (first_at, first)
        if arrow == "=>" and not (first and last):
            self._fail(last_at if first else first_at, "a rate above 0, since '=>' goes by factors")
        return _Stage(start, end, first, last, exponential=arrow == "=>")

    def _number(self, expected: str) -> tuple[int, float]:
        self._skip()
        at, match = self.at, self.NUMBER.match(self.text, self.at)
        if match is None or not math.isfinite(float(match.group())):
            self._fail(at, expected)
        self.at = match.end()
        self._skip()
        return at, float(match.group())

    def _take(self, mark: str) -> str:
        if not self.text.startswith(mark, self.at):
            return ""
        self.at += len(mark)
        return mark

    def _skip(self) -> None:
        match = self.SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def _fail(self, at: int, expected: str) -> NoReturn:
        shown = self.SPACE.sub(lambda space: " " * len(space.group()), self.text)
        raise ConfigError(
            f"the learning-rate strategy is wrong at character {at + 1}:\n  {shown}\n  {' ' * at}^\n"
            f"expected {expected}; a whole one is {EXAMPLE!r}"
        )


@dataclass(frozen=True, repr=False)
class _Decay:
    name: str
    max_lr: float
    min_lr: float
    max_step: int
    warmup: float
    decay_end: float
    power: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.min_lr <= self.max_lr:
            raise ConfigError(
                f"{self.name}: max_lr is {self.max_lr} and min_lr {self.min_lr}; write 0 <= min_lr <= max_lr"
            )
        if not self.max_step > 0:
            raise ConfigError(f"{self.name}: max_step is {self.max_step}; write how many steps training takes")
        if not 0 <= self.warmup < self.decay_end <= 1:
            raise ConfigError(
                f"{self.name}: warmup is {self.warmup} and decay_end {self.decay_end}; they are parts of max_step, "
                "such as 0.1 and 0.95, with 0 <= warmup < decay_end <= 1"
            )
        if self.power is not None and not self.power > 0:
            raise ConfigError(f"{self.name}: power is {self.power}; write a number above 0, 1 for a straight line")

    def __call__(self, step: int) -> float:
        part = step / self.max_step
        if part < self.warmup:
            return self.min_lr + (self.max_lr - self.min_lr) * part / self.warmup
        left = max(0.0, (self.decay_end - part) / (self.decay_end - self.warmup))
        return self.min_lr + (self.max_lr - self.min_lr) * self._factor(left)

    def _factor(self, left: float) -> float:
        if self.power is not None:
            return math.pow(left, self.power)
        return left * 0.5 * (1 + math.cos(math.pi * (1 - left)))

    def __repr__(self) -> str:
        names = ("max_lr", "min_lr", "max_step", "warmup", "decay_end", *(["power"] if self.power is not None else []))
        return f"{self.name}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def linear_cosine_decay(
    max_lr: float, min_lr: float, step: object = None, max_step: int = 0, warmup: float = 0.0, decay_end: float = 1.0
) -> _Decay:
    """Up from `min_lr` to `max_lr` in a straight line, down again along a line times a half cosine.

    Args:
        max_lr: The rate when the warm-up ends.
        min_lr: The rate at the start of a warm-up, and after the decay.
        step: Not used: it keeps the place of the global step, which the schedule is given when it is asked.
        max_step: How many steps training takes.
        warmup: The part of `max_step` that the warm-up takes, such as 0.1.
        decay_end: The part of `max_step` after which `min_lr` holds.

    """
    del step
    return _Decay("linear_cosine_decay", max_lr, min_lr, max_step, warmup, decay_end)


def polynomial_decay(
    max_lr: float,
    min_lr: float,
    step: object = None,
    max_step: int = 0,
    warmup: float = 0.0,
    decay_end: float = 1.0,
    power: float = 1.0,
) -> _Decay:
    """As `linear_cosine_decay`, but down with `power`: 1 is a straight line, 2 a parabola."""
    del step
    return _Decay("polynomial_decay", max_lr, min_lr, max_step, warmup, decay_end, power)


@dataclass(frozen=True, repr=False)
class _Warmup:
    schedule: float | Schedule
    steps: int
    start: float

    def __call__(self, step: int) -> float:
        if step >= self.steps:
            return self._after(step)
        return self.start + (self._after(self.steps) - self.start) * step / self.steps

    def _after(self, step: int) -> float:
        return float(self.schedule(step) if callable(self.schedule) else self.schedule)

    def __repr__(self) -> str:
        return f"warmup({self.schedule!r}, steps={self.steps}, start={self.start!r})"


def warmup(schedule: float | Schedule, steps: int, start: float = 0.0) -> _Warmup:
    """A straight line from `start` to what `schedule` (or a constant rate) says at `steps`; from there, `schedule`."""
    if steps < 0:
        raise ConfigError(f"steps is {steps}: write how many steps the warm-up takes")
    return _Warmup(schedule, steps, start)


def draw(schedule: Schedule, steps: int, path: str | os.PathLike[str]) -> bool:
    """Draw the rates of `steps` steps to a PNG; without matplotlib, say how to get it and return False."""
    if steps < 1:
        raise ConfigError(f"steps is {steps}: write how many steps to draw")
    if importlib.util.find_spec("matplotlib") is None:
        logging.getLogger("plait").warning("no schedule was drawn: for matplotlib, `pip install 'plait[plot]'`")
        return False
    write_atomic(path, _picture(schedule, steps))
    return True


def _picture(schedule: Schedule, steps: int) -> bytes:
    """1200 by 600 pixels."""
    import matplotlib.style  # noqa: PLC0415 - takes half a second, and may not be installed
    from matplotlib.figure import Figure  # noqa: PLC0415 - same; not pyplot, which would look for a screen

    at = sorted({round(point * (steps - 1) / POINTS) for point in range(POINTS + 1)})
    png = io.BytesIO()
    with matplotlib.style.context("default"):  # whatever style the user has set
        figure = Figure(figsize=(8, 4), dpi=150, facecolor="white")
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
        axes = figure.subplots()
        axes.plot(at, [schedule(step) for step in at], color=BLUE, linewidth=1.8)
        title = textwrap.shorten(repr(schedule), 200).replace("$", r"\$")  # not mathematics
        axes.set_title("\n".join(textwrap.wrap(title, 100)), loc="left", fontsize=9, color=INK)
        axes.set_xlabel("training step", color=INK)
        axes.set_ylabel("learning rate", color=INK)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.tick_params(colors=INK, length=0)
        figure.savefig(png, format="png")
    return png.getvalue()
