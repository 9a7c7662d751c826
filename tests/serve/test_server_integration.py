"""The server as a process: a real client, raw sockets, and a stop that loses nothing."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from plait.export import load

from .serving import export_sums, server

INFER = "/v2/models/sums/infer"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "sums"
    export_sums(directory)
    return directory


def body(value=1.0):
    entry = {"name": "images", "datatype": "FP32", "shape": [1, 3, 8, 8], "data": [value] * 192}
    return {"inputs": [entry]}


def test_a_real_client(exported):
    client_module = pytest.importorskip("tritonclient.http")
    images = np.random.default_rng(0).random((3, 3, 8, 8), "f4")
    with server(exported) as process:
        client = client_module.InferenceServerClient(f"127.0.0.1:{process.port}")
        try:
            assert client.is_server_live()
            assert client.is_server_ready()
            assert client.is_model_ready("sums")
            assert client.is_model_ready("sums", "1")
            assert not client.is_model_ready("nope")
            assert client.get_server_metadata()["name"] == "plait"
            assert client.get_model_repository_index() == [{"name": "sums", "version": "1", "state": "READY"}]
            metadata = client.get_model_metadata("sums")
            (given,), (output,) = metadata["inputs"], metadata["outputs"]
            assert (given["datatype"], given["shape"]) == ("FP32", [-1, 3, 8, 8])
            asked = client_module.InferInput(given["name"], images.shape, "FP32")
            wanted = load(exported / "1").run({"images": images})[output["name"]]
            for binary in (True, False):
                asked.set_data_from_numpy(images, binary_data=binary)
                outputs = [client_module.InferRequestedOutput(output["name"], binary_data=binary)]
                found = client.infer("sums", [asked], outputs=outputs, request_id="one")
                np.testing.assert_array_equal(found.as_numpy(output["name"]), wanted)
                assert found.get_response()["id"] == "one"
            np.testing.assert_array_equal(client.infer("sums", [asked]).as_numpy(output["name"]), wanted)
            with pytest.raises(client_module.InferenceServerException, match="no model"):
                client.infer("nope", [asked])
        finally:
            client.close()


def test_sigterm_answers_what_is_under_way_and_takes_nothing_new(exported):
    answers = []
    with server(exported, "--batch-delay", "1500") as process:
        url = f"http://127.0.0.1:{process.port}"
        threads = [
            threading.Thread(target=lambda: answers.append(httpx.post(url + INFER, json=body(), timeout=20)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 10
        while "plait_requests_under_way 4" not in httpx.get(url + "/metrics").text and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.4)
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/v2/health/live")
        for thread in threads:
            thread.join()
        assert process.wait(20) == 0
    assert [answer.status_code for answer in answers] == [200] * 4


def test_a_new_version_under_load(exported, tmp_path):
    directory = tmp_path / "sums"
    export_sums(directory)
    with server(directory, "--poll", "0.05") as process:
        seen, done = [], threading.Event()

        def keep_asking():
            with httpx.Client(base_url=f"http://127.0.0.1:{process.port}") as client:
                while not done.is_set():
                    response = client.post(INFER, json=body())
                    seen.append((response.status_code, response.json().get("model_version")))

        threads = [threading.Thread(target=keep_asking) for _ in range(2)]
        for thread in threads:
            thread.start()
        export_sums(directory)
        until = time.monotonic() + 20
        while (200, "2") not in seen[-5:] and time.monotonic() < until:
            time.sleep(0.01)
        done.set()
        for thread in threads:
            thread.join()
    assert set(seen) == {(200, "1"), (200, "2")}


def raw(port, data):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(data)
        found = b""
        while part := connection.recv(65536):
            found += part
        return found


def test_413_before_the_body_is_sent(exported):
    with server(exported, "--max-body", "1") as process:
        head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000000\r\n\r\n"
        found = raw(process.port, head.encode())
        assert found.startswith(b"HTTP/1.1 413")
        assert json.loads(found.split(b"\r\n\r\n")[1])["error"]


def resident(process):
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
def test_10_000_malformed_requests_leave_nothing(exported):
    draw = np.random.default_rng(0)
    good = json.dumps(body()).encode()
    with server(exported) as process, httpx.Client(base_url=f"http://127.0.0.1:{process.port}") as client:

        def send(count):
            for _ in range(count):
                content = bytearray(good)
                content[int(draw.integers(30))] = 0  # no JSON has this byte
                cut = bytes(content[: int(draw.integers(1, len(content)))])
                headers = {"Inference-Header-Content-Length": str(draw.integers(2000))} if draw.random() < 0.5 else {}
                assert 400 <= client.post(INFER, content=cut, headers=headers).status_code < 500

        send(2000)
        before = resident(process)
        send(8000)
        assert resident(process) - before < 8 * 2**20
        assert client.post(INFER, json=body()).status_code == 200


def test_what_cannot_be_served_is_one_message(tmp_path):
    command = [sys.executable, "-m", "plait", "serve", str(tmp_path), "--port", "0"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no exported model" in done.stderr
    assert "Traceback" not in done.stderr
