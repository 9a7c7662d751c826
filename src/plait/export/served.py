"""A function of a trained model as a module of its own, and what is known of the model that it comes from."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from plait.engine.calls import UserCall
from plait.engine.model import Model
from plait.engine.report import log
from plait.engine.task import MODE
from plait.errors import ConfigError

__all__ = ["Served", "facts_of"]


_COMPILED = "_compiled_call_impl"
"""Where `module.compile()` puts its work."""


class _Place(NamedTuple):
    """A module, the table in it and the name there, where a tensor stands."""

    module: nn.Module
    table: str
    name: str

    @property
    def tensor(self) -> Any:
        return vars(self.module)[self.table][self.name]  # torch may have put another table there

    def put(self, tensor: Any) -> None:
        vars(self.module)[self.table][self.name] = tensor


def _free(node: nn.Module, name: str) -> str:
    """The name, or one like it: torch finds parts by their attributes, and a scope may be called `train`."""
    while hasattr(node, name):
        name += "_"
    return name


class Served(nn.Module):
    """What `call` makes of named tensors, with the model's variables as they are then; it never trains.

    The variables have the names that they have in the model, so that an export can be compared with a checkpoint.
    """

    def __init__(self, model: Model, call: UserCall) -> None:
        super().__init__()
        self._models = (model,)  # not by itself: it is no part of this
        self._call = call
        self._warned = False
        self._places: dict[str, tuple[_Place, _Place]] = {}
        """Where variables that are no layer's stand, by their names: here, and in the model."""
        for owner in (model, model._store.root):  # noqa: SLF001 - a friend
            self._take(self, owner, "")
        if any(type(value).__name__ == "DTensor" for value in self.parameters()):
            raise ConfigError(
                "with fully_shard no worker has the whole model: export its checkpoint in a script of one process"
            )

    def _take(self, node: nn.Module, owner: nn.Module, prefix: str) -> None:
        """Put what `owner` has into `node`; scopes become modules of ours, others are taken as they are."""
        root = self._models[0]._store.root  # noqa: SLF001 - a friend
        for table in ("_parameters", "_buffers"):
            for name, value in vars(owner)[table].items():
                own = _free(node, name)
                vars(node)[table][own] = value
                self._places[prefix + name] = _Place(node, table, own), _Place(owner, table, name)
        for name, module in vars(owner)["_modules"].items():
            if module is root:
                continue
            if type(module) is not type(root):
                vars(node)["_modules"][_free(node, name)] = module
                continue
            scope = vars(node)["_modules"][_free(node, name)] = nn.Module()
            self._take(scope, module, f"{prefix}{name}/")

    def forward(self, **given: Tensor) -> Any:
        store, now = self._models[0]._store, self._models[0]._now  # noqa: SLF001 - a friend
        before = now.sample
        try:
            with self._at_home() as variables, store.replaced(variables), self._never_training():
                return self._call(given)
        finally:
            now.sample, store.step_collections = before, {}  # no step has to do with these

    @contextlib.contextmanager
    def _at_home(self) -> Iterator[dict[str, Any]]:
        """While torch follows a module, its variables are stand-ins: the model has to see these, too."""
        before = {name: there.tensor for name, (_, there) in self._places.items()}
        for here, there in self._places.values():
            there.put(here.tensor)
        try:
            yield {name: here.tensor for name, (here, _) in self._places.items()}
        finally:
            for name, (_, there) in self._places.items():
                there.put(before[name])

    @contextlib.contextmanager
    def _never_training(self) -> Iterator[None]:
        """Inside, nobody gets a module to train, as functions try, and modules compiled for training are not."""
        modules = list(self.modules())
        compiled = [(module, vars(module).pop(_COMPILED)) for module in modules if _COMPILED in vars(module)]
        for module in modules:
            vars(module)["train"] = self._refusal(module)
        try:
            yield
        finally:
            for module in modules:
                del vars(module)["train"]
            for module, call in compiled:
                vars(module)[_COMPILED] = call

    def _refusal(self, module: nn.Module) -> Any:
        def train(mode: bool = True) -> nn.Module:
            if mode and not self._warned:
                self._warned = True
                log.warning(
                    "%s is put into training while it is exported, which is not done: it is exported as it is in"
                    " evaluation. Hand the mode on, as in get_model_fn(name, run_mode=mode, ...)",
                    type(module).__name__,
                )
            return module

        return train


def facts_of(model: Model) -> dict[str, Any]:
    """For `model.json`: the step, what the last evaluation found, and what private training has cost."""
    return {
        "step": model.global_step.value,
        "metrics": _last_metrics(model),
        "epsilon": None if model.privacy is None else model.privacy.epsilon(exact=True),
    }


def _last_metrics(model: Model) -> dict[str, float]:
    if model.history:
        return dict(model.history[-1]["metrics"] or {})
    for scope in model.metric_states:  # evaluations in the middle of training leave their numbers here
        if scope.mode is MODE.EVAL:
            found = model.metric_values(MODE.EVAL, scope.task)
            if any(math.isfinite(value) for value in found.values()):
                return found
    return {}
