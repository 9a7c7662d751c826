"""The draws: how wide, how shaped, and which come again."""

from __future__ import annotations

import pytest
import torch

from plait.errors import ConfigError
from plait.privacy.noise import Noise, SecureNoise

KINDS = [pytest.param(lambda: Noise(7), id="stream"), pytest.param(SecureNoise, id="secure")]


def drawn(noise, count=1000, deviation=1.0, step=1, part=0):
    gradients = [torch.zeros(count)]
    noise.add(gradients, deviation, step, part)
    return gradients[0]


@pytest.mark.parametrize("make", KINDS)
def test_a_million_draws_are_gaussian(make):
    gradients = [torch.zeros(600, 1000), torch.zeros(400_000)]
    make().add(gradients, 3.0, 1)
    found = torch.cat([one.flatten() for one in gradients]).double() / 3.0
    assert found.std().item() == pytest.approx(1.0, rel=0.01)
    assert abs(found.mean().item()) < 0.01
    assert found.pow(3).mean().item() == pytest.approx(0.0, abs=0.02)
    assert found.pow(4).mean().item() == pytest.approx(3.0, rel=0.02)
    assert (found.abs() < 1).double().mean().item() == pytest.approx(0.6827, abs=0.003)


@pytest.mark.parametrize("make", KINDS)
def test_noise_is_added_to_what_is_there(make):
    gradient = torch.full((1000,), 5.0)
    make().add([gradient], 0.01, 1)
    assert (gradient - 5.0).abs().max() < 0.1
    assert gradient.unique().numel() > 500


@pytest.mark.parametrize("make", KINDS)
def test_no_deviation_changes_nothing(make):
    gradient = torch.ones(10)
    make().add([gradient], 0.0, 1)
    assert torch.equal(gradient, torch.ones(10))


def test_draws_are_a_function_of_key_step_and_part():
    first = drawn(Noise(7), step=5, part=2)
    assert torch.equal(first, drawn(Noise(7), step=5, part=2))
    again = Noise(None)
    again.load_state_dict(Noise(7).state_dict())
    assert torch.equal(first, drawn(again, step=5, part=2))


def correlation(one, other):
    return abs(torch.corrcoef(torch.stack([one, other]))[0, 1].item())


@pytest.mark.parametrize("other", [{"step": 6, "part": 2}, {"step": 5, "part": 3}])
def test_other_steps_and_parts_have_other_draws(other):
    noise = Noise(7)
    assert correlation(drawn(noise, 100_000, step=5, part=2), drawn(noise, 100_000, **other)) < 0.02


def test_other_keys_have_other_draws():
    found = [drawn(noise, 100_000) for noise in (Noise(7), Noise(8), Noise(None), Noise(None))]
    for place, one in enumerate(found):
        assert all(correlation(one, other) < 0.02 for other in found[place + 1 :])


def test_no_two_of_many_steps_begin_alike():
    """A seed of 32 bits would have them meet after some ten thousand steps."""
    noise, size = Noise(3), 16
    firsts = {tuple(drawn(noise, size, step=step)[:2].tolist()) for step in range(1, 2001)}
    assert len(firsts) == 2000


def test_secure_draws_never_come_again():
    noise = SecureNoise()
    assert correlation(drawn(noise, 100_000), drawn(noise, 100_000)) < 0.02


def test_a_changed_key_is_another_stream():
    for seed in (7, None):
        noise = Noise(seed)
        before = drawn(noise)
        noise.change_key("after step 5")
        assert not torch.equal(before, drawn(noise))
    again = Noise(7)
    again.change_key("after step 5")
    noise = Noise(7)
    noise.change_key("after step 5")
    assert torch.equal(drawn(noise), drawn(again))


def test_one_draw_alone_is_none_of_the_others():
    noise = Noise(7)
    assert noise.draw(2.0, 5) == noise.draw(2.0, 5)
    assert noise.draw(2.0, 5) not in drawn(noise, 16, deviation=2.0, step=5).tolist()
    assert SecureNoise().draw(1.0, 1) != SecureNoise().draw(1.0, 1)


def test_dtypes_and_shapes_may_be_mixed():
    gradients = [torch.zeros(50, 40), torch.zeros(2000, dtype=torch.float64), torch.zeros(3000, dtype=torch.bfloat16)]
    Noise(1).add(gradients, 1.0, 1)
    for gradient in gradients:
        assert gradient.double().std().item() == pytest.approx(1.0, rel=0.06)
    assert correlation(gradients[0].flatten().double(), gradients[1]) < 0.1


def test_global_random_states_are_left_alone():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    drawn(Noise(7))
    drawn(SecureNoise())
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_key_that_is_missing_is_an_error():
    with pytest.raises(ConfigError, match="secure_noise=True"):
        Noise(None).load_state_dict(SecureNoise().state_dict())


def test_seeds_of_the_system_are_new_in_every_run():
    assert Noise().key != Noise().key
    assert Noise(1).key == Noise(1).key != Noise(2).key
