"""The curve of a run: how the tasks did at each evaluation, as a picture."""

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
"""Steps, and a value for each."""

COLOURS = ("#2563a8", "#c2571a", "#2e7d4f", "#7a4fa3")
INK, FAINT = "#30363d", "#d8dee4"


def draw(history: History, path: Path) -> bool:
    """Write the picture to `path`; without matplotlib, say how to get it and return False."""
    if importlib.util.find_spec("matplotlib") is None:
        logging.getLogger("plait").warning("no curve was drawn: for matplotlib, `pip install 'plait[plot]'`")
        return False
    write_atomic(path, picture(history))
    return True


def series(history: History, metric: str) -> dict[str, Line]:
    """The steps and values of `metric`, for each task that has it."""
    found: dict[str, Line] = {}
    for entry in history:
        if metric in entry["metrics"]:
            steps, values = found.setdefault(str(entry["task"]), ([], []))
            steps.append(entry["global_step"])
            values.append(entry["metrics"][metric])
    return found


def picture(history: History) -> bytes:
    """Accuracy on the left, loss on the right, a line for each task: 1200 by 600 pixels, PNG."""
    import matplotlib.style  # noqa: PLC0415 - takes half a second, and may not be installed
    from matplotlib.figure import Figure  # noqa: PLC0415 - same; not pyplot, which would look for a screen

    png = io.BytesIO()
    with matplotlib.style.context("default"):  # whatever style the user has set
        figure = Figure(figsize=(8, 4), dpi=150, facecolor="white")
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
        left, right = figure.subplots(1, 2)
        figure.suptitle("Two tasks, one shared tower: handwritten digits", fontsize=12, color=INK)
        _panel(left, "Test accuracy", series(history, "accuracy"))
        _panel(right, "Test loss", series(history, "loss"))
        _log_scale(right)
        figure.savefig(png, format="png")
    return png.getvalue()


def _panel(axes: Axes, title: str, lines: Mapping[str, Line]) -> None:
    for colour, (task, (steps, values)) in zip(COLOURS, lines.items(), strict=False):
        label = f"{task}: {values[-1]:.3f}"
        axes.plot(steps, values, color=colour, linewidth=1.8, marker="o", markersize=3.5, label=label)
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel("training step", color=INK)
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
