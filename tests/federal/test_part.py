from __future__ import annotations

import pytest
import torch
from torch import nn

import plait
from plait import efl
from plait.errors import ConfigError, FederalError, FunctionError

from . import pair

TRAIN = efl.procedure_fn.train_and_eval(max_iter=1)
EXAMPLE = {"x": torch.rand(2, 4)}


def logits(model, sample):
    hidden = model.recv("hidden")
    own = pair.dense("left", 4, 5, sample.x).relu()
    return {"logits": pair.dense("top", 10, 3, torch.cat([own, hidden], 1))}


def hidden(model, sample):
    model.send("hidden", pair.dense("right", 4, 5, sample.x).relu())


def parted(predict_fn, inputs=EXAMPLE, *, follows=False, model=None, **made):
    """A function of a communicator that trains a party and makes its part."""

    def run(joined):
        train = pair.follower if follows else pair.leader
        evaluate = pair.follower_eval if follows else pair.leader_eval
        trained = train(TRAIN, evaluate=evaluate, model={"sample_id": "id", **(model or {})}, **made)(joined).model
        return trained.part(predict_fn, inputs)

    return run


def test_the_parts_together_are_the_model():
    leader, follower = pair.both(parted(logits), parted(hidden, follows=True))
    sent = follower(x=pair.X[:32, 4:])
    assert list(sent) == ["hidden"]
    found = leader(x=pair.X[:32, :4], hidden=sent["hidden"])["logits"]
    with leader.model.scope():
        own = pair.dense("left", 4, 5, pair.X[:32, :4]).relu()
        with follower.model.scope():
            other = pair.dense("right", 4, 5, pair.X[:32, 4:]).relu()
        wanted = pair.dense("top", 10, 3, torch.cat([own, other], 1))
    assert torch.equal(found, wanted)


def test_what_travels():
    leader, follower = pair.both(parted(logits), parted(hidden, follows=True))
    assert {name: value.shape for name, value in leader.inputs.items()} == {"x": (2, 4), "hidden": (2, 5)}
    assert list(follower.inputs) == ["x"]
    assert leader.facts == {
        "role": "leader", "pair": follower.facts["pair"], "key": "id", "receives": {"hidden": "hidden"}, "sends": [],
    }  # fmt: skip
    assert (follower.facts["role"], follower.facts["receives"], follower.facts["sends"]) == ("follower", {}, ["hidden"])
    assert len(leader.facts["pair"]) == 32


def test_each_pair_has_a_name_of_its_own():
    def twice(predict_fn, **how):
        def run(joined):
            model = parted(predict_fn, **how)(joined).model
            return [model.part(predict_fn, EXAMPLE).facts["pair"] for _ in range(2)]

        return run

    leaders, followers = pair.both(twice(logits), twice(hidden, follows=True))
    assert leaders == followers
    assert len(set(leaders)) == 2


def test_training_goes_on_as_if_nothing_had_been():
    def loss(model, sample):
        model.noise = plait.layer("drop", nn.Dropout, 0.5)
        return pair.leader_loss(model, sample)

    leader, _ = pair.both(parted(logits, loss=loss), parted(hidden, follows=True))
    assert leader.model.training
    assert leader.model.noise.training
    with pytest.raises(FunctionError, match="outside of loss_fn and eval_fn"):
        leader.model.recv("hidden")


def test_a_received_name_is_made_a_parameters():
    def ask(model, sample):
        return model.recv("1/hidden of") + sample.hidden_of

    def send(name):
        return lambda model, sample: model.send(name, pair.dense("right", 4, 5, sample.x), require_grad=True)

    def loss(model, sample):
        return pair.head(pair.dense("left", 4, 5, sample.x), model.recv("1/hidden of", require_grad=True), sample.y)

    def run(fields, loss, predict_fn, inputs):
        def trained(joined):
            made = pair.make(fields, loss, joined=joined)
            made.compile()
            return made.part(predict_fn, inputs)

        return trained

    example = {"hidden_of": torch.rand(3, 5), "_1_hidden_of": torch.rand(3, 5)}
    leader, follower = pair.both(
        run(pair.LEFT, loss, ask, example),
        run(pair.RIGHT, send("1/hidden of"), send("1/hidden of"), {"x": torch.rand(3, 4)}),
    )
    assert leader.facts["receives"] == {"_1_hidden_of_": "1/hidden of"}
    assert follower.facts["sends"] == ["1/hidden of"]
    assert leader.inputs["_1_hidden_of_"].shape == (3, 5)


@pytest.mark.parametrize(
    ("predict_fn", "inputs", "text"),
    [
        (lambda model, sample: sample.x, EXAMPLE, "neither sends nor receives"),
        (lambda model, sample: None if model.recv("hidden") is None else None, EXAMPLE, "returned nothing"),
        (lambda model, sample: model.send("back", model.recv("hidden")), EXAMPLE, "sends back and receives hidden"),
        (lambda model, sample: model.recv("other"), EXAMPLE, "never sent in training: it sent hidden"),
        (logits, {}, "an example of each input"),
        (logits, {"x": torch.rand(2, 4), "y": torch.rand(3)}, "same number of rows"),
        (logits, {"x": torch.rand(2, 4), "id": torch.arange(2)}, "what rows are asked for by"),
    ],
)
def test_a_wrong_part_is_refused_and_the_other_party_is_told(predict_fn, inputs, text):
    ours, theirs = pair.refused(parted(predict_fn, inputs), parted(hidden, follows=True), seconds=20)
    assert isinstance(ours, (ConfigError, FunctionError))
    assert text in str(ours)
    assert "the leader has ended" in str(theirs)


@pytest.mark.parametrize(
    ("predict_fn", "text"),
    [
        (lambda model, sample: model.send("hidden", sample.x.mean(0)), "shape [4] for 2 rows"),
        (lambda model, sample: [model.send("hidden", sample.x) for _ in range(2)], "twice"),
    ],
)
def test_what_a_follower_may_not_send(predict_fn, text):
    _, ours = pair.outcomes(parted(logits), parted(predict_fn, follows=True))
    assert isinstance(ours, FunctionError)
    assert text in str(ours)


def test_parts_of_other_steps_do_not_belong_together():
    def later(joined):
        model = parted(hidden, follows=True)(joined).model
        model.global_step.increment()
        return model.part(hidden, EXAMPLE)

    def twice(joined):
        return parted(logits)(joined).model.part(logits, EXAMPLE)

    with pytest.raises(FederalError, match="at step 11, the follower at step 12"):
        pair.both(twice, later)
