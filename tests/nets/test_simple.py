import pytest
import torch
from torch.nn import functional

from plait import nets
from plait.errors import ConfigError

COUNTS = {
    "lenet": (3_274_634, 4_289_384, 14_897_664),
    "cifarnet": (1_756_426, 1_947_496, 32_968_192),
    "alexnet_v2": (50_303_912, 50_303_912, 736_555_776),
    "overfeat": (145_704_424, 145_704_424, 2_647_011_328),
}
"""Parameters with the classes of the paper and with 1000, and multiply-adds with 1000."""

HEADED = {
    "alexnet_v2": {
        "conv1": (64, 54), "pool1": (64, 26), "conv2": (192, 26), "pool2": (192, 12), "conv3": (384, 12),
        "conv4": (384, 12), "conv5": (256, 12), "pool5": (256, 5), "fc6": (4096, 1), "fc7": (4096, 1),
    },
    "overfeat": {
        "conv1": (64, 56), "pool1": (64, 28), "conv2": (256, 24), "pool2": (256, 12), "conv3": (512, 12),
        "conv4": (1024, 12), "conv5": (1024, 12), "pool5": (1024, 6), "fc6": (3072, 1), "fc7": (4096, 1),
    },
}  # fmt: skip
"""Channels and side of each end point but the logits, in order."""


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(3)


def meta(name, batch=2, size=None, **options):
    """A network without memory, and pictures for it."""
    facts = nets.info(name)
    size = size or facts.image_size
    with torch.device("meta"):
        return nets.build(name, **options), torch.zeros(batch, facts.channels, size, size)


def quick(name, **options):
    """A network with uniform weights: drawing them as its paper does takes seconds."""
    net = meta(name, **options)[0].to_empty(device="cpu")
    with torch.no_grad():
        for value in net.parameters():
            torch.nn.init.xavier_uniform_(value) if value.ndim > 1 else value.zero_()
    return net


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name):
    canonical, thousand, multiply_adds = COUNTS[name]
    assert nets.card(name).parameters == canonical
    assert nets.card(name, 1000) == (thousand, multiply_adds)


@pytest.mark.parametrize("name", HEADED)
def test_end_points_of_headed_networks(name):
    net, images = meta(name)
    logits, points = net(images)
    assert logits.shape == (2, 1000)
    assert points[f"{name}/fc8"] is logits
    shapes = {f"{name}/{key}": (2, width, side, side) for key, (width, side) in HEADED[name].items()}
    assert {key: tuple(value.shape) for key, value in points.items()} == shapes | {f"{name}/fc8": (2, 1000)}


@pytest.mark.parametrize("name", COUNTS)
def test_backward_reaches_every_variable(name):
    net, images = meta(name)
    net(images)[0].sum().backward()
    assert [key for key, value in net.named_parameters() if value.grad is None] == []


@pytest.mark.parametrize("name", ["lenet", "cifarnet"])
def test_end_points_of_the_small_networks(name):
    size, channels = nets.info(name).image_size, nets.info(name).channels
    net = nets.build(name, 7).eval()
    logits, points = net(torch.randn(3, channels, size, size))
    assert logits.shape == (3, 7)
    assert points["Logits"] is logits
    torch.testing.assert_close(points["Predictions"].sum(1), torch.ones(3))
    inner = ["fc3", "dropout3"] if name == "lenet" else ["fc3", "fc4"]
    assert list(points) == ["conv1", "pool1", "conv2", "pool2", "Flatten", *inner, "Logits", "Predictions"]
    assert points["pool2"].shape == (3, 64, size // 4, size // 4)


def test_names_are_slim_s():
    assert {key: tuple(value.shape) for key, value in nets.build("lenet").named_parameters()} == {
        "conv1.weights": (32, 1, 5, 5),
        "conv1.biases": (32,),
        "conv2.weights": (64, 32, 5, 5),
        "conv2.biases": (64,),
        "fc3.weights": (1024, 3136),
        "fc3.biases": (1024,),
        "fc4.weights": (10, 1024),
        "fc4.biases": (10,),
    }
    layers = {
        "cifarnet": "conv1 conv2 fc3 fc4 logits",
        "alexnet_v2": "conv1 conv2 conv3 conv4 conv5 fc6 fc7 fc8",
        "overfeat": "conv1 conv2 conv3 conv4 conv5 fc6 fc7 fc8",
    }
    for name, wanted in layers.items():
        net, _ = meta(name)
        assert set(net.state_dict()) == {f"{key}.{leaf}" for key in wanted.split() for leaf in ("weights", "biases")}
    scopes = {name: meta(name)[0].scope for name in COUNTS}
    assert scopes == {
        "lenet": "LeNet", "cifarnet": "CifarNet", "alexnet_v2": "alexnet_v2", "overfeat": "overfeat"
    }  # fmt: skip


def test_lenet_by_hand():
    net = nets.build("lenet").eval()
    images = torch.randn(2, 1, 28, 28)
    x = functional.max_pool2d(functional.conv2d(images, net.conv1.weights, net.conv1.biases, padding=2).relu(), 2)
    x = functional.max_pool2d(functional.conv2d(x, net.conv2.weights, net.conv2.biases, padding=2).relu(), 2)
    rows = torch.stack([x[:, :, i, j] for i in range(7) for j in range(7)], 1).flatten(1)  # channels go last
    x = functional.linear(rows, net.fc3.weights, net.fc3.biases).relu()
    torch.testing.assert_close(net(images)[0], functional.linear(x, net.fc4.weights, net.fc4.biases))


def response_normalised(x):
    """x / (1 + 0.001 / 9 * the squares of four channels to both sides) ** 0.75."""
    channels = x.shape[1]
    sums = [x[:, max(0, c - 4) : c + 5].square().sum(1) for c in range(channels)]
    return x / (1 + 0.001 / 9 * torch.stack(sums, 1)) ** 0.75


def test_cifarnet_normalises_responses_as_tensorflow_does():
    net = nets.build("cifarnet").eval()
    _, points = net(torch.randn(2, 3, 32, 32) * 100)  # large, so that the division shows
    first = response_normalised(points["pool1"])
    assert (points["pool1"] - first).max() > 10
    conv2 = functional.conv2d(first, net.conv2.weights, net.conv2.biases, padding=2).relu()
    torch.testing.assert_close(points["conv2"], conv2, rtol=1e-3, atol=1e-3)
    pool2 = functional.max_pool2d(response_normalised(points["conv2"]), 2)
    torch.testing.assert_close(points["pool2"], pool2, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["lenet", "cifarnet", "alexnet_v2"])
def test_dropout_is_for_training(name):
    net = quick(name)
    images = torch.randn(1, nets.info(name).channels, *[nets.info(name).image_size] * 2)
    with torch.no_grad():
        trained = [net(images)[0] for _ in range(2)]
        evaluated = [net.eval()(images)[0] for _ in range(2)]
    assert not torch.equal(*trained)
    assert torch.equal(*evaluated)


@pytest.mark.parametrize("name", ["lenet", "cifarnet"])
def test_without_dropout_training_is_evaluation(name):
    net = nets.build(name, dropout_keep_prob=1.0)
    images = torch.randn(2, nets.info(name).channels, *[nets.info(name).image_size] * 2)
    assert torch.equal(net(images)[0], net.eval()(images)[0])


@pytest.mark.parametrize(("height", "width"), [(28, 28), (33, 22), (4, 7)])
def test_small_networks_take_pictures_of_the_size_they_were_built_for(height, width):
    for name in ("lenet", "cifarnet"):
        net = nets.build(name, channels=2, height=height, width=width)
        logits, points = net(torch.randn(2, 2, height, width))
        assert logits.shape == (2, 10)
        assert points["conv1"].shape[2:] == (height, width)
        assert points["pool2"].shape[2:] == (height // 4, width // 4)


def test_wrong_sizes_say_what_to_do():
    with pytest.raises(ConfigError, match="lenet halves a picture twice: 3x28 is too small"):
        nets.build("lenet", height=3)
    net, small = meta("alexnet_v2", size=192)
    with pytest.raises(ConfigError, match="map of 4x4 where its fc6 needs 5x5"):
        net(small)
    net, large = meta("alexnet_v2", size=320)
    with pytest.raises(ConfigError, match="alexnet_v2 gives a map of"):
        net(large)
    net, small = meta("overfeat", size=224)
    with pytest.raises(ConfigError, match="5x5 where its fc6 needs 6x6"):
        net(small)
    with pytest.raises(ConfigError, match="no option .depth."):
        nets.build("lenet", depth=3)


def test_first_values():
    lenet, cifarnet = nets.build("lenet"), nets.build("cifarnet")
    cut = 0.8796  # what is left of a deviation when the distribution is cut off at two
    for weights, deviation in (
        (lenet.fc3.weights, 0.1),
        (cifarnet.conv2.weights, 0.05),
        (cifarnet.fc3.weights, 0.04),
        (cifarnet.logits.weights, 1 / 192),
    ):
        assert weights.std().item() == pytest.approx(cut * deviation, rel=0.05)
        assert weights.abs().max() <= 2.0001 * deviation
    assert cifarnet.fc4.biases.unique().tolist() == pytest.approx([0.1])
    assert not any(layer.biases.any() for layer in (cifarnet.conv1, cifarnet.logits, lenet.conv1, lenet.fc3))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bias"), [("alexnet_v2", 0.1), ("overfeat", 0.0)])
def test_first_values_of_headed_networks(name, bias):
    net = nets.build(name)
    bound = (6 / (9 * (net.conv4.weights.shape[0] + net.conv4.weights.shape[1]))) ** 0.5
    assert net.conv4.weights.abs().max().item() == pytest.approx(bound, rel=1e-3)
    assert net.conv1.biases.unique().tolist() == pytest.approx([bias])
    for layer in (net.fc6, net.fc7, net.fc8):
        assert layer.weights.std().item() == pytest.approx(0.8796 * 0.005, rel=0.01)
    assert net.fc6.biases.unique().tolist() == pytest.approx([0.1])
    assert not net.fc8.biases.any()


def test_cifarnet_decays_two_layers_only():
    net = nets.build("cifarnet")
    assert [id(value) for value in net.decayed_variables()] == [id(net.fc3.weights), id(net.fc4.weights)]
    assert len(nets.build("lenet").decayed_variables()) == 4


def test_renorm_is_taken_where_there_is_nothing_to_normalise():
    assert set(nets.build("lenet", renorm=True).state_dict()) == set(nets.build("lenet").state_dict())


def test_lenet_learns():
    net = nets.build("lenet", 2, height=8, width=8, dropout_keep_prob=0.9)
    images = torch.randn(32, 1, 8, 8)
    labels = (images.mean((1, 2, 3)) > 0).long()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(images)[0], labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
