"""`Distributed` refuses what does not go together, and says what to write instead."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest

from plait.cluster import connect
from plait.cluster.settings import SERVED, Distributed
from plait.errors import ConfigError


def refused(words, **settings):
    with pytest.raises(ConfigError, match=re.escape(words)):
        Distributed(**settings)


def test_by_default_nothing_is_asked_for():
    assert dataclasses.asdict(Distributed()) == {
        "mode": "auto",
        "gradient_merge": 1,
        "local_sgd": 0,
        "adaptive": False,
        "compression": None,
        "sync_batch_norm": False,
        "recompute": (),
        "precision": None,
        "fully_shard": False,
        "replicas_to_aggregate": None,
        "geo_steps": 100,
        "timeout": 60.0,
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "collective", "local_sgd": 4, "adaptive": True},
        {"mode": "collective", "compression": "bf16", "gradient_merge": 2, "sync_batch_norm": True},
        {"mode": "collective", "fully_shard": True, "recompute": ["blocks"], "precision": "fp16"},
        {"mode": "sync", "replicas_to_aggregate": 1, "gradient_merge": 2},
        {"mode": "geo", "geo_steps": 1, "timeout": 0.1},
        {"mode": "auto", "replicas_to_aggregate": 2},
    ],
)
def test_what_goes_together(settings):
    made = Distributed(**settings)
    assert {name: getattr(made, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"mode": "ring"}, "mode='ring': write one of auto, collective, sync, half_async, async, geo"),
        ({"compression": "fp16"}, "compression='fp16': write 'bf16', or None"),
        ({"precision": "fp8"}, "precision='fp8': write 'bf16', 'fp16', or None"),
        ({"gradient_merge": 0}, "gradient_merge=0: write a whole number from 1 on"),
        ({"gradient_merge": 2.0}, "gradient_merge=2.0: write a whole number from 1 on"),
        ({"gradient_merge": True}, "gradient_merge=True: write a whole number from 1 on"),
        ({"local_sgd": -1}, "local_sgd=-1: write a whole number from 0 on"),
        ({"geo_steps": 0}, "geo_steps=0: write a whole number from 1 on"),
        ({"replicas_to_aggregate": 0}, "replicas_to_aggregate=0: write a whole number from 1 on"),
        ({"replicas_to_aggregate": 1.5}, "replicas_to_aggregate=1.5: write a whole number from 1 on"),
        ({"timeout": 0}, "timeout=0: write seconds, above 0"),
        ({"timeout": math.nan}, "timeout=nan: write seconds, above 0"),
        ({"recompute": "blocks"}, "recompute='blocks': write a list of scopes, ['blocks']"),
    ],
)
def test_values_that_are_wrong(setting, words):
    refused(words, **setting)


@pytest.mark.parametrize("mode", SERVED)
@pytest.mark.parametrize(
    "setting",
    [{"local_sgd": 4}, {"compression": "bf16"}, {"sync_batch_norm": True}, {"fully_shard": True}],
    ids=lambda setting: next(iter(setting)),
)
def test_what_is_for_workers_without_servers(mode, setting):
    words = f"{next(iter(setting))} is for workers without servers, mode='{mode}' has them: leave it out"
    refused(words, mode=mode, **setting)


@pytest.mark.parametrize("mode", ["collective", "half_async", "async", "geo"])
def test_backup_workers_are_for_sync(mode):
    refused(f"replicas_to_aggregate with mode='{mode}': it is for mode='sync'", mode=mode, replicas_to_aggregate=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"adaptive": True}, "adaptive=True without local_sgd: write how many steps to begin with, local_sgd=4"),
        ({"local_sgd": 2, "gradient_merge": 2}, "local_sgd and gradient_merge: both spare communication; choose one"),
        ({"local_sgd": 2, "compression": "bf16"}, "local_sgd sends variables, which compression would round"),
        ({"fully_shard": True, "local_sgd": 2}, "fully_shard reduces gradients itself: no local_sgd"),
        ({"fully_shard": True, "gradient_merge": 2}, "fully_shard reduces gradients itself"),
        ({"fully_shard": True, "compression": "bf16"}, "fully_shard reduces gradients itself"),
    ],
)
def test_combinations_that_do_not_go_together(settings, words):
    refused(words, **settings)


def test_they_are_fixed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Distributed().mode = "sync"


@pytest.mark.parametrize(("asked", "got"), [(None, 1), (3, 3)])
def test_connecting_may_say_how_many_gradients_a_step_takes(monkeypatch, asked, got):
    monkeypatch.setattr(connect, "connected", lambda settings: settings)
    assert Distributed(mode="sync", replicas_to_aggregate=1).connect(asked).replicas_to_aggregate == got
