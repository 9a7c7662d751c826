"""Workers without servers: each computes on its part of a batch, and all move their variables alike."""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from plait.cluster.buckets import Buckets, Plan
from plait.cluster.embedding import SparseEmbedding
from plait.cluster.exchange import Mesh, meet
from plait.cluster.reducing import combined
from plait.cluster.roles import Role
from plait.cluster.settings import Distributed
from plait.cluster.shared_memory import SharedMemory
from plait.cluster.transforms import after_build, before_build, choose_gpu
from plait.data.parts import part_of
from plait.data.sources import Source
from plait.engine.strategy import HOW, OneParty
from plait.engine.sync_replicas import wanted_replicas
from plait.engine.update import LeftError, leave_step
from plait.errors import ClusterError, ConfigError
from plait.variables.tree import snapshot

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["MOST_LOCAL_STEPS", "Collective"]

log = logging.getLogger("plait")

MOST_LOCAL_STEPS = 16
"""Adaptive local SGD takes the mean at least so often."""
_TOGETHER_BYTES = 64 << 20
"""Tensors are broadcast together until they have so many bytes."""


class _Agreed(NamedTuple):
    """How one list of tensors is averaged."""

    mean: Callable[[Sequence[Tensor | None]], dict[int, Tensor]]
    dense: list[int]
    """The places of what `mean` is given."""
    sparse: list[int]
    """Of gradients that some worker had as rows only."""
    tensors: Sequence[Tensor]
    """Kept, so that nothing else gets their ids."""


class Collective(OneParty):
    """The strategy of a worker in a group without servers."""

    in_step = True
    closed = False
    _may_share = True  # tests turn it off, to see the other way

    def __init__(self, role: Role, settings: Distributed) -> None:
        self.worker_id = role.index
        self.worker_num = role.workers
        self.gradient_merge = settings.gradient_merge
        self._settings = settings
        self._pace = _Pace(settings.local_sgd, settings.adaptive)
        self._by_id: dict[tuple[int, ...], _Agreed] = {}
        self._by_form: dict[tuple[Any, ...], _Agreed] = {}
        """The same, for all that means the same on every worker: what is not trained is known by its form alone."""
        self._joined = False
        """Whether torch's group is ours to leave."""
        self._shared: SharedMemory | None = None
        self._scheduling = contextlib.ExitStack()
        if role.workers == 1:
            self._mesh = Mesh(0, {}, settings.timeout)
            return
        self._mesh, store = meet(role, settings.timeout)
        try:
            self._join(role, store)
        except BaseException as error:
            self._mesh.close(f"worker {role.index} could not start: {error}")
            raise

    def _join(self, role: Role, store: Any) -> None:
        choose_gpu(role)
        self._group = self._process_group(role, store, nccl=self._has_a_gpu_of_its_own())
        if all(self._mesh.gather("one host?", self._mesh.on_one_host and self._may_share)):
            self._shared = SharedMemory(self._mesh)
        overlap = self.gradient_merge == 1  # otherwise, most backward passes are followed by no mean
        self._buckets = Buckets(self._mesh, self._group, compression=self._settings.compression, overlap=overlap)
        _choose_scheduling(self._mesh, self._probe, self._scheduling)

    def _has_a_gpu_of_its_own(self) -> bool:
        """Whether every worker has: NCCL refuses two of them on one GPU, where gloo copies through the host."""
        own = None
        if torch.cuda.is_available() and dist.is_nccl_available():
            own = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        all_of_them = self._mesh.gather("GPUs", own)
        shared = None not in all_of_them and len(set(all_of_them)) < len(all_of_them)
        if shared and self.worker_id == 0:
            log.warning("workers share a GPU: their gradients go through the host's memory; give each one of its own")
        return None not in all_of_them and not shared

    def _probe(self) -> None:
        """One small message, in the way that gradients wait for each other."""
        if self._shared is None:
            self._average([torch.zeros(256)])
        else:
            self._mesh.exchange("probe")

    def _process_group(self, role: Role, store: Any, *, nccl: bool) -> Any:
        if dist.is_initialized():
            if (dist.get_rank(), dist.get_world_size()) != (role.index, role.workers):
                raise ConfigError(
                    f"torch.distributed is initialized as {dist.get_rank()} of {dist.get_world_size()}, but this is"
                    f" worker {role.index} of {role.workers} ({role.source}): leave init_process_group to plait"
                )
            return dist.group.WORLD
        hook = sys.excepthook
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if nccl else "gloo",
                store=dist.PrefixStore("torch", store),  # type: ignore[attr-defined] # torch's stubs lack it
                rank=role.index,
                world_size=role.workers,
                timeout=dt.timedelta(seconds=self._settings.timeout),
            )
        except RuntimeError as error:
            raise ClusterError(f"worker {role.index} cannot join torch's process group: {error}") from error
        sys.excepthook = hook  # torch puts the rank before each line of a traceback, and never takes that back
        self._joined = True
        return dist.group.WORLD

    def close(self) -> None:
        """Leave; the others are told. Nothing is waited for."""
        self.closed = True
        self._mesh.close()
        self._by_id.clear()
        self._by_form.clear()
        self._shared = None
        self._scheduling.close()
        if self._joined:
            self._joined = False
            dist.destroy_process_group()

    # ---- life

    def begin(self, model: Model) -> None:
        before_build(model, self._settings)

    def transform(self, model: Model) -> None:
        after_build(model, self._settings)
        if any(isinstance(module, SparseEmbedding) for module in model.modules()):
            raise ConfigError("a SparseEmbedding of several workers lives on servers: `plait launch --servers 1`")
        if self._settings.sync_batch_norm:
            from plait.cluster.batch_norm import synchronise  # noqa: PLC0415 - few need it

            synchronise(model)
        if self._settings.fully_shard:
            from plait.cluster.fully_shard import shard_model  # noqa: PLC0415 - heavy

            shard_model(model)

    def prepare(self, model: Model) -> None:
        self.broadcast([value for value in model.variables().values() if not _is_sharded(value)])
        wanted = wanted_replicas(_optimizers(model), self.worker_num)
        if wanted is not None and wanted < self.worker_num:
            raise ConfigError(
                f"replicas_to_aggregate={wanted} of {self.worker_num} workers: to go on without the last ones needs "
                "servers, `plait launch --servers 1`"
            )
        if self._settings.fully_shard:
            from plait.cluster.fully_shard import one_by_one  # noqa: PLC0415 - heavy

            for optimizer in model.optimizers():
                one_by_one(optimizer)

    # ---- a step

    def part(self, source: Source, *, training: bool) -> Source:
        return part_of(source, self.worker_id, self.worker_num, together=training)

    def mover(self, model: Model, task: str | None, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        pass

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """A gradient that only others have counts as zeros here; one that nobody has stays None."""
        if self._pace.first or self.worker_num == 1:
            return
        agreed = self._by_id.get(tuple(map(id, parameters))) or self._agree(parameters)
        if agreed.sparse:
            self._reduce_sparse(agreed, parameters)
        gradients = [parameters[place].grad for place in agreed.dense]
        if [one for one in gradients if one is not None and one.is_sparse]:
            gradients = [_dense_gradient(parameters[place]) for place in agreed.dense]
        made = agreed.mean(gradients)
        for number, gradient in made.items():
            parameters[agreed.dense[number]].grad = gradient

    def after_step(self, model: Model) -> None:
        if self._pace.due():
            self._take_mean(model)

    def jumped(self) -> int:
        return 0

    def leave(self, model: Model, task: str | None, *, stop: bool) -> None:
        if self._pace.first:
            self._take_mean(model, leaves=True, stop=stop)
        else:
            leave_step(model, task, stop=stop)

    # ---- local SGD

    def _take_mean(self, model: Model, *, leaves: bool = False, stop: bool = False) -> None:
        """Variables, and the optimizers' state that all have, become the mean; who leaves tells the others."""
        loss, rate = _loss_and_rate(model)
        state = _optimizers_state(model)
        told = self._mesh.gather("local SGD", {"loss": loss, "leaves": leaves, "stop": stop, "state": list(state)})
        common = set(state).intersection(*[one["state"] for one in told])
        self._average([*_moving(model), *[value for name, value in state.items() if name in common]])
        losses = [one["loss"] for one in told if one["loss"] is not None]
        self._pace.restart(statistics.fmean(losses) if losses else None, rate)
        if not leaves and any(one["leaves"] for one in told):
            raise LeftError(stop=any(one["stop"] for one in told))

    def settle(self, model: Model) -> None:
        """Also what no gradient moves, such as running means, becomes the mean of all; whole numbers the chief's."""
        if self.worker_num == 1:
            return
        if not self.whole():
            self._take_mean(model)
        buffers = [value for value in model.variables().values() if not isinstance(value, nn.Parameter)]
        self._average([value for value in buffers if value.is_floating_point()])
        self.broadcast([value for value in buffers if not value.is_floating_point()])

    def _average(self, tensors: Sequence[Tensor]) -> None:
        if tensors:
            self._plan(tuple(map(_form, tensors)), tensors).mean(tensors)

    # ---- together

    def gather(self, value: Any) -> list[Any]:
        return self._mesh.gather("gather", value)

    def tell(self, value: Any) -> Any:
        return self._mesh.tell("tell", value)

    def choose(self, value: Any) -> Any:
        return value

    def reduce(self, value: Any, how: HOW) -> Any:
        own = snapshot(value)
        found = [own if rank == self.worker_id else one for rank, one in enumerate(self._mesh.gather("reduce", own))]
        return _moved(combined(found, how), _device(value))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        if self.worker_num == 1:
            return
        with torch.no_grad():
            for together in _batches(tensors):
                flat = torch.cat([_bytes(tensor) for tensor in together])
                self._broadcast(flat)
                start = 0
                for tensor in together:
                    end = start + tensor.numel() * tensor.element_size()
                    if self.worker_id > 0 and end > start:
                        tensor.copy_(flat[start:end].clone().view(tensor.dtype).view(tensor.shape))
                    start = end

    def _broadcast(self, flat: Tensor) -> None:
        try:
            dist.broadcast(flat, 0, group=self._group)
        except RuntimeError as error:
            text = f"worker {self.worker_id} waited in 'broadcast' and one of the others is lost or stuck: {error}"
            self._mesh.close(text)
            raise ClusterError(text) from error

    def barrier(self, name: str, interval: float) -> None:
        del interval  # a worker that comes, or dies, wakes the others at once
        self._mesh.exchange(name, patient=True)

    # ---- state

    def is_saver(self) -> bool:
        return self.worker_id == 0

    def whole(self) -> bool:
        return self._pace.steps == 0

    def rejoin(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return self._pace.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pace.load_state_dict(state)

    def capture(self, model: Model, directory: str | None) -> dict[str, Any]:
        del model, directory
        return self.state_dict()

    def full(self, tree: dict[str, Any]) -> dict[str, Any]:
        if not self._settings.fully_shard:
            return tree
        from plait.cluster.fully_shard import gathered  # noqa: PLC0415 - heavy

        keep = self.is_saver()
        return {**tree, **{part: gathered(tree[part], keep=keep) for part in ("variables", "optimizers")}}

    def own(self, model: Model, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self._settings.fully_shard:
            return tree
        from plait.cluster.fully_shard import own_tree  # noqa: PLC0415 - heavy

        return own_tree(model.variables(), tree)

    def durable(self, state: Mapping[str, Any], directory: str | None) -> bool:
        del state, directory
        return True

    def restore(self, model: Model, state: Mapping[str, Any], directory: str | None) -> None:
        del model, directory
        self.load_state_dict(state)

    # ---- means

    def _agree(self, parameters: Sequence[Tensor]) -> _Agreed:
        """The first time that these parameters' gradients are asked for."""
        key = tuple(id(one) if one.requires_grad else _form(one) for one in parameters)
        agreed = self._plan(key, parameters, [parameter.grad for parameter in parameters])
        self._by_id[tuple(map(id, parameters))] = agreed._replace(tensors=list(parameters))
        if isinstance(agreed.mean, Plan):
            self._buckets.watch(agreed.mean, [parameters[place] for place in agreed.dense])
        return agreed

    def _plan(self, key: tuple[Any, ...], likes: Sequence[Tensor], values: Sequence[Tensor | None] = ()) -> _Agreed:
        """How these are averaged; what is asked for first is compared with what the others ask for."""
        if key in self._by_form:
            return self._by_form[key]
        rows = [place for place, value in enumerate(values) if value is not None and value.is_sparse]
        own = {"forms": [[str(part) for part in _form(like)] for like in likes], "rows": rows}
        told = self._mesh.gather("list of tensors", own)
        _check_forms([one["forms"] for one in told])
        sparse = sorted({place for one in told for place in one["rows"]})
        whole = [place for place, like in enumerate(likes) if not _is_sharded(like)]  # sharded ones are reduced already
        dense = [place for place in whole if place not in sparse]
        kept = [likes[place].detach() for place in dense]
        shared = self._shared if all(like.device.type == "cpu" for like in kept) else None
        agreed = _Agreed((shared or self._buckets).plan(kept), dense, sparse, list(likes))
        self._by_form[key] = agreed
        return agreed

    def _reduce_sparse(self, agreed: _Agreed, parameters: Sequence[Tensor]) -> None:
        """Rows are sent to everybody, and added up in the order of workers."""
        own = {str(place): _rows(parameters[place]) for place in agreed.sparse}
        told = self._mesh.gather("rows of gradients", own)
        for place in agreed.sparse:
            like = parameters[place]
            found = [one[str(place)] for one in told if one[str(place)] is not None]
            if found:
                indices = torch.cat([one["indices"].to(like.device) for one in found], dim=1)
                values = torch.cat([one["values"].to(like.device) for one in found])
                total = torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=True)
                like.grad = total.coalesce() / self.worker_num


class _Pace:
    """When workers that move their own variables next take the mean."""

    def __init__(self, first: int, adaptive: bool) -> None:
        self.first = first
        self.adaptive = adaptive
        self.every = first
        self.steps = 0
        """Made since the last mean."""
        self._start: tuple[float, float] | None = None
        """The loss and the learning rate that later ones are measured by."""

    def due(self) -> bool:
        if not self.first:
            return False
        self.steps += 1
        return self.steps >= self.every

    def restart(self, loss: float | None, rate: float | None) -> None:
        """The mean was taken; with the loss falling, it is taken more often."""
        self.steps = 0
        if not self.adaptive or loss is None or not rate or not math.isfinite(loss):
            return
        if self._start is None:
            self._start = (loss, rate)
            return
        first_loss, first_rate = self._start
        share = first_rate * loss / (rate * first_loss) if first_loss else 0.0
        if share > 0 and math.isfinite(share):
            self.every = min(max(math.ceil(math.sqrt(share * self.first)), 1), MOST_LOCAL_STEPS)

    def state_dict(self) -> dict[str, Any]:
        if not self.first:
            return {}
        return {"every": self.every, "steps": self.steps, "start": None if self._start is None else list(self._start)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self.first or not state:
            return
        self.every, self.steps = int(state["every"]), int(state["steps"])
        self._start = None if state["start"] is None else (float(state["start"][0]), float(state["start"][1]))


def _loss_and_rate(model: Model) -> tuple[float | None, float | None]:
    losses = [float(shown.value.detach()) for shown in model.loss_metrics.values() if shown.value is not None]
    groups = [group for optimizer in _optimizers(model) for group in optimizer.param_groups]
    return statistics.fmean(losses) if losses else None, float(groups[0]["lr"]) if groups else None


def _optimizers(model: Model) -> list[torch.optim.Optimizer]:
    return list(dict.fromkeys(optimizer for assignment in model.assignments.values() for optimizer in assignment))


def _moving(model: Model) -> list[Tensor]:
    """What workers move by themselves: trained variables, and what is no parameter, such as running means."""
    found = model.variables().values()
    return [v for v in found if v.is_floating_point() and (v.requires_grad or not isinstance(v, nn.Parameter))]


def _optimizers_state(model: Model) -> dict[str, Tensor]:
    """Momenta and their like, by names that mean the same on every worker."""
    found: dict[str, Tensor] = {}
    for number, optimizer in enumerate(_optimizers(model)):
        moved = [variable for group in optimizer.param_groups for variable in group["params"]]
        for place, variable in enumerate(moved):
            for name, value in optimizer.state.get(variable, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    found[f"{number}/{place}/{name}"] = value
    return found


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh")


def _check_forms(told: Sequence[Sequence[Sequence[str]]]) -> None:
    for rank, form in enumerate(told):
        if len(form) != len(told[0]):
            raise ClusterError(
                f"worker {rank} has {len(form)} variables to move, worker 0 {len(told[0])}: every worker has to build"
                " the same model"
            )
        for place, (one, other) in enumerate(zip(form, told[0], strict=True)):
            if one != other:
                raise ClusterError(
                    f"variable number {place} is {' '.join(one[:2])} on worker {rank} and {' '.join(other[:2])} on"
                    " worker 0: every worker has to build the same model"
                )


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device.type


def _dense_gradient(parameter: Tensor) -> Tensor | None:
    """Rows that nobody had at first are filled up: the others count on the whole."""
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad


def _rows(parameter: Tensor) -> dict[str, Tensor] | None:
    """A gradient as rows, also where this worker has it whole."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if not gradient.is_sparse:
        gradient = gradient.to_sparse(1)
    return {"indices": gradient._indices(), "values": gradient._values()}  # noqa: SLF001 - uncoalesced will do


def _device(tree: Any) -> torch.device | None:
    """Where the first tensor of a tree is."""
    if isinstance(tree, Tensor):
        return tree.device
    inner = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ()
    return next((found for one in inner if (found := _device(one)) is not None), None)


def _moved(tree: Any, device: torch.device | None) -> Any:
    if device is None or device.type == "cpu":
        return tree
    if isinstance(tree, Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return {key: _moved(value, device) for key, value in tree.items()}
    return [_moved(item, device) for item in tree] if isinstance(tree, list) else tree


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _batches(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those of a device together, up to some size: a call for each would cost a millisecond each."""
    made: dict[torch.device, list[list[Tensor]]] = {}
    sizes: dict[torch.device, int] = {}
    for tensor in tensors:
        groups = made.setdefault(tensor.device, [])
        if not groups or sizes[tensor.device] > _TOGETHER_BYTES:
            groups.append([])
            sizes[tensor.device] = 0
        groups[-1].append(tensor)
        sizes[tensor.device] += tensor.numel() * tensor.element_size()
    return [group for groups in made.values() for group in groups]


# ---- scheduling


def _choose_scheduling(mesh: Mesh, once: Callable[[], object], stack: contextlib.ExitStack) -> None:
    """Batch scheduling, if it makes small messages quicker here.

    Some kernels let a process that was woken by a message wait for a tick of some milliseconds before it runs. Under
    SCHED_BATCH, which anybody may ask for, they do not. Other kernels are better without, so it is tried.
    """
    able = hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER
    if not all(mesh.gather("scheduling", able)):
        return
    times: dict[int, list[float]] = {os.SCHED_OTHER: [], os.SCHED_BATCH: []}
    for _ in range(2):
        for policy, taken in times.items():
            _schedule(policy)
            taken.extend(_seconds(once) for _ in range(8))
    told = mesh.gather("scheduling", [statistics.fmean(taken) for taken in times.values()])
    other, batch = (sum(column) for column in zip(*told, strict=True))
    if batch < 0.8 * other:
        stack.callback(_schedule, os.SCHED_OTHER)
    else:
        _schedule(os.SCHED_OTHER)


def _seconds(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def _schedule(policy: int) -> None:
    """For every thread of this process: gloo has some of its own."""
    for name in os.listdir("/proc/self/task"):  # noqa: PTH208 - names are all that is needed
        with contextlib.suppress(OSError):  # it has ended, or may not
            os.sched_setscheduler(int(name), policy, os.sched_param(0))
