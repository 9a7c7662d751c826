"""What inputs tell of their sampling."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from plait.data import PoissonSource, Sample, Stream, TensorSource
from plait.data.datasets import Dataset
from plait.data.parts import OwnPart, part_of
from plait.engine.sampling import check_rows, check_seed, draws_of, kept_seed, sampling_of, take_seed, uses_of
from plait.engine.task import MODE, TaskScope
from plait.errors import ConfigError, DataError
from plait.mox.replicas import JoinedSource

X = torch.zeros(100, 2)
SCOPE = TaskScope(MODE.TRAIN, None)


def drawn_rows():
    return PoissonSource({"x": X}, 10, seed=3)


def model_of(data, workers=1, merge=1, in_step=True):
    strategy = types.SimpleNamespace(worker_num=workers, in_step=in_step and workers > 1, gradient_merge=merge)
    sample = Sample(data)
    stream = Stream(part_of(sample.source, 0, workers, together=True))
    return types.SimpleNamespace(inputs={SCOPE: sample}, streams={SCOPE: stream}, strategy=strategy, said=set())


def rate_of(data, samples=None, first=None, **strategy):
    return sampling_of(model_of(data, **strategy), None, first, samples).rate


def test_the_share_of_rows_in_a_logical_batch():
    source = TensorSource({"x": X}, 10)
    assert rate_of(source) == 0.1
    assert rate_of(source, workers=2) == 0.2
    assert rate_of(source, workers=2, in_step=False) == 0.1
    assert rate_of(source, merge=2) == 0.2
    assert rate_of(source, workers=2, merge=5) == 1.0
    assert rate_of(TensorSource({"x": X}, 30), merge=4) == 1.0  # 30 + 30 + 30 + 10
    assert rate_of(source, samples=1000) == 0.01


@pytest.mark.parametrize(("merge", "workers"), [(3, 1), (20, 1), (2, 2), (5, 4)])
def test_batches_of_two_passes_are_not_merged(merge, workers):
    with pytest.raises(ConfigError, match=f"gradient_merge={merge} and {10 // workers} batches in a pass"):
        rate_of(TensorSource({"x": X}, 10), merge=merge, workers=workers)
    with pytest.raises(ConfigError, match="batches in a pass"):
        rate_of(DataLoader(TensorDataset(X), batch_size=10), merge=merge, workers=workers)


def columns(order=None):
    return Dataset("numbers", 100, {"x": torch.tensor}, batch_size=10, order=order)


def test_columns_of_a_data_set():
    assert rate_of(columns(), merge=5, workers=2) == 1.0
    assert rate_of(columns(order=lambda epoch: np.arange(50))) == 0.2
    assert uses_of(Stream(columns()))() == 1
    assert uses_of(Stream(columns(order=lambda epoch: np.zeros(100, dtype=np.int64)))) is None


def test_a_row_that_several_workers_may_have_in_one_step_is_refused():
    for data in ({"x": X}, [{"x": X[:5]}], loader(batch_size=None)):
        with pytest.raises(ConfigError, match="2 workers read a .*Source"):
            rate_of(data, samples=50, first=5, workers=2)
    assert rate_of([{"x": X[:5]}], samples=50, first=5, workers=2, in_step=False) == 0.1
    assert rate_of(OwnPart([{"x": X[:5]}]), samples=50, first=5, workers=2) == 0.2


def loader(sampler=None, **options):
    return DataLoader(TensorDataset(X), **{"batch_size": 10, "sampler": sampler, **options})


def test_samplers_that_give_a_row_once():
    weights = torch.ones(100)
    known = [
        (SequentialSampler(X), 0.1),
        (RandomSampler(X), 0.1),
        (RandomSampler(X, num_samples=50), 0.2),
        (SubsetRandomSampler(range(40)), 0.25),
        (WeightedRandomSampler(weights, 20, replacement=False), 0.5),
        (DistributedSampler(X, num_replicas=2, rank=0), 0.2),
    ]
    for sampler, rate in known:
        assert rate_of(loader(sampler)) == rate
        assert uses_of(model_of(loader(sampler)).streams[SCOPE])() == 1


def test_samplers_that_may_give_a_row_again():
    weights = torch.ones(100)
    for sampler in (
        RandomSampler(X, replacement=True),
        RandomSampler(X, num_samples=150),
        SubsetRandomSampler([1, 2, 1]),
        WeightedRandomSampler(weights, 20),
        DistributedSampler(X, num_replicas=3, rank=0),
    ):
        with pytest.raises(ConfigError, match=f"a {type(sampler).__name__} that may give a row several times"):
            rate_of(loader(sampler), samples=100)


def test_samplers_that_nothing_is_known_of():
    class Own(SequentialSampler):
        pass

    pairs = [[2 * place, 2 * place + 1] for place in range(50)]
    for given in (loader(Own(X)), DataLoader(TensorDataset(X), batch_sampler=pairs), loader(batch_size=None)):
        with pytest.raises(ConfigError, match="samples="):
            rate_of(given, first=2)
        assert rate_of(given, samples=100, first=10) == 0.1
        assert uses_of(model_of(given).streams[SCOPE]) is None


def test_workers_with_rows_of_their_own():
    assert rate_of(OwnPart(TensorSource({"x": X}, 10)), workers=2) == 0.1


def test_other_inputs():
    assert rate_of(DataLoader(TensorDataset(X), batch_size=20)) == 0.2
    assert rate_of({"x": X}) == 1.0
    assert rate_of([{"x": X[:5]}], samples=50, first=5) == 0.1
    with pytest.raises(ConfigError, match="samples="):
        rate_of([{"x": X[:5]}], first=5)


def test_drawn_rows():
    found = sampling_of(model_of(drawn_rows()), None, None, None)
    assert (found.rate, found.expected) == (0.1, 10.0)
    with pytest.raises(ConfigError, match="gradient_merge=2"):
        rate_of(drawn_rows(), merge=2)


def test_drawn_batches_are_not_joined():
    with pytest.raises(ConfigError, match="Poisson batches of 10 rows that are joined to 20"):
        rate_of(JoinedSource(drawn_rows(), 2))


def test_equal_draws_have_one_name():
    shuffled = [TensorSource({"x": X}, 10, shuffle=True, seed=seed) for seed in (1, 1, 2)]
    names = [draws_of(source) for source in (*shuffled, drawn_rows(), OwnPart(drawn_rows()))]
    assert names[0] == names[1]
    assert names[3] == names[4]
    assert len(set(names)) == 3


def test_who_draws_with_others_needs_their_seed():
    alone, workers = types.SimpleNamespace(worker_num=1), types.SimpleNamespace(worker_num=2)
    party = types.SimpleNamespace(worker_num=1, peer="leader")
    own = PoissonSource({"x": X}, 10)
    check_seed(own, alone, SCOPE)
    check_seed(OwnPart(own), workers, SCOPE)
    for strategy in (workers, party):
        check_seed(drawn_rows(), strategy, SCOPE)
        with pytest.raises(ConfigError, match="PoissonSource without a seed"):
            check_seed(own, strategy, SCOPE)


def test_a_seed_that_was_drawn_is_taken_up_again():
    one, other = (Stream(PoissonSource({"x": torch.arange(1000)}, 100)) for _ in range(2))
    other.read()
    take_seed(other, kept_seed(one.source))
    assert torch.equal(one.read().x, other.read().x)
    given = Stream(drawn_rows())
    assert kept_seed(given.source) is None
    before = given.read()
    take_seed(given, kept_seed(one.source))
    assert given.pending is before


def test_drawn_rows_of_several_workers():
    """All divide by the same, whoever has a row more."""
    shared = sampling_of(model_of(drawn_rows(), workers=3), None, None, None)
    assert (shared.rate, shared.expected) == (0.1, pytest.approx(10 / 3))
    own = sampling_of(model_of(OwnPart(drawn_rows()), workers=3), None, None, None)
    assert (own.rate, own.expected) == (0.1, 10.0)


def test_the_warning_is_given_once_and_not_for_drawn_rows(caplog):
    model = model_of(TensorSource({"x": X}, 10))
    for _ in range(2):
        sampling_of(model, None, None, None)
    assert caplog.text.count("not a promise") == 1
    caplog.clear()
    rate_of(drawn_rows())
    assert not caplog.text


def test_how_often_a_row_was_used():
    stream = Stream(TensorSource({"x": X}, 10))
    uses = uses_of(stream)
    assert uses() == 1
    stream.epoch, stream.position = 4, 3
    assert uses() == 5
    assert uses_of(Stream(Sample({"x": X}).source)) is None
    assert uses_of(Stream(Sample([{"x": X}]).source)) is None
    drawn = Stream(OwnPart(drawn_rows()))
    drawn.epoch, drawn.position = 2, 5
    assert uses_of(drawn)() == drawn_rows().uses(2, 5) > 1


def test_micro_batches_of_equal_size():
    check_rows(12, 4, SCOPE)
    with pytest.raises(DataError, match="12 rows, which 5 micro-batches"):
        check_rows(12, 5, SCOPE)
