"""End points that cost nothing unless they are looked at.

In evaluation a map that nobody keeps is freed, and its memory, still in the cache, serves the next one; keeping all of
them makes a forward pass a tenth slower. So a network keeps those that were looked at before. One that was not is
had by running the network again, once; from then on it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping

from torch import Tensor

__all__ = ["EndPoints", "Kept", "Memory"]


class Memory:
    """What a network knows of its end points."""

    def __init__(self) -> None:
        self.looked_at: set[str] = set()
        """Those that somebody has looked at, which are kept."""
        self.names: list[str] | None = None
        """All that there are; None: not known yet."""


class Kept(dict[str, Tensor]):
    """What a forward pass puts its end points into: keeps rows, which are small, and wanted maps; None: all."""

    def __init__(self, wanted: set[str] | None) -> None:
        super().__init__()
        self.wanted = wanted

    def __setitem__(self, name: str, value: Tensor) -> None:
        if value.ndim <= 2 or self.wants(name):
            super().__setitem__(name, value)

    def wants(self, name: str) -> bool:
        return self.wanted is None or name in self.wanted


class EndPoints(MutableMapping[str, Tensor]):
    """The end points of one call, by name.

    Args:
        found: those that were kept.
        memory: the network's, of what was looked at and what there is.
        again: gives all of them.

    """

    def __init__(self, found: dict[str, Tensor], memory: Memory, again: Callable[[], dict[str, Tensor]]) -> None:
        self._found = dict(found)
        self._memory = memory
        self._again: Callable[[], dict[str, Tensor]] | None = again
        self._removed: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._found:
            if name not in self._names():
                raise KeyError(name)
            self._all()
        self._memory.looked_at.add(name)
        return self._found[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._found[name] = value
        self._removed.discard(name)

    def __delitem__(self, name: str) -> None:
        if name not in self._names():
            raise KeyError(name)
        self._found.pop(name, None)
        self._removed.add(name)

    def __contains__(self, name: object) -> bool:
        return name in self._found or name in self._names()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __repr__(self) -> str:
        return f"EndPoints({', '.join(self)})"

    def map(self, function: Callable[[Tensor], Tensor]) -> EndPoints:
        """The same with `function` applied to each, now or when it is looked at."""

        def all_of_them() -> dict[str, Tensor]:
            self._all()
            return {name: function(value) for name, value in self._found.items()}

        found = {name: function(value) for name, value in self._found.items()}
        return EndPoints(found, self._memory, all_of_them)

    def _names(self) -> list[str]:
        if self._memory.names is None:
            self._all()
        known = self._memory.names or []
        return [name for name in dict.fromkeys([*known, *self._found]) if name not in self._removed]

    def _all(self) -> None:
        if self._again is None:
            return
        everything = self._again()
        self._memory.names = list(everything)
        self._found = {**everything, **self._found}
        self._again = None
