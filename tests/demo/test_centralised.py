from __future__ import annotations

import torch

from plait.demo import centralised


def scopes(model):
    return {name.partition("/")[0] for name in model.variables()}


def test_centralised_has_both_parties_parts_and_alone_has_the_leaders(trained):
    assert scopes(trained.whole) == {"left", "right", "top"}
    assert scopes(centralised.train_alone(0)) == {"left", "top"}


def test_no_pass_trains_nothing():
    model = centralised.train_alone(0)
    assert (int(model.global_step), model.history) == (0, [])


def test_the_follower_is_worth_something(trained):
    """After as many passes, half of each image is not enough."""
    alone = centralised.train_alone(3).history[-1]["metrics"]["accuracy"]
    assert alone + 0.05 < trained.whole.history[-1]["metrics"]["accuracy"]


def test_the_callers_threads_are_put_back(torch_settings, monkeypatch):
    torch.set_num_threads(2)
    seen = []
    monkeypatch.setattr(centralised.agreed, "fit", lambda model, passes: seen.append(torch.get_num_threads()))
    centralised.train_alone(0)
    assert (seen, torch.get_num_threads()) == ([1], 2)
