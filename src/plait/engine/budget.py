"""What people see of privacy, and the end of training where it is spent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from plait.engine.hooks import SessionRunContext, SessionRunHook, SessionRunValues
from plait.engine.metrics import Metric
from plait.engine.task import MODE, TaskScope

if TYPE_CHECKING:
    from plait.engine.model import Model
    from plait.engine.monitored import MonitoredSession
    from plait.engine.private import PrivateState
    from plait.privacy.ledger import Ledger

__all__ = ["BudgetHook", "Shown", "add_budget_hooks", "said_at_the_end", "show_epsilon", "stop_if_spent"]

log = logging.getLogger("plait")


class Shown(Metric):
    """A number that is computed when somebody looks at it."""

    def __init__(self, value: Callable[[], float]) -> None:
        super().__init__(torch.device("cpu"))
        self._value = value

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is measured."""

    def result(self) -> torch.Tensor:
        return torch.tensor(self._value(), dtype=torch.float64)

    def reset(self) -> None:
        """It is never forgotten."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """What it shows is saved elsewhere."""

    def merge(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """It is the same for all workers."""


def show_epsilon(model: Model, task: str | None, ledger: Ledger) -> None:
    """In the log line of a private task, its summaries and the table at the end."""
    states = model.metric_states.setdefault(TaskScope(MODE.TRAIN, task), {})
    states.setdefault("epsilon", Shown(ledger.epsilon))
    if getattr(model.strategy, "peer", None) is not None:
        states.setdefault("peer_epsilon", Shown(ledger.peer_epsilon))


class BudgetHook(SessionRunHook):
    """Stops training when the budget allows no other step."""

    def __init__(self, state: PrivateState) -> None:
        self._state = state

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:  # noqa: ARG002
        if self._state.spent:
            log.info("%s", _spent(self._state.ledger))
            run_context.request_stop()


def add_budget_hooks(model: Model) -> None:
    """For the tasks that are private, if there is a budget."""
    state = model.private_state
    if state is not None and state.ledger.budget is not None:
        for task in state.tasks:
            model.hooks.setdefault(TaskScope(MODE.TRAIN, task), []).append(BudgetHook(state))


def stop_if_spent(model: Model, session: MonitoredSession) -> None:
    """A run that begins with nothing left ends at once."""
    state = model.private_state
    if state is not None and state.spent:
        log.warning("%s", _spent(state.ledger))
        session.request_stop()


def _spent(ledger: Ledger) -> str:
    return (
        f"the privacy budget is spent: epsilon is {ledger.epsilon(exact=True):.4f} of {ledger.budget:g} at "
        f"delta={ledger.delta:g}, and another step would pass it; training stops"
    )


def said_at_the_end(model: Model) -> str:
    """The closing line: against whom, and how much."""
    ledger = model.privacy
    assert ledger is not None  # noqa: S101 - asked only where there is one
    line = f"privacy: epsilon {ledger.epsilon(exact=True):.4f} at delta={ledger.delta:g} against who sees the model"
    if getattr(model.strategy, "peer", None) is not None:
        line += f"; {ledger.peer_epsilon():.4f} against the {model.strategy.peer}, who knows the rows of each batch"  # type: ignore[attr-defined] # a federation's has one
    return line
