from __future__ import annotations

import pytest
import torch

from plait.engine.sync_replicas import SyncReplicasOptimizer, wanted_replicas
from plait.errors import ConfigError
from plait.train import SessionRunHook


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def made(*args, **kwargs):
    return SyncReplicasOptimizer(sgd, *args, **kwargs)([torch.zeros(2, requires_grad=True)])


def test_it_makes_the_inner_optimizer():
    assert type(made(2)) is torch.optim.SGD


def test_an_optimizer_without_it_wants_all_workers():
    assert wanted_replicas([sgd([torch.zeros(1)])], 4) is None


@pytest.mark.parametrize(("wanted", "workers", "found"), [(2, 3, 2), (3, 3, 3), (3, 1, 1)])
def test_the_number_wanted_is_at_most_that_of_workers(wanted, workers, found):
    assert wanted_replicas([made(wanted)], workers) == found


def test_more_than_there_are_workers_is_refused():
    with pytest.raises(ConfigError, match="replicas_to_aggregate=3: there are 2 workers"):
        wanted_replicas([made(3)], 2)


def test_two_numbers_are_refused():
    with pytest.raises(ConfigError, match="write the same for all"):
        wanted_replicas([made(1), made(2)], 3)


@pytest.mark.parametrize("numbers", [(0,), (3, 2), (-1, 2)])
def test_numbers_that_cannot_be(numbers):
    with pytest.raises(ConfigError, match="write 1 to the number of workers"):
        SyncReplicasOptimizer(sgd, *numbers)


def test_averages_are_refused():
    with pytest.raises(ConfigError, match="variable_averages"):
        SyncReplicasOptimizer(sgd, 1, variable_averages=object())


def test_the_hook_of_tensorflow_is_there():
    assert isinstance(SyncReplicasOptimizer(sgd, 1).make_session_run_hook(is_chief=True), SessionRunHook)
