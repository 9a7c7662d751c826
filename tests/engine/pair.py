"""Two workers of one process, each in a thread: they meet at a barrier, and exchange through a list."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from plait.cluster.reducing import combined
from plait.data.parts import PartSource, is_part
from plait.engine.strategy import Local
from plait.engine.update import leave_step
from plait.variables.tree import snapshot

SECONDS = 5.0
"""How long one waits for the other."""


class Meeting:
    """Where workers exchange values; those who come for different things have lost step, which is an error."""

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self.kinds: list[str] = []
        """What the workers met for, in order."""
        self._barrier = threading.Barrier(count)
        self._values: list[tuple[str, Any]] = [("", None)] * count

    def exchange(self, worker: int, kind: str, value: Any) -> list[Any]:
        self._values[worker] = (kind, value)
        self._barrier.wait(SECONDS)
        came = list(self._values)
        self._barrier.wait(SECONDS)
        kinds = [one for one, _ in came]
        assert len(set(kinds)) == 1, f"workers met for {kinds}"
        if worker == 0:
            self.kinds.append(kind)
        return [one for _, one in came]

    def end(self) -> None:
        """Nobody waits any more."""
        self._barrier.abort()


class Worker(Local):
    """One of several workers in step."""

    in_step = True

    def __init__(self, meeting: Meeting, worker_id: int, gradient_merge: int = 1) -> None:
        super().__init__(gradient_merge)
        self.meeting, self.worker_id, self.worker_num = meeting, worker_id, meeting.count
        self.durables: list[Mapping[str, Any]] = []

    def part(self, source: Any, *, training: bool) -> Any:
        return source if is_part(source) else PartSource(source, self.worker_id, self.worker_num, together=training)

    def reduce_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        own = [None if one.grad is None else one.grad.clone() for one in parameters]
        told = self.meeting.exchange(self.worker_id, f"{len(own)} gradients", own)
        for parameter, *grads in zip(parameters, *told, strict=True):
            if any(one is not None for one in grads):
                parts = [torch.zeros_like(parameter) if one is None else one for one in grads]
                parameter.grad = combined(parts, "mean")

    def leave(self, model: Any, task: str | None, *, stop: bool) -> None:
        leave_step(model, task, stop=stop)

    def gather(self, value: Any) -> list[Any]:
        return self.meeting.exchange(self.worker_id, "gather", snapshot(value))

    def tell(self, value: Any) -> Any:
        return snapshot(self.meeting.exchange(self.worker_id, "tell", value)[0])

    def reduce(self, value: Any, how: Any) -> Any:
        return combined(self.meeting.exchange(self.worker_id, "reduce", value), how)

    def barrier(self, name: str, interval: float) -> None:
        self.meeting.exchange(self.worker_id, f"end of {name}", None)

    def is_saver(self) -> bool:
        return self.worker_id == 0

    def durable(self, state: Mapping[str, Any], directory: str | None) -> bool:
        self.durables.append(state)
        return True


def workers(count: int = 2, gradient_merge: int = 1) -> list[Worker]:
    meeting = Meeting(count)
    return [Worker(meeting, number, gradient_merge) for number in range(count)]


def together(models: Sequence[Any], act: Callable[[Any], Any]) -> list[Any]:
    """What `act(model)` gives for each model, all at the same time; the first error of any is raised."""
    found: list[Any] = [None] * len(models)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            found[number] = act(models[number])
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors.append(error)
            models[number].strategy.meeting.end()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found
