# ruff: noqa: NPY002 - NumPy's global state is meant
import json
import random

import numpy as np
import pytest
import torch

from plait.rng import IsolatedRng, derive_seed, isolated_rng, rng_state, set_rng_state


def draw():
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(3).tolist(),
    ]


def test_derived_seeds_are_stable_and_differ_by_part():
    assert derive_seed(0, "epoch", 0) == derive_seed(0, "epoch", 0) == 8639117760935238290
    seeds = {derive_seed(seed, "epoch", epoch) for seed in range(20) for epoch in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert derive_seed(1) != derive_seed("1")


def test_isolation_leaves_the_global_states_alone():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    draw()  # leaves a cached Gaussian behind in Python's and NumPy's states
    before = rng_state()
    expected = draw()
    set_rng_state(before)
    with isolated_rng(7):
        first = draw()
    assert draw() == expected
    with isolated_rng(7):
        assert draw() == first
    with isolated_rng(8):
        assert draw() != first


def test_isolation_ends_with_an_error():
    before = rng_state()
    expected = draw()
    set_rng_state(before)
    with pytest.raises(ZeroDivisionError), isolated_rng(7):
        draw()[0] / 0
    assert draw() == expected


def test_isolation_entered_again_goes_on():
    with isolated_rng(3):
        expected = [draw(), draw(), draw()]
    own = IsolatedRng(3)
    got = []
    for _ in range(3):
        with own:
            got.append(draw())
        draw()
    assert got == expected


def test_round_trip_is_exact_after_json():
    draw()
    state = rng_state()
    plain = {
        key: [v for v in value if not isinstance(v, torch.Tensor)] for key, value in state.items() if key != "torch"
    }
    assert json.loads(json.dumps(plain)) == plain
    assert state["torch"].dtype == state["numpy"][1].dtype == torch.uint8
    expected = [draw() for _ in range(3)]
    through_json = json.loads(json.dumps(state["python"]))
    set_rng_state({**state, "python": through_json})
    assert [draw() for _ in range(3)] == expected


def test_state_is_a_copy():
    state = rng_state()
    kept = state["torch"].clone(), state["numpy"][1].clone()
    draw()
    np.random.rand(2000)
    assert torch.equal(state["torch"], kept[0])
    assert torch.equal(state["numpy"][1], kept[1])
