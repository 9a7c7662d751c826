"""Two servers of two parties as processes: one is killed, comes back, and both get a new version while clients ask."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from plait.export import export
from plait.federal import certificates

from .serving import server

INFER = "/v2/models/leader/infer"
ROWS = {"id": torch.tensor([30, 10, 20]), "x": torch.tensor([[3.0], [1.0], [2.0]])}


class Adds(nn.Module):
    def forward(self, own, theirs):
        return {"sum": own + theirs}


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return {"x": x * self.factor}


def export_pair(root, pair, factor):
    """The follower's part is there first, as it should be."""
    facts = {"role": "follower", "pair": pair, "key": "id", "receives": {}, "sends": ["x"]}
    formats = ["onnx"]
    export(Times(factor), {"x": torch.rand(2, 1)}, root / "follower", formats=formats, facts={"party": facts})
    facts = {"role": "leader", "pair": pair, "key": "id", "receives": {"theirs": "x"}, "sends": []}
    example = {"own": torch.rand(2, 1), "theirs": torch.rand(2, 1)}
    export(Adds(), example, root / "leader", formats=formats, facts={"party": facts})


@contextlib.contextmanager
def follower(root, listen="127.0.0.1:0"):
    arguments = ["--party", "follower", "--listen", listen, "--certs", str(root / "certs"), "--poll", "0.05"]
    command = [sys.executable, "-m", "plait", "serve", str(root / "follower"), "--rows", str(root / "rows")]
    process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        lines = []
        while not (found := re.search(r"listens at (\S+),", lines[-1] if lines else "")):
            lines.append(process.stderr.readline())
            assert lines[-1], f"the follower has ended: {lines}"
        process.endpoint = found[1]
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def body(*keys):
    own = {"name": "own", "datatype": "FP32", "shape": [len(keys), 1], "data": [100.0] * len(keys)}
    return {"inputs": [own, {"name": "id", "datatype": "INT64", "shape": [len(keys)], "data": list(keys)}]}


@pytest.mark.slow
def test_two_servers_of_two_parties(tmp_path):
    certificates.init(tmp_path / "certs")
    save_file(ROWS, tmp_path / "rows")
    export_pair(tmp_path, "one", 2.0)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(follower(tmp_path))
        arguments = ["--party", "leader", "--peer", first.endpoint, "--certs", str(tmp_path / "certs")]
        leader = stack.enter_context(server(tmp_path / "leader", *arguments, "--poll", "0.05"))
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{leader.port}", timeout=30))

        def ask(*keys):
            answer = client.post(INFER, json=body(*keys))
            return answer.status_code, answer.json().get("outputs", [{}])[0].get("data") or answer.json().get("error")

        assert ask(10, 30) == (200, [102, 106])
        assert ask(10, 31)[0] == 400

        first.send_signal(signal.SIGKILL)
        first.wait()
        begun = time.monotonic()
        status, text = ask(10)
        assert status == 503
        assert "the follower, whose part of the model is needed" in text
        assert time.monotonic() - begun < 5

        second = stack.enter_context(follower(tmp_path, first.endpoint))
        until = time.monotonic() + 30
        while ask(10)[0] != 200:
            assert time.monotonic() < until
            time.sleep(0.05)

        seen, done = [], threading.Event()

        def keep_asking():
            with httpx.Client(base_url=f"http://127.0.0.1:{leader.port}", timeout=30) as other:
                while not done.is_set():
                    answer = other.post(INFER, json=body(20))
                    seen.append((answer.status_code, answer.json().get("outputs", [{}])[0].get("data", [None])[0]))

        threads = [threading.Thread(target=keep_asking) for _ in range(2)]
        for thread in threads:
            thread.start()
        export_pair(tmp_path, "two", 3.0)
        until = time.monotonic() + 30
        while (200, 106.0) not in seen[-5:] and time.monotonic() < until:
            time.sleep(0.01)
        done.set()
        for thread in threads:
            thread.join()
        assert set(seen) == {(200, 104.0), (200, 106.0)}

        for process in (leader, second):
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
