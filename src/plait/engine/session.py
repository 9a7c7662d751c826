"""`Session.run`: plan once for each set of fetches, then run the plan."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import TracebackType
from typing import Any

import torch

from plait.data import Sample
from plait.engine.calls import feeds_of_this_run, find_placeholder
from plait.engine.op import GlobalStep, Op, Owner, Placeholder, as_op, default_global_step
from plait.engine.task import TaskScope
from plait.errors import FetchError

__all__ = ["Plan", "Session"]


class Plan:
    """What one set of fetches needs: which Ops, in which order, with gradients or not, which inputs move on."""

    __slots__ = ("fetches", "order", "owners", "scopes", "streams", "trains")

    def __init__(self, fetches: Any, fed: frozenset[Op]) -> None:
        self.fetches = _resolved(fetches)
        self.order: list[Op] = []
        _visit(self.fetches, self.order, set(fed))
        self.trains = any(op.trains for op in self.order)
        self.streams = [op.stream for op in self.order if op.stream is not None]
        owners: dict[int, Owner] = {id(op.owner): op.owner for op in self.order if op.owner is not None}
        self.owners = list(owners.values())
        self.scopes: set[TaskScope] = {op.scope for op in self.order if op.scope is not None}


def _resolved(fetches: Any) -> Any:
    """The same nesting with an Op at each leaf."""
    if fetches is None:
        return None
    if isinstance(fetches, Mapping):
        return {key: _resolved(value) for key, value in fetches.items()}
    if isinstance(fetches, tuple) and hasattr(fetches, "_fields"):
        return type(fetches)(*(_resolved(value) for value in fetches))
    if isinstance(fetches, (list, tuple)):
        return type(fetches)(_resolved(value) for value in fetches)
    return as_op(fetches)


def _visit(node: Any, order: list[Op], seen: set[Op]) -> None:
    if isinstance(node, Op):
        if node not in seen:
            seen.add(node)
            _visit(node.inputs, order, seen)
            order.append(node)
    elif isinstance(node, Mapping):
        _visit(tuple(node.values()), order, seen)
    elif isinstance(node, (list, tuple)):
        for child in node:
            _visit(child, order, seen)


def key_of(fetches: Any) -> Hashable:
    """A hashable stand-in for a nesting of fetches, so that its plan is made once."""
    if isinstance(fetches, (Op, Sample)) or fetches is None:
        return fetches
    if isinstance(fetches, Mapping):
        return (dict, *((key, key_of(value)) for key, value in fetches.items()))
    if isinstance(fetches, (list, tuple)):
        return (type(fetches), *map(key_of, fetches))
    return as_op(fetches)


def _filled(node: Any, values: Mapping[Op, Any]) -> Any:
    """The nesting of fetches with each Op's value in its place: tensors detached, never synchronised."""
    if isinstance(node, Op):
        value = values[node]
        return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value
    if isinstance(node, Mapping):
        return {key: _filled(value, values) for key, value in node.items()}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*(_filled(value, values) for value in node))
    if isinstance(node, (list, tuple)):
        return type(node)(_filled(value, values) for value in node)
    return None


class Session:
    """Runs Ops: takes them in any nesting of dict, list and tuple, and returns that nesting filled with values."""

    def __init__(self, model: Any = None, global_step: GlobalStep | None = None, state: Any = None) -> None:
        self.model = model
        self.global_step = global_step or default_global_step()
        self.state = state
        """What a checkpoint of this session holds."""
        self._plans: dict[Hashable, Plan] = {}
        self._closed = False

    def plan(self, fetches: Any, fed: frozenset[Op] = frozenset()) -> Plan:
        key = (key_of(fetches), fed) if fed else key_of(fetches)
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = Plan(fetches, fed)
        return found

    def run(self, fetches: Any, feed_dict: Mapping[Any, Any] | None = None) -> Any:
        """Evaluate every fetched Op at most once, and what it depends on."""
        if self._closed:
            raise FetchError("this session is closed: run() needs an open one, `with plait.Session() as session:`")
        if not feed_dict:
            return self.execute(self.plan(fetches), {})
        feeds = {_feed_key(key): value for key, value in feed_dict.items()}
        values = {op: op.convert(v) if isinstance(op, Placeholder) else v for op, v in feeds.items()}
        return self.execute(self.plan(fetches, frozenset(values)), values)

    def execute(self, plan: Plan, values: dict[Op, Any]) -> Any:
        """Run a plan: set the mode, call the Ops in order, then count the batches as consumed."""
        for owner in plan.owners:
            owner.enter_mode(plan.trains)
        if plan.trains:
            self._call(plan, values)
        else:
            with torch.no_grad():
                self._call(plan, values)
        for stream in plan.streams:
            stream.commit()
        return _filled(plan.fetches, values)

    def _call(self, plan: Plan, values: dict[Op, Any]) -> None:
        previous = feeds_of_this_run(values) if values else None
        try:
            for op in plan.order:
                values[op] = op.fn(*[values[i] for i in op.inputs])
        finally:
            if previous is not None:
                feeds_of_this_run(previous)

    def close(self) -> None:
        self._closed = True

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _feed_key(key: Any) -> Op:
    """The Op that a key of feed_dict means: itself, or the placeholder behind a tensor made at the build."""
    if isinstance(key, Op):
        return key
    found = find_placeholder(key) if isinstance(key, torch.Tensor) else None
    if found is None:
        raise FetchError(
            f"feed_dict has a key of type {type(key).__name__}: its keys are Ops and placeholders, "
            "made with plait.placeholder(dtype, shape)"
        )
    return found
