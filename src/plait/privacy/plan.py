"""`plait privacy plan`: the noise that a wished epsilon needs, or the epsilon that a noise gives, and how it grows."""

from __future__ import annotations

import importlib.util
import io
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plait.atomic import write_atomic
from plait.errors import ConfigError
from plait.privacy.accountant import Event, epsilon, gaussian_epsilon, noise_for, rough_epsilon

__all__ = ["Plan", "draw", "plan", "text"]

_POINTS = 30
_WIDTH, _HEIGHT = 60, 12
_BLUE, _INK, _FAINT = "#2563a8", "#30363d", "#d8dee4"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A training to come: what is asked of it, and what it will have told in the end."""

    samples: int
    batch: int
    epochs: int
    delta: float
    noise: float
    """The noise multiplier."""
    epsilon: float
    """Against an outsider, who sees the model."""
    rdp_epsilon: float
    """The same, by the older accountant: for comparison with published figures."""
    peer_epsilon: float
    """Against a peer, who knows the rows of each batch, if every epoch uses each row once."""
    drawn_peer_epsilon: float
    """The same, if rows are drawn by themselves: the row that is drawn most often counts."""
    drawn_uses: int
    curve: Sequence[tuple[float, float]]
    """Epochs, and the epsilon after so many."""

    @property
    def rate(self) -> float:
        """The probability with which a row is in a batch."""
        return self.batch / self.samples

    @property
    def steps(self) -> int:
        """Batches in all: whole ones only, as `PoissonSource` counts them."""
        return self.epochs * (self.samples // self.batch)


def plan(
    samples: int,
    batch: int,
    epochs: int,
    *,
    epsilon: float | None = None,
    noise: float | None = None,
    delta: float = 1e-5,
) -> Plan:
    """The plan for an epsilon that is wished for, or for a noise multiplier: one of the two."""
    for name, value in (("samples", samples), ("batch", batch), ("epochs", epochs)):
        if value < 1:
            raise ConfigError(f"{name}={value}: write a whole number from 1 up")
    if batch > samples:
        raise ConfigError(f"batch={batch} of samples={samples}: a batch has no more rows than there are")
    if (epsilon is None) == (noise is None):
        raise ConfigError(
            f"epsilon={epsilon}, noise={noise}: give the epsilon that you want, or the noise: one of them"
        )
    if noise is not None and not (noise > 0 and math.isfinite(noise)):
        raise ConfigError(f"noise={noise}: write a noise multiplier above 0; without noise there is no epsilon")
    rate, steps = batch / samples, epochs * (samples // batch)
    if noise is None:
        assert epsilon is not None  # noqa: S101 - one of them is given
        noise = noise_for(epsilon, delta, rate, steps)
    return _found(samples, batch, epochs, delta, Event(noise, rate), steps)


def _found(samples: int, batch: int, epochs: int, delta: float, event: Event, steps: int) -> Plan:
    # closer to each other where the curve is steep
    points = sorted({max(1, round(steps * (point / _POINTS) ** 2)) for point in range(1, _POINTS + 1)})
    uses = _most_drawn(samples, steps, event.rate)
    total = epsilon([(event, steps)], delta)
    curve = [(step * epochs / steps, rough_epsilon([(event, step)], delta)) for step in points[:-1]]
    return Plan(
        samples=samples,
        batch=batch,
        epochs=epochs,
        delta=delta,
        noise=event.noise,
        epsilon=total,
        rdp_epsilon=epsilon([(event, steps)], delta, "rdp"),
        peer_epsilon=gaussian_epsilon(epochs / event.noise**2, delta),
        drawn_peer_epsilon=gaussian_epsilon(uses / event.noise**2, delta),
        drawn_uses=uses,
        curve=[*((epoch, min(found, total)) for epoch, found in curve), (float(epochs), total)],
    )


def _most_drawn(samples: int, steps: int, rate: float) -> int:
    """How often the row that is drawn most often is likely to be."""
    from scipy.stats import binom  # noqa: PLC0415 - takes a moment, and only plans need it

    return min(steps, int(binom.isf(min(0.5, 0.5 / samples), steps, rate))) if rate < 1 else steps


def text(plan: Plan) -> str:
    """What people read: the figures, and the curve in characters."""
    return "\n".join([*_lines(plan), "", *_chart(plan)])


def _lines(plan: Plan) -> Iterator[str]:
    each = plan.samples // plan.batch
    yield f"noise multiplier  {plan.noise:g}"
    yield f"steps             {plan.steps:,}: {each:,} in each of {plan.epochs:,} epochs"
    yield f"sampling rate     {plan.rate:.4g}: each row is drawn by itself, as PoissonSource does"
    yield f"epsilon           {plan.epsilon:.4g} at delta={plan.delta:g}, against who sees the model"
    yield f"  by RDP          {plan.rdp_epsilon:.4g}: the older accountant, for comparison"
    yield f"  a peer          {plan.peer_epsilon:.4g}: who knows the rows of each batch, each used once in an epoch"
    yield (
        f"                  {plan.drawn_peer_epsilon:.4g}: the same with drawn rows, of which one comes about "
        f"{plan.drawn_uses:,} times"
    )
    if plan.delta * plan.samples >= 1:
        yield f"delta={plan.delta:g} is one over the number of rows or more: it promises little; take a smaller one"


def _chart(plan: Plan) -> Iterator[str]:
    top = plan.curve[-1][1]
    heights = [_at(plan.curve, (column + 1) / _WIDTH * plan.epochs) / top * _HEIGHT for column in range(_WIDTH)]
    for row in reversed(range(_HEIGHT)):
        label = f"{top * (row + 1) / _HEIGHT:8.3g}" if row in (_HEIGHT - 1, _HEIGHT // 2 - 1) else " " * 8
        yield f"{label} │{''.join(_block(height - row) for height in heights)}".rstrip()
    yield f"       0 └{'─' * _WIDTH}"
    yield f"          0{f'epochs {plan.epochs}':>{_WIDTH - 1}}"


def _block(height: float) -> str:
    return " ▁▂▃▄▅▆▇█"[round(min(max(height, 0.0), 1.0) * 8)]


def _at(curve: Sequence[tuple[float, float]], epoch: float) -> float:
    """The epsilon after `epoch` epochs, on a straight line between the points."""
    before = (0.0, 0.0)
    for point in curve:
        if point[0] >= epoch:
            share = (epoch - before[0]) / (point[0] - before[0])
            return before[1] + share * (point[1] - before[1])
        before = point
    return before[1]


def draw(plan: Plan, path: str | os.PathLike[str]) -> bool:
    """Draw the curve to a PNG; without matplotlib, say how to get it and return False."""
    if importlib.util.find_spec("matplotlib") is None:
        logging.getLogger("plait").warning("no curve was drawn: for matplotlib, `pip install 'plait[plot]'`")
        return False
    write_atomic(path, _picture(plan))
    return True


def _picture(plan: Plan) -> bytes:
    """1200 by 600 pixels."""
    import matplotlib.style  # noqa: PLC0415 - takes half a second, and may not be installed
    from matplotlib.figure import Figure  # noqa: PLC0415 - same; not pyplot, which would look for a screen

    png = io.BytesIO()
    with matplotlib.style.context("default"):  # whatever style the user has set
        figure = Figure(figsize=(8, 4), dpi=150, facecolor="white")
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
        axes = figure.subplots()
        axes.plot([0, *(epoch for epoch, _ in plan.curve)], [0, *(found for _, found in plan.curve)], color=_BLUE)
        axes.set_title(
            f"epsilon {plan.epsilon:.3g} at delta={plan.delta:g}: noise multiplier {plan.noise:g}, batches of "
            f"{plan.batch:,} of {plan.samples:,} rows",
            loc="left",
            fontsize=10,
            color=_INK,
        )
        axes.set_xlabel("epochs", color=_INK)
        axes.set_ylabel("epsilon", color=_INK)
        axes.set_xlim(0, plan.epochs)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color=_FAINT, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_FAINT)
        axes.tick_params(colors=_INK, length=0)
        figure.savefig(png, format="png")
    return png.getvalue()
