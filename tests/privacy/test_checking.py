"""What a private model may not have."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from plait.errors import ConfigError, DataError
from plait.privacy.recorder import Recorder

from .rules.reference import squared


def check(net, inputs, losses=squared, microbatches=None, variables=None):
    recorder = Recorder(net, [list(net.parameters() if variables is None else variables)])
    with recorder.recording():
        found = losses(net, inputs)
    recorder.check(found, microbatches)
    return recorder, found


class Using(nn.Module):
    """A layer, and a function that uses it otherwise than by calling it."""

    def __init__(self, use):
        super().__init__()
        self.inner, self.use = nn.Linear(6, 6), use
        self.alone = nn.Parameter(torch.rand(6))

    def forward(self, inputs):
        return self.use(self, inputs)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.BatchNorm1d(4, affine=False)], ids=str)
def test_batch_norm_is_refused_with_a_hint(norm):
    with pytest.raises(ConfigError, match=r"'1' is a \w*BatchNorm.*GroupNorm.*\.eval\(\)"):
        check(nn.Sequential(nn.Linear(6, 4), norm), torch.randn(4, 6), lambda net, x: net[0](x).sum(1))


def test_statistics_kept_of_samples_are_refused():
    with pytest.raises(ConfigError, match="track_running_stats"):
        check(nn.InstanceNorm1d(4, track_running_stats=True, affine=True), torch.randn(4, 4, 3))


@pytest.mark.parametrize(
    "mix",
    [lambda x: x - x.mean(0), lambda x: x.flip(0), lambda x: x @ x.t() @ x, lambda x: functional.softmax(x, 0)],
    ids=["mean", "flip", "attention over rows", "softmax over rows"],
)
def test_samples_that_mix_are_refused(mix):
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    with pytest.raises(ConfigError, match="layer '0'.*may not mix"):
        check(net, torch.randn(8, 6), lambda net, x: net[1](mix(net[0](x))).square().sum(1))


def test_losses_that_mix_are_refused():
    with pytest.raises(ConfigError, match="may not mix"):
        check(nn.Linear(6, 5), torch.randn(8, 6), lambda net, x: squared(net, x).softmax(0))


def test_rows_in_an_order_of_their_own_are_refused():
    with pytest.raises(ConfigError, match="sample by sample"):
        check(
            nn.Linear(6, 5),
            torch.randn(3, 8, 6),
            lambda net, x: net(x.reshape(24, 6)).view(3, 8, 5).square().sum((0, 2)),
        )


def test_outputs_without_rows_are_refused():
    class Placed(nn.Module):
        def __init__(self):
            super().__init__()
            self.places = nn.Embedding(5, 6)

        def forward(self, inputs):
            return inputs + self.places(torch.arange(5))

    with pytest.raises(ConfigError, match="layer 'places'.*a row for each sample"):
        check(Placed(), torch.randn(8, 5, 6))


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (lambda net, x: functional.linear(x, net.inner.weight), "inner.weight"),
        (lambda net, x: net.inner(x) @ net.inner.weight, "inner.weight"),
        (lambda net, x: net.inner(x) + net.inner.bias * 2, "inner.bias"),
    ],
)
def test_a_weight_used_outside_its_module_is_named(use, named):
    net = Using(use)
    with pytest.raises(ConfigError, match=f"^{named}: .*calling that module"):
        check(net, torch.randn(8, 6), variables=net.inner.parameters())


def test_a_variable_of_nobody_is_named():
    alone = torch.rand(6, requires_grad=True)
    with pytest.raises(ConfigError, match=r"a variable of shape \[6\]"):
        check(nn.Linear(6, 6), torch.randn(8, 6), lambda net, x: (net(x) * alone).sum(1), variables=[alone])


def test_a_module_that_draws_random_numbers_itself_is_refused():
    with pytest.raises(ConfigError, match="'' has no rule|'Using'"):
        check(Using(lambda net, x: functional.dropout(net.inner(x)) * net.alone), torch.randn(8, 6))


def test_a_module_with_a_state_is_refused():
    def use(net, inputs):
        net.count = getattr(net, "count", 0) + 1
        return net.inner(inputs) * net.alone * net.count

    with pytest.raises(ConfigError, match="another output.*keeps a state"):
        check(Using(use), torch.randn(8, 6))


def test_a_mask_that_might_be_rows_is_refused_rather_than_guessed():
    net = nn.MultiheadAttention(6, 2, batch_first=True)
    mask = torch.ones(8, 8).triu(1).bool()
    with pytest.raises(ConfigError, match="computed again"):
        check(net, torch.randn(8, 8, 6), lambda net, x: net(x, x, x, attn_mask=mask)[0].sum((1, 2)))


def test_one_row_shows_nothing():
    with pytest.raises(DataError, match="two rows"):
        check(nn.Linear(6, 5), torch.randn(1, 6))


def test_layers_that_no_loss_reaches_are_no_mistake():
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    recorder, losses = check(net, torch.randn(8, 6), lambda net, x: squared(net[0], x))
    assert recorder.gradients(losses.sum(), 8, 8).sums([torch.ones(8)])[0][2:] == [None, None]


def test_a_dead_sample_is_no_mistake():
    def losses(net, inputs):
        return squared(net, inputs) * torch.tensor([0.0, 1, 1, 1, 0, 1, 1, 1])

    check(nn.Linear(6, 5), torch.randn(8, 6), losses)


def test_the_graph_and_the_record_stay():
    recorder, losses = check(nn.Linear(6, 5), torch.randn(8, 6))
    assert recorder.gradients(losses.sum(), 8, 8).squares[0]["Linear"].shape == (8,)
