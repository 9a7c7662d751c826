"""Services and connections that end with their test."""

from __future__ import annotations

import pytest

from plait.cluster.ps.client import Connection
from plait.cluster.ps.service import Service


def _echo(request):
    request.reply(request.head, request.tensors)


@pytest.fixture
def serve():
    """Start a service; without a handler, one that sends back what it gets."""
    made = []

    def start(handle=_echo, endpoint="127.0.0.1:0", **settings):
        service = Service(endpoint, handle, **settings)
        made.append(service)
        service.start()
        return service

    yield start
    for service in made:
        service.stop()


@pytest.fixture
def connect():
    """Connect worker 0 to a service, or to an endpoint."""
    made = []

    def start(to, name="server 0", **settings):
        endpoint = to if isinstance(to, str) else to.endpoint
        connection = Connection(endpoint, name=name, own="worker 0", **{"timeout": 10, **settings})
        made.append(connection)
        return connection

    yield start
    for connection in made:
        connection.close()
