"""Ops: the coarse, named pieces of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from plait.data import Sample, Stream
from plait.engine.calls import Now, current_call
from plait.engine.task import TaskScope
from plait.errors import FetchError

__all__ = ["GlobalStep", "Op", "Placeholder", "as_op", "default_global_step", "op", "placeholder"]


class Op:
    """A piece of a step: a function of other Ops' values. Made with `plait.op`, run by a Session."""

    __slots__ = ("captured", "first", "fn", "inputs", "name", "now", "scope", "stream", "trains")

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: Sequence[Op] = (),
        *,
        first: Sequence[Op] = (),
        name: str = "op",
        now: Now | None = None,
        scope: TaskScope | None = None,
        stream: Stream | None = None,
        trains: bool = False,
    ) -> None:
        self.fn = fn
        self.inputs = tuple(inputs)
        self.first = tuple(first)
        """Ops that run before this one and its inputs; their values go nowhere."""
        self.name = name
        self.now = now
        """Whose mode is set before a run with this Op: a Model's."""
        self.scope = scope
        self.stream = stream
        """Where this Op's value is read from; the batch counts as consumed when the run has ended well."""
        self.trains = trains
        """Gradients are wanted of what it depends on, and `training_flag` is True in that run."""
        self.captured: Callable[[Any], Any] | None = None
        """Does what `first`, the only input and this Op do, given what that input is computed from."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


class Placeholder(Op):
    """A value that every run must be fed."""

    __slots__ = ("dtype", "shape")

    def __init__(self, dtype: torch.dtype, shape: Sequence[int | None] | None, name: str) -> None:
        super().__init__(self._unfed, name=name)
        self.dtype = dtype
        self.shape = None if shape is None else tuple(shape)

    def _unfed(self) -> Any:
        raise FetchError(
            f"placeholder {self.name!r} was not fed: pass feed_dict={{placeholder: value}} to run(), or return it "
            "from a hook's before_run in SessionRunArgs(feed_dict=...)"
        )

    def convert(self, value: Any) -> torch.Tensor:
        try:
            tensor = torch.as_tensor(value, dtype=self.dtype)
        except (TypeError, ValueError, RuntimeError) as error:
            raise FetchError(
                f"placeholder {self.name!r} takes {self.dtype}, but was fed a {type(value).__name__}: {error}"
            ) from error
        if self.shape is not None and not _fits(tensor.shape, self.shape):
            raise FetchError(
                f"placeholder {self.name!r} has shape {list(self.shape)}, but was fed {list(tensor.shape)}"
            )
        return tensor


def _fits(got: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(got) == len(wanted) and all(w is None or w == g for g, w in zip(got, wanted, strict=True))


class GlobalStep(Op):
    """The count of training steps: an int wherever one is wanted, and an Op that can be fetched."""

    __slots__ = ("value",)

    def __init__(self, value: int = 0) -> None:
        super().__init__(lambda: self.value, name="global_step")
        self.value = value

    def increment(self) -> None:
        self.value += 1

    def __int__(self) -> int:
        return self.value

    __index__ = __int__

    def __repr__(self) -> str:
        return f"<GlobalStep {self.value}>"


_default_step: list[GlobalStep] = []


def default_global_step() -> GlobalStep:
    """The step counter of sessions without a Model; made when first asked for."""
    if not _default_step:
        _default_step.append(GlobalStep())
    return _default_step[0]


def as_op(thing: Any) -> Op:
    """The Op that `thing` stands for: itself, a Sample's input, or a callable made into one."""
    if isinstance(thing, Op):
        return thing
    if isinstance(thing, Sample) and thing.op is not None:
        return thing.op  # type: ignore[no-any-return] # the data room does not know Ops
    if callable(thing) and not isinstance(thing, torch.Tensor):
        return Op(thing, name=getattr(thing, "__name__", type(thing).__name__))
    raise FetchError(
        f"an Op was expected, got {type(thing).__name__}. A tensor of one step has no value in the next: give an Op, "
        "such as model.loss(), model.train_op(), model.metrics()['name'] or plait.op(fn, *inputs)"
    )


def op(fn: Callable[..., Any], *inputs: Any, name: str | None = None) -> Op:
    """Make an Op that calls `fn` with the values of `inputs` (Ops, Samples or callables), at most once a run.

    >>> import plait
    >>> with plait.Session() as session:
    ...     session.run(plait.op(lambda: 3))
    3
    """
    return Op(fn, [as_op(i) for i in inputs], name=name or str(getattr(fn, "__name__", "op")))


def placeholder(
    dtype: torch.dtype = torch.float32, shape: Sequence[int | None] | None = None, name: str | None = None
) -> Any:
    """A value to be fed. Inside a loss_fn or model_fn it is a tensor: zeros at the build, what was fed in a step."""
    call = current_call()
    if call is not None:
        return call.placeholder(dtype, shape, name)
    return Placeholder(dtype, shape, name or "placeholder")
