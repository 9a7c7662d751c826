"""Recurrent layers: the recurrence is run again once for the whole batch, and gives the gradients of its gates.

From them, each weight's gradient is a sum of outer products over time, as a linear layer's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import ConfigError
from plait.privacy.rules.call import Call
from plait.privacy.rules.terms import Dense, Outer, Term, wide

__all__ = ["cell", "knows", "recurrent", "rows_dims"]

State = tuple[Tensor, ...]
Step = Callable[[Tensor, Tensor, State], State]
"""From the input's share of the gates, the last state's share, and that state: the new state, its output first."""


class Sweep(NamedTuple):
    """One layer in one direction, over all of time; tensors are [time, rows, ...]."""

    suffix: str
    inputs: Tensor
    before: Tensor
    """The output at the moment before, which the hidden weights were applied to."""
    from_inputs: Tensor
    from_before: Sequence[Tensor]
    outputs: list[Tensor]
    last: State


def knows(name: str) -> bool:
    return re.fullmatch(r"(weight|bias)_(ih|hh)(_l\d+(_reverse)?)?", name) is not None


def rows_dims(layer: nn.RNNBase, outputs: int) -> list[int]:
    """Of the outputs over time, and of the last states, which are [layers, rows, ...] either way."""
    return [0 if layer.batch_first else 1, *[1] * (outputs - 1)]


@torch.enable_grad()
def recurrent(layer: nn.RNNBase, call: Call, names: Collection[str]) -> dict[str, Term]:
    if layer.num_layers > 1 and layer.dropout > 0 and layer.training:
        raise ConfigError(
            f"dropout={layer.dropout} between its layers is drawn anew when it is run again: write dropout=0, and "
            "several layers of one with nn.Dropout between them"
        )
    if not isinstance(call.input, Tensor) or call.input.dim() != 3:
        raise ConfigError(
            f"it was given a {type(call.input).__name__}; give it a padded tensor of three dimensions, and leave out "
            "the padding in the loss"
        )
    inputs = wide(call.input.detach())
    inputs = inputs.transpose(0, 1) if layer.batch_first else inputs
    given = call.args[1] if len(call.args) > 1 else call.kwargs.get("hx")
    starts = _starts(given, layer.num_layers * (2 if layer.bidirectional else 1), inputs, layer.hidden_size)
    sweeps, outputs, lasts = _swept(layer, inputs, starts)
    gradients = list(call.gradients)
    if gradients[0] is not None and layer.batch_first:
        gradients[0] = gradients[0].transpose(0, 1)
    made = [outputs, *(torch.stack(part) for part in zip(*lasts, strict=True))]
    return _terms(sweeps, made, gradients, names, call.microbatches)


@torch.enable_grad()
def cell(layer: nn.RNNCellBase, call: Call, names: Collection[str]) -> dict[str, Term]:
    inputs = wide(call.input.detach())[None]
    given = call.args[1] if len(call.args) > 1 else call.kwargs.get("hx")
    given = (
        tuple(part[None] for part in given) if isinstance(given, tuple) else given[None] if given is not None else None
    )
    (start,) = _starts(given, 1, inputs, layer.hidden_size)
    sweep = _sweep(layer, "", inputs, start)
    return _terms([sweep], list(sweep.last), call.gradients, names, call.microbatches)


def _starts(given: Any, count: int, inputs: Tensor, size: int) -> list[State]:
    """The state that each layer and direction starts with; a second part is there for an LSTM, and no harm else."""
    if given is None:
        zeros = inputs.new_zeros(inputs.shape[1], size)
        return [(zeros, zeros)] * count
    parts = given if isinstance(given, tuple) else (given, given)
    return list(zip(*(wide(part.detach()).unbind(0) for part in parts), strict=True))


def _swept(layer: nn.RNNBase, inputs: Tensor, starts: list[State]) -> tuple[list[Sweep], Tensor, list[State]]:
    suffixes = ("", "_reverse") if layer.bidirectional else ("",)
    sweeps: list[Sweep] = []
    for number in range(layer.num_layers):
        made = []
        for suffix in suffixes:
            sweep = _sweep(layer, f"_l{number}{suffix}", inputs, starts[len(sweeps)])
            sweeps.append(sweep)
            made.append(torch.stack(sweep.outputs[::-1] if suffix else sweep.outputs))
        inputs = torch.cat(made, 2) if len(made) > 1 else made[0]
    return sweeps, inputs, [sweep.last for sweep in sweeps]


def _sweep(layer: Any, suffix: str, inputs: Tensor, state: State) -> Sweep:
    hidden, bias = _value(layer, "weight_hh" + suffix), _value(layer, "bias_hh" + suffix)
    if suffix.endswith("_reverse"):
        inputs = inputs.flip(0)
    shares = functional.linear(inputs, _value(layer, "weight_ih" + suffix), _value(layer, "bias_ih" + suffix))
    shares.requires_grad_()
    step, state = _step_of(layer), state if isinstance(layer, nn.LSTM | nn.LSTMCell) else state[:1]
    before, from_before, outputs = [], [], []
    for share in shares.unbind(0):
        before.append(state[0].detach())
        from_before.append(functional.linear(state[0], hidden, bias).requires_grad_())
        state = step(share, from_before[-1], state)
        outputs.append(state[0])
    separate = isinstance(layer, nn.GRU | nn.GRUCell)  # elsewhere both shares are added: they have one gradient
    return Sweep(suffix, inputs.detach(), torch.stack(before), shares, from_before if separate else (), outputs, state)


def _value(layer: nn.Module, name: str) -> Any:
    value = getattr(layer, name, None)
    return None if value is None else wide(value.detach())


def _step_of(layer: Any) -> Step:
    if isinstance(layer, nn.LSTM | nn.LSTMCell):
        return _lstm
    if isinstance(layer, nn.GRU | nn.GRUCell):
        return _gru
    squash = torch.tanh if layer.nonlinearity == "tanh" else torch.relu
    return lambda share, past, _: (squash(share + past),)


def _lstm(share: Tensor, past: Tensor, state: State) -> State:
    in_gate, forget, new, out_gate = (share + past).chunk(4, 1)
    memory = forget.sigmoid() * state[1] + in_gate.sigmoid() * new.tanh()
    return out_gate.sigmoid() * memory.tanh(), memory


def _gru(share: Tensor, past: Tensor, state: State) -> State:
    (reset, update, new), (past_reset, past_update, past_new) = share.chunk(3, 1), past.chunk(3, 1)
    candidate = torch.tanh(new + torch.sigmoid(reset + past_reset) * past_new)
    return (torch.lerp(candidate, state[0], torch.sigmoid(update + past_update)),)


def _terms(
    sweeps: list[Sweep], made: list[Tensor], wanted: Sequence[Tensor | None], names: Collection[str], microbatches: int
) -> dict[str, Term]:
    reached = [(output, wide(found)) for output, found in zip(made, wanted, strict=True) if found is not None]
    gates = [gate for sweep in sweeps for gate in (sweep.from_inputs, *sweep.from_before)]
    outputs, found = zip(*reached, strict=True)
    gradients = iter(torch.autograd.grad(outputs, gates, found, allow_unused=True, materialize_grads=True))
    terms: dict[str, Term] = {}
    with torch.no_grad():
        for sweep in sweeps:
            terms.update(_of_sweep(sweep, gradients, microbatches))
    return {name: term for name, term in terms.items() if name in names}


def _of_sweep(sweep: Sweep, gradients: Iterator[Tensor], microbatches: int) -> dict[str, Term]:
    def positions(values: Tensor) -> Tensor:
        return values.transpose(0, 1).reshape(microbatches, -1, values.shape[2])

    from_inputs = positions(next(gradients))
    separate = [next(gradients) for _ in sweep.from_before]
    from_before = positions(torch.stack(separate)) if separate else from_inputs
    return {
        "weight_ih" + sweep.suffix: Outer(positions(sweep.inputs), from_inputs),
        "weight_hh" + sweep.suffix: Outer(positions(sweep.before), from_before),
        "bias_ih" + sweep.suffix: Dense(from_inputs.sum(1)),
        "bias_hh" + sweep.suffix: Dense(from_before.sum(1)),
    }
