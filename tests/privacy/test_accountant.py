"""Epsilons against published ones and against each other, and the reverse."""

from __future__ import annotations

import functools
import logging
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from plait.errors import ConfigError
from plait.privacy.accountant import (
    Event,
    epsilon,
    gaussian_epsilon,
    most_steps,
    noise_for,
    rough_epsilon,
    together,
)

ROWS, BATCH, DELTA = 60_000, 256, 1e-5
RATE = BATCH / ROWS
STEPS = 20 * (ROWS // BATCH)  # 20 epochs of whole batches: 4,680
PLD = {0.5: 12.44, 0.7: 3.84, 1.0: 1.567, 1.3: 1.007}
RDP = {0.5: 14.30, 0.7: 4.50, 1.0: 1.758, 1.3: 1.106}
PRV = {0.5: 12.454, 0.7: 3.852, 1.0: 1.577, 1.3: 1.017}
"""Opacus 1.6.0, `PRVAccountant`, as benchmarks/privacy_peers/epsilons.py prints them."""


@functools.cache
def cost(noise, method="pld", steps=STEPS):
    return epsilon([(Event(noise, RATE), steps)], DELTA, method)


@pytest.mark.parametrize("noise", PLD)
def test_tight_epsilons(noise):
    assert cost(noise) == pytest.approx(PLD[noise], rel=0.005)


@pytest.mark.parametrize("noise", RDP)
def test_published_epsilons_by_renyi_divergences(noise):
    assert cost(noise, "rdp") == pytest.approx(RDP[noise], rel=0.005)


@pytest.mark.parametrize("noise", PRV)
def test_epsilons_of_another_accountant(noise):
    assert cost(noise) == pytest.approx(PRV[noise], rel=0.02)


@pytest.mark.parametrize(("noise", "uses", "found"), [(1.0, 20, 28.4), (2.0, 20, 11.5), (5.0, 20, 3.85)])
def test_without_sampling(noise, uses, found):
    assert epsilon([(Event(noise), uses)], DELTA) == pytest.approx(found, rel=0.005)


def test_without_sampling_the_exact_one_is_what_the_distribution_gives():
    """A batch that holds all rows but one in a thousand is next to no sampling."""
    almost = epsilon([(Event(2.0, 0.999), 8)], DELTA)
    assert epsilon([(Event(2.0), 8)], DELTA) == pytest.approx(almost, rel=0.003)
    assert epsilon([(Event(2.0), 8)], DELTA) < epsilon([(Event(2.0), 8)], DELTA, "rdp")


@settings(max_examples=50)
@given(st.floats(0.01, 200), st.floats(1e-10, 0.1))
def test_the_exact_epsilon_has_this_delta(precision, delta):
    found, distance = gaussian_epsilon(precision, delta), math.sqrt(precision)
    again = norm.cdf(distance / 2 - found / distance) - math.exp(found) * norm.cdf(-distance / 2 - found / distance)
    assert again == pytest.approx(delta, rel=1e-4) if found else again <= delta


def test_of_nothing_and_of_no_noise():
    assert epsilon([], DELTA) == epsilon([(Event(0.0, RATE), 0)], DELTA) == gaussian_epsilon(0, DELTA) == 0
    assert epsilon([(Event(1.0, RATE), 5), (Event(0.0, RATE), 1)], DELTA) == math.inf
    assert gaussian_epsilon(math.inf, DELTA) == epsilon([(Event(0.0), 1)], DELTA, "rdp") == math.inf
    assert epsilon([(Event(math.inf), 9)], DELTA) == 0


def test_hardly_any_noise_is_not_too_much_for_the_numbers():
    assert 1e5 < epsilon([(Event(0.01, RATE), 1000)], DELTA) < math.inf
    assert 100 < epsilon([(Event(0.06, RATE), 1000)], DELTA) < math.inf


def test_kinds_of_events_add_up():
    one, other = (Event(1.0, RATE), 500), (Event(2.0, 2 * RATE), 300)
    both = epsilon([one, other], DELTA)
    assert max(epsilon([one], DELTA), epsilon([other], DELTA)) < both
    assert both < epsilon([one], DELTA / 2) + epsilon([other], DELTA / 2)
    assert both == pytest.approx(epsilon([other, one], DELTA))
    assert epsilon([(one[0], 200), (one[0], 300)], DELTA) == epsilon([one], DELTA)
    assert epsilon([one, (Event(3.0), 2)], DELTA) > epsilon([one], DELTA)


def test_more_steps_less_noise_and_larger_batches_cost_more():
    assert cost(1.3, steps=100) < cost(1.3, steps=101) < cost(1.2, steps=101)
    assert cost(1.3, steps=100) < epsilon([(Event(1.3, 1.01 * RATE), 100)], DELTA)


@pytest.mark.parametrize(
    "events", [[(Event(1.0, RATE), 900)], [(Event(4.0, RATE), 900)], [(Event(0.8, 0.02), 300), (Event(3.0), 2)]]
)
def test_a_rough_epsilon_is_a_little_larger(events):
    exact = epsilon(events, DELTA)
    assert exact <= rough_epsilon(events, DELTA) < 1.02 * exact


def test_a_fine_grid_does_not_make_it_smaller_than_the_truth():
    """The distribution is rounded upwards: ten steps with next to no sampling are ten Gaussian ones."""
    assert epsilon([(Event(3.0, 1 - 1e-12), 10)], DELTA) >= gaussian_epsilon(10 / 9, DELTA)


def test_what_a_step_tells_twice():
    assert together(1.0) == 1.0
    assert together(2.0, 2.0) == pytest.approx(math.sqrt(2))
    assert together(3.0, 0.0) == 0.0
    assert together(math.inf) == together() == math.inf
    once, twice = [(Event(together(2.0, 3.0)), 7)], [(Event(2.0), 7), (Event(3.0), 7)]
    assert epsilon(once, DELTA) == pytest.approx(epsilon(twice, DELTA))


@pytest.mark.parametrize("method", ["pld", "rdp"])
@pytest.mark.parametrize(("wished", "rate", "steps"), [(1.0, RATE, STEPS), (0.1, RATE, 50), (4.0, 1.0, 20)])
def test_the_noise_for_an_epsilon_is_enough_and_no_more(method, wished, rate, steps):
    noise = noise_for(wished, DELTA, rate, steps, method)
    assert epsilon([(Event(noise, rate), steps)], DELTA, method) <= wished
    assert epsilon([(Event(noise * 0.998, rate), steps)], DELTA, method) > wished
    assert noise == float(f"{noise:.4g}")


def test_an_epsilon_that_needs_no_noise_gets_the_least():
    assert noise_for(1e9, DELTA, RATE, 1) == noise_for(1e9, DELTA, RATE, 1, "rdp") == 0.05


@pytest.mark.parametrize(("method", "wished"), [("pld", 0.5), ("pld", 0.8), ("rdp", 0.6), ("rdp", 1.2)])
def test_the_most_steps_are_the_last_that_the_epsilon_allows(method, wished):
    event = Event(1.3, RATE)
    steps = most_steps(event, DELTA, wished, method=method)
    further = steps + max(1, steps // 1000)
    assert epsilon([(event, steps)], DELTA, method) <= wished < epsilon([(event, further)], DELTA, method)


def test_the_most_steps_after_others():
    event, before = Event(2.0, RATE), [(Event(1.3, RATE), 500)]
    steps = most_steps(event, DELTA, 0.4, before)
    assert epsilon([*before, (event, steps)], DELTA) <= 0.4 < epsilon([*before, (event, steps + 1)], DELTA)


def test_the_most_steps_may_be_none_or_any_number():
    event, before = Event(2.0, RATE), [(Event(1.0, RATE), 800)]
    assert most_steps(event, DELTA, 0.1, before) == 0
    assert most_steps(Event(0.0, RATE), DELTA, 5.0) == 0
    assert most_steps(Event(1.0), DELTA, 28.5) == 20
    assert most_steps(Event(math.inf), DELTA, 1.0) == 1_000_000
    assert most_steps(Event(9.0, RATE), DELTA, 1.0, enough=300) == 300


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: epsilon([], 0.0), "delta=0.0: write a probability above 0"),
        (lambda: epsilon([], 1.0), "delta=1.0"),
        (lambda: epsilon([], DELTA, "prv"), "accountant='prv': there are 'pld' and 'rdp'"),
        (lambda: epsilon([(Event(-1.0), 1)], DELTA), "noise multiplier -1.0: write 0 or more"),
        (lambda: epsilon([(Event(math.nan), 1)], DELTA), "noise multiplier nan"),
        (lambda: epsilon([(Event(1.0, 0.0), 1)], DELTA), "sampling rate 0.0"),
        (lambda: epsilon([(Event(1.0, 1.5), 1)], DELTA), "sampling rate 1.5"),
        (lambda: noise_for(0.0, DELTA, RATE, 5), "epsilon=0.0: write a number above 0"),
        (lambda: noise_for(math.inf, DELTA, RATE, 5), "epsilon=inf"),
        (lambda: noise_for(1.0, DELTA, RATE, 0), "steps=0"),
        (lambda: noise_for(1.0, DELTA, 2.0, 5), "sampling rate 2.0"),
        (lambda: noise_for(1e-9, DELTA, 1.0, 10**6), "no noise below a million times the clipping norm is enough"),
        (lambda: most_steps(Event(1.0), DELTA, -1.0), "epsilon=-1.0"),
    ],
)
def test_mistakes(call, what):
    with pytest.raises(ConfigError, match=what):
        call()


def test_orders_that_do_not_converge_are_not_talked_of(caplog):
    with caplog.at_level(logging.DEBUG):
        assert epsilon([(Event(0.6, 0.5), 10)], DELTA, "rdp") > 0
    assert not caplog.records
    assert not logging.getLogger("absl").disabled
