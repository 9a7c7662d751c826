"""How many Python calls plait adds to a step."""

from __future__ import annotations

import functools
import logging
import sys

import torch
import torch.nn.functional as F
from torch import nn

from plait import efl

SHORT, LONG = 100, 200
ALLOWED = 40
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def make_batches(count):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(64, 64, generator=generator), torch.randint(10, (64,), generator=generator)) for _ in range(count)
    ]


def bare(batches):
    """The loop that everybody writes; returns a function that runs it, and its net."""
    net = make_net()
    optimizer = SGD(net.parameters())

    def run():
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()

    return run, net


def fit(batches):
    """The same with plait: the loss metric, the logger, everything as it is by default."""
    model = efl.Model()
    model.net = make_net()
    model.input_fn(lambda model, mode: batches)
    model.loss_fn(lambda model, sample: F.cross_entropy(model.net(sample[0]), sample[1]))
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(SGD))
    model.compile(session_config={"device": "cpu"})
    return lambda: model.fit(efl.procedure_fn.train()), model.net


def calls_of(run):
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(previous)
    return calls


def calls_a_step(prepare):
    """The difference between a long and a short run: what happens once drops out."""
    prepare(make_batches(2))[0]()  # imports and caches
    short, long = (calls_of(prepare(make_batches(count))[0]) for count in (SHORT, LONG))
    return (long - short) / (LONG - SHORT)


def test_a_step_with_the_default_hooks_adds_few_python_calls():
    logging.getLogger("plait").setLevel(logging.WARNING)
    plain, ours = calls_a_step(bare), calls_a_step(fit)
    print(f"calls a step: bare {plain}, plait {ours}")
    assert plain > 10  # the counting works
    assert ours - plain <= ALLOWED


def test_what_was_counted_trains_alike():
    batches = make_batches(20)
    (run_bare, expected), (run_fit, net) = bare(batches), fit(batches)
    run_bare()
    run_fit()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), expected.parameters(), strict=True))
