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
    return recorder, look(recorder, net, inputs, losses, microbatches)[0]


def look(recorder, net, inputs, losses=squared, microbatches=None):
    """One step, as far as the check."""
    with recorder.recording():
        found = losses(net, inputs)
    return found, recorder.check(found, microbatches)


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


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_table_that_shrinks_what_is_looked_up_is_refused(kind):
    net = nn.Sequential(kind(5, 6, max_norm=1.0), nn.Linear(6, 3))
    with pytest.raises(ConfigError, match="'0' is an? Embedding.*max_norm=1.0.*without noise"):
        check(net, torch.randint(0, 5, (4, 2)), variables=net[1].parameters())


class Keeping(nn.Module):
    """It writes into its buffers."""

    def __init__(self, write):
        super().__init__()
        self.inner, self.write = nn.Linear(6, 5), write
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, inputs):
        self.write(self, inputs)
        return self.inner(inputs)


def replace(net, inputs):
    net.mean = inputs.mean(0)


@pytest.mark.parametrize("write", [lambda net, x: net.mean.copy_(x.mean(0)), replace], ids=["in place", "another"])
def test_a_buffer_that_keeps_something_of_the_batch_is_refused(write):
    with pytest.raises(ConfigError, match="buffer 'mean'.*without noise"):
        check(Keeping(write), torch.randn(8, 6))


def test_buffers_that_count_steps_or_stay_are_no_mistake():
    def count(net, _):
        net.steps += 1
        net.mean.zero_()

    check(Keeping(count), torch.randn(8, 6))


@pytest.mark.parametrize(
    "mix",
    [lambda x: x - x.mean(0), lambda x: x.flip(0), lambda x: x @ x.t() @ x, lambda x: functional.softmax(x, 0)],
    ids=["mean", "flip", "attention over rows", "softmax over rows"],
)
def test_samples_that_mix_are_refused(mix):
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    with pytest.raises(ConfigError, match="layer '0'.*may not mix"):
        check(net, torch.randn(8, 6), lambda net, x: net[1](mix(net[0](x))).square().sum(1))


def test_neighbours_that_mix_are_refused():
    def losses(net, inputs):
        return squared(net, inputs).view(4, 2).flip(1).flatten()

    with pytest.raises(ConfigError, match="may not mix"):
        check(nn.Linear(6, 5), torch.randn(8, 6), losses)


class Branches(nn.Module):
    """A last layer that starts with zeros behind samples that mix, and perhaps another way around it."""

    def __init__(self, around):
        super().__init__()
        self.first, self.last, self.around = nn.Linear(6, 5), nn.Linear(5, 5), around
        nn.init.zeros_(self.last.weight)

    def forward(self, inputs):
        hidden = self.first(inputs)
        found = self.last(hidden - hidden.mean(0))
        return found + hidden if self.around else found


@pytest.mark.parametrize("around", [True, False])
def test_samples_that_mix_before_a_layer_of_zeros_are_refused(around):
    with pytest.raises(ConfigError, match="layer 'first'.*may not mix"):
        check(Branches(around), torch.randn(8, 6))


class Gated(nn.Module):
    """A branch that counts nothing at first."""

    def __init__(self, mix):
        super().__init__()
        self.first, self.branch, self.mix, self.gate = nn.Linear(6, 5), nn.Linear(6, 5), mix, 0.0

    def forward(self, inputs):
        branch = self.branch(inputs)
        return self.first(inputs) + self.gate * (branch.flip(0) if self.mix else branch)


def test_it_is_looked_at_again_until_every_layer_had_something_to_see():
    net, inputs = Gated(mix=True), torch.randn(8, 6)
    recorder = Recorder(net, [list(net.parameters())])
    assert look(recorder, net, inputs)[1] is False
    assert look(recorder, net, inputs)[1] is False
    net.gate = 1.0
    with pytest.raises(ConfigError, match="layer 'branch'.*may not mix"):
        look(recorder, net, inputs)


def test_it_was_looked_at_enough_when_every_layer_had_something_to_see():
    net, inputs = Gated(mix=False), torch.randn(8, 6)
    recorder = Recorder(net, [list(net.parameters())])
    assert look(recorder, net, inputs)[1] is False
    net.gate = 1.0
    assert look(recorder, net, inputs)[1] is True
    net.gate = 0.0
    assert look(recorder, net, inputs)[1] is True


def test_a_layer_that_was_not_called_is_looked_at_when_it_is():
    net, inputs = nn.ModuleList([nn.Linear(6, 5), nn.PReLU()]), torch.randn(8, 6)
    recorder = Recorder(net, [list(net.parameters())])
    assert look(recorder, net, inputs, lambda net, x: squared(net[0], x))[1] is False
    with pytest.raises(ConfigError, match="may not mix"):
        look(recorder, net, inputs, lambda net, x: net[1](net[0](x)).flip(0).sum(1))


def test_where_rows_are_is_not_forgotten_where_there_is_nothing_to_see():
    net, inputs = Gated(mix=False), torch.randn(8, 8, 6)
    recorder = Recorder(net, [list(net.parameters())])

    def losses(net, inputs):
        return net(inputs).square().sum((0, 2))  # as many positions as rows, and rows second

    look(recorder, net, inputs, losses)
    found, _ = look(recorder, net, inputs, lambda net, x: losses(net, x) * 0)
    found, _ = look(recorder, net, inputs, losses)
    ours = recorder.gradients(found.sum(), 8, 8).squares[0]["first"]
    for row in range(8):
        gradients = torch.autograd.grad(losses(net, inputs)[row], list(net.first.parameters()))
        assert float(ours[row]) == pytest.approx(float(sum(one.square().sum() for one in gradients)), rel=1e-4)


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


@pytest.mark.parametrize(
    "use",
    [
        lambda net, x: net.inner(functional.linear(x, net.inner.weight)),
        lambda net, x: net.inner(x) + net.inner.bias * 1e-9,
    ],
)
def test_a_weight_used_outside_is_found_in_half_precision_and_where_it_does_little(use):
    def losses(net, inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return squared(net, inputs)

    net = Using(use)
    for how in (losses, squared):
        with pytest.raises(ConfigError, match="^inner"):
            check(net, torch.randn(8, 6), how, variables=net.inner.parameters())


def test_gradients_that_ought_to_be_zero_are_no_mistake():
    class Attention(nn.Module):
        """What is added to all keys changes nothing: its gradient is rounding, and no other."""

        def __init__(self):
            super().__init__()
            self.queries, self.keys, self.values = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, inputs):
            return functional.scaled_dot_product_attention(self.queries(inputs), self.keys(inputs), self.values(inputs))

    torch.manual_seed(0)
    assert check(Attention(), torch.randn(8, 30, 6))


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


@pytest.mark.parametrize("first", [8, 5])
def test_a_mask_that_might_be_rows_is_known_by_what_it_gives(first):
    torch.manual_seed(0)
    net = nn.MultiheadAttention(6, 2, batch_first=True)
    mask = torch.ones(8, 8).triu(1).bool()
    recorder = Recorder(net, [list(net.parameters())])

    def losses(net, inputs):
        return net(inputs, inputs, inputs, attn_mask=mask)[0].square().sum((1, 2))

    assert look(recorder, net, torch.randn(first, 8, 6), losses)[1]
    for rows in (8, 5):  # a batch may have as many rows as the mask, later
        inputs = torch.randn(rows, 8, 6)
        with recorder.recording():
            found = losses(net, inputs)
        ours = recorder.gradients(found.sum(), rows, rows).squares[0]["MultiheadAttention"]
        gradients = torch.autograd.grad(losses(net, inputs)[1], list(net.parameters()))
        assert float(ours[1]) == pytest.approx(float(sum(one.square().sum() for one in gradients)), rel=1e-4)


def test_one_row_shows_nothing():
    with pytest.raises(DataError, match="two rows"):
        check(nn.Linear(6, 5), torch.randn(1, 6))


def test_a_loss_that_is_not_finite_shows_nothing():
    inputs = torch.randn(8, 6).index_fill(0, torch.tensor(3), torch.inf)
    with pytest.raises(DataError, match="not finite"):
        check(nn.Linear(6, 5), inputs)


def test_layers_that_no_loss_reaches_are_no_mistake():
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    recorder, losses = check(net, torch.randn(8, 6), lambda net, x: squared(net[0], x))
    assert recorder.gradients(losses.sum(), 8, 8).sums([torch.ones(8)])[0][2:] == [None, None]


def test_a_dead_sample_is_no_mistake():
    def losses(net, inputs):
        return squared(net, inputs) * torch.tensor([0.0, 1, 1, 1, 0, 1, 1, 1])

    check(nn.Linear(6, 5), torch.randn(8, 6), losses)


def test_a_model_at_its_best_has_gradients_to_compare():
    net, labels = nn.Linear(6, 1), torch.randn(32)
    inputs = torch.randn(32, 6)
    best = torch.linalg.lstsq(torch.cat([inputs, torch.ones(32, 1)], 1), labels[:, None]).solution
    with torch.no_grad():
        net.weight.copy_(best[:6].t())
        net.bias.copy_(best[6])

    def losses(net, inputs):
        return (net(inputs).squeeze(1) - labels).square()

    assert float(torch.autograd.grad(losses(net, inputs).sum(), net.weight)[0].norm()) < 1e-3  # all but rounding
    check(net, inputs, losses)


def test_the_graph_and_the_record_stay():
    recorder, losses = check(nn.Linear(6, 5), torch.randn(8, 6))
    assert recorder.gradients(losses.sum(), 8, 8).squares[0]["Linear"].shape == (8,)
