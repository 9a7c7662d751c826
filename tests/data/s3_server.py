"""Fixtures: a real S3 server, as long as the tests of a file, and buckets on it. Import them all."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import boto3
import fsspec.asyn
import pytest

from plait.data import files

__all__ = ["KEYS", "START_SECONDS", "bucket", "client", "environment", "io_threads", "server"]

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
START_SECONDS = 60


@pytest.fixture(scope="module", autouse=True)
def server():
    """The address of a server that lives as long as the tests of this file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **KEYS}
    )
    try:
        wait_for(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def wait_for(port, process):
    until = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            return
        time.sleep(0.05)
    pytest.fail(f"moto's server does not answer (exit status {process.poll()})")


@pytest.fixture(scope="module", autouse=True)
def io_threads():
    """fsspec's thread and its helper live until Python ends: they have to be there before a test is watched."""
    loop, helper = fsspec.asyn.get_loop(), ThreadPoolExecutor(1)
    helper.submit(int).result()
    loop.call_soon_threadsafe(loop.set_default_executor, helper)


@pytest.fixture
def environment(server, monkeypatch):
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": server}.items():
        monkeypatch.setenv(name, value)
    yield server
    files.set_auth()


@pytest.fixture
def client(environment):
    client = boto3.client("s3")
    yield client
    client.close()


@pytest.fixture
def bucket(client):
    """The address of a bucket that is new and empty."""
    name = f"bucket-{os.urandom(8).hex()}"
    client.create_bucket(Bucket=name)
    return f"s3://{name}"
