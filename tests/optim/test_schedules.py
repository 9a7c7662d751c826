from __future__ import annotations

import importlib.util
import logging
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ConfigError
from plait.optim.schedules import draw, linear_cosine_decay, piecewise_lr, polynomial_decay, warmup

STRATEGY = "5:0.1->0.4,10:0.4=>0.8,15:0.8,20:0.08"


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 0.1),
        (250, 0.25),  # half of the straight line
        (499, 0.1 + 0.3 * 499 / 500),
        (500, 0.4),
        (750, math.sqrt(0.4 * 0.8)),  # half of the factors
        (1000, 0.8),
        (1499, 0.8),
        (1500, 0.08),
        (1999, 0.08),
        (10**9, 0.08),
    ],
)
def test_the_documents_strategy(step, rate):
    assert piecewise_lr(STRATEGY, num_samples=3200, global_batch_size=32)(step) == pytest.approx(rate, rel=1e-12)


def test_epochs_are_counted_in_samples_so_that_a_batch_may_lie_across_an_end():
    schedule = piecewise_lr("1:1,2:2", num_samples=10, global_batch_size=4)
    assert [schedule(step) for step in range(7)] == [1, 1, 1, 2, 2, 2, 2]
    assert schedule.steps == 5


def test_a_rate_that_is_passed_holds_after_the_end():
    assert piecewise_lr("1:0.5->0.1", num_samples=10, global_batch_size=1)(10) == 0.1


def test_spaces_and_all_kinds_of_numbers():
    schedule = piecewise_lr(" 0.5 : 1e-1 -> .2 , 1.5 : 3. ", num_samples=10, global_batch_size=1)
    assert schedule(0) == 0.1
    assert schedule(5) == 3.0


@pytest.mark.parametrize(
    ("strategy", "column", "expected"),
    [
        ("", 0, "expected the epoch where a stage ends"),
        ("0.002", 5, "expected ':' and a learning rate"),
        ("5:0.1,10;0.4", 8, "expected ':' and a learning rate"),
        ("x:0.1", 0, "expected the epoch where a stage ends"),
        ("5:0.1,", 6, "expected the epoch where a stage ends"),
        ("5:", 2, "expected a learning rate, such as 0.1"),
        ("5:-0.1", 2, "expected a learning rate, such as 0.1"),
        ("5:1e999", 2, "expected a learning rate, such as 0.1"),
        ("5:0.1->", 7, "expected a learning rate, such as 0.1"),
        ("5:0.1>0.2", 5, "expected '->', '=>', ',' or the end"),
        ("5:0.1->0.2->0.3", 10, "expected ',' or the end"),
        ("5:0.1 0.2", 6, "expected '->', '=>', ',' or the end"),
        ("5:0.1,5:0.2", 6, "expected an epoch after 5"),
        ("0:0.1", 0, "expected an epoch after 0"),
        ("5:0=>0.3", 2, "expected a rate above 0"),
        ("5:0.3=>0", 7, "expected a rate above 0"),
        ("5:0.1\n,x", 7, "expected the epoch where a stage ends"),
    ],
)
def test_a_bad_string_is_shown_with_the_place(strategy, column, expected):
    with pytest.raises(ConfigError) as caught:
        piecewise_lr(strategy, 100, 10)
    first, text, caret, last = str(caught.value).split("\n")
    assert first == f"the learning-rate strategy is wrong at character {column + 1}:"
    assert text == "  " + strategy.replace("\n", " ")
    assert caret == "  " + " " * column + "^"
    assert last.startswith(expected)
    assert STRATEGY in last


def test_the_caret_stands_below_a_full_width_mark_and_after_a_full_width_space():
    for strategy, column in (("5：0.1", 1), ("5:0.1，10:0.2", 5), ("5:0.1\u3000,\u3000x", 8)):
        with pytest.raises(ConfigError) as caught:
            piecewise_lr(strategy, 100, 10)
        _, text, caret, _ = str(caught.value).split("\n")
        assert caret.index("^") == 2 + column
        assert text == "  " + strategy.replace("\u3000", " ")  # so that a letter before the caret has one column


@pytest.mark.parametrize("sizes", [(0, 10), (100, 0), (100, -1)])
def test_sizes_that_give_no_epochs(sizes):
    with pytest.raises(ConfigError, match="write a number above 0"):
        piecewise_lr("5:0.1", *sizes)


def test_something_else_than_a_string():
    with pytest.raises(ConfigError, match=r"lr_strategy is 0.1: write a string such as '5:0.1->0.4"):
        piecewise_lr(0.1, 100, 10)


rates = st.floats(1e-6, 1e3)


@given(
    st.lists(st.tuples(st.integers(1, 20), rates, rates, st.sampled_from(["->", "=>", ""])), min_size=1, max_size=5),
    st.integers(1, 500),
    st.integers(1, 100),
)
def test_any_strategy_stays_within_its_rates(stages, num_samples, batch):
    ends = [sum(length for length, *_ in stages[: number + 1]) for number in range(len(stages))]
    texts = [
        f"{end}:{first!r}{arrow}{last!r}" if arrow else f"{end}:{first!r}"
        for end, (_, first, last, arrow) in zip(ends, stages, strict=True)
    ]
    schedule = piecewise_lr(",".join(texts), num_samples, batch)
    start = 0
    for end, (_, first, last, arrow) in zip(ends, stages, strict=True):
        step = -(-start * num_samples // batch)  # the first step of the stage, if it has one
        if step * batch < end * num_samples:
            low, high = sorted([first, last]) if arrow else (first, first)
            assert low * (1 - 1e-9) <= schedule(step) <= high * (1 + 1e-9)
        start = end
    _, first, last, arrow = stages[-1]
    assert schedule(schedule.steps) == (last if arrow else first)


def test_linear_cosine_decay_by_hand():
    schedule = linear_cosine_decay(8.5, 0.05, None, 1000, 0.1, 0.92)
    assert schedule(0) == 0.05
    assert schedule(50) == pytest.approx((8.5 + 0.05) / 2)
    assert schedule(100) == 8.5
    assert schedule(510) == pytest.approx(0.05 + 8.45 * 0.5 * 0.5)  # half of the line, half of the cosine
    assert schedule(305) == pytest.approx(0.05 + 8.45 * 0.75 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert schedule(920) == pytest.approx(0.05)
    assert schedule(999) == schedule(5000) == 0.05


def test_polynomial_decay_by_hand():
    straight = polynomial_decay(max_lr=1.0, min_lr=0.0, max_step=100)
    assert [straight(step) for step in (0, 25, 100, 200)] == [1.0, 0.75, 0.0, 0.0]
    curved = polynomial_decay(max_lr=1.1, min_lr=0.1, max_step=100, warmup=0.2, decay_end=0.6, power=2.0)
    assert curved(10) == pytest.approx(0.6)
    assert curved(20) == pytest.approx(1.1)
    assert curved(40) == pytest.approx(0.1 + 0.25)
    assert curved(80) == 0.1


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_lr": 0.1, "min_lr": 0.2, "max_step": 10}, "0 <= min_lr <= max_lr"),
        ({"max_lr": 0.1, "min_lr": -1.0, "max_step": 10}, "0 <= min_lr <= max_lr"),
        ({"max_lr": 0.1, "min_lr": 0.0}, "max_step is 0; write how many steps training takes"),
        ({"max_lr": 0.1, "min_lr": 0.0, "max_step": 10, "warmup": 5}, "warmup is 5 and decay_end 1.0"),
        ({"max_lr": 0.1, "min_lr": 0.0, "max_step": 10, "warmup": 0.5, "decay_end": 0.5}, "warmup < decay_end"),
    ],
)
@pytest.mark.parametrize("decay", [linear_cosine_decay, polynomial_decay])
def test_decays_that_cannot_be(decay, settings, text):
    with pytest.raises(ConfigError, match=text):
        decay(**settings)


def test_a_power_that_cannot_be():
    with pytest.raises(ConfigError, match="power is 0; write a number above 0"):
        polynomial_decay(1.0, 0.0, max_step=10, power=0)


def test_warmup_goes_in_a_line_to_where_the_schedule_will_be():
    assert [warmup(0.5, 5)(step) for step in (0, 1, 4, 5, 50)] == [0.0, 0.1, 0.4, 0.5, 0.5]
    behind = warmup(piecewise_lr("1:0.1->1.1,2:0.3", 10, 1), steps=5, start=0.2)
    assert [behind(step) for step in (0, 5, 10)] == [0.2, pytest.approx(0.6), 0.3]
    assert warmup(0.5, 0)(0) == 0.5
    with pytest.raises(ConfigError, match="steps is -1"):
        warmup(0.5, -1)


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (piecewise_lr("5:0.1", 100, 10), "piecewise_lr('5:0.1', num_samples=100, global_batch_size=10)"),
        (
            linear_cosine_decay(8.5, 0.05, None, 10, 0.1),
            "linear_cosine_decay(max_lr=8.5, min_lr=0.05, max_step=10, warmup=0.1, decay_end=1.0)",
        ),
        (
            polynomial_decay(8.5, 0.05, max_step=10),
            "polynomial_decay(max_lr=8.5, min_lr=0.05, max_step=10, warmup=0.0, decay_end=1.0, power=1.0)",
        ),
        (warmup(0.1, 5), "warmup(0.1, steps=5, start=0.0)"),
    ],
)
def test_a_schedule_shows_what_makes_it_and_can_be_made_from_that(schedule, text):
    assert repr(schedule) == text
    assert eval(text) == schedule


def test_draws_a_png_of_1200_by_600(tmp_path):
    path = tmp_path / "new" / "schedule.png"
    assert draw(piecewise_lr(STRATEGY, 3200, 32), 2400, path)
    png = path.read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", png[16:24]) == (1200, 600)
    assert list(path.parent.iterdir()) == [path]


def test_the_picture_shows_the_schedule(tmp_path):
    def bytes_of(schedule, steps=50):
        draw(schedule, steps, tmp_path / "a.png")
        return (tmp_path / "a.png").read_bytes()

    class Named:
        def __init__(self, scale):
            self.scale = scale

        def __call__(self, step):
            return self.scale * (step > 20)

        def __repr__(self):
            return "any $function$ of the step"

    assert bytes_of(Named(1.0)) == bytes_of(Named(1.0))
    assert bytes_of(Named(1.0)) != bytes_of(Named(0.0))
    assert bytes_of(Named(1.0), steps=1)


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ConfigError, match="steps is 0"):
        draw(warmup(0.1, 5), 0, tmp_path / "a.png")


def test_without_matplotlib_it_says_how_to_get_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, "plait"):
        assert not draw(warmup(0.1, 5), 10, tmp_path / "a.png")
    assert "pip install 'plait[plot]'" in caplog.text
    assert list(tmp_path.iterdir()) == []
