"""`Session.run`: plan once for each set of fetches, then run the plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from types import TracebackType
from typing import Any, cast

import torch

from plait.data import Sample
from plait.data.columns import Column
from plait.engine.calls import Now, feeds_of_this_run, find_placeholder
from plait.engine.cursor import Cursor, column_ops
from plait.engine.op import GlobalStep, Op, Placeholder, as_op, default_global_step
from plait.engine.task import TaskScope
from plait.errors import FetchError

__all__ = ["Plan", "Session", "feed_key", "key_of"]


class Plan:
    """What one set of fetches needs: which Ops, in which order, with gradients or not, which inputs move on."""

    __slots__ = ("calls", "fetches", "modes", "scopes", "single", "slots", "streams", "trains")

    def __init__(self, fetches: Any, fed: frozenset[Op], cursors: dict[int, Cursor]) -> None:
        self.fetches = _resolved(fetches, column_ops(fetches, cursors))
        order: list[Op] = []
        _visit(self.fetches, order, set(fed))
        self.slots = {op: slot for slot, op in enumerate([*fed, *order])}
        """Where each Op's value stands in a run's list of values; what is fed comes first."""
        slots = self.slots
        self.calls: list[_Call] = [
            (slots[op], op.fn, tuple(slots[i] for i in op.inputs), len(op.inputs)) for op in order
        ]
        captured = next((op for op in order if op.captured is not None), None)
        if captured is not None and not fed.intersection(captured.inputs):
            self.calls = _with_captured(captured, self.calls, order, slots, self.fetches)
        self.trains = any(op.trains for op in order)
        self.streams = [op.stream for op in order if op.stream is not None]
        self.modes: list[Now] = list({id(op.now): op.now for op in order if op.now is not None}.values())
        self.single = slots[self.fetches] if isinstance(self.fetches, Op) else None
        self.scopes: set[TaskScope] = {op.scope for op in order if op.scope is not None}


_Call = tuple[int, Callable[..., Any], tuple[int, ...], int]


def _with_captured(
    captured: Op, calls: list[_Call], order: list[Op], slots: Mapping[Op, int], fetches: Any
) -> list[_Call]:
    """The calls with the core of a step in one: what depends on it comes after it, and all else before.

    The core's values, and what is worked out from them, are copies: the next step writes where they lie.
    """
    assert captured.captured is not None  # noqa: S101 - the caller has looked
    (loss,) = captured.inputs
    core, late = {*captured.first, loss, captured}, {loss, captured}
    before, after = [], []
    for op, call in zip(order, calls, strict=True):
        if op in core:
            continue
        if late.intersection((*op.inputs, *op.first)):
            late.add(op)
            after.append((call[0], _copying(op.fn), *call[2:]))
        else:
            before.append(call)
    looked_at = bool(after) or not isinstance(fetches, Op) or fetches is loss
    fn = _copying(captured.captured) if looked_at else captured.captured
    return [*before, (slots[loss], fn, tuple(slots[i] for i in loss.inputs), len(loss.inputs)), *after]


def _copying(fn: Callable[..., Any]) -> Callable[..., Any]:
    def copied(*args: Any) -> Any:
        value = fn(*args)
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        if isinstance(value, (list, tuple)):
            return [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in value]
        return value

    return copied


def _resolved(fetches: Any, columns: Mapping[Column, Op]) -> Any:
    """The same nesting with an Op at each leaf."""
    if fetches is None:
        return None
    if isinstance(fetches, Column):
        return columns[fetches]
    if isinstance(fetches, Mapping):
        return {key: _resolved(value, columns) for key, value in fetches.items()}
    if isinstance(fetches, tuple) and hasattr(fetches, "_fields"):
        return type(fetches)(*(_resolved(value, columns) for value in fetches))
    if isinstance(fetches, (list, tuple)):
        return type(fetches)(_resolved(value, columns) for value in fetches)
    return as_op(fetches)


def _visit(node: Any, order: list[Op], seen: set[Op]) -> None:
    if isinstance(node, Op):
        if node not in seen:
            seen.add(node)
            _visit((*node.first, *node.inputs), order, seen)
            order.append(node)
    elif isinstance(node, Mapping):
        _visit(tuple(node.values()), order, seen)
    elif isinstance(node, (list, tuple)):
        for child in node:
            _visit(child, order, seen)


def key_of(fetches: Any) -> Hashable:
    """A hashable stand-in for a nesting of fetches, so that its plan is made once."""
    if isinstance(fetches, (Op, Sample, Column)) or fetches is None:
        return fetches
    if isinstance(fetches, Mapping):
        return (dict, *((key, key_of(value)) for key, value in fetches.items()))
    if isinstance(fetches, (list, tuple)):
        return (type(fetches), *map(key_of, fetches))
    as_op(fetches)  # says what is wrong with anything but a callable
    return cast("Hashable", fetches)


def _filled(node: Any, values: list[Any], slots: Mapping[Op, int]) -> Any:
    """The nesting of fetches with each Op's value in its place: tensors detached, never synchronised."""
    if isinstance(node, Op):
        value = values[slots[node]]
        return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value
    if isinstance(node, Mapping):
        return {key: _filled(value, values, slots) for key, value in node.items()}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*(_filled(value, values, slots) for value in node))
    if isinstance(node, (list, tuple)):
        return type(node)(_filled(value, values, slots) for value in node)
    return None


class Session:
    """Runs Ops: takes them in any nesting of dict, list and tuple, and returns that nesting filled with values."""

    def __init__(self, model: Any = None, global_step: GlobalStep | None = None, state: Any = None) -> None:
        self.model = model
        self.global_step = global_step or default_global_step()
        self.state = state
        """What a checkpoint of this session holds."""
        self._plans: dict[Hashable, Plan] = {}
        self._cursors: dict[int, Cursor] = {}
        """Where columns are read, for each data set."""
        self._values: list[Any] = []
        self._closed = False

    def plan(self, fetches: Any, fed: frozenset[Op] = frozenset()) -> Plan:
        key = (key_of(fetches), fed) if fed else key_of(fetches)
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = Plan(fetches, fed, self._cursors)
        return found

    def run(self, fetches: Any, feed_dict: Mapping[Any, Any] | None = None) -> Any:
        """Evaluate every fetched Op at most once, and what it depends on."""
        if self._closed:
            raise FetchError("this session is closed: run() needs an open one, `with plait.Session() as session:`")
        if not feed_dict:
            plan = self._plans.get(fetches) if isinstance(fetches, Op) else None
            return self._execute(plan or self.plan(fetches), None)
        feeds = {feed_key(key): value for key, value in feed_dict.items()}
        values = {op: self._placed(op.convert(v)) if isinstance(op, Placeholder) else v for op, v in feeds.items()}
        previous = feeds_of_this_run(values)
        try:
            return self._execute(self.plan(fetches, frozenset(values)), values)
        finally:
            feeds_of_this_run(previous)

    def _placed(self, value: torch.Tensor) -> torch.Tensor:
        """What is fed, where the model is."""
        store = getattr(self.model, "_store", None)
        return value if store is None else value.to(store.device)

    def _execute(self, plan: Plan, feeds: Mapping[Op, Any] | None) -> Any:
        """Run a plan: set the mode, call the Ops in order, then count the batches as consumed."""
        trains = plan.trains
        for now in plan.modes:
            if now.training is not trains:
                now.enter_mode(trains)
        values: list[Any] = [None] * len(plan.slots)
        if feeds is not None:
            for op, value in feeds.items():
                values[plan.slots[op]] = value
        if trains or not plan.modes:  # a step of the user's own, without a Model, sees to gradients itself
            for slot, fn, inputs, count in plan.calls:
                if count == 1:
                    values[slot] = fn(values[inputs[0]])
                elif count == 0:
                    values[slot] = fn()
                else:
                    values[slot] = fn(*[values[i] for i in inputs])
        else:
            with torch.no_grad():
                for slot, fn, inputs, _ in plan.calls:
                    values[slot] = fn(*[values[i] for i in inputs])
        for stream in plan.streams:
            stream.pending = None  # what stream.commit() does, without the call
            stream.position += 1
        # Values live until the next run's are there, as in a bare loop: memory is then taken and freed in its order.
        self._values = values
        if plan.single is None:
            return _filled(plan.fetches, values, plan.slots)
        value = values[plan.single]
        return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value

    def close(self) -> None:
        self._values = []
        self._closed = True
        for cursor in self._cursors.values():
            cursor.close()
        for plan in self._plans.values():
            for stream in plan.streams:
                stream.rest()
            for now in plan.modes:
                now.leave()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def feed_key(key: Any) -> Op:
    """The Op that a key of feed_dict means: itself, or the placeholder behind a tensor in a function."""
    if isinstance(key, Op):
        return key
    found = find_placeholder(key) if isinstance(key, torch.Tensor) else None
    if found is None:
        raise FetchError(
            f"feed_dict has a key of type {type(key).__name__}: its keys are Ops and placeholders, "
            "made with plait.placeholder(dtype, shape)"
        )
    return found
