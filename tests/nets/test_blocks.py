import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from plait.errors import ConfigError
from plait.nets.blocks import (
    BatchNorm,
    Conv,
    Dense,
    Net,
    Norm,
    Recipe,
    SeparableConv,
    average_pool,
    constant,
    dropout,
    flat,
    glorot,
    he_normal,
    logits_of,
    max_pool,
    normal,
    pair,
    spatial_mean,
)

PLAIN = Recipe(init=normal(0.1), activation=None)
NORMED = Recipe(init=normal(0.1), norm=Norm(decay=0.9, epsilon=1e-3))
SIZES = [(1, 1), (2, 3), (7, 4), (8, 8), (9, 12)]
KERNELS = [1, 2, 3, 4, 5, 7]
STRIDES = [1, 2, 3, 4]


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(7)


def places(size, kernel, stride, dilation=1):
    """For each output of SAME, the inputs that its window covers: (place in the kernel, place in the input)."""
    outputs = math.ceil(size / stride)
    reach = (kernel - 1) * dilation + 1
    missing = max(0, (outputs - 1) * stride + reach - size)
    for output in range(outputs):
        start = output * stride - missing // 2
        yield [(k, start + k * dilation) for k in range(kernel) if 0 <= start + k * dilation < size]


def windows(x, kernel, stride, dilation=1):
    """Each output's row and column, and the kernel's rows and columns with the inputs' that they meet."""
    height, width = pair(kernel)
    rows = list(places(x.shape[2], height, stride, dilation))
    columns = list(places(x.shape[3], width, stride, dilation))
    shape = (len(rows), len(columns))
    for (i, down), (j, across) in itertools.product(enumerate(rows), enumerate(columns)):
        yield shape, i, j, [k for k, _ in down], [r for _, r in down], [k for k, _ in across], [c for _, c in across]


def pooled(x, kernel, stride, reduce):
    out = None
    for shape, i, j, _, rows, _, columns in windows(x, kernel, stride):
        out = x.new_empty(*x.shape[:2], *shape) if out is None else out
        out[:, :, i, j] = reduce(x[:, :, rows][:, :, :, columns])
    return out


def convolved(x, weights, stride, dilation=1):
    out = None
    for shape, i, j, krows, rows, kcolumns, columns in windows(x, tuple(weights.shape[2:]), stride, dilation):
        out = x.new_empty(x.shape[0], weights.shape[0], *shape) if out is None else out
        part = weights[:, :, krows][:, :, :, kcolumns]
        out[:, :, i, j] = torch.einsum("nchw,ochw->no", x[:, :, rows][:, :, :, columns], part)
    return out


# Padding and pooling


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "outputs", "before", "after"),
    [
        (224, 3, 2, 112, 0, 1),
        (225, 3, 2, 113, 1, 1),
        (224, 7, 2, 112, 2, 3),
        (299, 3, 2, 150, 1, 1),
        (28, 5, 1, 28, 2, 2),
        (7, 2, 1, 7, 0, 1),
        (7, 2, 2, 4, 0, 1),
        (8, 2, 2, 4, 0, 0),
        (8, 1, 2, 4, 0, 0),
        (5, 3, 4, 2, 1, 1),
    ],
)
def test_same_as_tensorflow_documents_it(size, kernel, stride, outputs, before, after):
    found = list(places(size, kernel, stride))
    assert len(found) == outputs
    assert found[0][0] == (min(before, kernel - 1), 0)
    assert kernel - len(found[-1]) == after
    image = torch.arange(1.0, size + 1).reshape(1, 1, 1, size)
    padded = functional.pad(image, (before, after))
    conv = Conv(1, 1, (1, kernel), PLAIN, stride=stride, bias=False)
    torch.testing.assert_close(conv(image), functional.conv2d(padded, conv.weights, stride=stride))


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_same_convolution(kernel, stride):
    for height, width in SIZES:
        x = torch.randn(2, 3, height, width)
        conv = Conv(3, 4, kernel, PLAIN, stride=stride, bias=False)
        torch.testing.assert_close(conv(x), convolved(x, conv.weights, stride), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", [(1, 7), (7, 1), (3, 2)])
def test_same_convolution_with_oblong_kernels(kernel):
    x = torch.randn(2, 3, 9, 6)
    for stride in (1, 2):
        conv = Conv(3, 2, kernel, PLAIN, stride=stride, bias=False)
        torch.testing.assert_close(conv(x), convolved(x, conv.weights, stride), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dilation", [2, 3])
@pytest.mark.parametrize("kernel", [2, 3, 5])
def test_same_convolution_with_dilation(kernel, dilation):
    for height, width in SIZES:
        x = torch.randn(1, 2, height, width)
        conv = Conv(2, 2, kernel, PLAIN, dilation=dilation, bias=False)
        torch.testing.assert_close(conv(x), convolved(x, conv.weights, 1, dilation), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_same_pools(kernel, stride):
    for height, width in SIZES:
        x = torch.randn(2, 2, height, width) - 3  # below 0, so that a padding of zeros would show
        assert torch.equal(max_pool(x, kernel, stride, "SAME"), pooled(x, kernel, stride, lambda w: w.amax((2, 3))))
        mean = pooled(x, kernel, stride, lambda w: w.mean((2, 3)))
        torch.testing.assert_close(average_pool(x, kernel, stride, "SAME"), mean)


def test_same_average_of_oblong_windows():
    x = torch.randn(2, 2, 7, 8)
    mean = pooled(x, (3, 2), 2, lambda w: w.mean((2, 3)))
    torch.testing.assert_close(average_pool(x, (3, 2), 2, "SAME"), mean)


def test_pools_without_padding_and_with_a_number():
    x = torch.arange(25.0).reshape(1, 1, 5, 5) - 100
    assert max_pool(x, 2, 2).flatten().tolist() == [-94, -92, -84, -82]
    assert average_pool(x, 2, 2).flatten().tolist() == [-97, -95, -87, -85]
    assert max_pool(x, 3, 2, 1).shape == (1, 1, 3, 3)
    assert max_pool(x, 3, 2, 1)[0, 0, 0, 0] == -94
    assert average_pool(x, 3, 2, 1)[0, 0, 0, 0] == -97  # of four numbers: the padding does not count


def test_pools_pass_gradients_only_to_the_picture():
    for pool in (max_pool, average_pool):
        x = torch.randn(1, 1, 6, 7, requires_grad=True)
        pool(x, 3, 2, "SAME").sum().backward()
        assert x.grad.sum().item() == pytest.approx(3 * 4, rel=1e-5)


def test_convolution_without_padding_and_with_a_number():
    x = torch.randn(1, 2, 9, 8)
    for padding, number in (("VALID", 0), (2, 2)):
        conv = Conv(2, 3, 3, PLAIN, stride=2, padding=padding)
        want = functional.conv2d(x, conv.weights, conv.biases, 2, number)
        assert torch.equal(conv(x), want)


def test_small_things():
    x = torch.arange(12.0).reshape(1, 2, 2, 3)
    assert flat(x).tolist() == [[0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]]  # rows, columns, channels
    assert torch.equal(flat(x.reshape(2, 6)), x.reshape(2, 6))
    assert spatial_mean(x).tolist() == [[[[2.5]], [[8.5]]]]
    assert pair(3) == (3, 3)
    assert pair((1, 7)) == (1, 7)
    assert logits_of(torch.zeros(2, 5, 1, 1), "net").shape == (2, 5)
    with pytest.raises(ConfigError, match="vgg_16 gives a map of 2x1"):
        logits_of(torch.zeros(2, 5, 2, 1), "vgg_16")


def test_dropout_keeps_the_mean_and_nothing_happens_in_evaluation():
    x = torch.ones(100_000)
    out = dropout(x, 0.8, training=True)
    assert sorted(set(out.tolist())) == pytest.approx([0, 1.25])
    assert (out != 0).float().mean().item() == pytest.approx(0.8, abs=0.01)
    assert dropout(x, 0.8, training=False) is x
    assert dropout(x, 1.0, training=True) is x


# How weights begin


@pytest.mark.parametrize("deviation", [0.005, 0.1])
def test_normal_is_cut_off_at_two_deviations(deviation):
    weights = torch.empty(64, 64, 5, 5)
    normal(deviation)(weights)
    assert weights.abs().max() <= 2.0001 * deviation
    assert weights.std().item() == pytest.approx(0.8796 * deviation, rel=0.01)
    assert abs(weights.mean().item()) < 0.01 * deviation


@pytest.mark.parametrize(
    ("options", "variance"),
    [({}, 2 / (64 * 9)), ({"mode": "out"}, 2 / (128 * 9)), ({"factor": 1.0}, 1 / (64 * 9))],
)
def test_he_normal_has_the_variance_it_says(options, variance):
    weights = torch.empty(128, 64, 3, 3)
    he_normal(weights, **options)
    assert weights.var(correction=0).item() == pytest.approx(variance, rel=0.02)
    dense = torch.empty(400, 500)
    he_normal(dense)
    assert dense.var(correction=0).item() == pytest.approx(2 / 500, rel=0.02)


def test_glorot_is_uniform_within_its_bound():
    weights = torch.empty(128, 64, 3, 3)
    glorot(weights)
    bound = math.sqrt(6 / (9 * (128 + 64)))
    assert weights.abs().max().item() == pytest.approx(bound, rel=1e-3)
    assert weights.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01)


def test_constant():
    weights = torch.empty(3, 2)
    constant(0.25)(weights)
    assert weights.eq(0.25).all()


# Batch normalisation


def test_batch_norm_is_torch_s():
    ours, theirs = BatchNorm(5, Norm(decay=0.9, epsilon=1e-3)), nn.BatchNorm2d(5, eps=1e-3, momentum=0.1)
    with torch.no_grad():
        for mine, other in ((ours.gamma, theirs.weight), (ours.beta, theirs.bias)):
            other.copy_(mine.copy_(torch.randn(5)))
    for _ in range(3):
        x = torch.randn(4, 5, 3, 2) * 2 + 1
        torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.moving_mean, theirs.running_mean)
    torch.testing.assert_close(ours.moving_variance, theirs.running_var)
    before = ours.moving_mean.clone()
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    assert torch.equal(ours.moving_mean, before)


def test_batch_norm_without_scale_has_no_gamma():
    norm = BatchNorm(3, Norm(scale=False))
    assert [name for name, _ in norm.named_parameters()] == ["beta"]
    assert sorted(norm.state_dict()) == ["beta", "moving_mean", "moving_variance"]
    x = torch.randn(8, 3, 4, 4) * 5
    assert norm(x).var((0, 2, 3), correction=0).tolist() == pytest.approx([1, 1, 1], rel=1e-3)


def limits(step):
    """Of r and d, as the paper widens them: from 5000 steps on, to 3 at 40000 and to 5 at 25000."""
    r = 1 if step <= 5000 else min(3, 1 + 2 * (step - 5000) / 35000)
    d = 0 if step <= 5000 else min(5, 5 * (step - 5000) / 20000)
    return r, d


def renormalised(x, norm, step):
    """Algorithm 1 of the paper, a channel at a time."""
    most_r, most_d = limits(step)
    out = torch.empty_like(x)
    for c in range(x.shape[1]):
        values = x[:, c]
        mean = values.mean()
        deviation = ((values - mean).square().mean() + norm.epsilon).sqrt()
        moving = (norm.moving_variance[c] + norm.epsilon).sqrt()
        r = (deviation / moving).detach().clamp(1 / most_r, most_r)
        d = ((mean - norm.moving_mean[c]) / moving).detach().clamp(-most_d, most_d)
        out[:, c] = norm.gamma[c] * ((values - mean) / deviation * r + d) + norm.beta[c]
    return out


@pytest.mark.parametrize("step", [0, 5000, 9000, 15000, 25000, 32500, 40000, 10**6])
def test_renormalisation_is_the_paper_s(step):
    norm = BatchNorm(4, Norm(decay=0.99, epsilon=1e-3, renorm=True)).double()
    with torch.no_grad():
        norm.gamma.copy_(torch.tensor([1.0, 0.5, 2.0, -1.0]))
        norm.beta.copy_(torch.tensor([0.0, 1.0, -1.0, 0.3]))
        norm.moving_mean.copy_(torch.tensor([0.1, -9.0, 4.0, 0.0]))
        norm.moving_variance.copy_(torch.tensor([1.3, 0.05, 90.0, 1.0]))
    norm.renorm_steps.fill_(step)
    x = torch.randn(6, 4, 3, 5, dtype=torch.float64).mul_(1.2).float().double().requires_grad_()
    mean, variance = x.detach().mean((0, 2, 3)), x.detach().var((0, 2, 3), correction=0)
    want_mean = norm.moving_mean + 0.01 * (mean - norm.moving_mean)
    want_variance = norm.moving_variance + 0.01 * (variance - norm.moving_variance)
    want = renormalised(x, norm, step)
    (want_grad,) = torch.autograd.grad(want.square().sum(), x)
    got = norm.float()(x.float())
    (got_grad,) = torch.autograd.grad(got.square().sum(), x)
    torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(norm.moving_mean, want_mean.float())
    torch.testing.assert_close(norm.moving_variance, want_variance.float())
    assert norm.renorm_steps.item() == step + 1


def test_renormalisation_begins_as_batch_normalisation_and_evaluates_like_it():
    ours, plain = (BatchNorm(3, Norm(renorm=renorm)) for renorm in (True, False))
    x = torch.randn(8, 3, 4, 4) * 3 + 2
    torch.testing.assert_close(ours(x), plain(x), rtol=1e-4, atol=1e-4)
    plain.moving_variance.copy_(ours.moving_variance)
    torch.testing.assert_close(ours.eval()(x), plain.eval()(x))
    assert ours.renorm_steps.item() == 1


def test_renormalisation_once_wide_gives_training_what_evaluation_gives():
    norm = BatchNorm(3, Norm(renorm=True))
    norm.renorm_steps.fill_(50_000)
    x = torch.randn(8, 3, 4, 4) * 1.5 + 0.5
    evaluated = norm.eval()(x)
    torch.testing.assert_close(norm.train()(x), evaluated, rtol=1e-4, atol=1e-4)


# Layers


def test_convolution_has_biases_or_a_norm():
    plain, normed = Conv(2, 3, 3, PLAIN), Conv(2, 3, 3, NORMED)
    assert sorted(plain.state_dict()) == ["biases", "weights"]
    names = ["BatchNorm.beta", "BatchNorm.gamma", "BatchNorm.moving_mean", "BatchNorm.moving_variance", "weights"]
    assert sorted(normed.state_dict()) == names
    assert sorted(Conv(2, 3, 3, NORMED, norm=None).state_dict()) == ["biases", "weights"]
    assert sorted(Conv(2, 3, 3, NORMED, bias=True).state_dict()) == sorted([*names, "biases"])
    assert Conv(2, 3, 3, PLAIN.but(bias=0.1)).biases.tolist() == pytest.approx([0.1] * 3)
    assert Conv(2, 3, 3, PLAIN, init=constant(2.0)).weights.eq(2).all()


def test_convolution_normalises_then_activates():
    x = torch.randn(4, 2, 5, 5)
    conv = Conv(2, 3, 3, NORMED)
    bare = functional.conv2d(x, conv.weights, padding=1)
    mean, variance = bare.mean((0, 2, 3), keepdim=True), bare.var((0, 2, 3), correction=0, keepdim=True)
    torch.testing.assert_close(conv(x), ((bare - mean) / (variance + 1e-3).sqrt()).relu(), rtol=1e-4, atol=1e-5)
    assert Conv(2, 3, 3, NORMED, activation=None)(x).min() < 0


def test_grouped_convolution_keeps_groups_apart():
    conv = Conv(4, 6, 1, PLAIN, groups=2)
    assert conv.weights.shape == (6, 2, 1, 1)
    x = torch.randn(1, 4, 1, 1, requires_grad=True)
    conv(x)[:, :3].sum().backward()
    assert x.grad.flatten()[2:].tolist() == [0, 0]


@pytest.mark.parametrize("multiplier", [1, 3])
@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise_is_a_convolution_of_each_channel(stride, multiplier):
    layer = SeparableConv(4, None, 3, PLAIN, stride=stride, multiplier=multiplier)
    x = torch.randn(2, 4, 6, 7)
    parts = [
        convolved(x[:, c : c + 1], layer.depthwise_weights[c * multiplier : (c + 1) * multiplier], stride)
        for c in range(4)
    ]
    torch.testing.assert_close(layer(x), torch.cat(parts, 1), rtol=1e-4, atol=1e-5)
    assert sorted(layer.state_dict()) == ["biases", "depthwise_weights"]
    assert "BatchNorm.beta" in SeparableConv(4, None, 3, NORMED).state_dict()


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 2), (7, 2)])
def test_separable_convolution_is_two(kernel, stride):
    layer = SeparableConv(3, 5, kernel, PLAIN, stride=stride, multiplier=2)
    x = torch.randn(2, 3, 8, 9)
    one = torch.cat(
        [convolved(x[:, c : c + 1], layer.depthwise_weights[2 * c : 2 * c + 2], stride) for c in range(3)], 1
    )
    want = torch.einsum("nchw,oc->nohw", one, layer.pointwise_weights[:, :, 0, 0]) + layer.biases[:, None, None]
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-5)


def test_separable_convolution_has_one_norm_and_may_begin_otherwise():
    layer = SeparableConv(3, 5, 3, NORMED, depthwise_init=constant(1.0))
    assert layer.depthwise_weights.eq(1).all()
    assert layer.pointwise_weights.std() > 0
    assert layer.BatchNorm.beta.shape == (5,)
    assert layer.biases is None
    assert layer(torch.randn(2, 3, 4, 4)).min() == 0  # activated


def test_dense_is_a_product_a_sum_and_an_activation():
    layer = Dense(3, 2, PLAIN.but(bias=0.5, activation=functional.relu))
    x = torch.randn(4, 3)
    torch.testing.assert_close(layer(x), (x @ layer.weights.T + 0.5).relu())
    assert Dense(3, 2, PLAIN, init=partial(nn.init.constant_, val=3.0)).weights.eq(3).all()


def test_a_network_decays_weights_only():
    class Small(Net):
        scope = "small"

        def __init__(self):
            super().__init__()
            self.conv = Conv(1, 2, 3, NORMED)
            self.deep = SeparableConv(2, None, 3, NORMED)
            self.split = SeparableConv(2, 2, 3, PLAIN)
            self.fc = Dense(2, 2, PLAIN)

        def forward(self, images):
            x = spatial_mean(self.split(self.deep(self.conv(images)))).flatten(1)
            return self.fc(x), {"fc": x}

    net = Small()
    decayed = net.decayed_variables()
    wanted = [net.conv.weights, net.split.pointwise_weights, net.fc.weights]
    assert len(decayed) == 3
    assert all(one is other for one, other in zip(decayed, wanted, strict=True))
    logits, points = net(torch.zeros(2, 1, 5, 5))
    assert logits.shape == (2, 2)
    assert list(points) == ["fc"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_renormalisation_in_other_types_and_of_nothing(dtype):
    norm = BatchNorm(3, Norm(renorm=True)).to(dtype)
    out = norm(torch.randn(4, 3, 2, 2).to(dtype))
    assert out.dtype is dtype
    before = norm.moving_mean.clone()
    assert norm(torch.empty(0, 3, 2, 2, dtype=dtype)).shape == (0, 3, 2, 2)
    assert norm.moving_mean.equal(before)


def test_one_value_a_channel_is_normalised_to_beta():
    norm = BatchNorm(3, Norm(decay=0.9))
    with torch.no_grad():
        norm.beta.copy_(torch.tensor([1.0, 2.0, 3.0]))
    x = torch.tensor([5.0, 6.0, 7.0]).reshape(1, 3, 1, 1)
    assert torch.allclose(norm(x).flatten(), norm.beta)
    assert torch.allclose(norm.moving_mean, 0.1 * x.flatten())
    assert torch.allclose(norm.moving_variance, torch.full((3,), 0.9))
