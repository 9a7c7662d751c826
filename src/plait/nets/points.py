"""End points that cost nothing unless they are looked at.

In evaluation a map that nobody keeps is freed, and its memory, still in the cache, serves the next one; keeping all of
them makes a forward pass a tenth slower. So a network keeps those that were looked at before. One that was not is
had by running the network again, once; from then on it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping

from torch import Tensor

__all__ = ["EndPoints", "Kept"]


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
        wanted: to which a name is added when it is looked at.
        again: gives all of them; None: `found` is all.

    """

    def __init__(
        self,
        found: dict[str, Tensor],
        wanted: set[str] | None = None,
        again: Callable[[], dict[str, Tensor]] | None = None,
    ) -> None:
        self._found = dict(found)
        self._wanted = set() if wanted is None else wanted
        self._again = again

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._found:
            self._all()
        value = self._found[name]
        self._wanted.add(name)
        return value

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._found[name] = value

    def __delitem__(self, name: str) -> None:
        self._all()
        del self._found[name]

    def __iter__(self) -> Iterator[str]:
        self._all()
        return iter(self._found)

    def __len__(self) -> int:
        self._all()
        return len(self._found)

    def __repr__(self) -> str:
        return f"EndPoints({', '.join(self)})"

    def map(self, function: Callable[[Tensor], Tensor]) -> EndPoints:
        """The same with `function` applied to each, now or when it is looked at."""
        again = self._again

        def all_of_them() -> dict[str, Tensor]:
            return {name: function(value) for name, value in again().items()} if again is not None else {}

        found = {name: function(value) for name, value in self._found.items()}
        return EndPoints(found, self._wanted, None if again is None else all_of_them)

    def _all(self) -> None:
        if self._again is not None:
            self._found = {**self._again(), **self._found}
            self._again = None
