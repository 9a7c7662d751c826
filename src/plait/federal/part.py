"""A party's part of a trained model by itself: what the peer sends is an input, what goes to the peer an output."""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from plait.data import Sample
from plait.engine.calls import UserCall
from plait.engine.task import MODE, TaskScope
from plait.errors import ConfigError, FederalError, FunctionError
from plait.federal.exchange import Exchange
from plait.rng import isolated_rng

if TYPE_CHECKING:
    from plait.federal.model import FederalModel

__all__ = ["Part", "PredictFn", "agree"]

PredictFn = Callable[[Any, Sample], Any]
"""Given the model and a sample, returns the outputs, or sends them; `model.send` and `model.recv` as in training."""
TOPIC = "part"
USUAL_KEY = "id"


class Part:
    """`part(**inputs)` is what `predict_fn` returns, or sends. The other party need not be there for it.

    Args:
        model: compiled, so that both parties know what travels.
        predict_fn: a party that receives returns a tensor or a dict of tensors; one that sends need not return
            anything. What goes there and back again is no part that can be asked for.
        inputs: an example of each of this party's own inputs, by their names in the sample.
        key: the name of the rows' ids.
        task: whose variables and tensors these are.

    """

    def __init__(
        self,
        model: FederalModel,
        predict_fn: PredictFn,
        inputs: Mapping[str, Tensor],
        *,
        key: str | None = None,
        task: str | None = None,
    ) -> None:
        self.model = model
        inputs = {name: value.to(model._store.device) for name, value in inputs.items()}  # noqa: SLF001 - its own part
        self._predict_fn, self._scope = predict_fn, TaskScope(MODE.EVAL, task)
        self._own, rows = list(inputs), _rows(inputs)
        self._received: dict[str, str] = {}
        """The name among the inputs, by that of the tensor."""
        seen = _Stands({}, functools.partial(_zeros, model._exchange, next(iter(inputs.values()))))  # noqa: SLF001 - its own part
        with torch.no_grad(), self._evaluating():
            returned = self._user_call(functools.partial(self._predict, seen))(dict(inputs))
        self._check(seen, returned, rows)
        for name in seen.received:
            self._received[name] = _free_name(name, {*inputs, *self._received.values()})
        self.call = self._user_call(self._outputs)
        """Gives the outputs for a dict of inputs."""
        self.inputs = {**inputs, **{self._received[name]: value for name, value in seen.received.items()}}
        """An example of each input, what is received included."""
        self.facts: dict[str, Any] = {
            "role": model.federal_role,
            "pair": None,
            "key": key or USUAL_KEY,
            "receives": {place: name for name, place in self._received.items()},
            "sends": list(seen.sent),
        }
        """For model.json: which inputs come from the other party, which outputs go to it; `agree` gives the pair."""
        if self._received and self.facts["key"] in inputs:
            raise ConfigError(
                f"inputs has {self.facts['key']!r}, which is what rows are asked for by: leave it out, or give it "
                "another name in the sample"
            )

    def __call__(self, **given: Tensor) -> Any:
        device = self.model._store.device  # noqa: SLF001 - its own part
        with torch.no_grad(), self._evaluating():
            return self.call({name: value.to(device) for name, value in given.items()})

    def _user_call(self, function: Callable[[Any], Any]) -> UserCall:
        return UserCall(function, self._scope, self.model._store, self.model._now)  # noqa: SLF001 - its own part

    def _outputs(self, given: Mapping[str, Tensor]) -> Any:
        stands = _Stands({name: given[place] for name, place in self._received.items()}, _unknown)
        returned = self._predict(stands, given)
        return stands.sent or returned

    def _predict(self, stands: _Stands, given: Mapping[str, Tensor]) -> Any:
        model = self.model
        before, model._exchange = model._exchange, stands  # type: ignore[assignment] # noqa: SLF001 - has send and recv
        try:
            with isolated_rng(model.seed):
                return self._predict_fn(model, Sample.of({name: given[name] for name in self._own}))
        finally:
            model._exchange = before  # noqa: SLF001 - same

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Nothing is trained by a look at what travels; afterwards each module is in the mode in which it was."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    def _check(self, stands: _Stands, returned: Any, rows: int) -> None:
        role = self.model.federal_role
        if stands.sent and stands.received:
            raise FunctionError(
                f"the {role}'s predict_fn sends {', '.join(stands.sent)} and receives {', '.join(stands.received)}: "
                "one party asks and the other answers, so let it do one of them"
            )
        if not stands.sent and not stands.received:
            raise FunctionError(
                f"the {role}'s predict_fn neither sends nor receives: export what needs no other party with "
                "plait.export.export"
            )
        if stands.received and returned is None:
            raise FunctionError(f"the {role}'s predict_fn returned nothing: return a tensor, or a dict of tensors")
        for name, tensor in stands.sent.items():
            if tensor.shape[:1] != (rows,):
                raise FunctionError(
                    f"the {role}'s predict_fn sends {name!r} with shape {list(tensor.shape)} for {rows} rows: let its "
                    "first dimension be the batch's"
                )


class _Stands:
    """Stands where an Exchange does: what is sent is kept, what is received was put in, or is what `other` gives."""

    building = False

    def __init__(self, received: dict[str, Tensor], other: Callable[[str], Tensor]) -> None:
        self.sent: dict[str, Tensor] = {}
        self.received, self._other = received, other

    def send(self, name: str, tensor: Tensor, *_: Any) -> Tensor:
        if name in self.sent:
            raise FunctionError(f"send of {name!r} twice in predict_fn: give each tensor a name of its own")
        self.sent[name] = tensor
        return tensor

    def recv(self, name: str, *_: Any) -> Tensor:
        if name not in self.received:
            self.received[name] = self._other(name)
        return self.received[name]


def _unknown(name: str) -> NoReturn:
    raise FunctionError(f"{name!r} is new in a call of predict_fn: receive the same tensors at every call")


def _zeros(exchange: Exchange, like: Tensor, name: str) -> Tensor:
    """Of the form that the peer has announced, in evaluation if it sends it there; with as many rows as `like`."""
    contract = exchange.contract
    known = {place: number for place, number in sorted(contract.slots.items()) if place[1] == exchange.peer}
    numbers = [number for (_, _, sent), number in known.items() if sent == name]
    if not numbers:
        names = sorted({sent for _, _, sent in known})
        raise FunctionError(
            f"predict_fn receives {name!r}, which the {exchange.peer} never sent in training: it sent "
            f"{', '.join(names) or 'nothing'}"
        )
    dtype, sizes = contract.forms()[numbers[0]]
    return torch.zeros(len(like), *sizes[1:], dtype=dtype, device=like.device)


def _rows(inputs: Mapping[str, Tensor]) -> int:
    rows = {int(value.shape[0]) if isinstance(value, Tensor) and value.dim() else 0 for value in inputs.values()}
    if len(rows) != 1 or 0 in rows:
        raise ConfigError("inputs is to have an example of each input, tensors with the same number of rows in all")
    return rows.pop()


def _free_name(name: str, taken: set[str]) -> str:
    """A name that a parameter of a function may have."""
    found = re.sub(r"\W", "_", name, flags=re.ASCII)
    found = found if found.isidentifier() else f"_{found}"
    while found in taken:
        found += "_"
    return found


def agree(model: FederalModel) -> str:
    """A name for the two parts that are exported now, which both parties know; the other one exports, too."""
    channel, step = model.communicator.channel, int(model.global_step)
    if model.federal_role == "leader":
        said = {"pair": secrets.token_hex(16), "step": step}
        channel.tell(TOPIC, said)
        return str(said["pair"])
    heard = channel.hear(TOPIC, "its part() call")
    if not isinstance(heard, dict) or not isinstance(heard.get("pair"), str) or heard.get("step") != step:
        theirs = heard.get("step") if isinstance(heard, dict) else None
        raise FederalError(f"the leader exports its part at step {theirs!r:.20}, the follower at step {step}")
    return str(heard["pair"])
