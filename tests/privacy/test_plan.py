"""The plan's figures are the accountant's, and the command shows them."""

from __future__ import annotations

import functools
import importlib.util
import sys

import pytest
from typer.testing import CliRunner

from plait import cli
from plait.errors import ConfigError
from plait.privacy.accountant import Event, epsilon, gaussian_epsilon
from plait.privacy.plan import draw, plan, text

SMALL = {"samples": 2000, "batch": 100, "epochs": 5}
WORDS = ["privacy", "plan", "--samples", "2000", "--batch", "100", "--epochs", "5"]


@functools.cache
def planned(**more):
    return plan(**SMALL, **more)


@pytest.fixture
def command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plait"])
    return lambda *words: CliRunner().invoke(cli.app, [*WORDS, *words])


def test_the_noise_of_an_epsilon():
    found = planned(epsilon=2.0)
    assert (found.steps, found.rate, found.delta) == (100, 0.05, 1e-5)
    assert found.epsilon == epsilon([(Event(found.noise, 0.05), 100)], 1e-5) <= 2.0
    assert found.epsilon > 1.99
    assert found.rdp_epsilon == epsilon([(Event(found.noise, 0.05), 100)], 1e-5, "rdp") > 2.0


def test_the_epsilon_of_a_noise():
    found = planned(noise=1.5, delta=1e-6)
    assert found.noise == 1.5
    assert found.epsilon == epsilon([(Event(1.5, 0.05), 100)], 1e-6)


def test_a_peer_is_told_more():
    found = planned(noise=1.5)
    assert found.peer_epsilon == gaussian_epsilon(5 / 2.25, 1e-5) > found.epsilon
    assert found.drawn_peer_epsilon == gaussian_epsilon(found.drawn_uses / 2.25, 1e-5) > found.peer_epsilon
    assert 12 <= found.drawn_uses <= 18  # of 2,000 rows, each drawn five times on average


def test_the_published_figures():
    found = plan(60_000, 256, 20, noise=1.0)
    assert (found.steps, round(found.epsilon, 3), round(found.rdp_epsilon, 3)) == (4680, 1.567, 1.758)
    assert found.peer_epsilon == pytest.approx(28.4, rel=0.005)


def test_the_curve_rises_to_the_epsilon():
    curve = planned(noise=1.5).curve
    epochs, found = zip(*curve, strict=True)
    assert list(epochs) == sorted(set(epochs))
    assert list(found) == sorted(found)
    assert curve[-1] == (5.0, planned(noise=1.5).epsilon)
    assert len(curve) > 25


def test_one_batch_of_everything_is_a_plan_too():
    found = plan(50, 50, 1, noise=4.0)
    assert (found.steps, found.rate, found.drawn_uses, len(found.curve)) == (1, 1.0, 1, 1)
    assert found.epsilon == found.peer_epsilon == found.drawn_peer_epsilon
    assert "█" in text(found)


def test_the_text_has_the_figures_and_a_curve():
    shown = text(planned(noise=1.5))
    lines = shown.splitlines()
    assert lines[0] == "noise multiplier  1.5"
    assert lines[1] == "steps             100: 20 in each of 5 epochs"
    assert f"{planned(noise=1.5).epsilon:.4g} at delta=1e-05" in shown
    heights = [sum(line[10:].ljust(60)[column] != " " for line in lines[-14:-2]) for column in range(60)]
    assert heights == sorted(heights)
    assert (heights[0], heights[-1]) == (heights[0], 12)
    assert max(map(len, lines)) <= 120


def test_an_epsilon_of_next_to_nothing_is_possible():
    assert 0 <= planned(epsilon=1e-9).epsilon <= 1e-9


def test_a_delta_that_promises_little_is_said():
    assert "it promises little" in text(plan(100, 10, 1, noise=2.0, delta=0.01))
    assert "it promises little" not in text(planned(noise=1.5))


@pytest.mark.parametrize(
    ("wish", "what"),
    [
        ({}, "epsilon=None, noise=None: give the epsilon that you want, or the noise"),
        ({"epsilon": 1.0, "noise": 1.0}, "one of them"),
        ({"epsilon": 0.0}, "epsilon=0.0: write a number above 0"),
        (
            {"epsilon": 1e-9, "batch": 2000, "epochs": 10**6},
            "no noise below a million times the clipping norm is enough",
        ),
        ({"noise": 0.0}, "noise=0.0: write a noise multiplier above 0"),
        ({"noise": 1.0, "delta": 0.0}, "delta=0.0"),
        ({"noise": 1.0, "batch": 2001}, "batch=2001 of samples=2000"),
        ({"noise": 1.0, "batch": 0}, "batch=0: write a whole number from 1 up"),
        ({"noise": 1.0, "epochs": 0}, "epochs=0"),
        ({"noise": 1.0, "samples": -5}, "samples=-5"),
    ],
)
def test_wishes_that_cannot_be(wish, what):
    with pytest.raises(ConfigError, match=what):
        plan(**{**SMALL, **wish})


def test_a_picture(tmp_path):
    assert draw(planned(noise=1.5), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_how_to_get_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not draw(planned(noise=1.5), tmp_path / "curve.png")
    assert "pip install 'plait[plot]'" in caplog.text
    assert not list(tmp_path.iterdir())


def test_the_command(command, tmp_path):
    found = command("--noise", "1.5", "--plot", str(tmp_path / "curve.png"))
    assert found.exit_code == 0, found.output
    assert found.output == f"{text(planned(noise=1.5))}\ndrawn: {tmp_path / 'curve.png'}\n"
    assert (tmp_path / "curve.png").exists()


def test_the_command_finds_the_noise(command):
    assert command("--epsilon", "2", "--delta", "1e-5").output == f"{text(planned(epsilon=2.0))}\n"


def test_the_command_without_a_wish(command):
    assert isinstance(command().exception, ConfigError)
