"""Two parties in one process: each in a thread, every wait bounded, everything closed."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
import types
import zlib

import torch
from torch import nn

import plait
from plait import efl
from plait.data import TensorSource
from plait.federal.communicator import Communicator

DEADLINE = 60.0
"""After so many seconds, a test of two parties has failed."""
SGD = efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=0.1))
ADAM = efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.Adam, lr=0.01))

ROWS = 330
"""Ten batches of 32, and a short one."""
BATCHES = 11
_generator = torch.Generator().manual_seed(0)
X = torch.randn(ROWS, 8, generator=_generator)
Y = torch.randint(0, 3, (ROWS,), generator=_generator)
IDS = torch.arange(ROWS) + 7_000_000
LEFT = {"x": X[:, :4], "y": Y, "id": IDS}
RIGHT = {"x": X[:, 4:], "y": Y, "id": IDS}
WHOLE = {"x": X[:, :4], "x2": X[:, 4:], "y": Y}


class Dense(nn.Linear):
    """Begins as its name and sizes say: threads share torch's random state."""

    def __init__(self, name, *sizes):
        self._begins = torch.Generator().manual_seed(zlib.crc32(f"{name} {sizes}".encode()))
        super().__init__(*sizes)

    def reset_parameters(self):
        bound = self.in_features**-0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound, generator=self._begins)


def dense(name, inputs, outputs, x):
    with plait.variable_scope("net", reuse=plait.AUTO_REUSE):
        return plait.layer(name, Dense, name, inputs, outputs)(x)


# ---- running both


def communicators(leader=None, follower=None, *, timeout=20.0, **both):
    """Two that are joined; `leader` and `follower` are settings in which they differ."""
    made = Communicator.pair(timeout=timeout, **both)
    for one, changes in zip(made, (leader, follower), strict=True):
        one.party = dataclasses.replace(one.party, **(changes or {}))
    return made


def outcomes(leader, follower, joined=None):
    """What both functions, called with their communicators at the same time, return or raise."""
    joined = joined or communicators()
    found = [None, None]

    def run(place, function):
        try:
            found[place] = function(joined[place])
        except Exception as error:  # noqa: BLE001 - given back, not lost in the thread
            found[place] = error
        finally:
            joined[place].close()

    threads = [
        threading.Thread(target=run, args=(place, function), name=f"party-{place}", daemon=True)
        for place, function in enumerate((leader, follower))
    ]
    until = time.monotonic() + DEADLINE
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        for one in joined:
            one.fail("the test is over")
        raise AssertionError(f"a party did not end; what both came to: {found}")
    return found


def both(leader, follower, joined=None):
    """What both functions return; the error of the one that failed by itself, if one did."""
    found = outcomes(leader, follower, joined)
    errors = [one for one in found if isinstance(one, Exception)]
    if errors:
        raise next((one for one in errors if "has ended" not in str(one)), errors[0])
    return found


def refused(leader, follower, joined=None, *, seconds=5.0):
    """The errors that both functions raise, which has to be soon."""
    begun = time.monotonic()
    found = outcomes(leader, follower, joined)
    assert time.monotonic() - begun < seconds, found
    assert all(isinstance(one, Exception) for one in found), found
    return found


# ---- models


def make(fields, loss, evaluate=None, *, joined=None, tasks=(None,), optimizer=SGD, batch=32, model=None, **source):
    """A model, one party's if it is `joined` to another by a communicator; `loss` and `evaluate` may be by task."""
    made = efl.Model(**(model or {})) if joined is None else efl.FederalModel(communicator=joined, **(model or {}))
    for task in tasks:
        made.input_fn(lambda model, mode: TensorSource(fields, batch, **{"shuffle": True, "seed": 1, **source}), task)
        made.loss_fn(loss[task] if isinstance(loss, dict) else loss, task)
        if evaluate is not None:
            made.eval_fn(evaluate[task] if isinstance(evaluate, dict) else evaluate, task)
        made.optimizer_fn(optimizer, task)
    return made


def trained(model, procedure, **fit):
    """Run the procedure; the model, its variables and step, and what evaluations found."""
    model.compile()
    model.fit(procedure, **fit)
    variables = {name: value.detach().clone() for name, value in model.variables().items()}
    found = [entry["metrics"] for entry in model.history]
    return types.SimpleNamespace(model=model, variables=variables, step=int(model.global_step), found=found)


def party(fields, loss, procedure, evaluate=None, *, fit=None, **settings):
    """A function of a communicator that trains one party's model."""
    return lambda joined: trained(make(fields, loss, evaluate, joined=joined, **settings), procedure, **(fit or {}))


def assert_same(whole, *parts):
    """The parties' variables together are those of the unsplit model, bit for bit."""
    joined = {name: value for part in parts for name, value in part.variables.items()}
    assert joined.keys() == whole.variables.keys()
    assert [name for name in joined if not torch.equal(joined[name], whole.variables[name])] == []


# ---- what most tests train: the follower has half of the columns, the leader the other half, and the labels


def head(own, other, y):
    return nn.functional.cross_entropy(dense("top", 10, 3, torch.cat([own, other], 1)), y)


def leader_loss(model, sample):
    hidden = model.recv("hidden", require_grad=True)
    return head(dense("left", 4, 5, sample.x).relu(), hidden, sample.y)


def follower_loss(model, sample):
    return model.send("hidden", dense("right", 4, 5, sample.x).relu(), require_grad=True)


def whole_loss(model, sample):
    return head(dense("left", 4, 5, sample.x).relu(), dense("right", 4, 5, sample.x2).relu(), sample.y)


def leader_eval(model, sample):
    hidden = model.recv("hidden")
    logits = dense("top", 10, 3, torch.cat([dense("left", 4, 5, sample.x).relu(), hidden], 1))
    model.add_metric("accuracy", efl.metrics.accuracy(sample.y, logits))


def follower_eval(model, sample):
    model.send("hidden", dense("right", 4, 5, sample.x).relu())


def whole_eval(model, sample):
    joined = torch.cat([dense("left", 4, 5, sample.x).relu(), dense("right", 4, 5, sample.x2).relu()], 1)
    model.add_metric("accuracy", efl.metrics.accuracy(sample.y, dense("top", 10, 3, joined)))


def leader(procedure, loss=leader_loss, evaluate=None, fields=LEFT, **settings):
    return party(fields, loss, procedure, evaluate, **settings)


def follower(procedure, loss=follower_loss, evaluate=None, fields=RIGHT, **settings):
    return party(fields, loss, procedure, evaluate, **settings)


def whole(procedure, loss=whole_loss, evaluate=None, *, fit=None, **settings):
    return trained(make(WHOLE, loss, evaluate, **settings), procedure, **(fit or {}))
