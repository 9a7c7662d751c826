"""What the private tasks of a model have in common: releases, noise, and what becomes of them when a run goes on."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import types
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from plait.errors import ConfigError
from plait.privacy.clipping import Adaptive
from plait.privacy.ledger import Ledger
from plait.privacy.optimizers import Private

if TYPE_CHECKING:
    from plait.engine.private import PrivateTask

__all__ = ["Living", "PrivateState", "described"]

log = logging.getLogger("plait")


class PrivateState:
    """What the private tasks of a model have in common: the count of releases, the ledger, and the noise."""

    def __init__(self, first: Private) -> None:
        self.ledger = Ledger(
            first.delta,
            budget=first.epsilon_budget,
            method=first.accountant,
            repeatable=not first.secure_noise,
            branched=self._change_keys,
        )
        self.step = 0
        """Releases so far."""
        self.tasks: dict[str | None, PrivateTask] = {}
        self.uses: dict[str | None, int] = {}
        self.living: dict[torch.optim.Optimizer, Living] = {}

    def check_same(self, private: Private) -> None:
        """One promise is made for the whole model."""
        ledger = self.ledger
        for name, known in (
            ("delta", ledger.delta),
            ("epsilon_budget", ledger.budget),
            ("accountant", ledger.method),
            ("secure_noise", not ledger.repeatable),
        ):
            if getattr(private, name) != known:
                raise ConfigError(
                    f"private optimizers with {name}={known} and {name}={getattr(private, name)}: what they release "
                    "adds up, and is one promise; write the same for all"
                )

    @property
    def spent(self) -> bool:
        """Whether a task could make no other step within the budget."""
        return self.ledger.budget is not None and not all(task.affords() for task in self.tasks.values())

    def of(self, optimizer: torch.optim.Optimizer, private: Private) -> Living:
        if optimizer not in self.living:
            self.living[optimizer] = Living(private, len(self.living))
        return self.living[optimizer]

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "ledger": self.ledger.state_dict(),
            "optimizers": [living.state_dict() for living in self.living.values()],
            "tasks": {task or "": one.state_dict() for task, one in self.tasks.items()},
            "facts": self._facts(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, positions: bool) -> None:
        """Go on from there; without `positions`, in a run of its own: step numbers come again, with other data.

        So do steps that were made after the checkpoint, and are made again by a program that was changed meanwhile.
        """
        self.step = int(state["step"])
        changed = _differences(state["facts"], self._facts()) if positions else []
        own = not positions or bool(changed)
        self.ledger.load_state_dict({**state["ledger"], "run": uuid.uuid4().hex} if own else state["ledger"])
        for living, saved in zip(self.living.values(), state["optimizers"], strict=True):
            living.load_state_dict(saved)
        if own:
            self._change_keys()
        for task, one in self.tasks.items():
            one.load_state_dict(state["tasks"].get(task or "", {}) if positions else {}, whole=not own)
        if changed:
            log.warning(
                "private training was changed since the checkpoint (%s): from here on it has noise of its own, and "
                "steps that are made again count again",
                "; ".join(changed),
            )

    def _facts(self) -> dict[str, Any]:
        """What a step depends on, as it comes back from a file."""
        facts: dict[str, Any] = json.loads(json.dumps({task or "": one.facts() for task, one in self.tasks.items()}))
        return facts

    def _change_keys(self) -> None:
        """Steps are made again, and not the same: with the same noise, the difference of both would be bare."""
        reason = f"after step {self.step} as {json.dumps(self._facts())}"
        for living in self.living.values():
            living.noise.change_key(reason)


def described(function: Any) -> str:
    """A function by its name and its code: the same in every process, and another once somebody has edited it."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    found = hashlib.blake2b(digest_size=4)
    todo = [] if code is None else [code]
    while todo:
        code = todo.pop()
        found.update(code.co_code + repr(code.co_names).encode())
        todo += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        found.update(repr([one for one in code.co_consts if isinstance(one, (int, float, str))]).encode())
    return f"{named.__qualname__} ({found.hexdigest()})"


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    if saved.keys() != now.keys():
        return [f"its tasks were {', '.join(map(repr, saved))}"]
    return [
        f"{name} was {saved[task].get(name)}, and is {value}"
        for task, facts in now.items()
        for name, value in facts.items()
        if saved[task].get(name) != value
    ]


class Living:
    """The noise and the limit of one private optimizer."""

    def __init__(self, private: Private, number: int) -> None:
        self.private, self.number = private, number
        self.noise = private.make_noise()
        self.adaptive: Adaptive | None = None

    def expect(self, microbatches: float) -> None:
        """How many micro-batches a step has, which a limit that follows them needs to know."""
        if self.private.clipping == "adaptive" and self.adaptive is None:
            self.adaptive = Adaptive(self.private.l2_norm_clip, self.private.noise_multiplier, microbatches)

    @property
    def limit(self) -> float:
        return self.private.l2_norm_clip if self.adaptive is None else self.adaptive.limit

    @property
    def multiplier(self) -> float:
        """Of the gradients' noise; what is released with them beside may have its own."""
        return self.private.noise_multiplier if self.adaptive is None else self.adaptive.noise_multiplier

    def state_dict(self) -> dict[str, Any]:
        adaptive = None if self.adaptive is None else self.adaptive.state_dict()
        return {"noise": self.noise.state_dict(), "adaptive": adaptive}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.noise.load_state_dict(state["noise"])
        if self.adaptive is not None and state["adaptive"] is not None:
            self.adaptive.load_state_dict(state["adaptive"])
