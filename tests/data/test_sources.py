# ruff: noqa: NPY002 - NumPy's global state is meant
import itertools
import random
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from plait.data import sources
from plait.data.sources import (
    ConstantSource,
    IterableSource,
    LoaderSource,
    SequenceSource,
    Source,
    TensorSource,
    as_source,
    fast_forward,
)
from plait.errors import ConfigError, DataError
from plait.rng import rng_state

N = 10
X, Y = torch.arange(N * 2.0).reshape(N, 2), torch.arange(N)


def ids(source, epoch=0, start=0):
    return [batch["y"].tolist() for batch in source.batches(epoch, start)]


def test_tensors_in_order():
    source = TensorSource({"x": X, "y": Y}, 4)
    assert ids(source) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert ids(source, 5, 1) == [[4, 5, 6, 7], [8, 9]]
    assert ids(source, 0, 3) == []
    assert ids(TensorSource({"y": Y}, 4, drop_remainder=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    x, y = next(TensorSource([X, Y], 4).batches(0, 0))
    assert torch.equal(x, X[:4])
    assert y.tolist() == [0, 1, 2, 3]


def test_tensor_order_is_a_pure_function_of_seed_and_epoch():
    source = TensorSource({"x": X, "y": Y}, 4, shuffle=True, seed=3)
    first, second = ids(source, 0), ids(source, 1)
    assert sorted(itertools.chain(*first)) == list(range(N))
    assert first != second
    torch.manual_seed(99)
    again = TensorSource({"x": X, "y": Y}, 4, shuffle=True, seed=3)
    assert ids(again, 1) == second
    assert ids(again, 0) == first
    assert ids(TensorSource({"y": Y}, 4, shuffle=True, seed=4), 0) != first
    for batch in source.batches(0, 0):
        assert torch.equal(batch["x"], X[batch["y"]])


@pytest.mark.parametrize("limit", [1, 100, 8 << 20])
@pytest.mark.parametrize("shuffle", [False, True])
def test_tensors_begin_anywhere_whatever_the_chunks(monkeypatch, limit, shuffle):
    monkeypatch.setattr(sources, "_CHUNK_BYTES", limit)
    source = TensorSource({"y": torch.arange(203)}, 2, shuffle=shuffle)
    monkeypatch.undo()
    whole = ids(TensorSource({"y": torch.arange(203)}, 2, shuffle=shuffle))
    for start in (0, 1, 63, 64, 65, 101, 102):
        assert ids(source, 0, start) == whole[start:]


def test_a_step_may_change_its_shuffled_batch():
    source = TensorSource((X.clone(),), 4, shuffle=True)
    weight = torch.ones(2, requires_grad=True)
    for (x,) in source.batches(0, 0):
        x.mul_(weight).sum().backward()
    assert torch.equal(source.tensors[0], X)


def test_wrong_tensors_are_errors():
    with pytest.raises(DataError, match="x: 10, y: 9"):
        TensorSource({"x": X, "y": Y[:9]}, 4)
    with pytest.raises(DataError, match="0: 10, 1: 9"):
        TensorSource((X, Y[:9]), 4)
    with pytest.raises(DataError, match="no tensors"):
        TensorSource({}, 4)
    with pytest.raises(DataError, match="rows cannot be taken from a list"):
        TensorSource({"x": [1, 2]}, 4)
    with pytest.raises(DataError, match=r"a Tensor of shape \[\]"):
        TensorSource({"x": torch.tensor(1)}, 4)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        TensorSource({"x": X}, 0)
    with pytest.raises(ConfigError, match="num_epochs is 0"):
        TensorSource({"x": X}, 4, num_epochs=0)


def test_arrays_are_rows_too():
    assert ids(TensorSource({"y": np.arange(5)[::-1]}, 3)) == [[4, 3, 2], [1, 0]]


def test_sequences():
    source = SequenceSource(list(range(9)), shuffle=True, seed=1)
    whole = list(source.batches(2, 0))
    assert sorted(whole) == list(range(9))
    assert whole != list(source.batches(3, 0))
    assert [list(source.batches(2, start)) for start in range(10)] == [whole[start:] for start in range(10)]
    assert list(SequenceSource("abc").batches(7, 1)) == ["b", "c"]


def test_iterables_start_anew():
    source = IterableSource(range(5))
    assert source.num_epochs is None
    assert not source.seekable
    assert list(source.batches(0, 0)) == [0, 1, 2, 3, 4]
    assert list(source.batches(1, 3)) == [3, 4]
    assert list(source.batches(1, 5)) == []


def test_a_one_shot_iterator_skips_only_the_difference():
    source = IterableSource(iter(range(8)))
    assert source.num_epochs == 1
    assert list(itertools.islice(source.batches(0, 0), 3)) == [0, 1, 2]
    assert list(itertools.islice(source.batches(0, 3), 1)) == [3]
    with pytest.raises(DataError, match="batch 3 was asked for, but 4 were taken"):
        source.batches(0, 3)
    assert list(source.batches(0, 6)) == [6, 7]
    with pytest.warns(UserWarning, match="num_epochs=3, but a generator can be read only once"):
        assert IterableSource((i for i in "ab"), num_epochs=3).num_epochs == 1


def test_a_generator_that_failed_does_not_seem_to_be_at_its_end():
    def broken():
        yield 1
        raise OSError("disk")

    source = IterableSource(broken())
    with pytest.raises(OSError):
        list(source.batches(0, 0))
    with pytest.raises(DataError, match=r"failed at batch 1 \(OSError\('disk'\)\)"):
        source.batches(0, 1)


def test_fast_forward_warns_only_when_it_takes_long():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast_forward(iter(range(9)), 8, "a reader")
    with pytest.warns(UserWarning, match="a reader cannot seek; reading 9 batches again"):
        fast_forward(iter(range(9)), 9, "a reader")
    with pytest.raises(DataError, match="ended after 2 of the 4 batches"):
        fast_forward(iter(range(2)), 4, "a reader")


def test_fast_forward_shows_progress_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.warns(UserWarning, match="cannot seek"):
        fast_forward(iter(range(20)), 20, "a reader")
    assert "reading again" in capsys.readouterr().err


class Noisy(Dataset):
    """Every row tells its number and draws from each of the three global generators."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return {"y": torch.tensor(index), "noise": torch.rand(()) + random.random() + np.random.rand()}


class OddSampler(Sampler):
    """Draws each index when it is asked for it, which no sampler of torch does."""

    def __iter__(self):
        for _ in range(N):
            yield int(torch.randint(N, ()))


class Buffered(IterableDataset):
    """A shuffle buffer: each draw decides what later ones find."""

    def __iter__(self):
        buffer = list(range(4))
        for row in range(4, N + 4):
            place = random.randrange(4)
            buffer[place], out = row, buffer[place]
            yield {"y": torch.tensor(out)}


def test_loader_order_is_a_pure_function_of_seed_and_epoch():
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
    first, second = ids(LoaderSource(loader), 0), ids(LoaderSource(loader), 1)
    torch.manual_seed(99)
    again = LoaderSource(DataLoader(Noisy(), batch_size=4, shuffle=True))
    assert ids(again, 1) == second != first == ids(again, 0)
    assert ids(LoaderSource(loader, seed=1), 0) != first
    assert ids(again, 0, 1) == first[1:]
    assert ids(again, 0, 3) == []
    assert again.batch_size == 4
    assert again.fingerprint()["rows"] == N


def test_a_loader_leaves_the_global_states_alone():
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
    before = rng_state()
    next(LoaderSource(loader).batches(0, 0))
    pass_ = LoaderSource(DataLoader([1, 2, 3, 4], batch_size=1, shuffle=True)).batches(0, 2)
    list(pass_)
    after = rng_state()
    assert torch.equal(before["torch"], after["torch"])
    assert before["python"] == after["python"]
    assert torch.equal(before["numpy"][1], after["numpy"][1])
    assert before["numpy"][2:] == after["numpy"][2:]


def test_a_generator_of_the_loader_gives_its_own_first_pass():
    def loader():
        return DataLoader(Noisy(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5))

    bare = [batch["y"].tolist() for batch in loader()]
    shared = loader()
    source = LoaderSource(shared)
    assert ids(source, 0) == bare
    second = ids(source, 1)
    assert second != bare
    assert ids(LoaderSource(shared), 0) == bare  # although its generator was seeded anew meanwhile
    assert ids(LoaderSource(loader()), 1) == second
    assert source.fingerprint()["generators"] == [5]


def test_a_generator_of_a_sampler_is_seeded_too():
    sampler = RandomSampler(Noisy(), generator=torch.Generator().manual_seed(5))
    source = LoaderSource(DataLoader(Noisy(), batch_sampler=BatchSampler(sampler, 4, drop_last=False)))
    assert source.batch_size == 4
    second = ids(source, 1)
    assert ids(source, 0) != second == ids(source, 1)


def test_a_sampler_is_told_the_epoch_before_its_order_is_drawn():
    class Told(Sampler):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([self.epoch] * 2)

    source = LoaderSource(DataLoader(Noisy(), sampler=Told()))
    assert ids(source, 3) == [[3], [3]]


@pytest.mark.parametrize("loader", [DataLoader(Noisy(), sampler=OddSampler()), DataLoader(Buffered(), batch_size=2)])
def test_draws_that_decide_about_later_batches_resume(loader):
    source = LoaderSource(loader)
    whole = ids(source, 1)
    for start in range(6):
        torch.manual_seed(start), random.seed(start)
        assert ids(source, 1, start) == whole[start:]


def test_persistent_workers_are_warned_of():
    with pytest.warns(UserWarning, match="persistent_workers=True.*will not resume exactly"):
        LoaderSource(DataLoader(Noisy(), num_workers=1, persistent_workers=True))


def test_constants_never_end():
    source = ConstantSource({"x": X, "y": np.arange(N)})
    batches = list(itertools.islice(source.batches(0, 10**9), 3))
    assert all(batch is batches[0] for batch in batches)
    assert batches[0]["y"].tolist() == list(range(N))
    assert source.batch_size == N
    with pytest.raises(DataError, match="field 'train' of a fixed batch is a DataLoader"):
        ConstantSource({"train": DataLoader([1])})
    with pytest.raises(DataError, match="no fields"):
        ConstantSource({})


def test_as_source():
    source = TensorSource((X,), 2)
    assert as_source(source) is source
    for made, kind in [
        (DataLoader([1]), LoaderSource),
        ({"x": X}, ConstantSource),
        ([(X, Y)], SequenceSource),
        (((X, Y), (X, Y)), SequenceSource),
        (range(3), SequenceSource),
        ((i for i in [X]), IterableSource),
        (Buffered(), IterableSource),
    ]:
        got = as_source(made, seed=6)
        assert isinstance(got, kind)
        assert isinstance(got, Source)
        assert getattr(got, "seed", 6) == 6


@pytest.mark.parametrize("wrong", [None, 3, "text", b"bytes", X, X.numpy(), Noisy(), lambda: [X]])
def test_as_source_says_what_may_be_returned(wrong):
    with pytest.raises(DataError, match="cannot be read from.*a DataLoader, a dict of"):
        as_source(wrong)


def test_a_tuple_of_tensors_is_ambiguous():
    with pytest.raises(DataError, match="one batch or 2"):
        as_source((X, Y))
