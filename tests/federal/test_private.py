"""Private parties: split equals unsplit, what goes back is clipped and noised by row, and both epsilons are kept."""

from __future__ import annotations

import functools
import inspect
import itertools
import math

import pytest
import torch
from torch import nn

import plait
from plait import efl
from plait.data import PoissonSource
from plait.errors import ConfigError, FunctionError
from plait.privacy.labels import marvell, max_norm
from plait.privacy.optimizers import make_private
from plait.privacy.recorder import Recorder

from .pair import LEFT, RIGHT, WHOLE, both, communicators, dense, make, refused

TRAIN = efl.procedure_fn.train
ROWS = 32
SGD = functools.partial(torch.optim.SGD, lr=0.5)
CLIP = 0.3
MODES = ("noise", "unnoise")


def private(noise=0.0, clip=CLIP, **settings):
    return make_private(SGD, clip, noise, **{"seed": 5, "samples": 320, **settings})


def losses(own, other, y):
    return nn.functional.cross_entropy(dense("top", 10, 3, torch.cat([own, other], 1)), y, reduction="none")


def leader_loss(model, sample):
    hidden = model.recv("hidden", require_grad=True)
    return losses(dense("left", 4, 5, sample.x).relu(), hidden, sample.y)


def plain_leader_loss(model, sample):
    return leader_loss(model, sample).mean()


def follower_loss(model, sample):
    return model.send("hidden", dense("right", 4, 5, sample.x).relu(), require_grad=True)


def whole_loss(model, sample):
    return losses(dense("left", 4, 5, sample.x).relu(), dense("right", 4, 5, sample.x2).relu(), sample.y)


def party(fields, loss, optimizer, *, steps=12, mode="unnoise", reduce="mean", fit=None, compiled=None, **source):
    """A function of a communicator that trains one party's model; without one, the unsplit model."""

    def run(joined=None):
        setter = optimizer if inspect.isfunction(optimizer) else efl.optimizer_fn.optimizer_setter(optimizer)
        model = make(
            fields,
            loss,
            joined=joined,
            optimizer=setter,
            batch=ROWS,
            drop_remainder=True,
            **{"num_epochs": 100, **source},
        )
        model.compile(opt_config={"REDUCE": reduce, "BACKEND_MODE": mode}, **(compiled or {}))
        model.fit(TRAIN(steps), **(fit or {}))
        return model

    return run


def sides(right, others):
    """An optimizer for the variables that a follower would have, and one for the leader's."""

    def setter(model, task):
        named, made = model.trainable_variables(), {}
        for factory, inside in ((right, True), (others, False)):
            theirs = [value for name, value in named.items() if name.startswith(("net/right", "net/aside")) is inside]
            made[model.make_optimizer(factory, theirs, str(inside))] = theirs, None
        return made

    return setter


def values(*models):
    return {name: value.detach().clone() for model in models for name, value in model.variables().items()}


def assert_close(found, wanted, tolerance=1e-5):
    assert found.keys() == wanted.keys()
    assert [name for name in found if not torch.allclose(found[name], wanted[name], atol=tolerance, rtol=0)] == []


# ---- split equals unsplit


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("count", [None, 8, 1])
def test_two_private_parties_train_as_the_unsplit_model_does(count, reduce):
    given, optimizer = {"reduce": reduce}, private(num_microbatches=count)
    found = both(party(LEFT, leader_loss, optimizer, **given), party(RIGHT, follower_loss, optimizer, **given))
    unsplit = functools.partial(party, WHOLE, whole_loss, sides(optimizer, optimizer), **given)
    wanted = values(unsplit()())
    assert_close(values(*found), wanted)
    assert not torch.allclose(values(unsplit(steps=1)())["net/right/weight"], wanted["net/right/weight"], atol=1e-3)


# All optimizers of a task are private, or none: a limit that nothing reaches stands for one that is not.
FREE = private(clip=1e9)


def test_a_private_follower_of_a_leader_that_is_not():
    found = both(party(LEFT, plain_leader_loss, SGD), party(RIGHT, follower_loss, private()))
    assert_close(values(*found), values(party(WHOLE, whole_loss, sides(private(), FREE))()))


def test_a_follower_that_is_not_private_of_a_private_leader():
    found = both(party(LEFT, leader_loss, private()), party(RIGHT, follower_loss, SGD))
    assert_close(values(*found), values(party(WHOLE, whole_loss, sides(FREE, private()))()))


def test_drawn_batches_some_of_them_empty():
    def drawn(fields, loss, setter, joined=None):
        model = efl.Model() if joined is None else efl.FederalModel(communicator=joined)
        model.input_fn(lambda model, mode: PoissonSource(fields, 2, seed=3)).loss_fn(loss).optimizer_fn(setter)
        model.compile(opt_config={"BACKEND_MODE": "unnoise"})
        model.fit(TRAIN(60))
        return model

    sizes = [len(batch["y"]) for batch in PoissonSource(LEFT, 2, seed=3).batches(0, 0)][:60]
    assert 0 in sizes
    setter = efl.optimizer_fn.optimizer_setter(private())
    found = both(
        lambda joined: drawn(LEFT, leader_loss, setter, joined),
        lambda joined: drawn(RIGHT, follower_loss, setter, joined),
    )
    assert_close(values(*found), values(drawn(WHOLE, whole_loss, sides(private(), private()))))


def test_a_loss_at_both_private_parties():
    def own(hidden, y):
        return nn.functional.cross_entropy(dense("aside", 5, 3, hidden), y, reduction="none")

    def follow(model, sample):
        hidden = model.send("hidden", dense("right", 4, 5, sample.x).relu(), require_grad=True)
        return own(hidden, sample.y)

    def unsplit(model, sample):
        right = dense("right", 4, 5, sample.x2).relu()
        return losses(dense("left", 4, 5, sample.x).relu(), right, sample.y) + own(right, sample.y)

    found = both(party(LEFT, leader_loss, private()), party(RIGHT, follow, private()))
    assert_close(values(*found), values(party(WHOLE, unsplit, sides(private(), private()))()))


# ---- what goes back


def returned(noise, mode, *, clip=CLIP, loss=leader_loss, steps=1, count=None, wide=5, **settings):
    """The gradients that the follower got, one a step, each of the mean over micro-batches."""
    found = []

    def follow(model, sample):
        sent = dense("right", 4, wide, sample.x).relu()
        sent.register_hook(lambda gradient: found.append(gradient.clone()))
        model.send("hidden", sent, require_grad=True)

    models = both(
        party(LEFT, loss, private(noise, clip, num_microbatches=count, **settings), mode=mode, steps=steps),
        party(RIGHT, follow, SGD, steps=steps),
    )
    return found, models


@pytest.mark.parametrize("count", [None, 8])
def test_rows_go_back_clipped(count):
    (bare,), _ = returned(0.0, "unnoise", count=count)
    norms = bare.norm(dim=1) * (count or ROWS)
    clip = float(norms.median())
    (clipped,), _ = returned(0.0, "noise", clip=clip, count=count)
    assert norms.min() < clip < norms.max()
    wanted = bare * (clip / norms).clamp(max=1)[:, None]
    assert torch.allclose(clipped, wanted, atol=1e-7)


@pytest.mark.parametrize("count", [None, 8])
@pytest.mark.parametrize("clipping", ["flat", "adaptive"])
def test_rows_go_back_noised_by_the_multiplier_and_the_limit(count, clipping):
    wide = 1000

    def lead(model, sample):
        hidden = dense("top", 4 + wide, 3, torch.cat([sample.x, model.recv("hidden", require_grad=True)], 1))
        return nn.functional.cross_entropy(hidden, sample.y, reduction="none")

    def difference(noise):
        given = {"loss": lead, "count": count, "wide": wide, "clipping": clipping}
        (clipped,), _ = returned(0.0, "noise", **given)
        (noised,), models = returned(noise, "noise", **given)
        return (noised - clipped) * (count or ROWS), models[0].private_tasks[None].parts[0].living.multiplier

    draws, multiplier = difference(2.0)
    assert multiplier == 2.0 if clipping == "flat" else multiplier > 2.0
    assert draws.shape == (ROWS, wide)
    assert float(draws.std()) == pytest.approx(multiplier * CLIP, rel=0.02)  # of 32,000 draws, known to 0.4%
    each = draws.std(dim=1)  # no row has less: known to 2.2%
    assert float(each.min()) > 0.9 * multiplier * CLIP
    correlations = draws.corrcoef().fill_diagonal_(0)
    assert float(correlations.abs().max()) < 0.2


def test_a_row_without_a_finite_gradient_does_not_show():
    calls = itertools.count()

    def lead(model, sample):
        hidden = model.recv("hidden", require_grad=True)
        found = losses(dense("left", 4, 5, sample.x).relu(), hidden, sample.y)
        if next(calls) < 2:  # the build, and a step that is looked at
            return found
        nothing = (hidden[3:4] * 0).abs().sqrt().sum(1)  # of which the gradient is not a number
        return torch.cat([found[:3], found[3:4] + nothing, found[4:]])

    (_, bare), _ = returned(0.0, "unnoise", loss=lead, steps=2)
    assert bool(bare[3].isnan().all())
    calls = itertools.count()
    (_, found), _ = returned(0.0, "noise", loss=lead, steps=2)
    assert bool(found.isfinite().all())


def test_each_step_has_noise_of_its_own_and_it_is_not_the_optimizers():
    found, _ = returned(1e4, "noise", steps=3)
    draws = [one.flatten() / one.std() for one in found]
    assert all(abs(float((one * other).mean())) < 0.3 for one in draws for other in draws if one is not other)


def test_unnoise_sends_rows_as_they_are():
    (bare,), _ = returned(0.0, "unnoise")
    (also_bare,), _ = returned(2.0, "unnoise")
    assert torch.equal(bare, also_bare)


@pytest.mark.parametrize("mode", MODES)
def test_without_a_private_optimizer_the_mode_does_nothing(mode, caplog):
    found = both(
        party(LEFT, plain_leader_loss, SGD, mode=mode),
        party(RIGHT, follower_loss, SGD, mode=mode),
    )
    wanted = party(WHOLE, lambda model, sample: whole_loss(model, sample).mean(), SGD)()
    assert_close(values(*found), values(wanted), 0.0)
    assert "noise" not in caplog.text


def test_a_gradient_without_a_row_for_each_sample_is_refused():
    def lead(model, sample):
        weight = model.recv("weight", require_grad=True)
        return losses(dense("left", 4, 5, sample.x).relu(), sample.x @ weight, sample.y)

    def follow(model, sample):
        weight = dense("right", 4, 5, sample.x[:4])
        model.send("weight", weight, require_grad=True)

    errors = refused(party(LEFT, lead, private(), mode="noise"), party(RIGHT, follow, SGD), seconds=20)
    assert any(isinstance(error, FunctionError) and "BACKEND_MODE='unnoise'" in str(error) for error in errors)


# ---- protect=


def test_protect_changes_what_goes_back():
    def lead(model, sample):
        hidden = model.recv("hidden", require_grad=True, protect=lambda rows: rows * 3)
        return losses(dense("left", 4, 5, sample.x).relu(), hidden, sample.y)

    (bare,), _ = returned(0.0, "unnoise")
    (changed,), _ = returned(0.0, "unnoise", loss=lead)
    assert torch.equal(changed, bare * 3)


PROTECTS = {"max_norm": lambda sample: max_norm, "marvell": lambda sample: functools.partial(marvell, labels=sample.y)}


def protecting(protect, *, since=0):
    """A leader's loss that hides labels from that call on."""
    calls = itertools.count()

    def lead(model, sample):
        given = protect(sample) if next(calls) >= since else None
        hidden = model.recv("hidden", require_grad=True, protect=given)
        return losses(dense("left", 4, 5, sample.x).relu(), hidden, sample.y)

    return lead


@pytest.mark.parametrize("since", [0, 3])
@pytest.mark.parametrize("protect", PROTECTS)
def test_protect_with_noise_is_refused(protect, since):
    lead = protecting(PROTECTS[protect], since=since)
    errors = refused(party(LEFT, lead, private(1.0), mode="noise"), party(RIGHT, follower_loss, SGD), seconds=20)
    assert isinstance(errors[0], FunctionError), errors
    assert "'hidden'" in str(errors[0])
    assert "BACKEND_MODE='unnoise'" in str(errors[0])


def test_protect_without_noise_promises_the_peer_nothing():
    lead = protecting(PROTECTS["max_norm"])
    leading, _ = both(
        party(LEFT, lead, private(3.0), mode="unnoise", steps=2), party(RIGHT, follower_loss, SGD, steps=2)
    )
    assert leading.privacy.peer_epsilon() == math.inf
    assert leading.privacy.epsilon(exact=True) < 10


def test_protect_without_a_private_optimizer():
    def lead(model, sample):
        hidden = model.recv("hidden", require_grad=True, protect=max_norm)
        return losses(dense("left", 4, 5, sample.x).relu(), hidden, sample.y).mean()

    both(party(LEFT, lead, SGD, steps=2), party(RIGHT, follower_loss, SGD, steps=2))


@pytest.mark.parametrize("made", [lambda rows: rows[:1], lambda rows: None, torch.Tensor.double])
def test_protect_has_to_return_rows_alike(made):
    def lead(model, sample):
        hidden = model.recv("hidden", require_grad=True, protect=made)
        return losses(dense("left", 4, 5, sample.x).relu(), hidden, sample.y).mean()

    errors = refused(party(LEFT, lead, SGD, steps=1), party(RIGHT, follower_loss, SGD, steps=1), seconds=20)
    assert any("same shape and dtype" in str(error) for error in errors)


def test_protect_without_a_gradient_is_refused():
    def lead(model, sample):
        return losses(dense("left", 4, 5, sample.x).relu(), model.recv("hidden", protect=max_norm), sample.y)

    errors = refused(party(LEFT, lead, SGD), party(RIGHT, follower_loss, SGD))
    assert any("write require_grad=True, too" in str(error) for error in errors)


# ---- epsilons


def gaussian(noise, uses, delta=1e-5):
    """The epsilon of so many Gaussian mechanisms, found by halving."""
    mu, low, high = math.sqrt(uses) / noise, 0.0, 1e4

    def tail(x):
        return 0.5 * math.erfc(-x / math.sqrt(2))

    for _ in range(200):
        middle = (low + high) / 2
        spent = tail(mu / 2 - middle / mu) - math.exp(min(middle, 700)) * tail(-mu / 2 - middle / mu)
        low, high = (middle, high) if spent > delta else (low, middle)
    return high


def test_both_epsilons_of_both_parties(caplog):
    optimizer = private(3.0)
    leading, following = both(
        party(LEFT, leader_loss, optimizer, mode="noise", steps=10, num_epochs=1),
        party(RIGHT, follower_loss, optimizer, mode="noise", steps=10, num_epochs=1),
    )
    # One pass: each row is used once, in the leader's gradient and in what goes back.
    assert leading.privacy.peer_epsilon() == pytest.approx(gaussian(3.0, 2), rel=1e-3)
    assert leading.privacy.epsilon(exact=True) < leading.privacy.peer_epsilon()
    # Numbers made of the follower's rows go to the leader as they are.
    assert following.privacy.peer_epsilon() == math.inf
    assert following.privacy.epsilon(exact=True) == leading.privacy.epsilon(exact=True)
    assert "peer_epsilon" in caplog.text or "against the follower" in caplog.text


def test_bare_gradients_hide_nothing_from_the_peer():
    leading, _ = both(
        party(LEFT, leader_loss, private(3.0), mode="unnoise", steps=2),
        party(RIGHT, follower_loss, SGD, steps=2),
    )
    assert leading.privacy.peer_epsilon() == math.inf
    assert leading.privacy.epsilon(exact=True) < 10


def test_two_tensors_that_go_back_tell_twice():
    def lead(model, sample):
        one, two = model.recv("one", require_grad=True), model.recv("two", require_grad=True)
        return losses(dense("left", 4, 5, sample.x).relu(), one * two, sample.y)

    def follow(model, sample):
        model.send("one", dense("one", 4, 5, sample.x), require_grad=True)
        model.send("two", dense("two", 4, 5, sample.x), require_grad=True)

    leading, _ = both(
        party(LEFT, lead, private(3.0), mode="noise", steps=5, num_epochs=1),
        party(RIGHT, follow, SGD, steps=5, num_epochs=1),
    )
    assert leading.privacy.peer_epsilon() == pytest.approx(gaussian(3.0, 3), rel=1e-3)


# ---- what is refused


@pytest.mark.parametrize("at", ["leader", "follower"])
def test_rows_that_mix_are_refused(at):
    def lead(model, sample):
        hidden = model.recv("hidden", require_grad=True)
        left = dense("left", 4, 5, sample.x).relu()
        return losses(left - left.mean(0) if at == "leader" else left, hidden, sample.y)

    def follow(model, sample):
        right = dense("right", 4, 5, sample.x).relu()
        model.send("hidden", right - right.mean(0) if at == "follower" else right, require_grad=True)

    errors = refused(party(LEFT, lead, private()), party(RIGHT, follow, private()), seconds=20)
    own = errors[at == "follower"]
    assert isinstance(own, ConfigError), own
    assert "left" in str(own) or "right" in str(own)


@pytest.mark.parametrize("late", [False, True])
def test_received_rows_that_mix_are_refused_where_they_go_back_noised(late):
    """A row's gradient would tell of others; with a head of zeros that cannot be seen in the first step."""

    def lead(model, sample):
        hidden = model.recv("hidden", require_grad=True)
        left = dense("left", 4, 5, sample.x).relu()
        mixed = torch.cat([left, hidden - hidden.mean(0)], 1)
        if not late:
            return nn.functional.cross_entropy(dense("top", 10, 3, mixed), sample.y, reduction="none")
        with plait.variable_scope("net", reuse=plait.AUTO_REUSE):
            logits = plait.layer("zeros", Zeros, 10, 3)(mixed)
        return nn.functional.cross_entropy(logits, sample.y, reduction="none")

    errors = refused(party(LEFT, lead, private(1.0), mode="noise"), party(RIGHT, follower_loss, SGD), seconds=20)
    assert isinstance(errors[0], ConfigError), errors
    assert "'hidden'" in str(errors[0])
    assert "BACKEND_MODE='unnoise'" in str(errors[0])
    both(
        party(LEFT, lead, private(1.0), mode="unnoise", steps=2), party(RIGHT, follower_loss, SGD, steps=2)
    )  # as they are, they are promised nothing


class Zeros(nn.Linear):
    def reset_parameters(self):
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


def test_a_step_that_shows_too_little_is_looked_at_again(monkeypatch):
    answers, asked = iter([False, False, True]), []

    def check(recorder, losses, microbatches=None):
        asked.append(len(losses))
        return next(answers)

    monkeypatch.setattr(Recorder, "check", check)
    both(party(LEFT, leader_loss, private(), steps=6), party(RIGHT, follower_loss, SGD, steps=6))
    assert asked == [ROWS] * 3


def test_a_function_of_a_groups_losses_with_noise_is_refused():
    """It may weigh one row's loss by another's: a row that goes back would tell of others."""
    given = {"reduce": lambda losses: losses.square().mean(), "steps": 1}
    lead = functools.partial(party, LEFT, leader_loss, **given)
    follow = party(RIGHT, follower_loss, SGD, steps=1)
    errors = refused(lead(private(1.0, num_microbatches=8), mode="noise"), follow, seconds=20)
    assert isinstance(errors[0], ConfigError), errors
    assert "REDUCE" in str(errors[0])
    assert "num_microbatches" in str(errors[0])
    both(lead(private(1.0, num_microbatches=8), mode="unnoise"), follow)
    both(lead(private(1.0), mode="noise"), follow)  # a group of one row


def test_a_follower_that_gives_nothing_back_may_have_any_mode():
    given = {"reduce": lambda losses: losses.square().mean(), "mode": "noise", "steps": 1}
    optimizer = private(1.0, num_microbatches=8)
    both(party(LEFT, plain_leader_loss, SGD, steps=1), party(RIGHT, follower_loss, optimizer, **given))


def test_staleness_with_a_private_follower_is_refused():
    errors = refused(
        party(LEFT, leader_loss, private()),
        party(RIGHT, follower_loss, private()),
        communicators(staleness=1),
        seconds=20,
    )
    assert any("staleness=1 with a private optimizer at the follower" in str(error) for error in errors)


def test_staleness_with_a_private_leader_works():
    leading, _ = both(
        party(LEFT, leader_loss, private(1.0), mode="noise"),
        party(RIGHT, follower_loss, SGD),
        communicators(staleness=1),
    )
    assert int(leading.global_step) == 12


# ---- resuming


def test_a_resumed_run_goes_on_with_the_same_noise_and_epsilon(tmp_path):
    def run(place, *counts):
        for steps in counts:
            fits = [{"checkpoint_dir": tmp_path / place / role, "save_steps": 5} for role in ("leader", "follower")]
            found = both(
                party(LEFT, leader_loss, private(1.0), mode="noise", steps=steps, fit=fits[0]),
                party(RIGHT, follower_loss, private(1.0), mode="noise", steps=steps, fit=fits[1]),
            )
        return found

    whole, resumed = run("whole", 16), run("resumed", 7, 16)
    assert_close(values(*resumed), values(*whole), 0.0)
    for one, other in zip(whole, resumed, strict=True):
        assert one.privacy.epsilon(exact=True) == other.privacy.epsilon(exact=True)
        assert one.privacy.peer_epsilon() == other.privacy.peer_epsilon()
