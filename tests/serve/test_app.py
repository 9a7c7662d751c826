"""The routes, in this process: what is there, what is refused, and that nothing is lost or kept."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.export.loaded import Loaded
from plait.serve import models

INFER = "/v2/models/doubler/infer"


def body(*rows):
    return {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [len(rows), 3], "data": [v for row in rows for v in row]}]
    }


@pytest.fixture
def slow(publish, monkeypatch):
    """A model that waits until it may go on; its directory, and the event."""
    go_on = threading.Event()
    folder, load = publish(1), models.load

    def load_slow(path, **options):
        loaded = load(path)
        run = lambda inputs: {"y": inputs["x"] * (2 if not inputs["x"].any() or go_on.wait(10) else 0)}
        return Loaded(loaded.about, loaded.labels, run)

    monkeypatch.setattr(models, "load", load_slow)
    return folder, go_on


def test_what_there_is(publish, with_app):
    async def use(client):
        for path in (
            "/v2/health/live",
            "/v2/health/ready",
            "/v2/models/doubler/ready",
            "/v2/models/doubler/versions/3/ready",
        ):
            assert (await client.get(path)).status_code == 200, path
        assert (await client.get("/v2")).json()["name"] == "plait"
        assert (await client.get("/v2/models/doubler/versions/3")).json() == {
            "name": "doubler",
            "versions": ["3"],
            "platform": "plait",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
        }
        index = (await client.post("/v2/repository/index")).json()
        assert index == [{"name": "doubler", "version": "3", "state": "READY"}]
        about = (await client.get("/v2/models/doubler/about")).json()
        assert (about["step"], about["labels"], about["version"]) == (7, ["a", "b", "c"], "3")
        shown = await client.get("/")
        assert shown.headers["content-security-policy"].startswith("default-src 'none'")
        assert "Try a model" in shown.text

    with_app(publish(3), use)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", "/v2/models/nope", 404),
        ("GET", "/v2/models/nope/ready", 404),
        ("GET", "/v2/models/doubler/versions/2", 404),
        ("POST", "/v2/models/nope/infer", 404),
        ("POST", "/v2/models/doubler/versions/9/infer", 404),
        ("GET", INFER, 405),
        ("POST", "/v2", 405),
    ],
)
def test_what_there_is_not(publish, with_app, method, path, status):
    async def use(client):
        response = await client.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]

    with_app(publish(1), use)


def test_an_inference_in_json_and_one_in_bytes(publish, with_app):
    async def use(client):
        found = (await client.post(INFER, json=body([1, 2, 3]))).json()
        assert found["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1, 3], "data": [2.0, 4.0, 6.0]}]
        assert (found["model_name"], found["model_version"]) == ("doubler", "1")
        x = np.array([[1, 2, 3]], "f4")
        entry = {"name": "x", "datatype": "FP32", "shape": [1, 3], "parameters": {"binary_data_size": 12}}
        head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        response = await client.post(INFER, content=head + x.tobytes(), headers=headers)
        length = int(response.headers["inference-header-content-length"])
        np.testing.assert_array_equal(np.frombuffer(response.content[length:], "f4"), x[0] * 2)

    with_app(publish(1), use)


def test_too_large_a_body_is_refused_unread(publish, with_app):
    read = []

    async def parts(count):
        for _ in range(count):
            read.append(1)
            yield b" " * 1000

    async def use(client):
        said = await client.post(INFER, content=parts(50), headers={"Content-Length": "50000"})
        assert (said.status_code, said.headers["connection"]) == (413, "close")
        assert read == []
        unsaid = await client.post(INFER, content=parts(50))
        assert unsaid.status_code == 413
        assert len(read) < 10
        assert (await client.post(INFER, json=body([1, 2, 3]))).status_code == 200

    with_app(publish(1), use, max_body=4096)


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"Content-Length": "9" * 30}, 413), ({"Content-Length": "x"}, 400), ({"Content-Encoding": "gzip"}, 415)],
)
def test_headers_that_are_refused(publish, with_app, headers, status):
    async def use(client):
        assert (await client.post(INFER, content=b"{}", headers=headers)).status_code == status

    with_app(publish(1), use)


def test_a_body_that_does_not_come(publish, with_app):
    async def never():
        yield b"{"
        await asyncio.sleep(10)
        yield b"}"

    async def use(client):
        assert (await client.post(INFER, content=never())).status_code == 408
        assert "plait_requests_under_way 0" in (await client.get("/metrics")).text

    with_app(publish(1), use, timeout=0.05)


def test_beyond_the_queue_is_503(slow, with_app):
    folder, go_on = slow

    async def use(client):
        asked = [asyncio.create_task(client.post(INFER, json=body([1, 2, 3]))) for _ in range(3)]
        await asyncio.sleep(0.05)
        refused = await client.post(INFER, json=body([1, 2, 3]))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await client.get("/v2/health/live")).status_code == 200
        assert "plait_requests_under_way 3" in (await client.get("/metrics")).text
        go_on.set()
        assert [response.status_code for response in await asyncio.gather(*asked)] == [200] * 3
        counted = (await client.get("/metrics")).text
        assert 'plait_requests_total{model="doubler",code="503"} 1' in counted
        assert "plait_requests_under_way 0" in counted

    with_app(folder, use, queue=3)


def test_too_slow_is_504(slow, with_app):
    folder, go_on = slow

    async def use(client):
        assert (await client.post(INFER, json=body([1, 2, 3]))).status_code == 504
        go_on.set()

    with_app(folder, use, timeout=0.05)


def test_a_model_that_fails_is_500_and_says_no_values(publish, with_app, monkeypatch, caplog):
    folder, load = publish(1), models.load

    def fail(inputs):
        if inputs["x"].any():
            raise RuntimeError(f"values {inputs['x']}")
        return {"y": inputs["x"]}

    monkeypatch.setattr(models, "load", lambda path, **options: Loaded(load(path).about, None, fail))

    async def use(client):
        response = await client.post(INFER, json=body([123.5, 2, 3]))
        assert response.status_code == 500
        assert "123.5" not in response.text + caplog.text

    with_app(folder, use)


def test_hot_swap_under_load_loses_nothing(publish, with_app):
    folder = publish(1, 1.0)

    async def use(client):
        seen, done = [], asyncio.Event()

        async def keep_asking():
            while not done.is_set():
                response = await client.post(INFER, json=body([1, 1, 1]))
                assert response.status_code == 200
                found = response.json()
                seen.append(int(found["model_version"]))
                assert found["outputs"][0]["data"] == [float(found["model_version"])] * 3

        asking = [asyncio.create_task(keep_asking()) for _ in range(8)]
        for version in (2, 3, 4):
            publish(version, float(version))
            while not seen or seen[-1] != version:
                assert not any(task.done() for task in asking)
                await asyncio.sleep(0.005)
        done.set()
        await asyncio.gather(*asking)
        assert 'plait_model_swaps_total{model="doubler"} 3' in (await client.get("/metrics")).text
        return seen

    assert set(with_app(folder, use, poll=0.02)) == {1, 2, 3, 4}


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
malformed = st.one_of(
    st.binary(max_size=60).map(lambda content: (content, None)),
    st.tuples(
        anything.map(lambda content: json.dumps(content).encode()),
        st.none() | st.text(alphabet="0123456789-x", max_size=6),
    ),
    st.tuples(
        st.dictionaries(st.sampled_from(["name", "datatype", "shape", "data", "parameters"]), anything, min_size=1).map(
            lambda change: json.dumps({"inputs": [{**body([1, 2, 3])["inputs"][0], "shape": [7], **change}]}).encode()
        ),
        st.none(),
    ),
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(malformed, min_size=20, max_size=40))
def test_malformed_requests_are_4xx(publish, with_app, tmp_path, requests):
    folder = tmp_path / "doubler"
    if not folder.exists():
        publish(1)

    async def use(client):
        for content, length in requests:
            headers = {} if length is None else {"Inference-Header-Content-Length": length}
            response = await client.post(INFER, content=content, headers=headers)
            assert 400 <= response.status_code < 500, (content, length, response.text)
        assert (await client.post(INFER, json=body([1, 2, 3]))).status_code == 200

    with_app(folder, use)


def test_the_names_of_unknown_models_are_not_counted(publish, with_app):
    async def use(client):
        await asyncio.gather(*(client.post(f"/v2/models/guess-{n}/infer") for n in range(5)))
        assert "guess" not in (await client.get("/metrics")).text

    with_app(publish(1), use)
