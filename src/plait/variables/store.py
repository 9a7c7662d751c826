"""The variables of one model, made and found by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from plait.errors import VariableError
from plait.rng import LOCK, derive_seed, isolated_rng

__all__ = ["AUTO_REUSE", "Reuse", "VariableFrame", "VariableStore", "current", "variable_name"]

AUTO_REUSE: Literal["auto"] = "auto"
"""Get the variable if it exists, create it if it does not."""

Reuse = bool | Literal["auto"] | None

ROOT = "_scoped"
"""The attribute of a Model below which scoped variables live, so that a scope may be called `train` or `type`."""


class VariableFrame:
    """Where a variable's name is looked up: in which store, below which scope, under which rule of reuse."""

    __slots__ = ("force_dtype", "prefix", "reuse", "store")

    def __init__(
        self,
        store: VariableStore | None = None,
        prefix: str = "",
        reuse: Reuse = None,
        force_dtype: torch.dtype | None = None,
    ) -> None:
        self.store = store
        self.prefix = prefix
        self.reuse = reuse
        self.force_dtype = force_dtype
        """The type in which variables are kept, whatever type they are asked for in."""


class _Current(threading.local):
    frame = VariableFrame()


current = _Current()


class _Scope(nn.Module):
    """A scope: holds what is made in it, under any name."""

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # nn.Module's would refuse `training = False` where a child is called so


def may_look_at(tensor: torch.Tensor) -> bool:
    """Whether to check its values: on a GPU that waits for it, which only the first call of a model's function may."""
    store = current.frame.store
    return tensor.device.type == "cpu" or (store is not None and store._building)  # noqa: SLF001 - its own module


def variable_name(path: str) -> str:
    """The name of a variable from its path in the module: `_scoped.tower.fc1.weight` is `tower/fc1/weight`."""
    return path.removeprefix(ROOT + ".").replace(".", "/")


class VariableStore:
    """Makes variables on first use, hands them out later, and knows who made which.

    Each is initialised from (seed, name): neither the build nor the order of creation changes a value.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.root = _Scope()
        self.module: nn.Module = self.root
        """The module whose variables these are among: the Model."""
        self.device = torch.device("cpu")
        self.collections: dict[str, list[Any]] = {}
        self.step_collections: dict[str, list[Any]] = {}
        """What functions collect anew in each call, such as regularisation losses."""
        self.fresh_buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Buffers made during the build, with their first values."""
        self._owners: dict[str, str | None] = {}
        self._made: dict[str, nn.Module | torch.Tensor] = {}
        self._called: set[str] = set()
        self._task: str | None = None
        self._building = False

    @contextmanager
    def building(self, task: str | None) -> Iterator[None]:
        """Inside, new variables may be made, and belong to `task`."""
        self._task, self._called, self._building = task, set(), True
        try:
            yield
        finally:
            self._building = False

    def move(self, device: torch.device) -> None:
        """Bring the module to a device. Torch replaces variables of whole numbers: the new ones are handed out then."""
        tables = [table for module in self.root.modules() for table in (module._parameters, module._buffers)]  # noqa: SLF001
        places = {id(value): (table, key) for table in tables for key, value in table.items()}
        self.module.to(device)
        self.device = device
        for name, made in self._made.items():
            if id(made) in places:
                table, key = places[id(made)]
                self._made[name] = table[key]  # type: ignore[assignment] # mypy joins both kinds of tables

    @contextmanager
    def replaced(self, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Inside, `get_variable` hands out these tensors, by name; layers are not looked at."""
        own = {name: self._made[name] for name in values if isinstance(self._made.get(name), torch.Tensor)}
        self._made.update({name: values[name] for name in own})
        try:
            yield
        finally:
            self._made.update(own)

    def call_again(self) -> None:
        """A function is called again in the same call, for another replica: it may make its names again."""
        self._called = set()

    def made_earlier(self, name: str) -> Any:
        """What `name` was made into, in a step; None if it is new, or may be made twice, as during the build."""
        return None if self._building else self._made.get(name)

    def get(self, name: str, kind: str, create: Callable[[], nn.Module | torch.Tensor], reuse: Reuse) -> Any:
        """The thing called `name`, made with `create` where the rules of reuse allow it."""
        found = self._made.get(name)
        if found is None:
            return self._make(name, kind, create, reuse)
        if self._building:
            if not reuse:
                self._check_not_twice(name)
            self._called.add(name)
        return found

    def _check_not_twice(self, name: str) -> None:
        hint = f"write `with plait.variable_scope({name.rpartition('/')[0]!r}, reuse=plait.AUTO_REUSE):` to share it"
        if name in self._called:
            raise VariableError(f"variable {name!r} is made twice in one call: {hint}")
        if self._owners[name] != self._task:
            raise VariableError(f"variable {name!r} of task {self._owners[name]!r} is made by {self._task!r}: {hint}")

    def _make(self, name: str, kind: str, create: Callable[[], nn.Module | torch.Tensor], reuse: Reuse) -> Any:
        if reuse is True:
            raise VariableError(
                f"the scope says reuse=True, but there is no {kind} {name!r}: it has {self._near(name)}"
            )
        if not self._building:
            raise VariableError(
                f"{kind} {name!r} is new after compile(): what a function makes, it makes in its first call. "
                f"The model has {self._near(name)}"
            )
        with LOCK, isolated_rng(derive_seed(self.seed, name)):
            made = create()
        made = made.to(self.device) if isinstance(made, nn.Module) else made
        self._insert(name, made)
        self._made[name] = made
        self._owners[name] = self._task
        self._called.add(name)
        fresh = made.buffers() if isinstance(made, nn.Module) else [made]
        self.fresh_buffers += [(buffer, buffer.detach().clone()) for buffer in fresh]
        return made

    def _insert(self, name: str, made: nn.Module | torch.Tensor) -> None:
        if not name or "." in name or not all(name.split("/")):
            raise VariableError(f"{name!r} is no name for a variable: use words joined by '/', without dots")
        *scopes, last = name.split("/")
        node: nn.Module = self.root
        for scope in scopes:
            # not add_module(): it refuses names that nn.Module uses, such as `train`
            node = node._modules.setdefault(scope, _Scope()) or node  # noqa: SLF001
        if last in node._modules or last in node._parameters or last in node._buffers:  # noqa: SLF001
            raise VariableError(f"{name!r} is already the name of something else: choose another")
        if isinstance(made, nn.Module):
            node._modules[last] = made  # noqa: SLF001
        elif isinstance(made, nn.Parameter):
            node._parameters[last] = made  # noqa: SLF001
        else:
            node._buffers[last] = made  # noqa: SLF001

    def _near(self, name: str) -> str:
        import difflib  # noqa: PLC0415 - for an error only

        near = difflib.get_close_matches(name, self._made, n=3, cutoff=0.3)
        return f"{', '.join(near)} and {len(self._made) - len(near)} more" if near else f"{len(self._made)} others"
