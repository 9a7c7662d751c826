"""One backward pass, and the gradients of every micro-batch from it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from plait import efl
from plait.data import PoissonSource
from plait.errors import ConfigError, DataError
from plait.privacy.recorder import LayerReport, Recorder

from .rules.reference import KINDS, close, compare, loop, squared


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def record(net, inputs, sets=None):
    recorder = Recorder(net, sets or [list(net.parameters())])
    with recorder.recording():
        losses = squared(net, inputs)
    return recorder, losses


X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("reduce", [torch.mean, torch.sum, torch.amax, lambda losses: losses.square().mean().sqrt()])
@pytest.mark.parametrize(("dtype", "count"), KINDS)
def test_every_reduction(reduce, dtype, count):
    compare(mlp(), X, dtype, count, reduce=reduce)


@pytest.mark.parametrize("count", [1, 8, 16])
def test_a_module_called_twice_counts_once(count):
    torch.manual_seed(1)
    for shared, shape in (
        (nn.Linear(6, 6), (16, 6)),
        (nn.Conv2d(3, 3, 3, padding=1), (16, 3, 5, 5)),
        (nn.LayerNorm(6), (16, 6)),
        (nn.PReLU(), (16, 6)),
    ):
        compare(nn.Sequential(shared, nn.Tanh(), shared), torch.randn(shape), torch.float64, count)


def test_two_modules_that_share_a_weight():
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    net[2].weight = net[0].weight
    compare(net, X, torch.float64, 8)


def test_sets_have_norms_and_weights_of_their_own():
    net = mlp()
    sets = [[net[0].bias, net[2].weight], [net[0].weight, net[2].bias]]
    recorder, losses = record(net, X, sets)
    found = recorder.gradients(losses.sum(), 16, 16)
    variables, expected = loop(net, squared, X, 16)
    weights = [torch.rand(16, dtype=torch.float64), {name: torch.rand(16, dtype=torch.float64) for name in "02"}]
    sums = found.sums(weights)
    for number, one in enumerate(sets):
        for variable, ours in zip(one, sums[number], strict=True):
            place = next(place for place, other in enumerate(variables) if other is variable)
            name = "0" if place < 2 else "2"
            close(found.squares[number][name], expected[place].flatten(1).square().sum(1), 1e-10)
            given = weights[number] if number == 0 else weights[1][name]
            close(ours, torch.tensordot(given, expected[place], 1), 1e-10)


def test_gradients_of_other_tensors_come_along_and_their_hooks_run():
    net, seen = mlp(), []
    received, unused = X.clone().requires_grad_(), torch.zeros(2, requires_grad=True)
    received.register_hook(seen.append)
    recorder, losses = record(net, received)
    found = recorder.gradients(losses.sum(), 16, 8, [received, unused])
    (expected,) = torch.autograd.grad(squared(net, received).sum(), received)
    close(found.also[0], expected, 1e-10)
    assert found.also[1] is None
    assert len(seen) == 2
    assert all(variable.grad is None for variable in net.parameters())


def test_no_gradient_of_a_variable_is_computed():
    net = mlp()
    for variable in net.parameters():
        variable.register_hook(lambda _: pytest.fail("autograd computed a gradient of a variable"))
    recorder, losses = record(net, X)
    recorder.gradients(losses.sum(), 16, 16).sums([torch.ones(16)])


def test_an_empty_batch_gives_none():
    net = mlp()
    recorder, losses = record(net, X[:0])
    found = recorder.gradients(losses.sum(), 0, 8)
    assert found.squares == [{}]
    assert found.sums([torch.ones(0)]) == [[None] * 4]


def test_a_batch_without_any_call_gives_none():
    recorder = Recorder(mlp(), [[]])
    assert recorder.gradients(torch.zeros(0).sum(), 0, 8).squares == [{}]


def test_microbatches_of_unequal_size_are_refused():
    recorder, losses = record(mlp(), X)
    with pytest.raises(DataError, match="16 rows.*5 micro-batches"):
        recorder.gradients(losses.sum(), 16, 5)


def test_only_calls_inside_are_noted_and_only_the_last_ones():
    net = mlp()
    recorder, _ = record(net, X)
    net(X)
    with recorder.recording():
        losses = squared(net, X[:8])
        with torch.no_grad():
            net(X)
    net(X)
    found = recorder.gradients(losses.sum(), 8, 8)
    assert found.squares[0]["0"].shape == (8,)


def test_what_was_noted_is_dropped_unless_it_is_kept():
    recorder, losses = record(mlp(), X)
    first = recorder.gradients(losses.sum(), 16, 16, keep=True)
    second = recorder.gradients(losses.sum(), 16, 16)
    close(first.squares[0]["2"], second.squares[0]["2"], 0)
    assert recorder.gradients(torch.zeros(()), 16, 16).squares == [{}]


def test_closed_it_notes_nothing():
    net = mlp()
    recorder, _ = record(net, X)
    recorder.close()
    with recorder.recording():
        losses = squared(net, X)
    assert recorder.gradients(losses.sum(), 16, 16).squares == [{}]
    assert not net[0]._forward_hooks


def test_an_input_changed_in_place_is_refused():
    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6).double()

        def forward(self, inputs):
            kept = inputs.clone()
            found = self.inner(kept)
            kept += found.detach()
            return found

    recorder, losses = record(Adding(), X)
    with pytest.raises(ConfigError, match="'inner'.*in place"):
        recorder.gradients(losses.sum(), 16, 16)


def test_a_call_without_a_row_a_sample_is_refused():
    recorder, losses = record(mlp(), X)
    with pytest.raises(DataError, match="no row for each of 15"):
        recorder.gradients(losses.sum(), 15, 15)


def test_the_report_names_the_path_of_each_layer():
    net = nn.Sequential(nn.Linear(6, 4), nn.PReLU(), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    recorder = Recorder(net, [list(net.parameters())])
    assert {one.path for one in recorder.report()} == {"-"}
    with recorder.recording():
        losses = squared(net[:3], X)
    recorder.gradients(losses.sum(), 16, 16)
    assert recorder.report() == [
        LayerReport("0", "Linear", "ghost", 28),
        LayerReport("1", "PReLU", "vmap", 1),
        LayerReport("2", "LayerNorm", "direct", 8),
        LayerReport("3", "Linear", "-", 10),
    ]


def test_half_precision_has_norms_in_float32():
    net, inputs = mlp().float(), X.float()
    recorder = Recorder(net, [list(net.parameters())])
    with recorder.recording(), torch.autocast("cpu", torch.bfloat16):
        losses = net(inputs).float().square().sum(1)
    found = recorder.gradients(losses.sum(), 16, 16)
    sums = found.sums([torch.ones(16)])[0]
    assert {values.dtype for values in (*found.squares[0].values(), *sums)} == {torch.float32}
    expected = torch.autograd.grad(squared(net, inputs).sum() - net(inputs)[:, 0].sum(), list(net.parameters()))
    for ours, theirs in zip(sums, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.1)


def test_variables_in_half_precision_are_refused():
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3).bfloat16())
    with pytest.raises(ConfigError, match=r"'1.weight' is of bfloat16.*float32"):
        Recorder(net, [list(net.parameters())])
    Recorder(net, [list(net[0].parameters())])


class Mixed(nn.Module):
    """A convolution, norms, a recurrence and attention with a mask, which has no rule."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.groups = nn.Conv1d(1, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.recurrence, self.attention = (
            nn.LSTM(16, 16, batch_first=True),
            nn.MultiheadAttention(16, 2, batch_first=True),
        )
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)
        self.register_buffer("mask", torch.ones(6, 6).triu(1).bool())

    def forward(self, inputs):
        hidden = torch.relu(self.groups(self.convolution(inputs[:, None]))).transpose(1, 2)
        hidden, _ = self.recurrence(hidden)
        hidden, _ = self.attention(hidden, hidden, hidden, attn_mask=self.mask, need_weights=False)
        return self.head(self.norm(hidden[:, -1]))


def trained(net, precision, steps=6):
    """A private model after some steps, without noise; batches have about as many rows as its mask."""
    model = efl.Model()
    model.net = net
    labels = torch.arange(96) % 3
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(1)) + labels[:, None]
    model.input_fn(lambda model, mode: PoissonSource({"x": inputs, "y": labels}, 6, seed=7, num_epochs=1))
    model.loss_fn(lambda model, sample: functional.cross_entropy(model.net(sample["x"]), sample["y"], reduction="none"))
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(efl.privacy.DPSGD(0.5, 1.0, 0.0)))
    model.compile(session_config={"device": "cpu", "precision": precision})
    model.fit(efl.procedure_fn.train(steps))
    return torch.cat([variable.detach().flatten() for variable in net.parameters()])


@pytest.mark.parametrize("make", [lambda: mlp().float(), Mixed], ids=["mlp", "mixed"])
def test_a_model_trains_in_half_precision(make):
    before = torch.cat([variable.detach().flatten() for variable in make().parameters()])
    full, half = trained(make(), "fp32") - before, trained(make(), "bf16") - before
    assert float(full.norm()) > 0.1
    assert float((half - full).norm() / full.norm()) < 0.05


def test_checkpointed_layers():
    def losses(net, inputs):
        return checkpoint(net, inputs, use_reentrant=False).square().sum(1)

    compare(mlp(), X, torch.float64, 8, losses)


def test_a_hook_of_the_user_that_changes_the_output():
    net = mlp()
    net[0].register_forward_hook(lambda module, args, output: output * 3)
    compare(net, X, torch.float64, 8)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_weights_made_by_a_function_are_found_by_vmap():
    net = mlp()
    with pytest.warns(FutureWarning, match="weight_norm"):
        torch.nn.utils.weight_norm(net[0])
    assert compare(net, X, torch.float64, 8)["0"] == "vmap"


def test_loss_of_cross_entropy():
    labels = torch.arange(16) % 3
    compare(mlp(), X, torch.float64, 16, lambda net, x: functional.cross_entropy(net(x), labels, reduction="none"))
