"""What the cluster sees of a training loop that is written by hand: variables, an optimizer, and steps."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plait.cluster.connect import strategy_of
from plait.cluster.roles import Role
from plait.cluster.settings import Distributed
from plait.engine.metrics import Latest
from plait.engine.model import Model
from plait.engine.settings import SessionConfig
from plait.engine.update import Flags, LeftError, moved_by
from plait.errors import ConfigError, VariableError
from plait.optim.assign import make_optimizer
from plait.variables.store import ROOT, variable_name

__all__ = ["Call", "Program"]

_HALF = {"bf16": torch.bfloat16}
_NEED_MODULE = ("recompute", "precision", "sync_batch_norm", "fully_shard")


class Call(NamedTuple):
    """What a module was last called with: tensors by their shapes and types alone."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Program(Model):
    """A module and its optimizer, as a strategy sees a model; the loop around them is the user's.

    Without a module, the optimizer's variables are called `variable_0`, `variable_1`, ...
    """

    def __init__(self, optimizer: Any, settings: Distributed, module: nn.Module | None = None) -> None:
        super().__init__()
        _check_module(optimizer, settings, module)
        self.settings = settings
        self.role = Role()
        self.has_module = module is not None
        self.refusal: str | None = (
            "this optimizer belongs to no algorithm: write algorithm.distributed_optimizer(optimizer)"
        )
        """Why no step can be taken now."""
        self.seen: Call | None = None
        # below this name, variables keep the module's own names
        self._modules[ROOT] = module if module is not None else _numbered(optimizer)
        self._given = optimizer
        self._moved: list[Tensor] = []
        self._mover: Callable[[], None] | None = None
        self._flags: Flags | None = None
        self._left = False
        self._handles: list[Any] = []
        device = next((value.device for value in self.parameters()), torch.device("cpu"))
        self.config = SessionConfig(device=str(device))
        self.loss_metrics[None] = Latest(device)
        self.loss_counts[None] = 1
        if isinstance(optimizer, torch.optim.Optimizer):
            self._assign(optimizer)

    @property
    def module(self) -> nn.Module | None:
        return self._modules[ROOT] if self.has_module else None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        found = self.optimizers()
        if not found:
            raise ConfigError("the optimizer is made by init_worker(), when the variables are known: call it before")
        return found[0]

    def _assign(self, optimizer: torch.optim.Optimizer) -> None:
        self._moved = moved_by([optimizer])
        names = {value: name for name, value in self.variables().items()}
        strange = [tuple(value.shape) for value in self._moved if value not in names]
        if strange:
            raise VariableError(
                f"the optimizer moves a variable of shape {strange[0]} that module= does not have: give the module"
                " whose parameters() the optimizer got"
            )
        self.assignments[None] = {optimizer: (self._moved, None)}

    # Life

    def connect(self, role: Role) -> None:
        """Join the cluster: everybody's variables become the first worker's, or the servers'."""
        self.role = role
        if self.settings.recompute:
            from plait.cluster.recompute import recompute  # noqa: PLC0415 - few need it

            recompute(self, self.settings.recompute)
        strategy = self.strategy = strategy_of(role, self.settings)
        strategy.begin(self)
        strategy.transform(self)
        if not self.assignments:
            self._assign(make_optimizer(self._given, list(self.trainable_variables().values())))
        strategy.prepare(self)
        self._mover = strategy.mover(self, None, self.optimizers())
        device = self.config.resolved_device()
        self._flags = Flags(device) if strategy.in_step and device.type == "cpu" else None
        self._watch()
        self.refusal = None

    def disconnect(self) -> None:
        """Leave the cluster; workers that still wait for this one in a step are told."""
        self.refusal = "stop_worker() was called: there are no steps, and nothing to save, after it"
        self._unwatch()
        try:
            if self.strategy.in_step and not self._left:
                with contextlib.suppress(LeftError):  # so has another
                    self.strategy.leave(self, None, stop=False)
        finally:
            self.strategy.close()

    def _watch(self) -> None:
        """Note what the module is called with, and let it compute in half precision if that was asked for."""
        module, half = self.module, _HALF.get(self.settings.precision or "")
        if module is None:
            return
        self._handles.append(module.register_forward_pre_hook(self._note, with_kwargs=True))
        if half is not None:
            entered: list[torch.autocast] = []
            device = self.config.resolved_device().type

            def enter(_module: nn.Module, _args: Any) -> None:
                entered.append(torch.autocast(device, dtype=half))
                entered[-1].__enter__()  # type: ignore[no-untyped-call] # torch leaves it unannotated

            def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
                entered.pop().__exit__(None, None, None)

            self._handles.append(module.register_forward_pre_hook(enter))
            self._handles.append(module.register_forward_hook(leave, always_call=True))

    def _unwatch(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Inside, the module is as its user made it."""
        watched = bool(self._handles)
        self._unwatch()
        try:
            yield
        finally:
            if watched:
                self._watch()

    def _note(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.seen = Call(_forms(args), _forms(kwargs))

    # A step

    def check_ready(self) -> None:
        if self.refusal is not None:
            raise ConfigError(self.refusal)

    def chosen(self, wanted: Iterable[Any] | None, left_out: Iterable[Any] | None) -> list[Tensor]:
        """Variables that are moved: those named, without those left out."""
        found = self._moved if wanted is None else self._resolved("parameter_list", wanted)
        without = set(self._resolved("no_grad_set", left_out or ()))
        return [value for value in found if value.requires_grad and value not in without]

    def _resolved(self, what: str, given: Iterable[Any]) -> list[Tensor]:
        if isinstance(given, (str, Tensor)):
            raise ConfigError(f"{what} is a {type(given).__name__}: write a list of variables, or of their names")
        named = self.variables()
        found = [_find(what, one, named) for one in given]
        moved = set(self._moved)
        for value in found:
            if value not in moved and value.requires_grad:
                raise VariableError(f"{what} has a variable of shape {tuple(value.shape)} that the optimizer lacks")
        return found

    def run_backward(self, loss: Tensor, variables: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The variables that the loss depends on, with their gradients; merged gradients add up."""
        if self.global_step.value % self.strategy.gradient_merge == 0:
            for value in self._moved:
                value.grad = None
            rows = getattr(self.strategy, "gradients", None)
            if rows is not None:
                rows.take(1.0)  # of a backward pass that nothing came of
        everything = len(variables) == sum(value.requires_grad for value in self._moved)
        loss.backward(inputs=None if everything else variables)  # type: ignore[no-untyped-call] # torch's
        self.loss_metrics[None].value = loss.detach()
        return [(value, value.grad) for value in variables if value.grad is not None]

    def move(self, gradients: Mapping[Tensor, Tensor]) -> list[Tensor]:
        """Move the variables by these gradients, if it is time; those that have moved, or might on servers."""
        known = set(self._moved)
        strange = [tuple(value.shape) for value in gradients if value not in known]
        if strange:
            raise VariableError(f"params_grads has a variable of shape {strange[0]} that the optimizer lacks")
        for value in self._moved:
            value.grad = gradients.get(value)
        merge = self.strategy.gradient_merge
        due = (self.global_step.value + 1) % merge == 0
        if due:
            self._finish(merge)
            self._move()
        self.global_step.value += 1
        return list(gradients) if due else []

    def _finish(self, merge: int) -> None:
        """What happens to gradients before the variables move."""
        if merge > 1:
            for value in self._moved:
                if value.grad is not None:
                    value.grad.div_(merge)
        if not self.strategy.in_step:
            return
        if self._flags is None:  # to look at them would mean to wait for the device at every step
            self.strategy.reduce_gradients(self._moved)
            return
        with self._noting_the_end():
            self.strategy.reduce_gradients([*self._moved, self._flags.sent(0.0, 0.0)])
            self._flags.check()

    def _move(self) -> None:
        if self._mover is None:
            self.optimizer.step()
            if self.strategy.worker_num > 1:
                with self._noting_the_end():
                    self.strategy.after_step(self)
            return
        self._check_rows()
        with self._noting_the_end():
            self._mover()
        self.optimizer._opt_called = True  # type: ignore[attr-defined] # noqa: SLF001 - or torch's schedulers complain

    @contextlib.contextmanager
    def _noting_the_end(self) -> Iterator[None]:
        try:
            yield
        except LeftError:
            self._left = True
            raise

    def _check_rows(self) -> None:
        """Servers take rows of embeddings that they know of, and whole gradients of the rest."""
        for value in self._moved if self.role.servers and self.settings.mode != "geo" else ():
            if value.grad is not None and value.grad.is_sparse:
                raise ConfigError(
                    f"the gradient of a variable of shape {tuple(value.shape)} is rows, and the servers do not know it"
                    " as an embedding: write distributed_optimizer(..., module=model), with its nn.Embedding in the"
                    " model, or sparse=False"
                )


def _check_module(optimizer: Any, settings: Distributed, module: nn.Module | None) -> None:
    is_one = isinstance(optimizer, torch.optim.Optimizer)
    if not is_one and (not callable(optimizer) or isinstance(optimizer, nn.Module)):
        raise ConfigError(
            f"the optimizer is a {type(optimizer).__name__}: write a torch.optim.Optimizer, such as"
            " torch.optim.SGD(model.parameters(), lr=0.1), or a function that makes one"
        )
    if module is not None and not isinstance(module, nn.Module):
        raise ConfigError(f"module is a {type(module).__name__}: write the nn.Module that is trained")
    if settings.precision == "fp16":
        raise ConfigError("precision='fp16' needs a scale of the loss that follows its overflows: write 'bf16'")
    if settings.fully_shard and is_one:
        raise ConfigError(
            "fully_shard makes new parameters, which this optimizer would not have: write a function that makes it,"
            " such as functools.partial(torch.optim.SGD, lr=0.1)"
        )
    if module is not None:
        return
    if not is_one:
        raise ConfigError("a function that makes an optimizer needs the variables: write module=model, too")
    asked = [name for name in _NEED_MODULE if getattr(settings, name)]
    if asked:
        raise ConfigError(f"{asked[0]} changes how a module computes: write distributed_optimizer(..., module=model)")


def _numbered(optimizer: torch.optim.Optimizer) -> nn.Module:
    root = nn.Module()
    for number, value in enumerate(moved_by([optimizer])):
        if not isinstance(value, nn.Parameter):
            raise ConfigError(
                f"the optimizer moves a plain tensor of shape {tuple(value.shape)}: make it an nn.Parameter"
            )
        root.register_parameter(f"variable_{number}", value)
    return root


def _find(what: str, one: Any, named: Mapping[str, Tensor]) -> Tensor:
    if isinstance(one, Tensor):
        return one
    if not isinstance(one, str):
        raise ConfigError(f"{what} has a {type(one).__name__}: write variables, or their names")
    name = variable_name(one)
    if name not in named:
        near = difflib.get_close_matches(name, named, n=3, cutoff=0.3) or list(named)[:3]
        raise VariableError(f"{what} has {one!r}, there is no such variable. Nearest: {', '.join(near)}")
    return named[name]


def _forms(value: Any) -> Any:
    """The same nesting, with tensors that have no values."""
    if isinstance(value, Tensor):
        return torch.empty_like(value, device="meta")
    if isinstance(value, dict):
        return {key: _forms(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_forms(item) for item in value)
    return value
