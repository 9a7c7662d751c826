"""Captured steps: a training step on a GPU recorded once as a CUDA graph, and replayed.

The graph holds what the task's functions and the update do on the device: dropping the old gradients, forward,
backward, clipping, the optimizers, the metrics. Their Python runs while it is recorded, and not again. So what changes
from step to step has to be a tensor: the batch is copied into tensors that stay, learning rates are such tensors, and
random numbers move on by themselves. Everything else of a run, the hooks and the Ops of others, runs as always.

The first steps of a shape run as always, and count: they warm up what has to be warm. A step that cannot be recorded
runs as always, too, after one line that says why.
"""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from plait.data import Sample
from plait.engine.calls import UserCall
from plait.engine.hooks import SessionRunHook
from plait.engine.metrics import Latest, Sums
from plait.engine.op import GlobalStep
from plait.engine.strategy import Local
from plait.engine.update import moved_by
from plait.errors import PlaitError
from plait.optim.factories import LR_SCALE, NEXT_STEP
from plait.optim.fusing import begin_momentum
from plait.optim.rules import Ftrl, RMSProp
from plait.optim.wrappers import Lars, chain

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["CapturedStep", "Graph", "forget_graphs", "recording_stream", "why_not"]

WARM_UP = 3
"""Steps of a shape that run as always before it is recorded."""
MAX_SHAPES = 8
"""Graphs that are kept; each holds the memory of a step."""

Optimizers = Sequence[torch.optim.Optimizer]
log = logging.getLogger("plait")


class Graph(Protocol):
    """What can record work, and do it again."""

    def capture(self, work: Callable[[], None]) -> None: ...

    def warm_up(self, work: Callable[[], Any]) -> Any: ...

    def replay(self) -> None: ...


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Where graphs are recorded: not on the stream of everybody."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch leaves it so
    return _streams[device]


@contextmanager
def recording_stream(device: torch.device) -> Iterator[None]:
    """Work on the stream on which graphs of this device are recorded, in order with the current one.

    A variable's place in autograd belongs to the stream of the first forward pass for as long as anybody holds a loss
    of it; so that pass, and all before the recording, are made here.
    """
    now, stream = torch.cuda.current_stream(device), _stream_of(device)
    stream.wait_stream(now)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        now.wait_stream(stream)


class CudaGraph:
    """A CUDA graph, recorded on a stream of its own, as warming up is."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, _stream_of(device)
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, work: Callable[[], Any]) -> Any:
        with recording_stream(self._device):
            return work()

    def capture(self, work: Callable[[], None]) -> None:
        index = self._stream.device_index
        generator = torch.cuda.default_generators[index]
        state = generator.get_state()
        try:
            # Other threads copy the next batch meanwhile, which is none of this graph's business.
            with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
                work()
        except BaseException:
            self._clear_away(index, generator, state)
            raise

    def _clear_away(self, index: int, generator: torch.Generator, state: Tensor) -> None:
        """After a recording that failed: torch leaves its generator and its allocator as if it were going on."""
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(index, self._graph.pool())  # noqa: SLF001 - there is no public way
        fresh = torch.Generator(generator.device)
        fresh.set_state(state)
        generator.graphsafe_set_state(fresh)
        forget_graphs()

    def replay(self) -> None:
        self._graph.replay()


_generation = [0]
"""How often the generator, or the memory of variables, was replaced: graphs of before use what nobody else does."""


def forget_graphs() -> None:
    """Steps are recorded anew: something has moved in memory."""
    _generation[0] += 1


@contextmanager
def _noticing_waits(device: torch.device) -> Iterator[list[str]]:
    """Where work inside waits for the device, which a graph cannot: nothing is hindered."""
    found: list[str] = []
    if device.type != "cuda":
        yield found
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for one in seen:
        if "synchronizing CUDA operation" in str(one.message):
            found.append(f"{Path(one.filename).name}:{one.lineno}")
        elif "Synchronization debug mode" not in str(one.message):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


class Refused(Exception):  # noqa: N818 - not an error: the step runs as always
    """Why something is not recorded."""


class _Recorded:
    """A graph and the tensors that it reads and writes."""

    __slots__ = (
        "first_at",
        "generation",
        "gradients",
        "hooks",
        "inputs",
        "latest",
        "losses",
        "replay",
        "settings",
        "trained",
    )

    def __init__(self, graph: Graph, inputs: list[Tensor], losses: Any) -> None:
        self.replay = graph.replay
        self.inputs = inputs
        self.losses = losses
        self.latest: list[tuple[Latest, Tensor | None]] = []
        """Metrics that show a tensor of the last step, the loss among them."""
        self.hooks: list[SessionRunHook] = []
        """Those that the function made, with tensors that the graph writes."""
        self.gradients: list[Tensor | None] = []
        self.settings: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """The optimizers' groups and what they said, learning rates aside; other words need another graph."""
        self.trained: list[bool] = []
        self.first_at = 0
        """Where the first variable lies."""
        self.generation = _generation[0]


class CapturedStep:
    """The core of a task's training step: drop gradients, loss, update. Called with a batch, it gives the losses."""

    def __init__(
        self,
        model: Model,
        task: str | None,
        parts: tuple[Callable[[], None], UserCall, Callable[[Any], None]],
        optimizers: Optimizers,
        make_graph: Callable[[], Graph] | None = None,
    ) -> None:
        self._clear, self._call, self._update = parts
        self._model = model
        self._optimizers = [one for optimizer in optimizers for one in chain(optimizer)]
        self._variables = moved_by(list(optimizers))
        self._step, self._shown = model.global_step, model.loss_metrics[task]
        self._merge = model.strategy.gradient_merge
        device = model.config.resolved_device()
        self._make_graph = make_graph or (lambda: CudaGraph(device))
        self._warm: dict[Any, int] = {}
        self._graphs: dict[Any, _Recorded] = {}
        self._last: _Recorded | None = None
        """The graph of the last step, whose gradients the variables have."""
        self._rates: list[_Rate] = []
        self._given_up = False
        _make_capturable(self._optimizers)

    def __call__(self, sample: Sample) -> Any:
        if self._given_up:
            return self._run(sample)
        key = self._key(sample)
        found = self._graphs.get(key)
        if found is None:
            return self._first_steps(key, sample)
        if not self._still_fits(found):
            self._graphs.clear()  # what they were made of is gone
            self._warm.clear()
            self._rates = []
            return self._first_steps(key, sample)
        if self._merge > 1 and not key[0] and not self._continues(found):
            return self._run(sample)
        return self._replay(found, sample)

    def _key(self, sample: Sample) -> Any:
        shapes = tuple([(v.shape, v.dtype) if type(v) is Tensor else type(v) for v in sample.values()])
        if self._merge == 1:
            return shapes
        step = self._step.value
        return step % self._merge == 0, (step + 1) % self._merge == 0, shapes

    def _run(self, sample: Sample) -> Any:
        """A step as always."""
        self._last = None
        self._clear()
        losses = self._call(sample)
        self._update(losses)
        self._let_go()
        return _detached(losses)

    def _latest(self) -> list[tuple[Latest, Tensor | None]]:
        states = self._model.metric_states.get(self._call.scope, {}).values()
        return [(one, one.value) for one in dict.fromkeys((self._shown, *states)) if isinstance(one, Latest)]

    def _let_go(self) -> None:
        """Nothing holds the step's autograd graph: its nodes would bind later steps to the stream of this one."""
        for metric, value in self._latest():
            metric.value = None if value is None else value.detach()

    def _first_steps(self, key: Any, sample: Sample) -> Any:
        seen = self._warm[key] = self._warm.get(key, 0) + 1
        if seen < WARM_UP:
            return self._make_graph().warm_up(lambda: self._run(sample))
        if seen == WARM_UP:
            return self._rehearse(key, sample)
        reason = ""
        try:
            recorded = self._graphs[key] = self._record(sample)
        except Refused as refused:
            reason = str(refused)
        if reason:  # out here, where no traceback holds what was recorded
            self._give_up(key, reason)
            return self._run(sample)
        return self._replay(recorded, sample)

    def _rehearse(self, key: Any, sample: Sample) -> Any:
        """A step as always, but with rates as the graph has them; it shows whether anything waits for the device."""
        reason = why_not(self._model, self._call, sample, self._optimizers)
        if len(self._graphs) >= MAX_SHAPES:
            reason = f"{MAX_SHAPES} shapes of batches have been, and here is another: drop short ones, or pad"
        if reason is None:
            self._make_rates()
            self._set_rates()
            with _noticing_waits(self._variables[0].device) as waits, self._tensor_rates():
                result = self._make_graph().warm_up(lambda: self._run(sample))
            if not waits:
                return result
            self._give_up(key, f"it waits for the device at {', '.join(dict.fromkeys(waits))}")
            return result
        self._give_up(key, reason)
        return self._run(sample)

    def _give_up(self, key: Any, reason: str) -> None:
        """Say why, once; a shape too many leaves the others as they are."""
        many = len(self._graphs) >= MAX_SHAPES
        if not (many and "shapes" in self._model.said):
            log.warning("the training step of %s is not captured: %s", self._call.scope, reason)
        if many:
            self._model.said.add("shapes")
            self._warm[key] = -(1 << 60)  # it is warmed up for ever
        else:
            self._given_up = True

    def _record(self, sample: Sample) -> _Recorded:
        """Record the step on copies of the batch's tensors. Nothing is computed, and nothing is counted."""
        static = sample.map(torch.clone)
        graph, step, latest, losses = self._make_graph(), self._step.value, self._latest(), None

        def work() -> None:
            nonlocal losses
            self._clear()
            with _unseen(self._step):
                losses = self._call(static)
            self._update(losses)

        self._make_rates()
        try:
            with self._tensor_rates():
                graph.capture(work)
        except Exception as error:
            for metric, value in latest:  # what was recorded has never been computed
                metric.value = value
            if isinstance(error, (PlaitError, Refused)):
                raise
            raise Refused(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error
        finally:
            self._step.value = step
        self._let_go()
        return self._kept(_Recorded(graph, list(static.values()), _detached(losses)))

    def _kept(self, recorded: _Recorded) -> _Recorded:
        """What has to be as it is now when the graph is replayed, or is put back then."""
        recorded.latest = self._latest()
        recorded.hooks = self._call.fresh_hooks
        recorded.gradients = [variable.grad for variable in self._variables]
        recorded.settings = [(group, _settings(group)) for one in self._optimizers for group in one.param_groups]
        recorded.trained = [variable.requires_grad for variable in self._variables]
        recorded.first_at = self._variables[0].data_ptr()
        return recorded

    def _still_fits(self, recorded: _Recorded) -> bool:
        """Whether nobody has loaded, frozen or set anything that the graph has inside."""
        now = [group for one in self._optimizers for group in one.param_groups]
        return (
            recorded.first_at == self._variables[0].data_ptr()
            and recorded.generation == _generation[0]
            and len(now) == len(recorded.settings)
            and all(
                group is then and _settings(group) == said
                for group, (then, said) in zip(now, recorded.settings, strict=True)
            )
            and recorded.trained == [variable.requires_grad for variable in self._variables]
        )

    def _continues(self, recorded: _Recorded) -> bool:
        """Whether the gradients that are being merged lie where the graph adds to them."""
        pairs = zip(self._variables, recorded.gradients, strict=True)
        return all(variable.grad is gradient for variable, gradient in pairs)

    def _replay(self, recorded: _Recorded, sample: Sample) -> Any:
        torch._foreach_copy_(recorded.inputs, list(sample.values()))
        self._set_rates()
        recorded.replay()
        if self._last is not recorded:
            self._last = recorded
            for variable, gradient in zip(self._variables, recorded.gradients, strict=True):
                variable.grad = gradient
            for metric, value in recorded.latest:
                metric.value = value
            self._call.rebind_hooks(recorded.hooks)
        self._model._now.sample = sample  # noqa: SLF001 - a friend
        self._step.value += 1
        return recorded.losses

    # Learning rates: numbers for everybody else, tensors for the graph

    def _make_rates(self) -> None:
        groups = [group for one in self._optimizers for group in one.param_groups]
        if [id(rate.group) for rate in self._rates] != [id(group) for group in groups]:
            self._rates = [_Rate(group, self._variables[0].device) for group in groups]

    @contextmanager
    def _tensor_rates(self) -> Iterator[None]:
        """While a graph is recorded, rates are tensors, and schedules, which set numbers, are silent."""
        groups = [rate.group for rate in self._rates]
        hooks = [one._optimizer_step_pre_hooks for one in self._optimizers]  # noqa: SLF001 - there is no public way
        kept = [group["lr"] for group in groups]
        try:
            for rate in self._rates:
                rate.group["lr"] = rate.tensor
            for one in self._optimizers:
                one._optimizer_step_pre_hooks = OrderedDict()  # noqa: SLF001 - same
            yield
        finally:
            for group, number in zip(groups, kept, strict=True):
                group["lr"] = number
            for one, own in zip(self._optimizers, hooks, strict=True):
                one._optimizer_step_pre_hooks = own  # noqa: SLF001 - same

    def _set_rates(self) -> None:
        for one in self._optimizers:
            for hook in one._optimizer_step_pre_hooks.values():  # noqa: SLF001 - a schedule's, above all
                hook(one, (), {})
        for rate in self._rates:
            now = rate.group["lr"]
            if now != rate.number:
                rate.number = now
                rate.tensor.fill_(now)


def _detached(losses: Any) -> Any:
    return losses.detach() if isinstance(losses, Tensor) else [loss.detach() for loss in losses]


class _Rate:
    """The learning rate of a group, as the graph sees it."""

    __slots__ = ("group", "number", "tensor")

    def __init__(self, group: dict[str, Any], device: torch.device) -> None:
        self.group = group
        self.number = float(group["lr"])
        self.tensor = torch.full((), self.number, device=device)


_CHANGING = frozenset(("params", "lr", NEXT_STEP, LR_SCALE))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _CHANGING}


class _Unseen(GlobalStep):
    """A step counter that nobody may look at."""

    __slots__ = ()

    @property
    def value(self) -> int:  # type: ignore[override]
        raise Refused("its function looks at the global step, which would stand still in a graph")


@contextmanager
def _unseen(step: GlobalStep) -> Iterator[None]:
    step.__class__ = _Unseen
    try:
        yield
    finally:
        step.__class__ = GlobalStep


def _make_capturable(optimizers: Optimizers) -> None:
    """Let optimizers count their steps on the device, from their first step on."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
            elif type(optimizer) is torch.optim.SGD:
                group["fused"], group["foreach"] = True, False  # the one that takes a tensor for the rate
        begin_momentum(optimizer)


def why_not(model: Model, call: UserCall, sample: Sample, optimizers: Optimizers) -> str | None:
    """What stands in the way of a graph, if anything that can be known does."""
    for name, value in sample.items():
        if type(value) is not Tensor:
            return f"field {name!r} of its batches is a {type(value).__name__}, not a tensor"
    if not isinstance(model.strategy, Local):
        return f"several processes take part in it ({type(model.strategy).__name__})"
    if model.scaler is not None:
        return "the loss scale of precision='fp16' follows overflows: write 'bf16', or a loss_scale"
    if call.placeholders:
        return "its function makes placeholders, which are fed at every step"
    for name, metric in model.metric_states.get(call.scope, {}).items():
        if not isinstance(metric, (Latest, Sums)):
            return f"metric {name!r} ({type(metric).__name__}) keeps every row"
    for optimizer in optimizers:
        if not _is_capturable(optimizer):
            return f"{type(optimizer).__name__} counts or decides outside of the device"
        if optimizer._optimizer_step_post_hooks:  # noqa: SLF001 - there is no public way
            return f"{type(optimizer).__name__} has a hook that is called after each of its steps"
    return None


def _is_capturable(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, (torch.optim.SGD, RMSProp, Ftrl, Lars)) or "capturable" in optimizer.defaults
