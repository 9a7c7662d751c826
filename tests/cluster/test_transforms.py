from __future__ import annotations

import pytest
import torch

from plait.cluster.alone import Alone
from plait.cluster.settings import Distributed
from plait.errors import ConfigError

from .ps.in_process import far, make_model, train


def plain():
    return torch.nn.Embedding(12, 3, dtype=torch.float64)


def test_the_precision_asked_for_is_computed_in():
    seen = []
    model = make_model(Alone(Distributed(precision="bf16")), embedding=plain())
    model.out.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    train(model, 1)
    assert model.config.precision == "bf16"
    assert seen


def test_modules_computed_again_give_the_same_bits():
    torch.manual_seed(0)
    expected = train(make_model(Alone(), embedding=plain()), 5)
    torch.manual_seed(0)
    found = train(make_model(Alone(Distributed(recompute=["out"])), embedding=plain()), 5)
    assert far(found, expected) == 0


def test_a_scope_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="tower"):
        make_model(Alone(Distributed(recompute=["tower"])))
