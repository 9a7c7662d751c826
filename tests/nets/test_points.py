from __future__ import annotations

import pytest
import torch

import plait
from plait import mox, nets
from plait.errors import FunctionError
from plait.nets.points import EndPoints, Kept


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nets.build("resnet_v1_20").eval()


IMAGES = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def count_runs(net, monkeypatch):
    runs = []
    forward = net.forward
    monkeypatch.setattr(net, "forward", lambda images: (runs.append(1), forward(images))[1])
    return runs


def test_kept_takes_what_is_wanted():
    kept = Kept({"a"})
    kept["a"], kept["b"], kept["row"] = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), torch.ones(1, 1)
    assert list(kept) == ["a", "row"]
    assert kept.wants("a")
    assert not kept.wants("b")
    everything = Kept(None)
    everything["b"] = torch.ones(1)
    assert list(everything) == ["b"]


def test_an_end_point_that_nobody_looked_at_is_worked_out_once_and_kept_then(net, monkeypatch):
    runs = count_runs(net, monkeypatch)
    with torch.no_grad():
        logits, points = net(IMAGES)
        assert len(runs) == 1
        found = points["resnet_v1_20/block1"]
        assert len(runs) == 2
        assert net.points.looked_at == {"resnet_v1_20/block1"}
        again, points = net(IMAGES)
        assert points["resnet_v1_20/block1"].equal(found)
    assert len(runs) == 3
    assert logits.equal(again)


def test_they_are_those_of_a_forward_pass(net):
    expected = net.forward(IMAGES)[1]
    with torch.no_grad():
        _, points = net(IMAGES)
    assert set(points) == set(expected)
    assert len(points) == len(expected)
    assert all(points[name].equal(expected[name]) for name in expected)
    assert "global_pool" in points
    assert "block1" in repr(points)


def test_names_that_are_not_there(net):
    with torch.no_grad():
        _, points = net(IMAGES)
    with pytest.raises(KeyError):
        points["block9"]
    assert points.get("block9") is None
    assert net.points.looked_at == set()


def test_a_caller_may_add_and_remove(net):
    with torch.no_grad():
        _, points = net(IMAGES)
    points["mine"] = torch.ones(1)
    del points["predictions"]
    assert "mine" in points
    assert "predictions" not in points
    assert "global_pool" in points


@pytest.mark.parametrize("training", [True, False])
def test_with_gradients_all_are_there(net, training):
    _, points = net.train(training)(IMAGES)
    assert "resnet_v1_20/block3" in points
    assert all(points[name].requires_grad for name in points)


def test_a_build_without_gradients_in_training_mode_sees_them(net):
    with torch.no_grad():
        _, points = net.train()(IMAGES)
    assert "resnet_v1_20/block3" in points


def test_auxiliary_heads_that_nobody_looks_at_are_not_run(monkeypatch):
    net = nets.build("inception_v3", height=107, width=107).eval()
    images = torch.randn(1, 3, 107, 107)
    runs = []
    net.AuxLogits.register_forward_hook(lambda *_: runs.append(1))
    with torch.no_grad():
        _, points = net(images)
        assert runs == []
        assert points["AuxLogits"].shape == (1, 1001)
        net(images)
    assert len(runs) == 2


def test_through_the_door_they_are_in_the_order_of_the_data_format():
    images = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)
    with plait.Model().scope(), torch.no_grad():
        _, points = mox.get_model_fn("resnet_v1_20", "EVAL", 10)(images)
        assert isinstance(points, EndPoints)
        assert points["resnet_v1_20/block2"].shape == (2, 16, 16, 32)
        assert {name: value.ndim for name, value in points.items()}["predictions"] == 2


def test_going_through_all_of_them_runs_the_network_once_more_and_never_again(net, monkeypatch):
    runs = count_runs(net, monkeypatch)
    with torch.no_grad():
        for _ in range(4):
            _, points = net(IMAGES)
            assert "AuxLogits" not in points
            assert len(dict(points.items())) == len(points)
    assert len(runs) == 5


@pytest.mark.parametrize(
    "change",
    [
        lambda net, images: net.train(),
        lambda net, images: net.conv1.weights.mul_(2),
        lambda net, images: images.add_(1),
    ],
)
def test_a_late_look_at_a_changed_network_is_refused(net, change):
    images = IMAGES.clone()
    with torch.no_grad():
        _, points = net(images)
        change(net, images)
        with pytest.raises(FunctionError, match="right after the call"):
            points["resnet_v1_20/block1"]


def test_a_late_look_has_the_precision_of_the_call(net):
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, points = net(IMAGES)
        assert points["resnet_v1_20/block1"].dtype is torch.bfloat16
