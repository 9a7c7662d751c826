from __future__ import annotations

import importlib.util
import logging
import struct

import matplotlib.style
import pytest

from plait.demo import curve

HISTORY = [
    {"task": "digit", "global_step": 90, "metrics": {"accuracy": 0.5, "loss": 1.2}},
    {"task": "even", "global_step": 90, "metrics": {"accuracy": 0.8, "loss": 0.4}},
    {"task": "digit", "global_step": 180, "metrics": {"accuracy": 0.9, "loss": 0.3}},
    {"task": "even", "global_step": 180, "metrics": {"accuracy": 0.95}},
]


def test_series_are_split_by_task_and_skip_what_was_not_measured():
    assert curve.series(HISTORY, "accuracy") == {"digit": ([90, 180], [0.5, 0.9]), "even": ([90, 180], [0.8, 0.95])}
    assert curve.series(HISTORY, "loss") == {"digit": ([90, 180], [1.2, 0.3]), "even": ([90], [0.4])}
    assert curve.series(HISTORY, "recall") == {}


def size(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


def test_draws_a_png_of_1200_by_600(tmp_path):
    path = tmp_path / "new" / "curve.png"
    assert curve.draw(HISTORY, path)
    assert size(path.read_bytes()) == (1200, 600)
    assert list(path.parent.iterdir()) == [path]


def test_the_picture_shows_both_tasks():
    one = curve.picture([entry for entry in HISTORY if entry["task"] == "digit"])
    assert curve.picture(HISTORY) != one


def test_the_users_style_does_not_matter():
    plain = curve.picture(HISTORY)
    with matplotlib.style.context("dark_background"):
        assert curve.picture(HISTORY) == plain


def test_without_matplotlib_it_says_how_to_get_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, "plait"):
        assert not curve.draw(HISTORY, tmp_path / "curve.png")
    assert [record.getMessage() for record in caplog.records] == [
        "no curve was drawn: for matplotlib, `pip install 'plait[plot]'`"
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [1, 3])
def test_any_number_of_tasks(count):
    history = [{"task": f"t{i}", "global_step": 1, "metrics": {"accuracy": 0.5, "loss": 1.0}} for i in range(count)]
    assert size(curve.picture(history)) == (1200, 600)
