"""Operator by operator, TensorFlow gives what torch gives, at the edges of their settings too."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow")

from plait.errors import ConfigError  # noqa: E402 - after it is known to be there
from plait.export.program import in_evaluation, trace  # noqa: E402 - same
from plait.export.tf_graph import check, translate  # noqa: E402 - same


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def same(module, example, rtol=1e-5):
    """For batches of several sizes, in a function that was written for any."""
    module = module if isinstance(module, nn.Module) else Of(module)
    (name,) = [one for one in ("x", "input", "src") if one in module.forward.__code__.co_varnames[:3]]
    with in_evaluation(module):
        program = trace(module, {name: example})
    check(program.core)
    shape = program.inputs[0]["shape"]
    spec = tf.TensorSpec(shape, tf.as_dtype(program.inputs[0]["dtype"]))
    variables = {}
    run = tf.function(lambda x: translate(program.core, [x], variables), input_signature=[spec], autograph=False)
    for rows in (1, 2, 5):
        x = torch.cat([example] * rows)[:rows] if shape[0] is None else example
        x = x + torch.randn(x.shape) if x.is_floating_point() else x
        with torch.no_grad():
            expected = module.eval()(x)
        found = run(tf.constant(x.numpy()))
        for one, other in zip([expected] if torch.is_tensor(expected) else expected, found, strict=True):
            assert tuple(other.shape) == tuple(one.shape)
            assert other.dtype.name == str(one.dtype).removeprefix("torch.")
            scale = one[one.isfinite()].abs().max().item() if one.is_floating_point() and one.isfinite().any() else 0
            np.testing.assert_allclose(other.numpy(), one.numpy(), rtol=rtol, atol=rtol * scale)
    return variables


def pictures(channels=4, height=9, width=7, rows=2):
    return torch.randn(rows, channels, height, width, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stride": (2, 1), "padding": (1, 3), "dilation": (1, 2)},
        {"groups": 2, "padding": 1},
        {"groups": 2, "dilation": 2, "stride": 3, "padding": 4, "bias": False},
        {"groups": 4},
        {"groups": 4, "stride": 2, "padding": 2},
        {"groups": 4, "stride": (1, 2), "padding": 1},
        {"groups": 4, "dilation": (2, 3), "padding": 3},
        {"padding": "same", "kernel_size": (3, 5), "dilation": 2},
        {"padding": 1, "padding_mode": "reflect"},
        {"padding": 2, "padding_mode": "replicate"},
        {"padding": (1, 2), "padding_mode": "circular"},
        {"kernel_size": 1, "stride": 3, "padding": 2},
    ],
    ids=str,
)
def test_convolutions(settings):
    same(nn.Conv2d(4, 8, **{"kernel_size": 3, **settings}), pictures())


@pytest.mark.parametrize(
    "settings",
    [
        {"stride": 2, "padding": 1, "output_padding": 1},
        {"stride": (3, 2), "padding": (0, 2), "bias": False},
        {"groups": 2, "stride": 2},
        {"groups": 4, "padding": 1},
        {"dilation": (2, 3), "stride": 2, "padding": 3, "output_padding": 1},
        {"kernel_size": 2, "stride": 4, "output_padding": 3},
        {"kernel_size": 3, "stride": 1, "dilation": 3, "output_padding": 2},
    ],
    ids=str,
)
def test_transposed_convolutions(settings):
    same(nn.ConvTranspose2d(4, 8, **{"kernel_size": 3, **settings}), pictures())


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), (2, 4, 11)),
        (nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1), (2, 4, 11)),
        (nn.Conv3d(4, 6, 3, stride=(1, 2, 1), padding=(1, 0, 2), dilation=(1, 1, 2), groups=2), (2, 4, 5, 6, 7)),
        (nn.ConvTranspose3d(4, 6, 2, stride=2, padding=1, output_padding=(1, 0, 1), groups=2), (2, 4, 3, 4, 3)),
    ],
    ids=lambda one: type(one).__name__,
)
def test_convolutions_of_other_dimensions(layer, shape):
    same(layer, torch.randn(shape))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_convolutions_that_tensorflow_joins_with_what_follows(groups):
    same(
        nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1, groups=groups, bias=False),
            norm(nn.BatchNorm2d(8)),
            nn.ReLU(),
            nn.Conv2d(8, 4, 3, groups=groups),
            nn.ReLU6(),
            nn.Conv2d(4, 4, 1, groups=groups),
            nn.ELU(),
        ),
        pictures(),
    )


def test_a_kernel_that_is_worked_out():
    layer = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 8, 3, groups=2))
    same(layer, pictures())
    same(lambda x: functional.conv2d(x, torch.ones(4, 1, 3, 3) * x.mean(), groups=4), pictures())


@pytest.mark.parametrize("count_include_pad", [True, False])
@pytest.mark.parametrize("ceil_mode", [True, False])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(2, 2, 0), (3, 2, 1), ((2, 3), (3, 2), (1, 1)), (5, 4, 2), (3, 1, 1)]
)
def test_average_pools(kernel, stride, padding, ceil_mode, count_include_pad):
    same(nn.AvgPool2d(kernel, stride, padding, ceil_mode, count_include_pad), pictures(height=10))


def test_other_average_pools():
    same(lambda x: functional.avg_pool2d(x, 3, 2, 1, divisor_override=2), pictures())
    same(lambda x: functional.avg_pool2d(x[:, 0], 2), pictures())
    same(nn.AvgPool1d(3, 2, 1, ceil_mode=True), torch.randn(2, 3, 10))
    same(nn.AvgPool3d((1, 3, 2), 2, (0, 1, 1), ceil_mode=True, count_include_pad=False), torch.randn(2, 3, 4, 6, 5))
    same(nn.LocalResponseNorm(4, 1e-2, 0.7, 2.0), pictures(6))


@pytest.mark.parametrize("ceil_mode", [True, False])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [(2, 2, 0, 1), (3, 2, 1, 1), ((2, 3), (3, 2), (1, 1), 1), (3, 2, 1, 2), (2, 1, 0, (3, 1)), (1, 3, 0, 1)],
)
def test_largest_pools(kernel, stride, padding, dilation, ceil_mode):
    same(nn.MaxPool2d(kernel, stride, padding, dilation, ceil_mode=ceil_mode), pictures(height=10) - 3)


def test_other_largest_pools():
    same(nn.MaxPool1d(3, 2, 1), torch.randn(2, 3, 10))
    same(nn.MaxPool3d(2, 2, 1, ceil_mode=True), torch.randn(2, 3, 4, 5, 6))
    same(lambda x: functional.max_pool2d(x[:, 0], 2), pictures())
    with pytest.raises(ConfigError, match="second result of aten.max_pool2d_with_indices"):
        same(lambda x: functional.max_pool2d(x, 2, return_indices=True)[1], pictures())


@pytest.mark.parametrize("size", [1, 3, (4, 2), (9, 7), (12, 3), (None, 2)])
def test_adaptive_pools(size):
    same(nn.AdaptiveAvgPool2d(size), pictures())
    same(nn.AdaptiveMaxPool2d(size), pictures())


def test_adaptive_pools_of_other_dimensions():
    same(nn.AdaptiveAvgPool1d(3), torch.randn(2, 3, 10))
    same(nn.AdaptiveAvgPool3d((2, 3, 1)), torch.randn(2, 3, 5, 7, 4))


def norm(layer):
    for value in layer.state_dict().values():
        if value.is_floating_point():
            value.uniform_(0.5, 2)
    return layer


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm2d(4), (2, 4, 5, 3)),
        (nn.BatchNorm2d(4, eps=0.1, affine=False), (2, 4, 5, 3)),
        (nn.BatchNorm1d(4), (2, 4)),
        (nn.BatchNorm1d(4), (2, 4, 6)),
        (nn.BatchNorm3d(4), (2, 4, 2, 3, 2)),
        (nn.BatchNorm2d(4).double(), (2, 4, 5, 3)),
        (nn.InstanceNorm2d(4, affine=True), (2, 4, 5, 3)),
        (nn.InstanceNorm2d(4, track_running_stats=True), (2, 4, 5, 3)),
        (nn.GroupNorm(2, 4), (2, 4, 5, 3)),
        (nn.GroupNorm(2, 4, affine=False), (2, 4)),
        (nn.GroupNorm(1, 4, eps=0.1), (2, 4, 5)),
        (nn.LayerNorm(6), (2, 4, 6)),
        (nn.LayerNorm((4, 6), eps=0.1, bias=False), (2, 4, 6)),
        (nn.RMSNorm(6), (2, 4, 6)),
    ],
    ids=str,
)
def test_norms(layer, shape):
    dtype = next(iter(layer.state_dict().values()), torch.zeros(1)).dtype
    same(norm(layer), torch.randn(shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32))


@pytest.mark.parametrize(
    "settings",
    [
        {"scale_factor": 2},
        {"scale_factor": (1.7, 0.6)},
        {"size": (5, 13)},
        {"size": 4, "mode": "nearest-exact"},
        {"scale_factor": 2, "mode": "bilinear"},
        {"scale_factor": (1.7, 0.6), "mode": "bilinear"},
        {"scale_factor": 1.5, "mode": "bilinear", "recompute_scale_factor": True},
        {"size": (5, 13), "mode": "bilinear", "align_corners": True},
        {"size": (1, 1), "mode": "bilinear", "align_corners": True},
        {"size": (12, 12), "mode": "bicubic"},
        {"size": (5, 4), "mode": "area"},
    ],
    ids=str,
)
def test_resizing(settings):
    same(lambda x: functional.interpolate(x, **settings), pictures())


@pytest.mark.parametrize("pad", [(1, 2), (1, 2, 0, 3), (-1, 2, 3, -2), (0, 0, 0, 0, 1, 2)], ids=str)
def test_padding(pad):
    same(lambda x: functional.pad(x, pad), pictures())
    same(lambda x: functional.pad(functional.conv2d(x, torch.ones(4, 4, 1, 1)), pad, value=-2.5), pictures())
    for mode in ("reflect", "replicate", "circular"):
        if len(pad) <= 4 and min(pad) >= 0:
            same(lambda x, mode=mode: functional.pad(x, (pad + (0, 0))[:4], mode=mode), pictures())


ACTIVATIONS = [
    nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.3), nn.ELU(0.7), nn.SELU(), nn.CELU(0.5), nn.GELU(), nn.GELU("tanh"),
    nn.SiLU(), nn.Mish(), nn.Hardswish(), nn.Hardsigmoid(), nn.Hardtanh(-0.5, 2), nn.Softplus(2, 1), nn.Softsign(),
    nn.Tanhshrink(), nn.Hardshrink(), nn.Softshrink(), nn.Threshold(0.1, 20), nn.LogSigmoid(), nn.Sigmoid(), nn.Tanh(),
    nn.PReLU(4), nn.GLU(1), nn.Softmax(1), nn.Softmin(-1), nn.LogSoftmax(1), nn.Softmax2d(), nn.Dropout(0.5),
    nn.Dropout2d(), nn.AlphaDropout(),
]  # fmt: skip


@pytest.mark.parametrize("layer", ACTIVATIONS, ids=str)
def test_activations(layer):
    same(layer, pictures() * 3)
    same(nn.Sequential(nn.Conv2d(4, 4, 1), layer, nn.Flatten()), pictures() * 3)  # with the channels last


@pytest.mark.parametrize(
    "name",
    [
        "abs",
        "neg",
        "exp",
        "expm1",
        "sin",
        "cos",
        "tan",
        "asinh",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "erf",
        "erfc",
        "sign",
        "square",
        "reciprocal",
        "sigmoid",
        "floor",
        "ceil",
        "trunc",
        "round",
        "frac",
        "isnan",
        "isinf",
        "isfinite",
        "logit",
        "rad2deg",
        "nan_to_num",
        "sinc",
    ],
)
def test_functions_of_one_number(name):
    same(getattr(torch, name), pictures() * 3)


@pytest.mark.parametrize("name", ["sqrt", "rsqrt", "log", "log1p", "log2", "log10", "acosh"])
def test_functions_of_a_positive_number(name):
    same(lambda x: getattr(torch, name)(x.abs() + 1), pictures())


@pytest.mark.parametrize("name", ["asin", "acos", "atanh"])
def test_functions_of_a_small_number(name):
    same(lambda x: getattr(torch, name)(x.tanh() * 0.9), pictures())


def test_halves_round_to_even():
    same(
        lambda x: (x > 9).float() + torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]).round() + x[:, :6] * 0,
        pictures(6)[:, :, 0, 0],
    )


PAIRS = {
    "add": lambda x, y: torch.add(x, y, alpha=2.5),
    "sub": lambda x, y: torch.sub(x, y, alpha=3),
    "rsub": lambda x, y: 2 - x + torch.rsub(x, y, alpha=2),
    "mul": lambda x, y: x * y * 2,
    "div": lambda x, y: x / (y.abs() + 1) / 3,
    "floor": lambda x, y: torch.div(x, y.abs() + 1, rounding_mode="floor") + x // 0.5,
    "trunc": lambda x, y: torch.div(x, y.abs() + 1, rounding_mode="trunc"),
    "remainder": lambda x, y: torch.remainder(x, -1.5) + torch.remainder(x, y.abs() + 1),
    "fmod": lambda x, y: torch.fmod(x, -1.5) + torch.fmod(x, y.abs() + 1),
    "pow": lambda x, y: x.abs() ** y + x**2 + x**3 + x.abs() ** 0.5 + 2.0**x,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "extremes": lambda x, y: torch.maximum(x, y) - torch.minimum(x, -y),
    "clamp": lambda x, y: x.clamp(-1) + x.clamp(max=0.5) + x.clamp(-0.2, 0.3) + x.clamp(max=y),
    "compare": lambda x, y: ((x > y) | (x < 0)) & (x >= -1) ^ (x <= y) | (x == y) | (x != 0.0) & ~(y > 1),
    "logic": lambda x, y: torch.logical_and(x, y > 0) | torch.logical_or(x > 0, y) | torch.logical_xor(x > 0, y > 0),
    "where": lambda x, y: torch.where(x > 0, x, y) + torch.where(y > 0, 1.0, x) + x.masked_fill(y < 0, 5),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3) + torch.addcmul(x, x, y, value=2) + torch.addcdiv(x, x, y.abs() + 1),
    "whole": lambda x, y: (x * 10).int() // 3 + (y * 10).long() % -7 + (x * 10).to(torch.int16),
    "trunc of whole": lambda x, y: torch.div((x * 10).int(), 3, rounding_mode="trunc"),
    "mixed": lambda x, y: (x * 10).int() * 0.5 + (y > 0) + (x * 10).long() / 4,
    "bits": lambda x, y: ((x * 10).int() & 6) | ((y * 10).int() ^ 3) & ~(x * 10).int(),
    "root of whole": lambda x, y: (x.abs() * 10).int().sqrt() + ((x * 10).int() > 2.5),
    "doubles": lambda x, y: x.double() * 2 + y,
    "halves": lambda x, y: (x.half() + y.half()).float(),
    "bytes": lambda x, y: (x.abs() * 9).to(torch.uint8) + (y.abs() * 9).to(torch.uint8),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name):
    function = PAIRS[name]
    same(lambda x: function(x, x.flip(1) + 0.1), pictures())
    conv = nn.Conv2d(4, 4, 1)
    weight = torch.randn(4, 1, 1)
    same(lambda x: function(conv(x), weight), pictures())  # channels last beside a weight that is not
    same(lambda x: function(conv(x), conv(x)[:1, :, :1]), pictures())


REDUCTIONS = {
    "sum": lambda x: (x.sum(), x.sum(1), x.sum((2, 3)), x.sum((0, 2), keepdim=True), (x > 0).sum(-1)),
    "mean": lambda x: (x.mean(), x.mean(1), x.mean((2, 3)), x.mean((-1, -2), keepdim=True), x.double().mean((1, 2))),
    "extremes": lambda x: (x.amax(), x.amax(1), x.amax((2, 3), keepdim=True), x.amin((1, 3)), x.max(), x.min()),
    "places": lambda x: (*x.max(1), *x.min(2, keepdim=True), x.argmax(1), x.argmin(3, keepdim=True),
        x.flatten(1).argmax(-1)),
    "truths": lambda x: ((x > 0).any(), (x > 2).any(1), (x > -2).all((2, 3)), (x > 0).all(1, keepdim=True)),
    "spread": lambda x: (x.var(), x.std(1), x.var((2, 3), correction=0, keepdim=True), *torch.std_mean(x, (1, 2, 3))),
    "norms": lambda x: (x.norm(), x.norm(dim=1), x.norm(3, dim=1), x.norm(float("inf"), dim=1), x.norm(1, dim=(2, 3))),
    "other": lambda x: (x.prod(1), x.logsumexp(1), x.cumsum(1), x.cumprod(2), x.flatten(1).cumsum(-1)),
    "sorted": lambda x: (*x.sort(1), *x.sort(-1, descending=True), *x.topk(2, 1), *x.topk(3, -1, largest=False)),
    "likeness": lambda x: (functional.normalize(x), functional.cosine_similarity(x, x + 1, 1),
        functional.softmax(x, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name):
    conv = nn.Conv2d(4, 4, 1)
    same(REDUCTIONS[name], pictures(), rtol=1e-4)
    same(lambda x: REDUCTIONS[name](conv(x)), pictures(), rtol=1e-4)


SHAPES = {
    "views": lambda x: (x.flatten(1), x.view(x.shape[0], -1), x.reshape(-1, 7), x.view(x.shape[0] * 2, 2, 9, 7)),
    "batch and pixels": lambda x: x.permute(0, 2, 3, 1).reshape(-1, 4).view(x.shape[0], 63, 4).transpose(1, 2),
    "order": lambda x: (x.permute(0, 2, 3, 1), x.transpose(1, 2), x.permute(3, 1, 0, 2), x.mT),
    "dimensions": lambda x: (x[:, :, None], x[:, :1].squeeze(1), x.unsqueeze(-1), x.unsqueeze(0), x[:, 0].squeeze(1)),
    "expand": lambda x: (x[:, :1].expand(-1, 3, -1, -1), x[:, :1].expand(5, *x[:, :1].shape), x.repeat(1, 2, 1, 3)),
    "join": lambda x: (torch.cat([x, x * 2], 1), torch.cat([x, x], 0), torch.stack([x, x], -1), torch.cat([x,
        x.int()], 3)),
    "slices": lambda x: (x[:, 1:3], x[:, :, ::2], x[:, -2:], x[..., 1:-1], x[:, 2], x[:, :, -1], x[:, 3:100]),
    "parts": lambda x: (*x.split(3, 1), *x.chunk(2, 3), *x.unbind(1), *x.tensor_split(2, 2)),
    "turn": lambda x: (x.flip(1), x.flip((2, 3)), x.roll(2, 1), x.roll((1, -1), (2, 3)), x.rot90(1, (2, 3))),
    "pixels": lambda x: (functional.pixel_shuffle(x, 2), functional.channel_shuffle(x, 2), functional.unfold(x, 3)),
    "corners": lambda x: (x.tril(), x.triu(1), x.tril(-2)),
    "new": lambda x: (x.new_zeros(x.shape[0], 3) + 1, torch.ones_like(x), torch.full_like(x, 2.5), x.new_full((2,),
        3) + x[:1, :2, 0, 0]),
    "ranges": lambda x: (torch.arange(7) + x, torch.arange(1, 8, 1.0) + x, torch.linspace(0, 1, 7) + x,
        torch.arange(x.shape[0])),
    "eye": lambda x: x[..., :7, :] + torch.eye(7) + functional.one_hot(torch.arange(7) % 3, 7),
    "sizes": lambda x: (x * x.shape[0], x.sum() / x.shape[0], x.view(x.shape[0] * 4, -1)[: x.shape[0]], x[:,
        : x.shape[1] // 2]),
    "index": lambda x: (x[:, [1, -1]], x[:, :, [1, 2], [0, -1]], x[:, [0, 1], :, [1, 2]], x[:, :, [[0], [1]], [2, 3]]),
    "choose": lambda x: (x.index_select(1, torch.tensor([2, 0])), x.gather(1, (x > 0).long()), x[:, :,
        :4].gather(2, (x[:, :2, :3] > 0).long())),
    "repeat": lambda x: (x.repeat_interleave(2, 1), x.tile(2, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    conv = nn.Conv2d(4, 4, 1)
    same(SHAPES[name], pictures())
    same(lambda x: SHAPES[name](conv(x)), pictures())


def test_writing_in_place():
    def change(x):
        y = x.clone()
        y[:, 0] = 1.0
        y[:, :, 1:3] = x[:, :, 2:4]
        y[:, :, -1] += 2
        return y.relu_().add_(1)

    same(change, pictures())


PRODUCTS = {
    "linear": nn.Linear(7, 3),
    "linear of pictures": nn.Sequential(nn.Flatten(), nn.Linear(252, 5, bias=False)),
    "matmul": lambda x: x @ x.transpose(2, 3),
    "einsum": lambda x: torch.einsum("nchw,ncwk->nhk", x, x.transpose(2, 3)),
    "baddbmm": lambda x: torch.baddbmm(x[:, 0], x[:, 1], x[:, 2, :7], beta=0.5, alpha=2),
    "addmm": lambda x: torch.addmm(torch.ones(3), x[:, 0, 0], torch.ones(7, 3), beta=2, alpha=0.5),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    same(PRODUCTS[name], pictures())


class First(nn.Module):
    """Of what a layer returns."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


@pytest.mark.filterwarnings("ignore:The tensor attributes")  # torch's, of its own recurrent layers
def test_sequences():
    x = torch.randn(2, 5, 8)
    same(First(nn.LSTM(8, 3, num_layers=2, batch_first=True, bidirectional=True)), x)
    same(First(nn.GRU(8, 3, batch_first=True)), x)
    same(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), x)


def test_tables():
    ids = torch.randint(10, (2, 3))
    same(nn.Embedding(10, 4), ids)
    table = nn.Embedding(10, 4)
    variables = same(lambda x: table(x) @ table.weight.T, ids)
    assert {form for _, form in variables} == {"", "permute[1, 0]"}


def test_a_weight_is_one_variable():
    layer = nn.Conv2d(4, 4, 3, padding=1)
    variables = same(nn.Sequential(layer, layer), pictures())
    assert sorted(tuple(one.shape) for one in variables.values()) == [(3, 3, 4, 4), (4,)]
    assert all(one.trainable for one in variables.values())


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x + self.count


def test_what_changes_from_call_to_call():
    with pytest.raises(ConfigError, match="buffer that changes whenever it runs, such as 'module.count'"):
        same(Counting(), pictures())


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (torch.special.modified_bessel_i1, "operator aten.special_modified_bessel_i1.default, which"),
        (lambda x: torch.fft.rfft(x).abs(), "operator aten._fft_r2c.default"),
        (
            lambda x: functional.grid_sample(x, x[:, :2].permute(0, 2, 3, 1), align_corners=False),
            "aten.grid_sampler_2d.default",
        ),
    ],
)
def test_what_is_not_in_the_table(function, words):
    with pytest.raises(ConfigError, match=words):
        same(function, pictures())
