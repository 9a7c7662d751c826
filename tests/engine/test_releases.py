"""Runs that end and go on: the same step has the same noise, and no other has."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plait import efl
from plait.data import PoissonSource, TensorSource
from plait.engine.hooks import SessionRunHook
from plait.engine.releases import described
from plait.engine.sampling import kept_seed, take_seed
from plait.engine.settings import GradientConfig
from plait.engine.strategy import Local
from plait.privacy.accountant import Event, epsilon, together
from plait.privacy.optimizers import make_private

ROWS, BATCH = 96, 16
X = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (ROWS,), generator=torch.Generator().manual_seed(1))
SGD = functools.partial(torch.optim.SGD, lr=1.0)
TRAIN = efl.procedure_fn.train


class Dies(SessionRunHook):
    def __init__(self, at):
        self.at = at

    def before_run(self, run_context):
        if run_context.session.global_step.value == self.at:
            raise KeyboardInterrupt


def drawn(seed=7):
    return PoissonSource({"x": X, "y": Y}, BATCH, seed=seed, num_epochs=2)


def in_order():
    return TensorSource({"x": X, "y": Y}, BATCH, num_epochs=2)


def made(opt, source=drawn, *, scale=1.0, reduce="mean", loss=None, **settings):
    """With `scale=0`, what moves is the noise alone."""

    def losses(model, sample):
        return scale * F.cross_entropy(model.net(sample["x"]), sample["y"], reduction="none")

    torch.manual_seed(3)
    model = efl.Model()
    model.net = nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 3))
    model.input_fn(lambda model, mode: source())
    model.loss_fn(loss or losses)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(opt))
    return model.compile(session_config={"device": "cpu"}, opt_config={"REDUCE": reduce}, **settings)


def weights(model):
    return torch.cat([value.detach().flatten() for value in model.net.parameters()])


def killed(model, directory, at=5, save=100):
    start = weights(model)
    with pytest.raises(KeyboardInterrupt):
        model.fit(TRAIN(), checkpoint_dir=directory, save_steps=save, hooks=[Dies(at)])
    return weights(model) - start


def likeness(one, other):
    return float(torch.corrcoef(torch.stack([one, other]))[0, 1])


def mean(losses):
    return losses.mean()


def nothing(model, sample):
    return model.net(sample["x"]).sum(1) * 0


CHANGES = {
    "noise": (lambda: make_private(SGD, 1.0, 2.0), {}, "noise_multiplier of optimizer 0 was 1.0, and is 2.0"),
    "limit": (lambda: make_private(SGD, 0.5, 1.0), {}, "l2_norm_clip of optimizer 0 was 1.0, and is 0.5"),
    "clipping": (lambda: make_private(SGD, 1.0, 1.0, clipping="per-layer"), {}, "clipping of optimizer 0 was flat"),
    "losses": (lambda: make_private(SGD, 1.0, 1.0), {"reduce": "sum"}, "REDUCE was mean, and is sum"),
    "scale": (
        lambda: make_private(SGD, 1.0, 1.0),
        {"gradient": GradientConfig(loss_scale=64.0)},
        "loss_scale was 1.0, and is 64.0",
    ),
    "function": (lambda: make_private(SGD, 1.0, 1.0), {"reduce": mean}, "REDUCE was mean, and is mean ("),
    "loss": (lambda: make_private(SGD, 1.0, 1.0), {"loss": nothing}, "loss_fn was made.<locals>.losses ("),
}


def plain_noise():
    return make_private(SGD, 1.0, 1.0)


@pytest.mark.parametrize("what", list(CHANGES))
def test_a_program_that_was_changed_has_other_noise_and_counts_again(tmp_path, caplog, what):
    make, settings, said = CHANGES[what]
    before = killed(made(plain_noise(), scale=0.0), tmp_path)
    model = made(make(), scale=0.0, **settings)
    after = killed(model, tmp_path)
    assert abs(likeness(before, after)) < 0.3
    assert said in caplog.text
    runs = [sum(run.counts.values()) for run in model.privacy._runs()]
    assert runs == [5, 5]


def test_one_that_was_not_has_the_same_and_does_not(tmp_path, caplog):
    before = killed(made(plain_noise(), scale=0.0), tmp_path)
    budget = make_private(SGD, 1.0, 1.0, epsilon_budget=99.0, samples=5)  # nothing of this is in a step
    model = made(budget, scale=0.0)
    assert torch.equal(before, killed(model, tmp_path))
    assert "was changed" not in caplog.text
    assert len(list(model.privacy._runs())) == 1


def test_what_was_clipped_for_other_noise_is_dropped(tmp_path):
    def make(clip):
        return made(make_private(SGD, clip, 0.0), in_order, strategy=Local(gradient_merge=2))

    killed(make(1.0), tmp_path, at=3, save=3)
    for clip, merged in ((1.0, 2), (0.001, 1)):
        model = make(clip)
        # a batch of the first run, which could move them by 1.0 / 2, and one of this
        moved = []

        class Notes(SessionRunHook):
            def before_run(self, run_context, model=model, moved=moved):
                moved.append(weights(model))

        with pytest.raises(KeyboardInterrupt):
            model.fit(TRAIN(), checkpoint_dir=tmp_path, save_steps=100, hooks=[Notes(), Dies(4)])
        assert model.global_step.value == 4
        assert (float((moved[1] - moved[0]).norm()) > 0.01) == (merged == 2)


def test_a_step_that_comes_again_as_another_gets_another_key():
    model = made(plain_noise(), scale=0.0)
    model.fit(TRAIN(4))
    (living,) = model.private_state.living.values()
    key = living.noise.key
    model.privacy.release(Event(5.0, 0.1), step=3, uses=1)
    assert living.noise.key != key


def test_a_seed_has_another_key_for_each_change(tmp_path):
    keys = set()
    killed(made(make_private(SGD, 1.0, 1.0, seed=4)), tmp_path)
    for noise in (1.0, 2.0, 3.0):
        model = made(make_private(SGD, 1.0, noise, seed=4))
        killed(model, tmp_path, at=2)
        keys.add(next(iter(model.private_state.living.values())).noise.key)
    assert len(keys) == 3


def test_functions_are_known_by_their_code():
    class Called:
        def __call__(self, losses):
            return losses.mean()

    functions = [lambda x: x.mean(), lambda x: x.sum(), lambda x: x.mean() * 2.0, lambda x: x.mean() * 3.0, mean]
    assert len({described(one) for one in (*functions, Called(), torch.mean, Dies(1).before_run)}) == 8
    assert described(mean) == described(functools.partial(mean)) != described(nothing)
    assert described(Called()).startswith("test_functions_are_known_by_their_code.<locals>.Called (")


# ---- the seed of draws


@pytest.mark.parametrize("save", [3, 100])
def test_draws_of_the_system_are_resumed(tmp_path, save):
    def make():
        return made(make_private(SGD, 1.0, 1.0, seed=1), functools.partial(drawn, None))

    killed(make(), tmp_path / "a", at=5, save=save)
    resumed, whole = make(), make()
    resumed.fit(TRAIN(), checkpoint_dir=tmp_path / "a")
    first, second = (next(iter(model.streams.values())) for model in (resumed, whole))
    take_seed(second, kept_seed(first.source))
    whole.fit(TRAIN(), checkpoint_dir=tmp_path / "b")
    assert torch.equal(weights(resumed), weights(whole))
    assert resumed.privacy.epsilon(exact=True) == whole.privacy.epsilon(exact=True)


def twice(tmp_path, seed):
    for name in "ab":
        model = made(plain_noise(), functools.partial(drawn, seed))
        model.fit(TRAIN(), project_name=name, checkpoint_dir=tmp_path)
    return model.privacy.epsilon(exact=True)


def test_runs_of_one_seed_tell_more_than_runs_that_draw_by_themselves(tmp_path):
    rate = BATCH / ROWS
    same = epsilon([(Event(together(1.0, 1.0), rate), 12)], 1e-5)
    assert twice(tmp_path / "given", 7) == pytest.approx(same)
    assert twice(tmp_path / "own", None) == pytest.approx(epsilon([(Event(1.0, rate), 24)], 1e-5))
    assert same > 8
