"""Epsilon as a metric, and the hook that stops; whole runs are in test_private.py."""

from __future__ import annotations

import types

import torch

from plait.engine.budget import BudgetHook, Shown, said_at_the_end, show_epsilon, stop_if_spent
from plait.engine.hooks import SessionRunContext
from plait.engine.task import MODE, TaskScope
from plait.privacy.accountant import Event
from plait.privacy.ledger import Ledger


def ledger_of(steps, budget=None):
    ledger = Ledger(1e-5, budget=budget, method="rdp")
    for step in range(1, steps + 1):
        ledger.release(Event(2.0, 0.1), step=step, uses=1)
    return ledger


def model_of(ledger, *, spent=False, **strategy):
    state = types.SimpleNamespace(ledger=ledger, spent=spent)
    return types.SimpleNamespace(
        privacy=ledger, private_state=state, strategy=types.SimpleNamespace(**strategy), metric_states={}
    )


def test_a_number_that_is_computed_when_it_is_looked_at():
    values = iter([1.0, 2.0])
    metric = Shown(lambda: next(values))
    metric.update(torch.ones(3))
    metric.reset()
    assert metric.state_dict() == {}
    metric.load_state_dict({})
    metric.merge([{}, {}])
    assert [metric.result().item(), metric.result().item()] == [1.0, 2.0]


def test_a_federation_shows_two_epsilons():
    ledger = ledger_of(3)
    alone, party = model_of(ledger), model_of(ledger, peer="follower")
    for model in (alone, party):
        show_epsilon(model, "click", ledger)
    assert list(alone.metric_states[TaskScope(MODE.TRAIN, "click")]) == ["epsilon"]
    shown = party.metric_states[TaskScope(MODE.TRAIN, "click")]
    assert shown["epsilon"].result() < shown["peer_epsilon"].result()
    assert "against the follower" in said_at_the_end(party)
    assert "follower" not in said_at_the_end(alone)


def test_the_hook_stops_when_the_budget_is_spent(caplog):
    caplog.set_level("INFO", logger="plait")
    state = types.SimpleNamespace(ledger=ledger_of(3, budget=5.0), spent=False)
    context = SessionRunContext(None, None, None)
    BudgetHook(state).after_run(context, None)
    assert not context.stop_requested
    state.spent = True
    BudgetHook(state).after_run(context, None)
    assert context.stop_requested
    assert "of 5 at delta=1e-05" in caplog.text


def test_a_session_with_nothing_left_ends_at_once():
    asked = []
    session = types.SimpleNamespace(request_stop=lambda: asked.append(True))
    stop_if_spent(model_of(ledger_of(3, budget=5.0)), session)
    assert not asked
    stop_if_spent(model_of(ledger_of(3, budget=5.0), spent=True), session)
    assert asked == [True]
    stop_if_spent(types.SimpleNamespace(private_state=None), session)
    assert asked == [True]
