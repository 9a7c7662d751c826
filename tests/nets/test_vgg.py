import pytest
import torch

from plait import nets
from plait.errors import ConfigError
from plait.nets.blocks import BatchNorm

COUNTS = {
    "vgg_a": (132_863_336, 7_609_090_048),
    "vgg_16": (138_357_544, 15_470_264_320),
    "vgg_19": (143_667_240, 19_632_062_464),
    "vgg_a_bn": (132_866_088, 7_609_090_048),
    "vgg_16_bn": (138_361_768, 15_470_264_320),
    "vgg_19_bn": (143_672_744, 19_632_062_464),
}
"""Parameters and multiply-adds with 1000 classes, which are the paper's."""
LAYERS = {"vgg_a": (1, 1, 2, 2, 2), "vgg_16": (2, 2, 3, 3, 3), "vgg_19": (2, 2, 4, 4, 4)}


def meta(name, batch=1, size=224, **options):
    with torch.device("meta"):
        return nets.build(name, **options), torch.zeros(batch, 3, size, size)


def convolutions(name):
    depths = LAYERS[name.removesuffix("_bn")]
    return [
        f"conv{block}/conv{block}_{layer}" for block, depth in enumerate(depths, 1) for layer in range(1, depth + 1)
    ]


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name):
    assert nets.card(name) == COUNTS[name]
    assert nets.card(name, 10).parameters == COUNTS[name][0] - 990 * 4097


@pytest.mark.parametrize("name", COUNTS)
def test_end_points(name):
    net, images = meta(name, batch=2)
    logits, points = net(images)
    pools = [f"pool{number}" for number in range(1, 6)]
    assert logits.shape == (2, 1000)
    assert points[f"{name}/fc8"] is logits
    assert set(points) == {f"{name}/{key}" for key in [*convolutions(name), *pools, "fc6", "fc7", "fc8"]}
    assert [points[f"{name}/{pool}"].shape[1:] for pool in pools] == [
        (64, 112, 112),
        (128, 56, 56),
        (256, 28, 28),
        (512, 14, 14),
        (512, 7, 7),
    ]
    assert points[f"{name}/conv1/conv1_1"].shape == (2, 64, 224, 224)
    assert points[f"{name}/fc6"].shape == (2, 4096, 1, 1)


@pytest.mark.parametrize("name", ["vgg_a", "vgg_16", "vgg_19"])
def test_names_are_slim_s(name):
    net, _ = meta(name)
    assert net.scope == name
    layers = [*convolutions(name), "fc6", "fc7", "fc8"]
    wanted = {f"{layer}/{leaf}" for layer in layers for leaf in ("weights", "biases")}
    assert {key.replace(".", "/") for key in net.state_dict()} == wanted
    assert net.state_dict()["fc6.weights"].shape == (4096, 512, 7, 7)


@pytest.mark.parametrize("name", ["vgg_a_bn", "vgg_16_bn", "vgg_19_bn"])
def test_normalised_ones_have_norms_instead_of_biases_before_the_head(name):
    net, _ = meta(name)
    leaves = ["weights", *(f"BatchNorm/{leaf}" for leaf in ("beta", "gamma", "moving_mean", "moving_variance"))]
    wanted = {f"{layer}/{leaf}" for layer in convolutions(name) for leaf in leaves}
    wanted |= {f"{layer}/{leaf}" for layer in ("fc6", "fc7", "fc8") for leaf in ("weights", "biases")}
    assert {key.replace(".", "/") for key in net.state_dict()} == wanted


def test_renorm_reaches_every_norm():
    net, _ = meta("vgg_16_bn", renorm=True)
    norms = [module for module in net.modules() if isinstance(module, BatchNorm)]
    assert len(norms) == 13
    assert all(norm.renorm for norm in norms)
    assert not any(isinstance(module, BatchNorm) for module in meta("vgg_16", renorm=True)[0].modules())


@pytest.mark.parametrize("name", ["vgg_a", "vgg_19", "vgg_a_bn"])
def test_backward_reaches_every_variable(name):
    net, images = meta(name)
    net(images)[0].sum().backward()
    assert [key for key, value in net.named_parameters() if value.grad is None] == []


def test_other_sizes_say_what_to_do():
    net, small = meta("vgg_a", size=192)
    with pytest.raises(ConfigError, match="vgg_a has a map of 6x6 where its fc6 needs 7x7"):
        net(small)
    net, large = meta("vgg_a", size=256)
    with pytest.raises(ConfigError, match="vgg_a gives a map of 2x2"):
        net(large)
    net, odd = meta("vgg_a", size=255)  # what is odd is left out when halved: 127, 63, 31, 15, 7
    assert net(odd)[0].shape == (1, 1000)


def test_blocks_are_convolutions_and_a_maximum():
    torch.manual_seed(0)
    net = meta("vgg_a_bn")[0]
    for block in ("conv1", "conv2"):
        getattr(net, block).to_empty(device="cpu")
    with torch.no_grad():
        for value in [*net.conv1.parameters(), *net.conv2.parameters(), *net.conv1.buffers(), *net.conv2.buffers()]:
            value.uniform_(0.1, 0.3)
    x = torch.randn(2, 3, 10, 9)
    conv, norm = net.conv1.conv1_1, net.conv1.conv1_1.BatchNorm
    bare = torch.nn.functional.conv2d(x, conv.weights, padding=1)
    scaled = (bare - norm.moving_mean[:, None, None]) / (norm.moving_variance[:, None, None] + 1e-5).sqrt()
    want = (scaled * norm.gamma[:, None, None] + norm.beta[:, None, None]).relu()
    torch.testing.assert_close(conv.eval()(x), want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg_a", "vgg_a_bn"])
def test_real_numbers_in_training_and_evaluation(name):
    torch.manual_seed(0)
    net = nets.build(name, 5)
    images = torch.randn(2, 3, 224, 224)
    first, second = net(images)[0], net(images)[0]
    assert not torch.equal(first, second)  # dropout
    second.square().sum().backward()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in net.parameters())
    assert all(value.grad.abs().sum() > 0 for value in net.decayed_variables())
    net.eval()
    with torch.no_grad():
        assert torch.equal(net(images)[0], net(images)[0])
