"""What the engine needs of a cluster, and the one for a single process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from plait.data import Sample, Stream
from plait.data.sources import Source
from plait.engine.task import TaskScope

if TYPE_CHECKING:
    from pathlib import Path

    from plait.engine.model import Model
    from plait.engine.monitored import MonitoredSession
    from plait.engine.stage import Stage
    from plait.variables.checkpoint import CheckpointDir, CheckpointInfo

__all__ = ["HOW", "Connectable", "Local", "OneParty", "Strategy", "default_strategy", "set_default_strategy"]

HOW = Literal["sum", "mean", "min", "max", "concat"]


class Strategy(Protocol):
    """How several workers act as one. A way of distributing is a class with these methods, in a file of its own.

    Trees are dicts with string keys, lists and plain values, with tensors among the leaves.
    """

    worker_id: int
    worker_num: int
    gradient_merge: int
    """Variables move every so many steps, by the mean of the gradients until then."""
    in_step: bool
    """Whether several workers take each training step together."""
    closed: bool
    """Whether this process has left."""
    follows: bool
    """Whether another party says, in this stage, when steps are made, when loops end and when it is time to save."""
    shared: bool
    """Whether the stage is the other party's, too, so that both agree at its end."""

    # Life: begin → (the build) → transform → (optimizers are made) → prepare → steps → close

    def begin(self, model: Model) -> None:
        """Before the build. A process that is a server serves here, and ends here."""

    def transform(self, model: Model) -> None:
        """Variables exist, optimizers do not yet."""

    def prepare(self, model: Model) -> None:
        """Variables and optimizers exist: everybody's variables become the chief's."""

    def close(self) -> None:
        """Leave; the others are told."""

    # A step

    def part(self, source: Source, *, training: bool) -> Source:
        """The part of the data that is this worker's."""

    def mover(
        self, model: Model, task: str | None, optimizers: Sequence[torch.optim.Optimizer]
    ) -> Callable[[], None] | None:
        """What moves the variables once their gradients are there; None: the optimizers do, in this process."""

    def reduce_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Make every worker's gradients of these parameters the mean of all."""

    def after_step(self, model: Model) -> None:
        """The variables have moved."""

    def jumped(self) -> int:
        """How many steps the others have made without this worker since it was last asked."""

    def leave(self, model: Model, task: str | None, *, stop: bool) -> None:
        """The worker takes no more steps of `task`: those who wait for it in one are told, and drop it."""

    # Two parties, of which one leads

    def reader(self, stream: Stream, scope: TaskScope) -> Callable[[], Sample]:
        """What the input's Op calls; the other party is told what was read."""

    def begin_stage(self, name: str, stage: Stage) -> None:
        """A stage begins here; one that is the other party's, too, has to begin there."""

    def stopper(self, session: MonitoredSession) -> Callable[[], bool]:
        """What a loop asks before each step, whether it is over; one that follows waits there for the other's word."""

    def end_loop(self) -> None:
        """The loop makes no more steps."""

    def lead(self, value: Any) -> Any:
        """The tree of the party that leads, in both."""

    def is_due(self, due: Callable[..., bool]) -> bool:
        """Whether to save now: what `due` says, or the party that leads. `due(ahead=n)`: n steps from now."""

    def begun(self, wait: Callable[[], object]) -> None:
        """The first checkpoint is being written. `wait` waits for it, which a peer that begins together needs."""

    def finish(self) -> None:
        """The procedure has ended, and all that it saved is on disk; returns when it is so in both parties."""

    def has_loss(self, scope: TaskScope) -> bool:
        """Whether this party's loss_fn gives a loss; without, its gradients are those that the other party returns."""

    def received(self) -> Sequence[torch.Tensor]:
        """The tensors of this step that came from another party, which waits for their gradients."""

    def returned_noise(self, scope: TaskScope) -> float | None:
        """The noise multiplier of the gradients that go back in a step; None: none go, 0: they go as they are."""

    # Together

    def gather(self, value: Any) -> list[Any]:
        """Every worker's tree, in their order; everybody gets them all."""

    def tell(self, value: Any) -> Any:
        """The chief's tree, on every worker."""

    def choose(self, value: Any) -> Any:
        """The choice for the next step; workers whose choices are alike by construction need not talk."""

    def reduce(self, value: Any, how: HOW) -> Any:
        """Combine a number, tensor or nesting of them over all workers; everybody gets the result."""

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite everybody's tensors with the chief's."""

    def barrier(self, name: str, interval: float) -> None:
        """Wait until every worker is here, looking each `interval` seconds, and notice a dead one."""

    def settle(self, model: Model) -> None:
        """A stage ends: variables that workers moved by themselves become those of all."""

    # State

    def is_saver(self) -> bool:
        """Whether this worker writes checkpoints."""

    def whole(self) -> bool:
        """Whether all workers have the same variables at this moment, so that the chief's are everybody's."""

    def rejoin(self) -> None:
        """Before a checkpoint is taken up: be a member again, if that was lost."""

    def capture(self, model: Model, directory: str | None) -> dict[str, Any]:
        """What a checkpoint in `directory` needs of the cluster beside the chief's own state."""

    def full(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The tree with whole tensors, where workers have parts of them; all workers call it."""

    def own(self, model: Model, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        """The reverse, for the variables and optimizers of a checkpoint."""

    def durable(self, state: Mapping[str, Any], directory: str | None) -> bool:
        """Block, in any thread, until what `capture` gave is on disk; False if it was lost, and is not to be kept."""

    def newest(self, directory: CheckpointDir) -> tuple[CheckpointInfo, Any] | None:
        """The checkpoint to go on from."""

    def saved(self, state: Mapping[str, Any], path: Path) -> None:
        """What `capture` gave is on disk now; called in any thread."""

    def restore(self, model: Model, state: Mapping[str, Any], directory: str | None) -> None:
        """Take that back; the model has its own state already."""


class Connectable(Protocol):
    """Settings that become a strategy."""

    def connect(self, replicas_to_aggregate: int | None = None) -> Strategy: ...


class OneParty:
    """What a strategy has to say of other parties when there are none."""

    follows = False
    shared = True

    def reader(self, stream: Stream, scope: TaskScope) -> Callable[[], Sample]:
        del scope
        return stream.read

    def begin_stage(self, name: str, stage: Stage) -> None:
        pass

    def stopper(self, session: MonitoredSession) -> Callable[[], bool]:
        return session.should_stop

    def end_loop(self) -> None:
        pass

    def lead(self, value: Any) -> Any:
        return value

    def is_due(self, due: Callable[..., bool]) -> bool:
        result: bool = due()
        return result

    def begun(self, wait: Callable[[], object]) -> None:
        pass

    def finish(self) -> None:
        pass

    def has_loss(self, scope: TaskScope) -> bool:
        del scope
        return True

    def received(self) -> Sequence[torch.Tensor]:
        return ()

    def returned_noise(self, scope: TaskScope) -> float | None:
        del scope
        return None

    def newest(self, directory: CheckpointDir) -> tuple[CheckpointInfo, Any] | None:
        return directory.read_latest()

    def saved(self, state: Mapping[str, Any], path: Path) -> None:
        pass


class Local(OneParty):
    """One process: nothing to combine and nobody to wait for."""

    worker_id = 0
    worker_num = 1
    in_step = False
    closed = False

    def __init__(self, gradient_merge: int = 1) -> None:
        self.gradient_merge = gradient_merge

    def begin(self, model: Model) -> None:
        pass

    def transform(self, model: Model) -> None:
        pass

    def prepare(self, model: Model) -> None:
        pass

    def close(self) -> None:
        pass

    def part(self, source: Source, *, training: bool) -> Source:
        del training
        return source

    def mover(
        self, model: Model, task: str | None, optimizers: Sequence[torch.optim.Optimizer]
    ) -> Callable[[], None] | None:
        del model, task, optimizers
        return None

    def reduce_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        pass

    def after_step(self, model: Model) -> None:
        pass

    def jumped(self) -> int:
        return 0

    def leave(self, model: Model, task: str | None, *, stop: bool) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def tell(self, value: Any) -> Any:
        return value

    def choose(self, value: Any) -> Any:
        return value

    def reduce(self, value: Any, how: HOW) -> Any:
        return [value] if how == "concat" and not isinstance(value, (torch.Tensor, list, tuple)) else value

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def barrier(self, name: str, interval: float) -> None:
        pass

    def settle(self, model: Model) -> None:
        pass

    def is_saver(self) -> bool:
        return True

    def whole(self) -> bool:
        return True

    def rejoin(self) -> None:
        pass

    def capture(self, model: Model, directory: str | None) -> dict[str, Any]:
        del model, directory
        return {}

    def full(self, tree: dict[str, Any]) -> dict[str, Any]:
        return tree

    def own(self, model: Model, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        del model
        return tree

    def durable(self, state: Mapping[str, Any], directory: str | None) -> bool:
        del state, directory
        return True

    def restore(self, model: Model, state: Mapping[str, Any], directory: str | None) -> None:
        pass


def _alone(replicas_to_aggregate: int | None = None) -> Strategy:
    del replicas_to_aggregate  # checked where the number of workers is
    return Local()


_default: list[Callable[[int | None], Strategy]] = [_alone]


def default_strategy(replicas_to_aggregate: int | None = None) -> Strategy:
    """The strategy of a model that was given none."""
    return _default[0](replicas_to_aggregate)


def set_default_strategy(make: Callable[[int | None], Strategy]) -> None:
    """Let `make` say what a model that was given no strategy gets: the cluster that the environment describes."""
    _default[0] = make
