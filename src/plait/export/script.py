"""What a script describes, exported from a checkpoint: the script runs, and nothing is trained."""

from __future__ import annotations

import contextlib
import contextvars
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.engine import fit as fit_module
from plait.engine.model import Model
from plait.engine.report import log
from plait.engine.task import MODE
from plait.errors import ConfigError, MismatchError
from plait.export.formats import check_formats
from plait.variables import bank
from plait.variables.checkpoint import CheckpointDir, is_checkpoint

__all__ = ["Asked", "Done", "asked", "export_script"]


class Done(SystemExit):
    """The export that a script was run for is written: the script ends, as with `sys.exit()`."""


@dataclass(kw_only=True)
class Asked:
    """An export that somebody outside of the script has asked for."""

    checkpoint: Path
    formats: Sequence[str] = ()
    """Empty: those that the script names."""
    version: int | str | None = None
    """None: the script's."""
    directory: Path | None = None
    """None: where the script puts it."""
    published: Path | None = None
    _taken: Model | None = None

    def take_up(self, model: Model) -> None:
        """Put the checkpoint into a compiled model, once."""
        if self._taken is not model:
            _take_up(model, self.checkpoint)
            self._taken = model

    def done(self, published: Path) -> None:
        """What was asked for is written: whatever the script does afterwards is not wanted."""
        self.published = published
        raise Done(0)


_asked: contextvars.ContextVar[Asked | None] = contextvars.ContextVar("plait_export", default=None)


def asked() -> Asked | None:
    """The export that this script is run for, if it is."""
    return _asked.get()


def export_script(request: Asked, script: str | os.PathLike[str], arguments: Sequence[str] = ()) -> Path:
    """Run a script up to its `mox.run` or `efl.export`, which writes what `request` asks for; give where that is."""
    if request.formats:
        check_formats(request.formats)
    if not Path(request.checkpoint).exists() and not Path(request.checkpoint).parent.is_dir():
        raise ConfigError(f"there is no checkpoint {request.checkpoint}: name the directory of a run, or one in it")
    with _running(script, arguments), _asking(request):
        try:
            runpy.run_path(os.fspath(script), run_name="__main__")
        except SystemExit as left:
            if left.code and request.published is None:
                raise  # its own words
    if request.published is None:
        raise ConfigError(
            f"{script} has ended without an export: it has to call mox.run with a model_fn that answers EXPORT mode, or"
            " efl.export(model, predict_fn, inputs, directory)"
        )
    return request.published


@contextlib.contextmanager
def _running(script: str | os.PathLike[str], arguments: Sequence[str]) -> Iterator[None]:
    words, path = sys.argv, list(sys.path)
    sys.argv = [os.fspath(script), *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = words, path


@contextlib.contextmanager
def _asking(request: Asked) -> Iterator[None]:
    """Inside, doors know of the request, and `model.fit` takes up the checkpoint instead of training."""

    def fit(model: Model, *_: Any, **__: Any) -> None:
        if not model.compiled:
            model.compile()
        for stream in model.streams.values():
            stream.close()  # nothing more is read
        request.take_up(model)

    token, before = _asked.set(request), fit_module.fit
    fit_module.fit = fit  # it needs no more of what it is given
    try:
        yield
    finally:
        fit_module.fit = before
        _asked.reset(token)


def _take_up(model: Model, checkpoint: str | os.PathLike[str]) -> None:
    """Put the variables of a checkpoint into a compiled model, and what the run had found until then."""
    tree, variables = _tree(Path(checkpoint)), model.variables()
    saved = tree["variables"] if "variables" in tree else bank.read_variables(checkpoint)
    missing = [name for name in variables if name not in saved]
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise MismatchError(
            f"{checkpoint} lacks variable {missing[0]!r}{more}: it is of another model than the script's"
        )
    config = [{"load": {name: name for name in variables}, "exclude": [], "path": os.fspath(checkpoint)}]
    bank.apply(bank.match(config, variables, {os.fspath(checkpoint): saved}), variables)
    model.global_step.value = tree["global_step"] if "global_step" in tree else bank.read_step(checkpoint)
    log.info("%d variables from %s, step %d", len(variables), checkpoint, model.global_step.value)
    model.history[:] = tree.get("history", [])
    _take_metrics(model, tree.get("metrics", {}))
    private = tree.get("privacy")
    if private is not None and model.privacy is None:
        log.warning("%s was trained privately, and the script's optimizers are not: epsilon is not known", checkpoint)
    elif private is not None and model.privacy is not None:
        model.privacy.load_state_dict(private["ledger"])


def _tree(path: Path) -> dict[str, Any]:
    """All that a checkpoint of plait's has; nothing of other kinds."""
    if not path.is_dir():
        return {}
    if is_checkpoint(path):
        found = CheckpointDir(path.parent).read(path)
    else:
        newest = CheckpointDir(path).read_latest()
        found = newest[1] if newest is not None else {}
    return dict(found)


def _take_metrics(model: Model, saved: dict[str, Any]) -> None:
    for scope, states in model.metric_states.items():
        found = saved.get(f"{scope.mode}:{scope.task or ''}", {}) if scope.mode is MODE.EVAL else {}
        for name, metric in states.items():
            if name in found:
                metric.load_state_dict(found[name])
