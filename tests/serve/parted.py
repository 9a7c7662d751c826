"""A model of two parts, made by hand: the follower doubles its x, the leader adds that to its own."""

from __future__ import annotations

import contextlib
import json

import numpy as np

from plait.export.describe import write_about
from plait.export.loaded import Loaded
from plait.federal.settings import Party
from plait.serve.answering import Answerer, Parts
from plait.serve.asking import Asker
from plait.serve.rows import Table
from plait.serve.settings import Settings

from .conftest import about, tensor

KEYS = np.array([30, 10, 20])
ROWS = {"id": KEYS, "x": np.array([[3.0, 3.0], [1.0, 1.0], [2.0, 2.0]], "f4")}


def described(party, inputs, outputs):
    return {**about([tensor(name, shape=(None, 2)) for name in inputs],
                    [tensor(name, shape=(None, 2)) for name in outputs]), "party": party}  # fmt: skip


def write_part(directory, pair, factor, party, inputs, outputs):
    """A version whose program is a number; `open_part` reads it."""
    version = directory / str(1 + sum(1 for _ in directory.glob("[0-9]*")))
    version.mkdir(parents=True)
    (version / "factor.json").write_text(json.dumps(factor))
    write_about(version, described({"pair": pair, "key": "id", **party}, inputs, outputs))
    return version


def write_leader(directory, pair="one", factor=1.0):
    party = {"role": "leader", "receives": {"theirs": "the/half"}, "sends": []}
    return write_part(directory, pair, factor, party, ["own", "theirs"], ["sum"])


def write_follower(directory, pair="one", factor=2.0):
    party = {"role": "follower", "receives": {}, "sends": ["the/half"]}
    return write_part(directory, pair, factor, party, ["x"], ["the/half"])


def open_part(folder, **options):
    found = json.loads((folder / "model.json").read_text())
    factor, name = json.loads((folder / "factor.json").read_text()), found["outputs"][0]["name"]
    return Loaded(found, None, lambda inputs: {name: np.asarray(sum(inputs.values()) * factor, "f4")})


@contextlib.contextmanager
def answering(directory, listen="127.0.0.1:0", rows=None, *, certs=None, poll=0.01, **party):
    parts = Parts(directory, Settings(poll=poll))
    found = Party(role="follower", listen=listen, certs=certs, **{"timeout": 20.0, **party})
    answerer = Answerer(found, parts, rows or Table(ROWS), batch=2)
    try:
        yield answerer
    finally:
        answerer.close()


@contextlib.contextmanager
def asking(endpoint, *, seconds=10.0, certs=None, **party):
    asker = Asker(Party(role="leader", peer=endpoint, certs=certs, **{"timeout": 20.0, **party}), seconds)
    try:
        yield asker
    finally:
        asker.close()
