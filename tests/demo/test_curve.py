from __future__ import annotations

import importlib.util
import logging
import struct

import matplotlib.style
import pytest

from plait.demo import curve

HISTORY = [
    {"task": None, "global_step": 45, "metrics": {"accuracy": 0.5, "loss": 1.2}},
    {"task": None, "global_step": 90, "metrics": {"accuracy": 0.8}},
    {"task": None, "global_step": 135, "metrics": {"accuracy": 0.9, "loss": 0.3}},
]
HISTORIES = {"two parties": HISTORY, "centralised": HISTORY, "leader alone": HISTORY[:2]}


def test_series_count_passes_and_skip_what_was_not_measured():
    assert curve.series(HISTORY, "accuracy") == ([1, 2, 3], [0.5, 0.8, 0.9])
    assert curve.series(HISTORY, "loss") == ([1, 3], [1.2, 0.3])
    assert curve.series(HISTORY, "recall") == ([], [])


def size(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


def test_draws_a_png_of_1200_by_600(tmp_path):
    path = tmp_path / "new" / "curve.png"
    assert curve.draw(HISTORIES, path)
    assert size(path.read_bytes()) == (1200, 600)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("left_out", HISTORIES)
def test_the_picture_shows_every_run_also_where_two_are_the_same(left_out):
    fewer = {name: history for name, history in HISTORIES.items() if name != left_out}
    assert curve.picture(HISTORIES) != curve.picture(fewer)


def test_the_users_style_does_not_matter():
    plain = curve.picture(HISTORIES)
    with matplotlib.style.context("dark_background"):
        assert curve.picture(HISTORIES) == plain


def test_without_matplotlib_it_says_how_to_get_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, "plait"):
        assert not curve.draw(HISTORIES, tmp_path / "curve.png")
    assert [record.getMessage() for record in caplog.records] == [
        "no curve was drawn: for matplotlib, `pip install 'plait[plot]'`"
    ]
    assert list(tmp_path.iterdir()) == []
