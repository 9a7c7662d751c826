"""Models that are quick to make: an export that multiplies, and the application in this process."""

from __future__ import annotations

import asyncio
import functools
import json

import httpx
import numpy as np
import pytest

from plait.export.describe import write_about
from plait.export.loaded import Loaded
from plait.serve import models
from plait.serve.app import make_app
from plait.serve.settings import Settings


def tensor(name, dtype="float32", shape=(None, 3)):
    return {"name": name, "dtype": dtype, "shape": list(shape)}


def about(inputs=None, outputs=None):
    return {
        "formats": ["torch"],
        "inputs": inputs or [tensor("x")],
        "outputs": outputs or [tensor("y")],
        "step": 7,
        "metrics": {"accuracy": 0.5},
        "epsilon": None,
        "labels": None,
        "preprocess": None,
    }


def write_version(directory, version, factor=2.0, **facts):
    """A version whose model gives `factor` times its input; written as publishers do, with one rename."""
    hidden = directory / f".{version}.partial"
    hidden.mkdir(parents=True)
    (hidden / "factor.json").write_text(json.dumps(factor))
    write_about(hidden, about(**facts))
    hidden.rename(directory / str(version))
    return directory


def load_factor(folder, **options):
    described = json.loads((folder / "model.json").read_text())
    factor = json.loads((folder / "factor.json").read_text())
    name = described["inputs"][0]["name"]
    run = lambda inputs: {one["name"]: np.asarray(inputs[name] * factor, "f4") for one in described["outputs"]}
    return Loaded(described, ["a", "b", "c"], run)


@pytest.fixture
def publish(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load", load_factor)
    return functools.partial(write_version, tmp_path / "doubler")


@pytest.fixture
def with_app():
    """Run `await use(client)` beside the application of a directory."""

    def run(directory, use, **settings):
        async def main():
            app = make_app(directory, Settings(**{"poll": 60.0, **settings}))
            async with app.router.lifespan_context(app):
                transport = httpx.ASGITransport(app, raise_app_exceptions=False)
                async with httpx.AsyncClient(transport=transport, base_url="http://plait") as client:
                    return await use(client)

        return asyncio.run(main())

    return run
