from __future__ import annotations

import asyncio
import json
import threading
import time

import httpx
import numpy as np
import pytest

from plait.errors import DataError, UnavailableError
from plait.serve import answering as answering_room
from plait.serve import asking as room
from plait.serve import models
from plait.serve.app import make_app
from plait.serve.asking import Whole
from plait.serve.settings import Settings

from .parted import ROWS, answering, asking, open_part, write_follower, write_leader


@pytest.fixture
def exported(tmp_path, monkeypatch):
    for module in (answering_room, models):
        monkeypatch.setattr(module, "load", open_part)
    write_leader(tmp_path / "leader")
    write_follower(tmp_path / "follower")
    return tmp_path


@pytest.fixture
def asker(exported):
    with answering(exported / "follower") as answerer, asking(answerer.endpoint) as found:
        yield found


def keys(*values):
    return np.array(values, np.int64)


def test_the_other_partys_part_for_its_rows(asker):
    found = asker.ask("one", keys(20, 30, 30, 10))
    np.testing.assert_array_equal(found["the/half"], [[4, 4], [6, 6], [6, 6], [2, 2]])
    assert asker.ready


def test_many_threads_ask_at_once(asker):
    wrong = []

    def ask(key, value):
        for _ in range(20):
            found = asker.ask("one", keys(key, 10))["the/half"]
            if found.tolist() != [[value, value], [2, 2]]:
                wrong.append(found)

    threads = [threading.Thread(target=ask, args=pair) for pair in [(10, 2.0), (20, 4.0), (30, 6.0)]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_row_that_it_does_not_have(asker):
    with pytest.raises(DataError, match="does not have all of these rows"):
        asker.ask("one", keys(10, 11))
    assert asker.ask("one", keys(10))


def test_a_part_that_it_does_not_have(asker):
    with pytest.raises(UnavailableError, match="no part that belongs to this version"):
        asker.ask("two", keys(10))


def test_is_it_there(asker):
    assert asker.ask("one", keys()) == {}
    with pytest.raises(UnavailableError):
        asker.ask("two", keys())


def test_nobody_is_there_and_then_somebody_is(exported):
    with answering(exported / "follower") as first:
        endpoint = first.endpoint
    with asking(endpoint) as asker:
        begun = time.monotonic()
        with pytest.raises(UnavailableError, match="the follower, whose part of the model is needed, cannot be"):
            asker.ask("one", keys(10))
        assert time.monotonic() - begun < 3
        assert not asker.ready
        for _ in range(2):  # and again, after it has ended
            with answering(exported / "follower", endpoint):
                assert answered(asker)["the/half"].tolist() == [[2, 2]]


def answered(asker):
    """Asks until it is answered: a question into the moment in which the other party starts anew is lost."""
    until = time.monotonic() + 15
    while True:
        try:
            return asker.ask("one", keys(10))
        except UnavailableError:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_one_that_stands_still_is_not_waited_for_by_everybody(exported):
    going = threading.Event()

    def slow(wanted):
        going.wait(10)
        return {"x": ROWS["x"][:1]}

    with answering(exported / "follower", rows=slow) as answerer, asking(answerer.endpoint, seconds=0.5) as asker:
        while not asker.ready:
            time.sleep(0.01)
        with pytest.raises(UnavailableError, match=r"did not answer within 0\.5 s"):
            asker.ask("one", keys(10))
        begun = time.monotonic()
        with pytest.raises(UnavailableError, match="late with an answer"):
            asker.ask("one", keys(10))
        assert time.monotonic() - begun < 0.2
        assert not asker.ready
        going.set()
        until = time.monotonic() + 10
        while not asker.ready:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert asker.ask("one", keys(10))["the/half"].tolist() == [[6, 6]]


# ---- what clients see


def test_to_a_client_it_is_one_model(exported, asker):
    whole = Whole(open_part(exported / "leader" / "1"), asker)
    assert {name: (spec.datatype, spec.sizes) for name, spec in whole.inputs.items()} == {
        "own": ("FP32", [-1, 2]),
        "id": ("INT64", [-1]),
    }
    found = whole.run({"own": np.full((2, 2), 100, "f4"), "id": keys(30, 10)})
    assert found["sum"].tolist() == [[106, 106], [102, 102]]
    whole.check()


@pytest.mark.parametrize("answer", [{}, {"the/half": np.zeros((1, 3), "f4")}, {"the/half": np.zeros((1, 2))},
                                    {"the/half": np.zeros((2, 2), "f4")}])  # fmt: skip
def test_an_answer_of_another_form(exported, asker, monkeypatch, answer):
    whole = Whole(open_part(exported / "leader" / "1"), asker)
    monkeypatch.setattr(asker, "ask", lambda pair, keys: answer)
    with pytest.raises(UnavailableError, match="'the/half' is not what this version receives"):
        whole.run({"own": np.zeros((1, 2), "f4"), "id": keys(10)})


def test_more_rows_than_are_answered(exported, asker, monkeypatch):
    monkeypatch.setattr(room, "MAX_ROWS", 1)
    whole = Whole(open_part(exported / "leader" / "1"), asker)
    with pytest.raises(DataError, match="the request has 2 rows: ask for 1 at most"):
        whole.run({"own": np.zeros((2, 2), "f4"), "id": keys(10, 20)})
    assert asker.ask("one", keys(10))["the/half"].tolist() == [[2, 2]]


def request(*asked):
    own = {"name": "own", "datatype": "FP32", "shape": [len(asked), 2], "data": [1.0] * 2 * len(asked)}
    ids = {"name": "id", "datatype": "INT64", "shape": [len(asked)], "data": list(asked)}
    return {"inputs": [own, ids]}


def served(exported, asker, use):
    """Run `await use(client)` beside the leader's application."""

    async def main():
        app = make_app(exported / "leader", Settings(poll=60.0), asker)
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://plait") as client:
                return await use(client)

    return asyncio.run(main())


def test_requests(exported, asker):
    async def use(client):
        async def ask(*asked):
            return await client.post("/v2/models/leader/infer", json=request(*asked))

        good, bad, other = await asyncio.gather(ask(10, 30), ask(99), ask(20))
        assert good.json()["outputs"][0]["data"] == [3, 3, 7, 7]
        assert other.json()["outputs"][0]["data"] == [5, 5]
        assert bad.status_code == 400
        assert "does not have all of these rows" in bad.json()["error"]
        many = await ask(*[10, 20, 30] * 20)
        assert many.json()["outputs"][0]["data"] == [3, 3, 5, 5, 7, 7] * 20
        assert (await client.get("/v2/models/leader/ready")).status_code == 200
        listed = (await client.get("/v2/models/leader")).json()["inputs"]
        assert [one["name"] for one in listed] == ["own", "id"]
        assert "theirs" not in json.dumps(listed)

    served(exported, asker, use)


def test_503_while_the_other_party_has_another_pair(exported, tmp_path):
    write_follower(tmp_path / "others", "other")

    async def use(client):
        for answer in (
            await client.post("/v2/models/leader/infer", json=request(10)),
            await client.get("/v2/models/leader/ready"),
        ):
            assert answer.status_code == 503
            assert "has no part that belongs to this version" in answer.json()["error"]

    with answering(tmp_path / "others") as answerer, asking(answerer.endpoint) as asker:
        while not asker.ready:
            time.sleep(0.01)
        served(exported, asker, use)


def test_503_while_the_other_party_is_away(exported):
    async def use(client):
        answer = await client.post("/v2/models/leader/infer", json=request(10))
        assert answer.status_code == 503
        assert "the follower, whose part" in answer.json()["error"]
        assert answer.headers["retry-after"] == "1"
        assert (await client.get("/v2/models/leader/ready")).status_code == 503
        assert (await client.get("/v2/health/live")).status_code == 200

    with asking("127.0.0.1:9") as asker:
        served(exported, asker, use)
