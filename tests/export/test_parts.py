from __future__ import annotations

import functools
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import plait
from plait import demo, efl
from plait.data import TensorSource
from plait.errors import ConfigError
from plait.export import load
from plait.export.parts import export_part

HELD_OUT = 1437
ADAM = efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.Adam, lr=0.01))


def source(fields):
    images, digits = demo.load()
    values = {"left": images[..., :4].flatten(1), "right": images[..., 4:].flatten(1), "digit": digits}
    rows = {name: values[name] for name in fields}
    return lambda model, mode: TensorSource({name: value[:HELD_OUT] for name, value in rows.items()}, 32)


def logits_of(model, sample, require_grad=False):
    left = plait.layer("left", nn.Linear, 32, 64)(sample.left).relu()
    right = model.recv("right", require_grad=require_grad)
    normed = plait.layer("norm", nn.BatchNorm1d, 128)(torch.cat([left, right], 1))
    hidden = plait.layer("hidden", nn.Linear, 128, 64)(normed).relu()
    hidden = hidden * plait.get_variable("scale", shape=[64], initializer=nn.init.ones_)
    return plait.layer("output", nn.Linear, 64, 10)(hidden)


def loss_fn(model, sample):
    plait.layer("unused", nn.Linear, 32, 777)(sample.left)
    return nn.functional.cross_entropy(logits_of(model, sample, require_grad=True), sample.digit)


def right_of(sample):
    return plait.layer("right", nn.Linear, 32, 64)(sample.right).relu()


def predict_left(model, sample):
    logits = logits_of(model, sample)
    return {"logits": logits, "digit": logits.argmax(1)}


def predict_right(model, sample):
    model.send("right", right_of(sample))


def both(*runs):
    """What both functions return, each called in a thread with its end of a pair."""
    ends = efl.Communicator.pair(timeout=20.0)

    def run(place):
        try:
            return runs[place](ends[place])
        finally:
            ends[place].close()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def party(fields, loss_fn, predict_fn):
    def run(joined):
        model = efl.FederalModel(communicator=joined)
        model.input_fn(source(fields)).loss_fn(loss_fn).optimizer_fn(ADAM)
        model.fit(efl.procedure_fn.train())
        return model.part(predict_fn, {fields[0]: torch.rand(2, 32)})

    return run


@pytest.fixture(scope="module")
def parts():
    """The digits federation, trained for a pass: the leader's part and the follower's."""

    def sends(model, sample):
        model.send("right", right_of(sample), require_grad=True)

    return both(
        party(["left", "digit"], loss_fn, predict_left),
        party(["right"], sends, predict_right),
    )


@pytest.fixture(scope="module")
def exported(parts, tmp_path_factory):
    root = tmp_path_factory.mktemp("parts")
    formats = ["torch", "onnx"]
    return [export_part(part, root / part.facts["role"], formats=formats) for part in parts]


def eager(parts, left, right):
    """What the federation computes, by the functions that it was trained with."""
    (leader, follower), sample = parts, efl.Sample({"right": right})
    norm = dict(leader.model.named_modules())
    modules = [module for module in norm.values() if isinstance(module, nn.BatchNorm1d)]
    assert len(modules) == 1
    with torch.no_grad():
        with follower.model.scope():
            sent = right_of(sample)
        modules[0].eval()
        with leader.model.scope():
            hidden = plait.layer("left", nn.Linear, 32, 64)(left).relu()
            hidden = modules[0](torch.cat([hidden, sent], 1))
            hidden = plait.layer("hidden", nn.Linear, 128, 64)(hidden).relu() * plait.get_variable("scale")
            return plait.layer("output", nn.Linear, 64, 10)(hidden)


@pytest.mark.parametrize("kind", ["torch", "onnx"])
@pytest.mark.parametrize("rows", [1, 3, 32])
def test_exported_parts_together_equal_the_federation(parts, exported, rows, kind):
    images = demo.load()[0][HELD_OUT : HELD_OUT + rows]
    left, right = images[..., :4].flatten(1), images[..., 4:].flatten(1)
    leader, follower = (load(where, format=kind) for where in exported)
    sent = follower.run({"right": right.numpy()})
    found = leader.run({"left": left.numpy(), "right": sent["right"]})
    wanted = eager(parts, left, right).numpy()
    np.testing.assert_allclose(found["logits"], wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    assert (found["logits"].argmax(1) == wanted.argmax(1)).all()
    assert (found["digit"] == wanted.argmax(1)).all()


def test_what_is_written_of_them(parts, exported):
    leader, follower = (json.loads((where / "model.json").read_text()) for where in exported)
    assert leader["party"] == parts[0].facts
    assert leader["party"]["receives"] == {"right": "right"}
    assert follower["party"]["sends"] == ["right"]
    assert leader["party"]["pair"] == follower["party"]["pair"]
    assert (leader["step"], follower["step"]) == (45, 45)  # batches of 32 of 1437 images
    assert [one["name"] for one in leader["inputs"]] == ["left", "right"]
    assert [one["shape"] for one in follower["outputs"]] == [[None, 64]]


def test_variables_that_it_does_not_use_stay_at_home(exported):
    program = torch.export.load(exported[0] / "model.pt2")
    assert 777 not in {value.shape[0] for value in program.state_dict.values() if value.ndim}


def test_anything_else_is_no_part(tmp_path):
    with pytest.raises(ConfigError, match="write model.part"):
        export_part(lambda x: x, tmp_path)
