"""Batches: the same answers as one by one, few calls, and no request that another one spoils."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from plait.errors import DataError, UnavailableError
from plait.serve.batching import Batcher, ModelFailedError


class Model:
    """Twice the input; remembers the rows of each call, and waits until it may go on."""

    def __init__(self):
        self.calls = []
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, inputs):
        assert self.go_on.wait(10)
        self.calls.append(len(inputs["x"]))
        if np.isnan(inputs["x"]).any():
            raise ValueError(f"no number: {inputs['x']}")
        return {"y": inputs["x"] * 2}


def use(main, threads=1, model=None, **options):
    """Run `await main(ask, model, batcher)`; `ask(values)` is one request."""
    model = model or Model()

    async def run():
        with ThreadPoolExecutor(threads) as executor:
            batcher = Batcher(model, executor, threads=threads, **options)

            async def ask(values, timeout=10.0):
                x = np.asarray(values, "f4")
                return (await batcher.infer({"x": x}, len(x), timeout))["y"]

            try:
                return await main(ask, model, batcher)
            finally:
                model.go_on.set()

    return asyncio.run(run())


def test_batches_give_what_single_requests_give():
    requests = [np.random.default_rng(seed).normal(size=(1 + seed % 5, 3)).astype("f4") for seed in range(60)]

    async def main(ask, model, batcher):
        answers = await asyncio.gather(*map(ask, requests))
        for request, answer in zip(requests, answers):
            np.testing.assert_array_equal(answer, request * 2)
        return model.calls

    calls = use(main, rows=16, delay=0.01)
    assert sum(calls) == sum(map(len, requests))
    assert max(calls) <= 16
    assert len(calls) < 20


def test_a_full_batch_does_not_wait():
    async def main(ask, model, batcher):
        start = time.monotonic()
        await asyncio.gather(*(ask([[1.0]]) for _ in range(4)))
        assert time.monotonic() - start < 5
        return model.calls

    assert use(main, rows=4, delay=60) == [4]


def test_a_lonely_request_waits_for_the_delay_only():
    async def main(ask, model, batcher):
        start = time.monotonic()
        await ask([[1.0]])
        return time.monotonic() - start

    assert 0.05 <= use(main, rows=4, delay=0.05) < 5


def test_what_comes_while_a_batch_is_computed_is_the_next_one():
    async def main(ask, model, batcher):
        model.go_on.clear()
        asked = [asyncio.create_task(ask([[1.0]])) for _ in range(7)]
        await asyncio.sleep(0.05)
        assert batcher.waiting == 6
        model.go_on.set()
        await asyncio.gather(*asked)
        return model.calls

    assert use(main, rows=16) == [1, 6]


def test_many_rows_are_computed_in_pieces():
    async def main(ask, model, batcher):
        values = np.arange(10, dtype="f4").reshape(10, 1)
        np.testing.assert_array_equal(await ask(values), values * 2)
        return model.calls

    assert use(main, rows=4) == [4, 4, 2]


def test_other_shapes_are_other_batches_and_nobody_is_overtaken_for_long():
    async def main(ask, model, batcher):
        model.go_on.clear()
        first = asyncio.create_task(ask([[0.0]]))
        await asyncio.sleep(0.01)
        asked = [asyncio.create_task(ask([[1.0] * width])) for width in (1, 2, 1, 2, 3)]
        await asyncio.sleep(0.01)
        model.go_on.set()
        await first
        assert [answer.shape[1] for answer in await asyncio.gather(*asked)] == [1, 2, 1, 2, 3]
        return model.calls

    assert use(main, rows=16) == [1, 2, 2, 1]


def test_a_model_without_rows_computes_each_request_by_itself():
    async def main(ask, model, batcher):
        await asyncio.gather(*(ask([[1.0]] * 3) for _ in range(3)))
        return model.calls

    assert use(main, rows=2, together=False) == [3, 3, 3]


def test_a_request_that_fails_does_not_fail_its_neighbours(caplog):
    async def main(ask, model, batcher):
        asked = [ask([[1.0]]), ask([[float("nan")]]), ask([[3.0]])]
        return await asyncio.gather(*asked, return_exceptions=True)

    first, failed, last = use(main, rows=3, delay=10)
    assert (first.tolist(), last.tolist()) == ([[2.0]], [[6.0]])
    assert isinstance(failed, ModelFailedError)
    assert "nan" not in str(failed) + caplog.text
    assert "ValueError" in caplog.text


def test_what_a_model_says_for_clients_is_said_to_them():
    class Picky(Model):
        def __call__(self, inputs):
            super().__call__(inputs)
            if (inputs["x"] == 4).any():
                raise DataError("no 4 here")
            if (inputs["x"] == 5).any():
                raise UnavailableError("nobody at home")
            return {"y": inputs["x"]}

    async def main(ask, model, batcher):
        asked = [ask([[1.0]]), ask([[4.0]]), ask([[3.0]])]
        first, wrong, last = await asyncio.gather(*asked, return_exceptions=True)
        assert (first.tolist(), last.tolist()) == ([[1.0]], [[3.0]])
        assert isinstance(wrong, DataError)
        model.calls.clear()
        away = await asyncio.gather(*[ask([[5.0]]) for _ in range(3)], return_exceptions=True)
        assert [str(error) for error in away] == ["nobody at home"] * 3
        assert model.calls == [3]  # it is not asked again for each

    use(main, model=Picky(), rows=3, delay=10)


def test_outputs_with_other_rows_are_a_failure():
    async def main(ask, model, batcher):
        return await asyncio.gather(ask([[1.0]]), ask([[2.0]]), return_exceptions=True)

    model = Model()
    whole = lambda inputs: {"y": inputs["x"].sum(0)}
    whole.go_on = model.go_on
    assert [answer.tolist() for answer in use(main, model=whole, rows=2, delay=10)] == [[1.0], [2.0]]


def test_who_waits_too_long_is_told_and_forgotten():
    async def main(ask, model, batcher):
        model.go_on.clear()
        first = asyncio.create_task(ask([[1.0]]))
        await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            await ask([[2.0]], timeout=0.02)
        assert batcher.waiting == 0
        gone = asyncio.create_task(ask([[2.0]]))
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.wait([gone])
        assert batcher.waiting == 0
        model.go_on.set()
        await first
        assert (await ask([[4.0]])).tolist() == [[8.0]]
        return model.calls

    assert use(main) == [1, 1]


def test_threads_compute_at_once():
    barrier = threading.Barrier(2, timeout=10)

    async def main(ask, model, batcher):
        await asyncio.gather(ask([[1.0]]), ask([[2.0]]))

    def meet(inputs):
        barrier.wait()
        return {"y": inputs["x"]}

    meet.go_on = threading.Event()
    use(main, model=meet, threads=2, rows=1)


def test_batches_are_counted():
    seen = []

    async def main(ask, model, batcher):
        await asyncio.gather(ask([[1.0]]), ask([[1.0], [2.0]]))

    use(main, rows=3, delay=10, seen=seen.append)
    (batch,) = seen
    assert (batch.requests, batch.rows) == (2, 3)
    assert batch.waited >= 0
    assert batch.seconds >= 0
