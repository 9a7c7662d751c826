"""The curves of the demo's runs: how each did at its evaluations, as a picture."""

from __future__ import annotations

import importlib.util
import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.atomic import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw", "picture", "series"]

History = Sequence[Mapping[str, Any]]
"""What `model.history` holds: `{"task": ..., "global_step": ..., "metrics": {...}}` for each evaluation."""

Line = tuple[list[int], list[float]]
"""Passes, and a value for each."""

STYLES: Sequence[Mapping[str, Any]] = (
    {"color": "#2563a8", "linewidth": 1.6, "marker": "o", "markersize": 3.5, "zorder": 3},
    {"color": "#f0b27a", "linewidth": 6.0, "zorder": 2},  # wide and pale: what lies upon it stays in sight
    {"color": "#8b949e", "linewidth": 1.6, "linestyle": "--", "zorder": 1},
)
"""Of the first run, the second and the third."""
INK, FAINT = "#30363d", "#d8dee4"


def draw(histories: Mapping[str, History], path: Path) -> bool:
    """Write the picture to `path`; without matplotlib, say how to get it and return False."""
    if importlib.util.find_spec("matplotlib") is None:
        logging.getLogger("plait").warning("no curve was drawn: for matplotlib, `pip install 'plait[plot]'`")
        return False
    write_atomic(path, picture(histories))
    return True


def series(history: History, metric: str) -> Line:
    """The values of `metric`, and after how many passes over the data each was found."""
    found = [
        (number, float(one["metrics"][metric])) for number, one in enumerate(history, 1) if metric in one["metrics"]
    ]
    return [number for number, _ in found], [value for _, value in found]


def picture(histories: Mapping[str, History]) -> bytes:
    """Accuracy on the left, loss on the right, a line for each of up to three runs: 1200 by 600 pixels, PNG."""
    import matplotlib.style  # noqa: PLC0415 - takes half a second, and may not be installed
    from matplotlib.figure import Figure  # noqa: PLC0415 - same; not pyplot, which would look for a screen

    png = io.BytesIO()
    with matplotlib.style.context("default"):  # whatever style the user has set
        figure = Figure(figsize=(8, 4), dpi=150, facecolor="white")
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
        left, right = figure.subplots(1, 2)
        figure.suptitle("Two parties, one model: left and right halves of handwritten digits", fontsize=12, color=INK)
        for axes, title, metric in ((left, "Test accuracy", "accuracy"), (right, "Test loss", "loss")):
            _panel(axes, title, {name: series(history, metric) for name, history in histories.items()})
        _log_scale(right)
        figure.savefig(png, format="png")
    return png.getvalue()


def _panel(axes: Axes, title: str, lines: Mapping[str, Line]) -> None:
    for style, (name, (passes, values)) in zip(STYLES, lines.items(), strict=False):
        if values:
            axes.plot(passes, values, label=f"{name}: {values[-1]:.3f}", **style)
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel("passes over the training data", color=INK)
    axes.set_xlim(left=0)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, length=0)
    axes.legend(frameon=False, labelcolor=INK)


def _log_scale(axes: Axes) -> None:
    """A logarithmic scale that is read without thinking: 0.03, 0.1, 0.3, 1."""
    from matplotlib.ticker import LogLocator, NullLocator  # noqa: PLC0415 - as in `picture`

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
