from __future__ import annotations

import importlib

import pytest
import torch

from plait import nets
from plait.errors import ConfigError
from plait.nets.blocks import BatchNorm, Net
from plait.nets.family import Shape
from plait.nets.registry import NETS, Card, NetInfo, build, card, info, scope_of

NAMES = """
alexnet_v2 cifarnet overfeat vgg_a vgg_16 vgg_19 vgg_a_bn vgg_16_bn vgg_19_bn
inception_v1 inception_v2 inception_v3 inception_v4 inception_resnet_v2 lenet
resnet_v1_18 resnet_v1_50 resnet_v1_50_8k resnet_v1_101 resnet_v1_152 resnet_v1_200
resnet_v2_50 resnet_v2_101 resnet_v2_152 resnet_v2_200 resnext_b_50 resnext_b_101 resnext_c_50 resnext_c_101
pvanet mobilenet_v1 mobilenet_v1_075 mobilenet_v1_050 mobilenet_v1_025 mobilenet_v2 mobilenet_v2_140 mobilenet_v2_035
resnet_v1_20 resnet_v1_110 nasnet_cifar nasnet_mobile nasnet_large pnasnet_large pnasnet_mobile
""".split()  # noqa: SIM905 - as a list it would take 44 lines


def recorder(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What `build` hands to the family of residual networks."""
    calls: list[tuple] = []

    def create(name: str, shape: Shape, *, renorm: bool = False, colour: str = "red") -> Net:
        calls.append((name, shape, renorm, colour))
        return Net()

    monkeypatch.setattr(importlib.import_module("plait.nets.resnet"), "create", create)
    return calls


def test_all_44_in_the_documents_order():
    assert len(NAMES) == 44
    assert list(NETS) == NAMES


def test_what_is_known_before_a_network_is_built():
    assert info("resnet_v1_50") == NetInfo("resnet", 224, 3, 1, 1000, "vgg", "logits")
    assert info("lenet") == NetInfo("simple", 28, 1, 0, 10, "lenet", "fc4")
    assert info("nasnet_large") == NetInfo("nasnet", 331, 3, 0, 1001, "inception", "final_layer")


def test_facts_that_hold_for_all():
    for name, facts in NETS.items():
        assert facts.classes == (1000 if facts.labels_offset else facts.classes), name
        assert facts.classes in (10, 1000, 1001), name
        assert (facts.classes == 10) == (facts.image_size <= 32), name
        assert facts.channels == (1 if name == "lenet" else 3), name
        assert facts.preprocessing in ("vgg", "inception", "cifarnet", "lenet", "pvanet"), name


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("resnet_50", "resnet_v"),
        ("mobilenetv2", "mobilenet_v2"),
        ("vgg16", "vgg_16"),
        ("???", "alexnet_v2"),
        (7, "mobilenet_v1_075"),
    ],
)
def test_an_unknown_name_gets_the_near_ones(name: object, near: str):
    with pytest.raises(ConfigError, match=f"no network .*nearest: .*{near}.*`plait nets` lists all 44"):
        info(name)
    with pytest.raises(ConfigError, match="there is no network"):
        build(name)


def test_what_is_left_out_is_as_in_the_paper(monkeypatch: pytest.MonkeyPatch):
    calls = recorder(monkeypatch)
    build("resnet_v1_20")
    assert calls == [("resnet_v1_20", Shape(channels=3, height=32, width=32, classes=10), False, "red")]


def test_what_is_given_is_handed_on(monkeypatch: pytest.MonkeyPatch):
    calls = recorder(monkeypatch)
    build("resnet_v1_50", 7, channels=4, height=96, width=128, renorm=True, colour="blue")
    assert calls == [("resnet_v1_50", Shape(channels=4, height=96, width=128, classes=7), True, "blue")]


@pytest.mark.parametrize("classes", [0, -3])
def test_a_network_needs_a_class(classes: int):
    with pytest.raises(ConfigError, match=f"classes={classes}.*at least 1"):
        build("resnet_v1_20", classes)


def test_an_unknown_option(monkeypatch: pytest.MonkeyPatch):
    recorder(monkeypatch)
    with pytest.raises(ConfigError, match="resnet_v1_20 has no option .flavour.; it has colour"):
        build("resnet_v1_20", flavour="sour")


def test_an_error_inside_a_family_is_not_taken_for_a_wrong_option(monkeypatch: pytest.MonkeyPatch):
    def create(name: str, shape: Shape, *, renorm: bool = False) -> Net:
        raise TypeError("broken")

    monkeypatch.setattr(importlib.import_module("plait.nets.resnet"), "create", create)
    with pytest.raises(TypeError, match="broken"):
        build("resnet_v1_20")


def test_a_network_with_other_channels_and_classes():
    net = build("resnet_v1_20", 3, channels=1)
    logits, points = net(torch.zeros(2, 1, 32, 32))
    assert logits.shape == (2, 3)
    assert points["resnet_v1_20/logits"].shape == (2, 3)


def test_a_card_counts_parameters_and_multiply_adds():
    assert card("resnet_v1_20") == Card(parameters=269_722, multiply_adds=40_551_040)
    more = card("resnet_v1_20", 1000)
    assert more.parameters - 269_722 == 65 * 990  # weights and a bias of each class
    assert more.multiply_adds - 40_551_040 == 64 * 990


def test_a_card_leaves_auxiliary_heads_out(monkeypatch: pytest.MonkeyPatch):
    class WithHead(Net):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Linear(3 * 32 * 32, 10)
            self.AuxLogits = torch.nn.Linear(10, 10)

        def forward(self, images):
            return self.body(images.flatten(1)), {}

    monkeypatch.setattr(importlib.import_module("plait.nets.resnet"), "create", lambda *_, **__: WithHead())
    assert card("resnet_v1_20") == (3 * 32 * 32 * 10 + 10, 3 * 32 * 32 * 10)


def test_a_card_draws_no_numbers():
    before = torch.get_rng_state()
    card("resnet_v1_20")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_room_gives_the_registry():
    assert nets.__all__ == ["NETS", "build", "card", "info", "scope_of"]
    assert nets.build is build


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("resnet_v1_50", "resnet_v1_50"),
        ("inception_v3", "InceptionV3"),
        ("lenet", "LeNet"),
        ("mobilenet_v1_025", "MobilenetV1"),
        ("mobilenet_v2_140", "MobilenetV2"),
        ("nasnet_cifar", "nasnet_cifar"),
    ],
)
def test_variables_are_kept_under_slims_scope(name: str, scope: str):
    assert scope_of(name) == scope


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_network_can_be_built(name: str):
    with torch.device("meta"):
        net = build(name, 7, renorm=True)
    assert isinstance(net, Net)
    assert net.scope == scope_of(name)
    norms = [module for module in net.modules() if isinstance(module, BatchNorm)]
    assert all(norm.renorm for norm in norms)
    assert net.decayed_variables()
