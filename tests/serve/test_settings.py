"""Settings that cannot work are refused at once."""

from __future__ import annotations

import pytest

from plait.errors import ConfigError
from plait.serve.settings import Settings


@pytest.mark.parametrize(
    "wrong", [{"batch": 0}, {"batch_delay": -1.0}, {"workers": 0}, {"queue": 0}, {"max_body": 0}, {"timeout": 0.0},
              {"poll": 0.0}, {"threads": 0}, {"stop_timeout": -1.0}, {"timeout": float("nan")}],
)  # fmt: skip
def test_too_little(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Settings(**wrong)


def test_the_usual_ones_work():
    assert Settings(batch=32).batch == 32
