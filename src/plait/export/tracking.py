"""Which tensors were made of which: is an output made of anything that will not be there?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Tracking"]


class Tracking(TorchDispatchMode):
    """Inside, every operation's results are known to be made of what its arguments were made of.

    Tensors that share memory are one: who writes into a view changes what the others see.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch does not annotate it
        self._names: dict[int, frozenset[str]] = {}
        self._kept: dict[int, Tensor] = {}
        """So that no memory is used again, and taken for another."""

    def begin(self, tensor: Tensor, name: str) -> None:
        """From here on, what is made of `tensor` is made of `name`."""
        self._note(tensor, frozenset([name]))

    def made_of(self, tensor: Tensor) -> frozenset[str]:
        return self._names.get(_memory(tensor), frozenset())

    def _note(self, tensor: Tensor, names: frozenset[str]) -> None:
        self._kept[_memory(tensor)] = tensor
        self._names[_memory(tensor)] = self.made_of(tensor) | names

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        names: frozenset[str] = frozenset().union(*(self.made_of(one) for one in given))
        if names:
            for one in tree_leaves([results, _written(func, args, kwargs or {})]):
                if isinstance(one, Tensor):
                    self._note(one, names)
        return results


def _written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes into."""
    forms = operator._schema.arguments  # noqa: SLF001 - it has no other name
    given = {**dict(zip((one.name for one in forms), args, strict=False)), **kwargs}
    return [given.get(one.name) for one in forms if one.alias_info is not None and one.alias_info.is_write]


def _memory(tensor: Tensor) -> int:
    name: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - the one name that memory has
    return name
