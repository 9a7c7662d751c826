"""What makes an optimizer private, and what is refused."""

from __future__ import annotations

import functools

import pytest
import torch

from plait.errors import ConfigError
from plait.optim import rules
from plait.optim.wrappers import get_optimizer_wrapper_fn
from plait.privacy.noise import Noise, SecureNoise
from plait.privacy.optimizers import (
    DPSGD,
    DPAdagrad,
    DPAdam,
    DPFtrl,
    DPMomentum,
    DPRMSprop,
    PrivateFactory,
    make_private,
    private_of,
)

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def variables():
    return [torch.zeros(3, requires_grad=True)]


def test_the_optimizer_is_the_inner_one():
    made = make_private(SGD, 1.0, 1.1)(variables())
    assert type(made) is torch.optim.SGD
    assert private_of(made).l2_norm_clip == 1.0
    assert private_of(made).noise_multiplier == 1.1
    assert private_of(SGD(variables())) is None


def test_an_optimizer_around_a_private_one_is_private():
    factory = get_optimizer_wrapper_fn("lars", make_private(SGD, 1.0, 1.0))()
    assert private_of(factory(variables())) is not None


@pytest.mark.parametrize(
    ("maker", "kind", "options"),
    [
        (DPSGD, torch.optim.SGD, {}),
        (DPMomentum, torch.optim.SGD, {"momentum": 0.9}),
        (DPAdam, rules.Adam, {"beta1": 0.8}),
        (DPAdagrad, torch.optim.Adagrad, {}),
        (DPRMSprop, rules.RMSProp, {"decay": 0.8}),
        (DPFtrl, rules.Ftrl, {"l1": 0.1}),
    ],
)
def test_named_optimizers(maker, kind, options):
    factory = maker(0.25, 2.0, 0.5, 4, scope="tower", delta=1e-6, clipping="per-layer", **options)
    assert isinstance(factory, PrivateFactory)
    assert factory.scope == "tower"
    made = factory(variables())
    assert type(made) is kind
    assert made.param_groups[0]["lr"] == 0.25
    private = private_of(made)
    assert (private.l2_norm_clip, private.noise_multiplier, private.num_microbatches) == (2.0, 0.5, 4)
    assert (private.delta, private.clipping) == (1e-6, "per-layer")
    assert maker.__name__ in ("DPSGD", "DPMomentum", "DPAdam", "DPAdagrad", "DPRMSprop", "DPFtrl")
    assert "l2_norm_clip=2.0" in repr(factory)


def test_options_of_another_optimizer_are_refused():
    with pytest.raises(ConfigError, match="no argument 'momentum'"):
        DPSGD(0.1, 1.0, 1.0, momentum=0.9)


@pytest.mark.parametrize("clip", [None, 0, -1.0, float("nan"), float("inf"), True, "1"])
def test_noise_without_clipping_is_refused(clip):
    with pytest.raises(ConfigError, match="noise without clipping bounds nothing"):
        make_private(SGD, clip, 1.0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"noise_multiplier": -0.1}, "from 0 up"),
        ({"noise_multiplier": None}, "from 0 up"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
        ({"samples": -3}, "samples=-3"),
        ({"clipping": "round"}, "'per-layer'"),
        ({"secure_noise": True, "seed": 3}, "has no seed"),
    ],
)
def test_bad_values_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        make_private(SGD, **{"l2_norm_clip": 1.0, "noise_multiplier": 1.0, **options})


def test_what_is_no_factory_is_refused():
    with pytest.raises(ConfigError, match="give a factory"):
        make_private(SGD(variables()), 1.0, 1.0)
    with pytest.raises(ConfigError, match="write it once"):
        make_private(make_private(SGD, 1.0, 1.0), 1.0, 1.0)
    with pytest.raises(ConfigError, match="returned list"):
        make_private(lambda params: params, 1.0, 1.0)(variables())
    with pytest.raises(ConfigError, match="write it once"):
        make_private(make_private(SGD, 1.0, 1.0).__call__, 1.0, 1.0)(variables())


def test_which_noise():
    assert isinstance(make_private(SGD, 1.0, 1.0, secure_noise=True).private.make_noise(), SecureNoise)
    seeded = make_private(SGD, 1.0, 1.0, seed=4).private
    assert isinstance(seeded.make_noise(), Noise)
    assert seeded.make_noise().key == seeded.make_noise().key
