"""The routes of `plait serve`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from plait.errors import DataError, UnavailableError
from plait.serve.asking import Asker
from plait.serve.batching import ModelFailedError
from plait.serve.gate import Gate
from plait.serve.metrics import Metrics
from plait.serve.models import Models, Served
from plait.serve.page import page
from plait.serve.protocol import describe, read_request, write_response
from plait.serve.settings import Settings
from plait.version import __version__

__all__ = ["make_app"]

log = logging.getLogger("plait")

BODIES = 8
"""So many of the largest bodies may be in memory together."""
LENGTH = "inference-header-content-length"
EXTENSIONS = ["binary_tensor_data", "model_repository"]


def make_app(
    directory: str | os.PathLike[str], settings: Settings | None = None, asker: Asker | None = None
) -> Starlette:
    """The server without a socket: any ASGI server runs it. The models are loaded when it starts up.

    `asker` asks the other party, where the models are parts of a federation's.
    """
    routes = _Routes(directory, settings or Settings(), asker)
    model = "/v2/models/{name}"
    version = model + "/versions/{version}"
    return Starlette(
        routes=[
            Route(model + "/infer", routes.infer, methods=["POST"]),
            Route(version + "/infer", routes.infer, methods=["POST"]),
            Route("/", routes.page),
            Route("/metrics", routes.metrics),
            Route("/v2", routes.server),
            Route("/v2/health/live", routes.live),
            Route("/v2/health/ready", routes.live),  # a server that answers has loaded its models
            Route("/v2/repository/index", routes.index, methods=["GET", "POST"]),
            Route(model, routes.model),
            Route(version, routes.model),
            Route(model + "/ready", routes.ready),
            Route(version + "/ready", routes.ready),
            Route(model + "/about", routes.about),
            Route(version + "/about", routes.about),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _unforeseen},
        lifespan=routes.lifespan,
    )


class _Routes:
    def __init__(self, directory: str | os.PathLike[str], settings: Settings, asker: Asker | None) -> None:
        self._settings, self._asker = settings, asker
        self._metrics = Metrics()
        self._gate = Gate(settings.queue, BODIES * settings.max_body)
        self._directory = directory
        self._models: Models

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:  # noqa: ARG002 - Starlette gives it
        self._models = Models(self._directory, self._settings, self._metrics, self._asker)
        try:
            await self._models.start()
            watch = asyncio.create_task(self._models.watch())
            try:
                yield
            finally:
                watch.cancel()
                await asyncio.wait([watch])
        finally:
            self._models.close()

    # ---- what there is

    async def page(self, request: Request) -> Response:  # noqa: ARG002 - a route takes its request
        html, policy = page()
        return HTMLResponse(html, headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache"})

    async def metrics(self, request: Request) -> Response:  # noqa: ARG002
        waiting = {served.name: served.batcher.waiting for served in self._models}
        versions = {served.name: served.version for served in self._models}
        text = self._metrics.text(self._gate.under_way, waiting, versions)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def server(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse({"name": "plait", "version": __version__, "extensions": EXTENSIONS})

    async def live(self, request: Request) -> Response:  # noqa: ARG002
        return Response()

    async def index(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse(
            [{"name": served.name, "version": served.version, "state": "READY"} for served in self._models]
        )

    async def ready(self, request: Request) -> Response:
        served = self._served(request)
        if served.whole is not None and self._asker is not None and not self._asker.ready:
            raise HTTPException(503, f"the {self._asker.peer}, whose part of the model is needed, is away")
        if served.whole is not None:
            try:
                await asyncio.to_thread(served.whole.check)  # it may be there with the part of another pair
            except UnavailableError as error:
                raise HTTPException(503, str(error)) from error
        return Response()

    async def model(self, request: Request) -> Response:
        served = self._served(request)
        return JSONResponse(
            {
                "name": served.name,
                "versions": [served.version],
                "platform": "plait",
                "inputs": describe(served.inputs),
                "outputs": describe(served.outputs),
            }
        )

    async def about(self, request: Request) -> Response:
        served = self._served(request)
        return JSONResponse({**served.loaded.about, "labels": served.loaded.labels, "version": served.version})

    def _served(self, request: Request) -> Served:
        name, version = request.path_params["name"], request.path_params.get("version")
        served = self._models.get(name)
        if served is None:
            raise HTTPException(404, "there is no model of this name; GET /v2/repository/index lists them")
        if version not in (None, served.version):
            raise HTTPException(404, f"this version is not served: version {served.version} is")
        return served

    # ---- inference

    async def infer(self, request: Request) -> Response:
        start = time.monotonic()
        served = self._served(request)
        response = await self._answer(served, request)
        self._metrics.request(served.name, response.status_code, time.monotonic() - start)
        return response

    async def _answer(self, served: Served, request: Request) -> Response:
        """Every way in which an inference can end."""
        try:
            limit = self._body_limit(request)
            with self._gate.inside(limit):
                return await self._inferred(served, request, await self._body(request, limit))
        except HTTPException as error:
            return _error(error.status_code, error.detail, error.headers)
        except DataError as error:
            return _error(400, str(error))
        except UnavailableError as error:
            return _error(503, str(error), {"Retry-After": "1"})
        except TimeoutError as error:
            return _error(504, str(error))
        except ModelFailedError as error:
            return _error(500, str(error))
        except ClientDisconnect:
            return _error(400, "the client has gone")  # nobody reads it

    def _body_limit(self, request: Request) -> int:
        """How many bytes the body has, or may have if the client does not say."""
        if request.headers.get("content-encoding", "identity") != "identity":
            raise HTTPException(415, "bodies are read as they are: send no Content-Encoding")
        text = request.headers.get("content-length")
        if text is None:
            return self._settings.max_body
        if not (text.isascii() and text.isdigit()):
            raise HTTPException(400, "Content-Length is no number", {"Connection": "close"})
        if len(text) > 18 or int(text) > self._settings.max_body:
            raise self._too_large()
        return int(text)

    def _too_large(self) -> HTTPException:
        text = f"the body is larger than {self._settings.max_body} bytes: send fewer rows in a request"
        return HTTPException(413, text, {"Connection": "close"})

    async def _body(self, request: Request, limit: int) -> bytes:
        parts, size = [], 0
        with anyio.move_on_after(self._settings.timeout):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise self._too_large()
                parts.append(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        raise HTTPException(408, "the body did not come in time", {"Connection": "close"})

    async def _inferred(self, served: Served, request: Request, body: bytes) -> Response:
        asked = read_request(body, request.headers.get(LENGTH), served.inputs, served.outputs)
        results = await served.batcher.infer(asked.inputs, asked.rows, self._settings.timeout)
        content, length = write_response(served.name, served.version, asked, results, served.outputs)
        if length is None:
            return Response(content, media_type="application/json")
        return Response(content, headers={LENGTH: str(length)}, media_type="application/octet-stream")


def _error(status: int, text: str, headers: Any = None) -> Response:
    return JSONResponse({"error": text}, status, headers)


async def _http_error(request: Request, error: Exception) -> Response:  # noqa: ARG001 - Starlette gives it
    if not isinstance(error, HTTPException):
        raise error
    return _error(error.status_code, error.detail, error.headers)


async def _unforeseen(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return _error(500, f"the server failed with {type(error).__name__}")
