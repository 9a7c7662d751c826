"""Counters, in the text that Prometheus reads."""

from __future__ import annotations

import re

from plait.serve.metrics import Histogram, Metrics

LINE = re.compile(r'^[a-z_]+(\{[a-z]+="([^"\\]|\\.)*"(,[a-z]+="([^"\\]|\\.)*")*\})? [0-9.e+-]+$')


def values(text):
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def test_what_is_counted():
    metrics = Metrics()
    for _ in range(3):
        metrics.request("m", 200, 0.002)
    metrics.request("m", 503, 40.0)
    metrics.batch("m", 5, 0.1, 0.2)
    metrics.swap("m")
    found = values(metrics.text(2, {"m": 1}, {"m": "4"}))
    assert found['plait_requests_total{model="m",code="200"}'] == "3"
    assert found['plait_requests_total{model="m",code="503"}'] == "1"
    assert found['plait_request_seconds_bucket{model="m",le="0.001"}'] == "0"
    assert found['plait_request_seconds_bucket{model="m",le="0.0025"}'] == "3"
    assert found['plait_request_seconds_bucket{model="m",le="30.0"}'] == "3"
    assert found['plait_request_seconds_bucket{model="m",le="+Inf"}'] == "4"
    assert found['plait_request_seconds_count{model="m"}'] == "4"
    assert found['plait_batch_rows_bucket{model="m",le="8"}'] == "1"
    assert found["plait_requests_under_way"] == "2"
    assert found['plait_requests_waiting{model="m"}'] == "1"
    assert found['plait_model_version{model="m",version="4"}'] == "1"
    assert found['plait_model_swaps_total{model="m"}'] == "1"


def test_every_line_is_well_formed():
    metrics = Metrics()
    metrics.request('a "b"\\\n', 200, 0.1)
    text = metrics.text(0, {'a "b"\\\n': 0}, {'a "b"\\\n': "1"})
    assert text.endswith("\n")
    for line in text.splitlines():
        assert line.startswith("# ") or LINE.match(line), line
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_a_bound_belongs_to_its_bucket():
    histogram = Histogram((1, 2))
    for value in (1, 2, 3):
        histogram.add(value)
    assert histogram.counts == [1, 1, 1]
    assert histogram.total == 6
