"""Columns: each stands for one field of every sample of a data set; what is done to it is done to each sample.

A column remembers functions and does not look into them. They run later, in the readers, once for each sample; what
they draw at random comes from the data set's seed, the pass and the sample's number, so it is the same in any order.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from plait.data.sources import as_tensor
from plait.data.undecoded import whole
from plait.errors import DataError, FunctionError, PlaitError
from plait.rng import derive_seed

__all__ = [
    "Column",
    "ColumnFunction",
    "Evaluation",
    "Origin",
    "SkippedSample",
    "applied",
    "derive",
    "described",
    "root",
    "this_pass",
]

_HINT = "write column.map(function) to work on each sample's value"

_FACTS = {"item", "size", "tolist", "numpy", "dim", "numel", "stride", "data_ptr", "element_size", "is_contiguous"}
"""Methods of tensors that give no tensor: of a column, they would give another column."""
_LIKE = {
    torch.rand_like: torch.rand,
    torch.randn_like: torch.randn,
}
_DRAWS = {
    "dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d",
    "native_dropout", "rrelu", "gumbel_softmax", "randint_like", "fractional_max_pool2d", "fractional_max_pool3d",
    "fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices", "svd_lowrank", "pca_lowrank", "lobpcg",
    "gru", "lstm", "rnn_relu", "rnn_tanh", "scaled_dot_product_attention", "multi_head_attention_forward",
}  # fmt: skip
"""Functions that draw, or may draw, from torch's global generator and cannot be given another."""
_SEEDED = {"bernoulli", "binomial", "multinomial", "normal", "poisson"}
"""Functions that draw from a generator that they are given."""


class SkippedSample(Exception):  # noqa: N818 - not an error: it says that a sample is left out
    """Raised in a reader to leave a sample out."""


class Origin:
    """The data set that columns belong to, and their count, which tells the draws of one from those of another."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.columns = itertools.count()
        self.owner: Any = None
        """What can be read from: the data set."""


class Column:
    """A field of every sample, or what a function makes of such fields."""

    __slots__ = ("arguments", "arrays", "draws", "function", "keywords", "name", "number", "origin")
    __array_ufunc__ = None  # or an array would take a column for one of its elements

    def __init__(
        self,
        origin: Origin,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[Any] | None,
        keywords: Mapping[str, Any] | None = None,
        draws: str | None = None,
        arrays: bool = False,
    ) -> None:
        self.origin = origin
        self.name = name
        self.function = function
        self.arguments = arguments
        """None: a root, whose function is given the row's source."""
        self.keywords = dict(keywords or {})
        self.draws = draws
        """The keyword by which the function takes a generator; "": its last argument; None: it draws nothing."""
        self.arrays = arrays
        """The function may give NumPy's arrays and numbers, and take them; others are given tensors instead.

        Of pictures, it takes those that are not decoded yet."""
        self.number = next(origin.columns)

    def map(self, function: Callable[..., Any]) -> Column:
        """A column of what `function(value)` gives for each sample; `function(value, rng)` gets a NumPy generator."""
        return derive(function, [self], draws="" if _takes_two(function) else None)

    def set_shape(self, shape: Any) -> None:
        """Nothing: a sample's shape is its own. TensorFlow's scripts call it."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Column:
        name = getattr(function, "__name__", "function")
        if name in _DRAWS:
            raise DataError(
                f"{name} of a column draws from torch's global generator, which readers must not share; write "
                "column.map(lambda value, rng: ...) and draw from rng"
            )
        if _writes(name, kwargs or {}):
            raise DataError(
                f"{name} writes into its argument, which other columns may need; write the form that gives a new value,"
                " as column = column.add(1)"
            )
        if "generator" in (kwargs or {}):
            raise DataError(f"{name} of a column gets a generator for each sample: leave generator= out")
        if function in _LIKE:
            return derive(_drawn_like(_LIKE[function]), args, kwargs, draws="generator", name=name)
        return derive(function, args, kwargs, draws="generator" if name in _SEEDED else None)

    def __getattr__(self, name: str) -> Callable[..., Column]:
        if name in Column.__slots__:  # while a copy is being made
            raise AttributeError(name)
        if name.startswith("__") or name in _FACTS or not callable(getattr(torch.Tensor, name, None)):
            self._refuse(f"has no {name!r}")

        def call(*args: Any, **kwargs: Any) -> Column:
            return Column.__torch_function__(getattr(torch.Tensor, name), (), (self, *args), kwargs)

        return call

    def __int__(self) -> int:
        self._refuse("is no number")

    __index__ = __float__ = __complex__ = __int__  # none of them returns

    def __array__(self, *args: Any, **kwargs: Any) -> NDArray[Any]:
        self._refuse("is no array")

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse("cannot be written into")

    def __iter__(self) -> Iterator[Any]:
        self._refuse("cannot be iterated over")

    def __bool__(self) -> bool:  # noqa: PLE0304 - it never returns
        self._refuse("is neither true nor false")

    def __len__(self) -> int:  # noqa: PLE0303 - same
        self._refuse("has no length")

    def __eq__(self, other: object) -> bool:
        """Columns are keys of dicts, so two of them are equal if they are one."""
        if isinstance(other, (int, float, complex, str, bytes, np.generic, np.ndarray)):
            raise DataError(f"column {self.name!r} == {other!r:.40}: write torch.eq(column, value), which is a column")
        return NotImplemented

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<Column {self.name!r} of {self.origin.name}>"

    def _refuse(self, what: str) -> NoReturn:
        error = AttributeError if what.startswith("has no '") else DataError
        raise error(f"column {self.name!r} {what}: it stands for a field of every sample; {_HINT}")


def _drawn_like(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def drawn(value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return make(value.shape, **{"dtype": value.dtype, **kwargs})

    return drawn


def _writes(name: str, keywords: Mapping[str, Any]) -> bool:
    """Whether torch's function of this name changes a tensor that it is given."""
    if name.endswith("__"):  # `tensor[0] = column`, `tensor |= column`
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_") or bool(keywords.get("inplace")) or keywords.get("out") is not None


def _operators() -> None:
    """Operators as methods."""
    both = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift lt le gt ge"
    for word in both.split():
        plain = getattr(operator, f"{word}_" if word in ("and", "or") else word)

        def forward(self: Column, other: Any, plain: Any = plain) -> Column:
            return derive(plain, [self, other])

        def backward(self: Column, other: Any, plain: Any = plain) -> Column:
            return derive(plain, [other, self])

        setattr(Column, f"__{word}__", forward)
        if word not in ("lt", "le", "gt", "ge"):
            setattr(Column, f"__r{word}__", backward)
    for word in ("neg", "pos", "abs", "invert"):
        plain = getattr(operator, word)
        setattr(Column, f"__{word}__", lambda self, plain=plain: derive(plain, [self]))
    setattr(Column, "__getitem__", lambda self, key: derive(operator.getitem, [self, key]))  # noqa: B010 - as above


_operators()


def root(origin: Origin, name: str, function: Callable[[Any], Any]) -> Column:
    """A column that is read: `function` gets the row's source."""
    return Column(origin, name, function, None, arrays=True)


def derive(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any] | None = None,
    *,
    draws: str | None = None,
    name: str | None = None,
    arrays: bool = False,
) -> Column:
    """A column of what `function` gives: columns among the arguments, in lists too, stand for their values."""
    found: list[Column] = []

    def noted(column: Column) -> Column:
        found.append(column)
        return column

    # Lists are copied on the way: they may be changed before the columns are read.
    kept: tuple[tuple[Any, ...], dict[str, Any]] = _mapped((tuple(arguments), dict(keywords or {})), noted)
    origins = {id(column.origin): column.origin for column in found}
    if len(origins) != 1:
        names = ", ".join(origin.name for origin in origins.values()) or "none"
        raise DataError(f"columns of different data sets ({names}) cannot be put together: their samples do not match")
    (origin,) = origins.values()
    label = name or str(getattr(function, "__name__", type(function).__name__))
    return Column(origin, label, function, *kept, draws, arrays)


class _Now(threading.local):
    """Which row this thread is working on."""

    key: tuple[int, ...] | None = None
    draws = 0

    def seed(self) -> int:
        """For a draw outside the columns' own: from the row, where there is one."""
        if self.key is None:
            return int(torch.randint(2**62, ()))
        self.draws += 1
        return derive_seed(*self.key, "inside", self.draws)


_now = _Now()


def this_pass() -> int:
    """The pass that this thread is working on a row of; outside of one, the first."""
    return 0 if _now.key is None else _now.key[1]


@contextlib.contextmanager
def row_of(key: tuple[int, ...]) -> Iterator[None]:
    """Inside, this thread works on the row of `key`."""
    outer = _now.key, _now.draws
    _now.key, _now.draws = key, 0
    try:
        yield
    finally:
        _now.key, _now.draws = outer


class ColumnFunction:
    """A function of (value, NumPy generator), to be called with a column, or with a value.

    For a column the generator is each sample's own; for a value it is seeded from torch's global one, or, inside a
    function that readers run, from the sample. It takes arrays and tensors alike, and pictures that are `Undecoded`.
    """

    def __init__(self, function: Callable[[Any, np.random.Generator], Any], name: str) -> None:
        self.function = function
        self.__name__ = name

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Column):
            return derive(self.function, [value], draws="", name=self.__name__, arrays=True)
        return self.function(value, np.random.Generator(np.random.PCG64(_now.seed())))


def applied(function: Callable[..., Any], column: Column) -> Column:
    """The column of what `function(value)`, or `function(value, rng)`, gives."""
    made: Column = function(column) if isinstance(function, ColumnFunction) else column.map(function)
    return made


def _mapped(node: Any, change: Callable[[Column], Any]) -> Any:
    """The same nesting of lists, tuples, dicts and slices, with `change(column)` in the place of each column."""
    if isinstance(node, Column):
        return change(node)
    kind = type(node)
    if kind is list or kind is tuple:
        return kind([_mapped(child, change) for child in node])
    if kind is dict:
        return {key: _mapped(child, change) for key, child in node.items()}
    if kind is slice:
        return slice(*(_mapped(part, change) for part in (node.start, node.stop, node.step)))
    return node


class Evaluation:
    """How the values of columns are worked out for one row: every column that they need, once, in order.

    Values stand in a list, by place; what does not change from row to row stands in it from the start. Pictures push
    everything else out of the processor's caches, so that each look-up saved here is worth many times its usual price.
    """

    def __init__(self, wanted: Sequence[Column]) -> None:
        self._values: list[Any] = [None]  # the first is the row's source
        self._places: dict[Column, int] = {}
        self._tensors: dict[Column, int] = {}
        self._steps: list[tuple[int, Callable[..., Any], tuple[int, ...], Column]] = []
        for column in _in_order(wanted):
            self._add(column)
        self.wanted = [self._places[column] for column in wanted]

    def __call__(self, source: Any, key: tuple[int, ...]) -> list[Any]:
        """The wanted values for the row of `source`; `key` is what randomness comes from."""
        values = self._values.copy()
        values[0] = source
        _now.key, _now.draws = key, 0
        try:
            self._run(values, key)
        finally:
            _now.key = None
        return [whole(values[place]) for place in self.wanted]

    def _run(self, values: list[Any], key: tuple[int, ...]) -> None:
        for place, function, arguments, column in self._steps:
            try:
                if column.draws is not None:
                    values[place] = function(key, *[values[i] for i in arguments])
                elif len(arguments) == 1:
                    values[place] = function(values[arguments[0]])
                else:
                    values[place] = function(*[values[i] for i in arguments])
            except (PlaitError, SkippedSample):
                raise
            except Exception as error:
                raise _failed(column, key, error) from error

    def _add(self, column: Column) -> None:
        arguments: Sequence[Any] = [] if column.arguments is None else column.arguments
        plain = not column.keywords and not any(_nested(argument) for argument in arguments)
        if column.arguments is None:
            function, places = column.function, [0]
        elif plain:
            function, places = column.function, [self._place(argument, column) for argument in arguments]
        else:
            inputs = list(_columns_in((arguments, column.keywords)))
            function, places = _rebuilt(column, inputs), [self._place(inner, column) for inner in inputs]
        if column.draws is not None:
            function = _drawing(function, column.draws, column.number)
        self._values.append(None)
        self._places[column] = place = len(self._values) - 1
        self._steps.append((place, function, tuple(places), column))

    def _place(self, argument: Any, column: Column) -> int:
        """Where an argument of `column` stands; what may be an array stands there as a tensor, too, if it has to."""
        if not isinstance(argument, Column):
            self._values.append(argument if column.arrays else as_tensor(argument))
            return len(self._values) - 1
        if column.arrays or not argument.arrays:
            return self._places[argument]
        if argument not in self._tensors:
            self._values.append(None)
            self._tensors[argument] = place = len(self._values) - 1
            converted = Column(Origin(column.origin.name), argument.name, _whole_tensor, (argument,))
            self._steps.append((place, _whole_tensor, (self._places[argument],), converted))
        return self._tensors[argument]


def _whole_tensor(value: Any) -> Any:
    return as_tensor(whole(value))


def _in_order(wanted: Sequence[Column]) -> list[Column]:
    """All columns that are needed, each after those that it is made of."""
    order: dict[Column, None] = {}
    waiting = [(column, False) for column in reversed(wanted)]
    while waiting:
        column, ready = waiting.pop()
        if ready:
            order[column] = None
        elif column not in order:
            waiting.append((column, True))
            waiting += [(inner, False) for inner in _columns_in((column.arguments, column.keywords))]
    return list(order)


def _nested(argument: Any) -> bool:
    return type(argument) in (list, tuple, dict, slice)


def _columns_in(node: Any) -> list[Column]:
    found: dict[Column, None] = {}
    _mapped(node, found.setdefault)
    return list(found)


def _rebuilt(column: Column, inputs: Sequence[Column]) -> Callable[..., Any]:
    """The column's function, of the values of `inputs`: its arguments are put together again around them."""

    def function(*values: Any, **generator: Any) -> Any:
        given = dict(zip(inputs, values, strict=False))
        more = values[len(inputs) :]  # the generator of a function that takes it last
        arguments, keywords = _mapped((column.arguments, column.keywords), given.__getitem__)
        return column.function(*arguments, *more, **keywords, **generator)

    return function


class _Generators(threading.local):
    """A NumPy generator for each thread, whose state is set anew for each draw: making one takes ten times as long."""

    def __init__(self) -> None:
        self.bits = np.random.PCG64(0)
        self.generator = np.random.Generator(self.bits)
        self.state: Any = self.bits.state

    def seeded(self, key: tuple[int, ...], number: int) -> np.random.Generator:
        digest = hashlib.blake2b(repr((key, number)).encode(), digest_size=16).digest()
        self.state["state"]["state"] = int.from_bytes(digest, "big")
        self.bits.state = self.state
        return self.generator


_generators = _Generators()


def _drawing(function: Callable[..., Any], draws: str, number: int) -> Callable[..., Any]:
    """`function` with a generator of its own for the row of a key."""
    if draws:
        return lambda key, *arguments: function(
            *arguments, **{draws: torch.Generator().manual_seed(derive_seed(*key, number))}
        )
    return lambda key, *arguments: function(*arguments, _generators.seeded(key, number))


def _failed(column: Column, key: tuple[int, ...], error: Exception) -> FunctionError:
    applied_to = "a field" if column.arguments is None else "applied to a column"
    return FunctionError(
        f"{column.name!r}, {applied_to} of {column.origin.name}, failed for {described(key)}: "
        f"{type(error).__name__}: {error}"
    )


def described(key: tuple[int, ...]) -> str:
    """For errors: which row it is."""
    return f"{'sample' if len(key) == 3 else 'the batch that begins with sample'} {key[-1]}"


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [p for p in inspect.signature(function).parameters.values() if p.kind in kinds]
    return len(places) == 2 and places[1].default is inspect.Parameter.empty
