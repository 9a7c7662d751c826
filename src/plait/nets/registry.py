"""The table of networks, and how one is built."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import re
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from plait.errors import ConfigError
from plait.nets.blocks import Net
from plait.nets.family import Create, Shape

__all__ = ["NETS", "Card", "NetInfo", "build", "card", "info", "scope_of"]


class NetInfo(NamedTuple):
    """What is known of a network before it is built."""

    family: str
    """The file of this room that has it."""
    image_size: int
    channels: int
    labels_offset: int
    classes: int
    """Of its paper, or of the checkpoints that go with it."""
    preprocessing: str
    logits_pattern: str


def _table() -> dict[str, NetInfo]:
    found: dict[str, NetInfo] = {}

    def add(family: str, names: str, *facts: Any) -> None:
        found.update({name: NetInfo(family, *facts) for name in names.split()})

    add("simple", "alexnet_v2", 224, 3, 1, 1000, "vgg", "fc8")
    add("simple", "cifarnet", 32, 3, 0, 10, "cifarnet", "logits")
    add("simple", "overfeat", 231, 3, 1, 1000, "vgg", "fc8")
    add("vgg", "vgg_a vgg_16 vgg_19 vgg_a_bn vgg_16_bn vgg_19_bn", 224, 3, 1, 1000, "vgg", "fc8")
    add("inception_v1", "inception_v1", 224, 3, 0, 1001, "inception", "Logits")
    add("inception_v2", "inception_v2", 224, 3, 0, 1001, "inception", "Logits")
    add("inception_v3", "inception_v3", 299, 3, 0, 1001, "inception", "Logits")
    add("inception_v4", "inception_v4", 299, 3, 0, 1001, "inception", "Logits")
    add("inception_resnet_v2", "inception_resnet_v2", 299, 3, 0, 1001, "inception", "Logits")
    add("simple", "lenet", 28, 1, 0, 10, "lenet", "fc4")
    add("resnet", "resnet_v1_18 resnet_v1_50 resnet_v1_50_8k", 224, 3, 1, 1000, "vgg", "logits")
    add("resnet", "resnet_v1_101 resnet_v1_152 resnet_v1_200", 224, 3, 1, 1000, "vgg", "logits")
    add("resnet", "resnet_v2_50 resnet_v2_101 resnet_v2_152 resnet_v2_200", 224, 3, 1, 1000, "vgg", "logits")
    add("resnet", "resnext_b_50 resnext_b_101 resnext_c_50 resnext_c_101", 224, 3, 1, 1000, "vgg", "logits")
    add("pvanet", "pvanet", 192, 3, 1, 1000, "pvanet", "fc8")
    add("mobilenet_v1", "mobilenet_v1 mobilenet_v1_075", 224, 3, 0, 1001, "inception", "Logits")
    add("mobilenet_v1", "mobilenet_v1_050 mobilenet_v1_025", 224, 3, 0, 1001, "inception", "Logits")
    add("mobilenet_v2", "mobilenet_v2 mobilenet_v2_140 mobilenet_v2_035", 224, 3, 0, 1001, "inception", "Logits")
    add("resnet", "resnet_v1_20 resnet_v1_110", 32, 3, 0, 10, "cifarnet", "logits")
    add("nasnet", "nasnet_cifar", 32, 3, 0, 10, "cifarnet", "final_layer")
    add("nasnet", "nasnet_mobile", 224, 3, 0, 1001, "inception", "final_layer")
    add("nasnet", "nasnet_large", 331, 3, 0, 1001, "inception", "final_layer")
    add("pnasnet", "pnasnet_large", 331, 3, 0, 1001, "inception", "final_layer")
    add("pnasnet", "pnasnet_mobile", 224, 3, 0, 1001, "inception", "final_layer")
    return found


NETS = _table()
"""Every network by its name, in the document's order."""


_SCOPES = {
    "cifarnet": "CifarNet",
    "inception_resnet_v2": "InceptionResnetV2",
    "inception_v1": "InceptionV1",
    "inception_v2": "InceptionV2",
    "inception_v3": "InceptionV3",
    "inception_v4": "InceptionV4",
    "lenet": "LeNet",
    "mobilenet_v1": "MobilenetV1",
    "mobilenet_v2": "MobilenetV2",
}
"""Families whose variables are kept under another name than the network's."""


def scope_of(name: str) -> str:
    """Under which name a network's variables are kept: TF-Slim's."""
    family = info(name).family
    return _SCOPES.get(name) or _SCOPES.get(family) or name


def info(name: str) -> NetInfo:
    if name not in NETS:
        parts = re.findall(r"[a-z]+|\d+", str(name).lower())
        near = [known for known in NETS if parts and all(part in known for part in parts)][:4]
        near = near or difflib.get_close_matches(str(name), NETS, n=3) or list(NETS)[:3]
        raise ConfigError(
            f"there is no network {name!r}; nearest: {', '.join(near)}. `plait nets` lists all {len(NETS)}"
        )
    return NETS[name]


def build(
    name: str,
    num_classes: int | None = None,
    *,
    channels: int | None = None,
    height: int | None = None,
    width: int | None = None,
    renorm: bool = False,
    **options: Any,
) -> Net:
    """The network `name`; what is left out is as in its paper.

    >>> from plait import nets
    >>> logits, end_points = nets.build("lenet")(torch.zeros(2, 1, 28, 28))
    >>> list(logits.shape)
    [2, 10]
    """
    facts = info(name)
    shape = Shape(
        channels=facts.channels if channels is None else channels,
        height=facts.image_size if height is None else height,
        width=facts.image_size if width is None else width,
        classes=facts.classes if num_classes is None else num_classes,
    )
    if min(shape.classes, shape.channels, shape.height, shape.width) < 1:
        raise ConfigError(f"{name} for {shape}: give num_classes, channels, height and width of at least 1")
    create: Create = importlib.import_module(f"plait.nets.{facts.family}").create
    known = [key for key in inspect.signature(create).parameters if key not in ("name", "shape", "renorm")]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"{name} has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    return create(name, shape, renorm=renorm, **options)


class Card(NamedTuple):
    """What a network costs."""

    parameters: int
    """That are trained; auxiliary heads not counted."""
    multiply_adds: int
    """Of one picture, in evaluation."""


class _Counter(TorchFunctionMode):
    """Adds up the multiply-adds of convolutions and products while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = function(*args, **(kwargs or {}))
        if function in (functional.conv2d, functional.linear):
            weights = args[1]
            self.total += result.numel() * math.prod(weights.shape[1:])
        return result


def card(name: str, num_classes: int | None = None) -> Card:
    """Count without memory or work: on torch's `meta` device."""
    facts = info(name)
    with torch.device("meta"):
        net = build(name, num_classes).eval()
        images = torch.zeros(1, facts.channels, facts.image_size, facts.image_size)
    counter = _Counter()
    with torch.no_grad(), counter:
        net.forward(images)  # all of it: a call would leave out heads that nobody looks at
    trained = sum(value.numel() for path, value in net.named_parameters() if "aux" not in path.lower())
    return Card(trained, counter.total)
