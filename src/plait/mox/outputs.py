"""What `output_fn` gets: the tensors of `output_info`, step by step, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from plait.engine.hooks import SessionRunContext, SessionRunHook, SessionRunValues
from plait.engine.session import Session
from plait.errors import FunctionError
from plait.mox.spec import ModelSpec

__all__ = ["OutputHook"]


class OutputHook(SessionRunHook):
    """Collects `output_info` and hands it to `output_fn`: every so many steps, and the rest at the end.

    `specs` gives the ModelSpecs of the step, one for each replica; each is one dict in the list that is handed over.
    """

    def __init__(self, specs: Callable[[], Sequence[ModelSpec]], output_fn: Callable[..., Any], every: int) -> None:
        self._specs = specs
        self._output_fn = output_fn
        self._every = every
        self._steps = 0
        self._collected: list[dict[str, Any]] = []

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:  # noqa: ARG002
        for spec in self._specs():
            if not spec.output_info:
                raise FunctionError("output_fn is given, but the ModelSpec has no output_info: add it")
            self._collected.append({name: _array(name, value) for name, value in spec.output_info.items()})
        self._steps += 1
        if self._every and self._steps >= self._every:
            self._hand_over()

    def end(self, session: Session) -> None:  # noqa: ARG002
        if self._collected:
            self._hand_over()

    def _hand_over(self) -> None:
        collected, self._collected, self._steps = self._collected, [], 0
        self._output_fn(collected)

    def state_dict(self) -> dict[str, Any]:
        kept = [{name: torch.as_tensor(value) for name, value in step.items()} for step in self._collected]
        return {"collected": kept, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = int(state.get("steps", 0))
        self._collected = [
            {name: _array(name, value) for name, value in step.items()} for step in state.get("collected", [])
        ]


def _array(name: str, value: Any) -> Any:
    """A copy: a variable goes on changing."""
    try:
        return torch.as_tensor(value).detach().to("cpu", copy=True).numpy()
    except TypeError as error:
        raise FunctionError(f"output_info[{name!r}] is a {type(value).__name__}: give a tensor ({error})") from error
