"""Counters in Prometheus's text format."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping

__all__ = ["Histogram", "Metrics"]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

Labels = tuple[tuple[str, str], ...]


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str, labels: Labels) -> Iterator[str]:
        below = 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            below += count
            yield _line(f"{name}_bucket", (*labels, ("le", bound)), below)
        yield _line(f"{name}_sum", labels, self.total)
        yield _line(f"{name}_count", labels, below)


class Metrics:
    """What the server counts; only its event loop touches it. Models are few, and labels come from them alone."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, int], int] = {}
        self._histograms: dict[tuple[str, str], Histogram] = {}
        self._swaps: dict[str, int] = {}

    def request(self, model: str, status: int, seconds: float) -> None:
        key = (model, status)
        self._requests[key] = self._requests.get(key, 0) + 1
        self._histogram("plait_request_seconds", model, SECONDS).add(seconds)

    def batch(self, model: str, rows: int, waited: float, seconds: float) -> None:
        self._histogram("plait_batch_rows", model, ROWS).add(rows)
        self._histogram("plait_queue_seconds", model, SECONDS).add(waited)
        self._histogram("plait_inference_seconds", model, SECONDS).add(seconds)

    def swap(self, model: str) -> None:
        self._swaps[model] = self._swaps.get(model, 0) + 1

    def _histogram(self, name: str, model: str, bounds: tuple[float, ...]) -> Histogram:
        found = self._histograms.get((name, model))
        if found is None:
            found = self._histograms[name, model] = Histogram(bounds)
        return found

    def text(self, under_way: int, waiting: Mapping[str, int], versions: Mapping[str, str]) -> str:
        """Everything, with three facts of this moment: requests under way, waiting by model, versions by model."""
        return "\n".join([*self._lines(under_way, waiting, versions), ""])

    def _lines(self, under_way: int, waiting: Mapping[str, int], versions: Mapping[str, str]) -> Iterator[str]:
        yield from _head("plait_requests_total", "counter", "Inference requests by their answer's status.")
        for (model, status), count in sorted(self._requests.items()):
            yield _line("plait_requests_total", (("model", model), ("code", str(status))), count)
        helps = {
            "plait_request_seconds": "Time from a request's header to its answer.",
            "plait_queue_seconds": "Time that the first request of a batch waited.",
            "plait_inference_seconds": "Time that a batch was computed.",
            "plait_batch_rows": "Rows that were computed together.",
        }
        for name, text in helps.items():
            yield from _head(name, "histogram", text)
            for (other, model), histogram in sorted(self._histograms.items(), key=lambda pair: pair[0]):
                if other == name:
                    yield from histogram.lines(name, (("model", model),))
        yield from _head("plait_requests_under_way", "gauge", "Inference requests that are not answered yet.")
        yield _line("plait_requests_under_way", (), under_way)
        yield from _head("plait_requests_waiting", "gauge", "Requests that are not being computed yet.")
        for model, count in waiting.items():
            yield _line("plait_requests_waiting", (("model", model),), count)
        yield from _head("plait_model_version", "gauge", "1 for the version that answers.")
        for model, version in versions.items():
            yield _line("plait_model_version", (("model", model), ("version", version)), 1)
        yield from _head("plait_model_swaps_total", "counter", "Versions that took another's place.")
        for model in versions:
            yield _line("plait_model_swaps_total", (("model", model),), self._swaps.get(model, 0))


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _line(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    return f"{name}{{{inside}}} {value}" if inside else f"{name} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
