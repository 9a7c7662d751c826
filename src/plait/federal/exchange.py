"""Tensors that travel inside a step, as parts of the autograd graph: one backward pass in each party.

What is received is a leaf: its gradient goes out as soon as the backward pass has it. What is sent hangs on the root of
the pass by a node that waits for its gradient. Nodes run the latest first, and whatever came of a tensor that was sent
came later, in both parties: so nobody waits for a gradient that waits for his own. Who waits for one has, for the same
reason, all the gradients of what came later; what has none by then, no loss depends on, and the other party is told.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from plait.engine.task import MODE, TaskScope
from plait.errors import FederalError, FunctionError
from plait.federal.channel import Channel
from plait.federal.contract import Contract, Item, dtype_of, key_of
from plait.federal.delay import keeping_variables
from plait.federal.precision import Feedback

__all__ = ["Exchange"]

Protect = Callable[[Tensor], Tensor]
"""What a user makes of a gradient before it goes back."""
Hide = Callable[[Tensor, int, int], Tensor]
"""What a task with private optimizers makes of it, given the number of rows and the number of the tensor."""


class _Once:
    """A function that is called once, and then forgotten: nobody sees cycles through what torch's nodes hold."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._function: Callable[..., Any] | None = functools.partial(function, *args)

    def __call__(self, *args: Any) -> Any:
        function, self._function = self._function, None
        if function is None:
            raise FederalError("a second backward pass through the same step: the other party makes one")
        return function(*args)


class _Awaited(torch.autograd.Function):
    """A zero that hangs on what was sent; going back, it waits for the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, wait: Callable[[], Tensor]) -> Tensor:
        ctx.wait = wait
        return tensor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.wait(), None


class _Root(torch.autograd.Function):
    """The loss as it is; going back begins with it, and with all that was sent."""

    @staticmethod
    def forward(ctx: Any, begin: Callable[[], None], loss: Tensor | None, *tokens: Tensor) -> Tensor:
        ctx.begin, ctx.has_loss, ctx.tokens = begin, loss is not None, len(tokens)
        return loss.detach().clone() if loss is not None else tokens[0].detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.begin()
        return None, gradient if ctx.has_loss else None, *[gradient.new_zeros(())] * ctx.tokens


class _Step:
    """What one call of a function has sent and received."""

    __slots__ = ("awaited", "key", "leaves", "protects", "rows", "scope", "sent", "travels", "turn")

    def __init__(self, scope: TaskScope, turn: int, rows: int) -> None:
        self.scope = scope
        self.key = key_of(scope)
        self.turn = turn
        self.rows = rows
        self.travels = False
        """Whether anything was sent or received."""
        self.sent: list[Tensor] = []
        self.awaited: list[Tensor] = []
        self.leaves: dict[str, Tensor] = {}
        """Received with a gradient to give back, by name, until it was given."""
        self.protects: dict[str, Protect] = {}


class Exchange:
    """The sends and receives of one model: announced at the build, done at steps."""

    def __init__(self, own: str, peer: str, precision: str | None, *, late: bool = False) -> None:
        self.own, self.peer = own, peer
        self.contract = Contract(own, peer)
        self.feedback = Feedback(precision)
        self.building = True
        self._saving: Callable[[], AbstractContextManager[Any]] = keeping_variables if late else nullcontext
        self.turn = 0
        """The number of the step, in both parties."""
        self.riding: Callable[[], Sequence[tuple[str, Any]]] = tuple
        """Gives the words that ride on the next gradient."""
        self.latest: dict[tuple[str, str, str], Tensor | None] = {}
        """What was received last, by scope, kind and name: "recv", or "grad" of what was sent."""
        self.lossless: set[str] = set()
        """Where this party has no loss of its own."""
        self.sends: set[str] = set()
        """Scopes in which this party sends tensors."""
        self.gives: dict[str, set[str]] = {}
        """By scope, the names of what gradients go back for."""
        self.hides: dict[str, Hide] = {}
        """By scope, where gradients that go back are noised."""
        self.watched: set[str] = set()
        """Scopes of which the next step is to be looked at, row by row."""
        self.views: dict[str, dict[str, Tensor]] = {}
        """Of watched scopes where gradients are noised: what was received last, before its gradient has gone."""
        self._precision = precision
        self._channel: Channel | None = None
        self._step: _Step | None = None
        self._leaves: dict[str, Tensor] = {}
        """Of the training step whose loss was computed last."""
        self._seen: dict[str, tuple[Tensor | None, list[Tensor], int]] = {}
        """Of watched scopes: the loss, what was sent with a gradient to come, and the number of rows."""

    @property
    def channel(self) -> Channel:
        if self._channel is None:
            raise FederalError("send and recv belong into loss_fn and eval_fn: there is no connection before compile()")
        return self._channel

    def use(self, channel: Channel) -> None:
        self._channel = channel

    def built(self) -> None:
        """The build is over in both parties; from now on tensors travel."""
        self.contract.finish(self.channel)
        self.channel.expect(self.contract.forms())
        self.building = False

    # ---- around the user's functions

    def around_loss(self, function: Callable[..., Any], current: Callable[[], TaskScope]) -> Callable[..., Any]:
        @functools.wraps(function)
        def loss_of(model: Any, sample: Any) -> Any:
            step = self._begin(current(), sample)
            try:
                with self._saving():
                    loss = function(model, sample)
            finally:
                self._step = None
            return self._root(step, loss)

        return loss_of

    def around_eval(self, function: Callable[..., Any], current: Callable[[], TaskScope]) -> Callable[..., Any]:
        @functools.wraps(function)
        def evaluated(model: Any, sample: Any) -> Any:
            self._begin(current(), sample)
            try:
                return function(model, sample)
            finally:
                self._step = None

        return evaluated

    def _begin(self, scope: TaskScope, sample: Any) -> _Step:
        step = self._step = _Step(scope, self.turn, sample.batch_size)
        if self.building:
            self.contract.begin(self.channel, step.key, sample.batch_size)
        return step

    def _current(self, what: str, mode: MODE | None, task: str | None) -> _Step:
        step = self._step
        if step is None:
            raise FunctionError(f"{what}() was called outside of loss_fn and eval_fn: call it where a step is computed")
        for name, given, real in (("mode", mode, step.scope.mode), ("task", task, step.scope.task)):
            if given is not None and given != real:
                raise FunctionError(
                    f"{what}({name}={given!s}) inside a function for {step.scope}: leave {name}= out there"
                )
        step.travels = True
        return step

    # ---- sending

    def send(self, name: str, tensor: Tensor, gradient: bool, mode: MODE | None, task: str | None) -> Tensor:
        step = self._current("send", mode, task)
        gradient = gradient and step.scope.mode is MODE.TRAIN
        if not isinstance(tensor, Tensor):
            raise FunctionError(f"send({name!r}) got a {type(tensor).__name__}: give a tensor")
        if gradient and not tensor.is_floating_point():
            raise FunctionError(f"send({name!r}, require_grad=True): {tensor.dtype} has no gradient; leave it out")
        if gradient and not tensor.requires_grad:
            raise FunctionError(
                f"send({name!r}, require_grad=True): the tensor depends on no trainable variable, so that a gradient "
                "would go nowhere; leave require_grad out"
            )
        if self.building:
            self.contract.add(self.channel, step.key, _item("send", name, tensor, gradient))
            self.sends.add(step.key)
        else:
            slot = self._slot(step, self.own, name)
            self.channel.send(slot, step.turn, _settled(tensor), precision=self._precision)
        if gradient:
            wait = _Once(self._gradient_of, step, name, tensor.shape, tensor.device, set(step.leaves))
            step.awaited.append(_Awaited.apply(tensor, wait))  # type: ignore[no-untyped-call] # torch leaves it so
            step.sent.append(tensor)
        return tensor

    def _gradient_of(self, step: _Step, name: str, shape: torch.Size, device: torch.device, before: set[str]) -> Tensor:
        """Wait for it. `before` was received before this was sent: of the others, all that come have come by now."""
        if step.leaves:
            self._backward_begins(step)
            for other in [other for other in step.leaves if other not in before]:
                self._give_nothing(step, other)
        what = f"the gradient of {name!r} in step {step.turn}"
        found = self.channel.receive(self._slot(step, self.own, name), step.turn, gradient=True, what=what)
        self.latest[step.key, "grad", name] = found
        if found is None:
            return torch.zeros(shape, device=device)
        if found.shape != shape:
            raise FederalError(
                f"{what} came with shape {list(found.shape)} from the {self.peer}; what was sent has {list(shape)}"
            )
        return found.to(device)

    # ---- receiving

    def recv(
        self,
        name: str,
        dtype: torch.dtype,
        gradient: bool,
        shape: Sequence[int | None] | None,
        mode: MODE | None,
        task: str | None,
        device: torch.device,
        protect: Protect | None = None,
    ) -> Tensor:
        step = self._current("recv", mode, task)
        if protect is not None and not gradient:
            raise FunctionError(f"recv({name!r}, protect=...) protects a gradient: write require_grad=True, too")
        gradient = gradient and step.scope.mode is MODE.TRAIN
        found = self._built_form(step, name, dtype, gradient, shape) if self.building else self._received(step, name)
        if found.device != device:
            found = found.to(device)
        self.latest[step.key, "recv", name] = found.detach()  # without the hook below, which holds this
        if gradient:
            if not found.is_floating_point():
                raise FunctionError(f"recv({name!r}, require_grad=True): {found.dtype} has no gradient; leave it out")
            found.requires_grad_()
            step.leaves[name] = found
            if protect is not None:
                step.protects[name] = protect
            if self.building:
                self.gives.setdefault(step.key, set()).add(name)
            else:
                found.register_hook(_Once(self._give_back, step, name))  # type: ignore[no-untyped-call] # same
                if step.key in self.hides:
                    return self._noised_later(step, name, found)
        return found

    def _noised_later(self, step: _Step, name: str, found: Tensor) -> Tensor:
        """What the loss is computed from, where each row's gradient goes back with noise of its own."""
        if name in step.protects:
            raise FunctionError(
                f"recv({name!r}, protect=...), and optimizers are private with BACKEND_MODE='noise': protect makes a "
                "row's gradient of all rows, and noise for one row does not hide them; leave protect out, or write "
                "BACKEND_MODE='unnoise', which promises nothing against the other party"
            )
        if step.key not in self.watched:
            return found
        seen = self.views.setdefault(step.key, {})[name] = found.view_as(found)
        return seen

    def _built_form(
        self, step: _Step, name: str, dtype: torch.dtype, gradient: bool, shape: Sequence[int | None] | None
    ) -> Tensor:
        sizes = None if shape is None else [None if place == 0 else size for place, size in enumerate(shape)]
        item = Item("recv", name, _name(dtype), gradient, sizes)
        self.contract.add(self.channel, step.key, item)
        form = self.contract.form(self.channel, step.key, name)
        return torch.zeros(form.sizes(), dtype=dtype_of(form.dtype))

    def _received(self, step: _Step, name: str) -> Tensor:
        slot = self._slot(step, self.peer, name)
        found = self.channel.receive(slot, step.turn, what=f"{name!r} of step {step.turn}")
        if found is None:
            raise FederalError(f"{name!r} of step {step.turn} came from the {self.peer} without its elements")
        return found

    def _give_back(self, step: _Step, name: str, gradient: Tensor) -> Tensor:
        """Send it; returned it is in one piece, as it travels: the leaf would copy it to have it so."""
        slot = self._slot(step, self.peer, name)
        del step.leaves[name]
        gradient = gradient.contiguous()
        value = self._protected(step, name, slot, gradient.detach())
        if self._precision:
            value = self.feedback.add(slot, value.cpu())
        self.channel.send(slot, step.turn, value, gradient=True, precision=self._precision, words=self.riding())
        return gradient

    def _protected(self, step: _Step, name: str, slot: int, gradient: Tensor) -> Tensor:
        """The gradient as it may go back: protected or noised, if either, and never both."""
        hide, protect = self.hides.get(step.key), step.protects.pop(name, None)
        if hide is not None:
            return hide(gradient, step.rows, slot)
        if protect is None:
            return gradient
        made = protect(gradient)
        if not isinstance(made, Tensor) or made.shape != gradient.shape or made.dtype != gradient.dtype:
            found = f"{made.dtype} {list(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
            raise FunctionError(
                f"recv({name!r}, protect=...): the function made {found} of a gradient that is {gradient.dtype} "
                f"{list(gradient.shape)}: return one of the same shape and dtype"
            )
        return made.detach()

    def _slot(self, step: _Step, sender: str, name: str) -> int:
        try:
            return self.contract.slots[step.key, sender, name]
        except KeyError:
            raise FunctionError(
                f"{name!r} is new in a call for {step.scope}: send and receive the same tensors at every call"
            ) from None

    # ---- the root of the backward pass

    def _root(self, step: _Step, loss: Any) -> Any:
        if isinstance(loss, (list, tuple)) and (step.awaited or step.leaves):
            raise FunctionError(
                f"the loss_fn for {step.scope} returned {len(loss)} losses, and tensors travel: return their sum"
            )
        self._leaves = step.leaves
        own = None if loss is None or any(loss is one for one in step.sent) else loss  # it returned what it sent
        if self.building and own is None:
            self.lossless.add(step.key)
        if not step.awaited and not step.leaves:
            if own is None and step.travels:
                raise FunctionError(
                    f"the loss_fn for {step.scope} returned no loss, and nothing that it sends comes back with a "
                    "gradient: return a loss, or write require_grad=True in send and in the other party's recv"
                )
            return own
        if own is None and not step.awaited:
            raise FunctionError(
                f"the loss_fn for {step.scope} returned no loss, and nothing is sent with require_grad=True: there is "
                "nothing to train by"
            )
        if step.key in self.watched and not self.building:
            self._seen[step.key] = own, step.sent, step.rows
        elif not step.awaited and own is not None and own.grad_fn is not None:  # nothing else hangs on the root
            own.register_hook(_Once(self._backward_begins, step))
            return own
        # What waits for gradients holds the step: it must not hold them in turn, or no step would ever be freed.
        tokens, step.awaited, step.sent = step.awaited, [], []
        if own is None and len(tokens) == 1:  # what waits will do
            return tokens[0]
        root: Tensor = _Root.apply(_Once(self._backward_begins, step), own, *tokens)  # type: ignore[no-untyped-call] # torch leaves it so
        return root

    def leaves(self) -> list[Tensor]:
        """What the step whose loss was computed last has received, and gives gradients back for."""
        return list(self._leaves.values())

    def by_row(self, key: str) -> Tensor | None:
        """Of the watched step: a loss for each row that reaches all that gradients will come for, and waits for none.

        What was sent counts with random weights, so that nothing cancels. None if the step was another one.
        """
        if key not in self._seen:
            return None
        total, everything, rows = self._seen.pop(key)
        generator = torch.Generator().manual_seed(rows)
        for sent in everything:
            if sent.shape[:1] != (rows,):
                raise FunctionError(
                    f"a tensor of shape {list(sent.shape)} was sent in a step of {rows} rows, and this party's "
                    "optimizers are private: let its first dimension be the batch's, so that each row has its gradient"
                )
            weights = torch.randn(sent.shape, generator=generator).to(sent)
            one = (sent * weights).reshape(rows, -1).sum(1)
            total = one if total is None else total + one
        return total

    def _backward_begins(self, step: _Step, _: Tensor | None = None) -> None:
        callback = functools.partial(self._backward_ended, step)
        torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001 - the only way to the end of a pass

    def _backward_ended(self, step: _Step) -> None:
        """Gradients that did not come are told, since the peer waits for them."""
        for name in list(step.leaves):
            self._give_nothing(step, name)

    def _give_nothing(self, step: _Step, name: str) -> None:
        del step.leaves[name]
        self.channel.send(self._slot(step, self.peer, name), step.turn, None, gradient=True, words=self.riding())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _settled(tensor: Tensor) -> Tensor:
    """What does not change any more: a variable is moved by its optimizer while it may still be on its way."""
    base = tensor._base if tensor._base is not None else tensor  # noqa: SLF001 - the only way from a view
    return tensor.detach().clone() if base.is_leaf and base.requires_grad else tensor.detach()


def _item(kind: str, name: str, tensor: Tensor, gradient: bool) -> Item:
    shape: list[int | None] = [None, *tensor.shape[1:]] if tensor.dim() else []
    return Item(kind, name, _name(tensor.dtype), gradient, shape, tensor.shape[0] if tensor.dim() else 0)
