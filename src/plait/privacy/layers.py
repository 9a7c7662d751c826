"""The modules with private variables of their own, and what is noted of their calls."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from plait.privacy.rules.anything import half_of, tensors_of
from plait.privacy.rules.call import Call, Split
from plait.privacy.rules.registry import ANYTHING, WHOLE, Rule, rule_of

__all__ = ["Layer", "layers_of"]


class Layer:
    """A module with variables of its own, and its calls."""

    def __init__(self, name: str, module: nn.Module, variables: dict[str, Tensor]) -> None:
        self.name, self.module, self.variables = name, module, variables
        self.rule: Rule = rule_of(module, variables)
        self.calls: list[Call] = []
        self.outputs: list[list[Tensor]] | None = [] if self.rule is ANYTHING else None
        """Copies of what the calls gave, for the check to compare; None: not wanted."""
        self.rows_dims: list[int] = []
        """Which dimension of each output holds the rows, once the check has found it."""
        self.proven: dict[int, int] = {}
        """The same of outputs that gradients came back to: it was not only likely."""
        self.splits: dict[Any, Split] = {}
        """Which dimension of each input holds the rows, where the layer is computed again."""
        self.reached: set[tuple[int, int]] = set()
        """Outputs that a loss depends on, each with the number of its call."""
        self.seen: set[tuple[int, int]] = set()
        """Those of them that gradients came back to, other than zeros."""
        self.looked = False
        """Whether the check has seen all of them."""
        self.path = "-"

    def dims(self, outputs: int) -> list[int]:
        return self.rows_dims or self.rule.rows_dims(self.module, outputs)

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Note a call; gives the output to go on with."""
        if isinstance(output, Tensor):
            outputs = [output]
        else:
            output = tree_map_only(Tensor, _apart, output)
            outputs = tensors_of(output)
        call = Call(args, kwargs, outputs)
        if self.rule is ANYTHING:
            call.splits, call.half = self.splits, half_of(outputs)
        self.calls.append(call)
        if self.outputs is not None:
            self.outputs.append([outputs[number].detach().clone() for number in call.picked])
        return output

    def drop(self) -> None:
        """Forget the calls, and with them the activations."""
        self.calls = []
        if self.outputs:
            self.outputs = []


def _apart(output: Tensor) -> Tensor:
    """One of several outputs, at a place of its own in the graph: an LSTM cell makes one of its two from the other."""
    return output.view_as(output)


def layers_of(root: nn.Module, variables: AbstractSet[Tensor]) -> list[Layer]:
    """The modules of `root` that own any of the variables, in order."""
    layers: list[Layer] = []
    inside: set[nn.Module] = set()
    for name, module in root.named_modules():
        if module in inside:
            continue
        whole = isinstance(module, WHOLE)
        inside.update(module.modules() if whole else ())
        named = module.named_parameters(recurse=whole)
        owned = {key: value for key, value in named if value in variables}
        if owned:
            layers.append(Layer(name or type(module).__name__, module, owned))
    return layers
