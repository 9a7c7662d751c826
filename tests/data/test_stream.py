# ruff: noqa: NPY002 - NumPy's global state is meant
import json
import multiprocessing
import random
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from plait.data.sources import ConstantSource, IterableSource, LoaderSource, SequenceSource, TensorSource
from plait.data.stream import Stream
from plait.errors import DataError, OutOfRangeError
from plait.rng import rng_state, set_rng_state

N, SIZE, BATCHES = 10, 4, 3
X, Y = torch.arange(N * 2.0).reshape(N, 2), torch.arange(N)


class Rows(Dataset):
    """Rows with random augmentation from each of the three global generators."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return {"y": torch.tensor(index), "noise": torch.rand(()) + random.random() + np.random.rand()}


class Lines(IterableDataset):
    """Each worker gives its share, shuffled."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        rows = list(range(N)) if worker is None else list(range(worker.id, N, worker.num_workers))
        random.shuffle(rows)
        for row in rows:
            yield {"y": torch.tensor(row), "noise": torch.rand(())}


class Shuffled:
    """An iterable that draws its order from the global generator, as scripts do."""

    def __iter__(self):
        for rows in torch.randperm(N).split(SIZE):
            yield {"y": rows, "noise": torch.rand(())}


def ready_batches():
    return [{"y": Y[i : i + SIZE], "noise": torch.zeros(())} for i in range(0, N, SIZE)]


def one_pass():
    yield from ready_batches()


SOURCES = {
    "tensors": lambda: TensorSource({"y": Y, "noise": X}, SIZE),
    "tensors, shuffled": lambda: TensorSource({"y": Y, "noise": X}, SIZE, shuffle=True),
    "tensors, whole batches": lambda: TensorSource({"y": Y, "noise": X}, SIZE, shuffle=True, drop_remainder=True),
    "sequence": lambda: SequenceSource(ready_batches()),
    "sequence, shuffled": lambda: SequenceSource(ready_batches(), shuffle=True),
    "iterable": lambda: IterableSource(Shuffled()),
    "iterator": lambda: IterableSource(one_pass()),
    "loader": lambda: LoaderSource(DataLoader(Rows(), SIZE, shuffle=True)),
    "loader, own generator": lambda: LoaderSource(DataLoader(Rows(), SIZE, shuffle=True, generator=torch.Generator())),
    "loader, stream": lambda: LoaderSource(DataLoader(Lines(), SIZE)),
    "constant": lambda: ConstantSource({"y": Y, "noise": X}),
}
WORKERS = {
    "loader, 2 workers": lambda: LoaderSource(DataLoader(Rows(), SIZE, shuffle=True, num_workers=2)),
    "loader, stream, 2 workers": lambda: LoaderSource(DataLoader(Lines(), SIZE, num_workers=2)),
}


def facts(sample):
    return sample.y.tolist(), sample.noise.tolist()


def step(stream):
    """What one step gives: a batch, or the end of a pass; and draws from the global generators, as dropout does."""
    try:
        got = facts(stream.read())
        stream.commit()
    except OutOfRangeError:
        got = "end"
    torch.rand(2), random.random(), np.random.rand()
    return got


def uninterrupted(make):
    """Two passes; before each step, the state of the stream and of the global generators."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    stream = Stream(make())
    states, steps = [], []
    while len(steps) < 10 and steps.count("end") < min(2, stream.source.num_epochs or 2):
        states.append((json.loads(json.dumps(stream.state_dict())), rng_state()))
        steps.append(step(stream))
    stream.close()
    return states, steps


def resumed(make, state, count, *, looked):
    """A new process: other random states, perhaps a look at the first batch, then the checkpoint."""
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    stream = Stream(make())
    if looked:
        stream.read()
    stream.load_state_dict(state[0])
    set_rng_state(state[1])
    steps = [step(stream) for _ in range(count)]
    stream.close()
    return steps


@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("kind", SOURCES)
def test_resume_at_every_position(kind, looked):
    states, steps = uninterrupted(SOURCES[kind])
    assert len(steps) >= 4
    assert kind == "constant" or steps[-1] == "end"
    for place, state in enumerate(states):
        assert resumed(SOURCES[kind], state, len(steps) - place, looked=looked) == steps[place:], place


@pytest.mark.parametrize("kind", WORKERS)
def test_resume_at_every_position_with_workers(kind):
    states, steps = uninterrupted(WORKERS[kind])
    assert steps.count("end") == 2
    assert len({str(got) for got in steps if got != "end"}) == len(steps) - 2  # passes and noise differ
    for place in (1, len(steps) // 2 - 1, len(steps) - 2):
        assert resumed(WORKERS[kind], states[place], len(steps) - place, looked=False) == steps[place:], place


def test_the_place_does_not_depend_on_what_was_read_ahead():
    for kind in ("tensors, shuffled", "iterable", "loader"):
        stream = Stream(SOURCES[kind]())
        stream.read()
        assert stream.state_dict()["position"] == 0
        stream.commit()
        assert stream.state_dict()["position"] == 1


def test_a_batch_stays_until_it_is_committed():
    stream = Stream(TensorSource({"y": Y}, SIZE))
    first = stream.read()
    assert stream.read() is first
    assert stream.position == 0
    stream.close()
    assert stream.read() is first
    stream.commit()
    assert stream.position == 1
    assert stream.read().y.tolist() == [4, 5, 6, 7]
    stream.load_state_dict(stream.state_dict())
    assert stream.read().y.tolist() == [4, 5, 6, 7]


def test_closing_between_steps_changes_nothing():
    def steps(*, close):
        torch.manual_seed(0)
        stream = Stream(IterableSource({"y": torch.zeros(1), "noise": torch.rand(2)} for _ in range(4)))
        for _ in range(5):
            yield step(stream)
            if close:
                stream.close()

    assert list(steps(close=True)) == list(steps(close=False))


def test_commit_without_a_batch_is_our_mistake():
    with pytest.raises(AssertionError):
        Stream(TensorSource({"y": Y}, SIZE)).commit()


def test_passes_end_and_are_spent():
    stream = Stream(TensorSource({"y": Y}, SIZE, num_epochs=2), name="train")
    for epoch in range(2):
        assert (stream.epoch, stream.position, stream.spent) == (epoch, 0, False)
        for _ in range(BATCHES):
            stream.read(), stream.commit()
        with pytest.raises(OutOfRangeError, match=f"input 'train': pass {epoch} is over after 3 batches"):
            stream.read()
    assert (stream.epoch, stream.position, stream.spent) == (2, 0, True)
    for _ in range(2):
        with pytest.raises(OutOfRangeError, match="no pass is left of 2"):
            stream.read()
    assert stream.state_dict()["epoch"] == 2
    other = Stream(TensorSource({"y": Y}, SIZE, num_epochs=2))
    other.load_state_dict(stream.state_dict())
    assert other.spent


def test_more_passes_may_be_asked_for_later():
    saved = Stream(TensorSource({"y": Y}, SIZE, num_epochs=1)).state_dict()
    longer = Stream(TensorSource({"y": Y}, SIZE, num_epochs=5))
    longer.load_state_dict(saved)
    assert torch.equal(longer.read()["y"], Y[:SIZE])


@pytest.mark.parametrize(
    "source",
    [
        TensorSource({"y": Y[:0]}, SIZE),
        TensorSource({"y": Y}, N + 1, drop_remainder=True, shuffle=True),
        SequenceSource([]),
        IterableSource(iter([])),
        LoaderSource(DataLoader(Rows(), N + 1, drop_last=True)),
    ],
)
def test_no_data_is_an_error_and_no_end(source):
    stream = Stream(source, name="eval")
    for _ in range(2):
        with pytest.raises(DataError, match="input 'eval' has no data: pass 0"):
            stream.read()
    assert (stream.epoch, stream.position) == (0, 0)


def test_other_data_than_the_checkpoint_s_is_shown_side_by_side():
    saved = Stream(TensorSource({"y": Y}, 4, shuffle=True)).state_dict()
    stream = Stream(TensorSource({"y": Y[:8]}, 2, shuffle=True), name="train")
    with pytest.raises(DataError) as caught:
        stream.load_state_dict(saved)
    lines = [line.split() for line in str(caught.value).splitlines()]
    assert lines[1:4] == [["checkpoint", "now"], ["rows", "10", "8"], ["batch_size", "4", "2"]]
    with pytest.raises(DataError, match="kind +tensors +sequence"):
        Stream(SequenceSource([X])).load_state_dict(saved)


def test_data_that_became_shorter_is_an_error():
    stream = Stream(IterableSource(x for x in ready_batches()))
    stream.load_state_dict({**stream.state_dict(), "position": 5})
    with pytest.raises(DataError, match="ended after 3 of the 5 batches"):
        stream.read()


def test_a_source_that_fails_is_opened_anew_at_its_place():
    class Flaky:
        failures = 1

        def __iter__(self):
            for number in range(3):
                if number == 1 and self.failures:
                    self.failures -= 1
                    raise OSError("disk")
                yield {"n": torch.tensor([number])}

    stream = Stream(IterableSource(Flaky()))
    stream.read(), stream.commit()
    with pytest.raises(OSError):
        stream.read()
    assert [stream.read().n.item(), stream.commit(), stream.read().n.item()] == [1, None, 2]


def test_a_batch_of_no_known_kind_is_an_error_again_and_again():
    stream = Stream(SequenceSource([3, {"y": Y}]))
    for _ in range(2):
        with pytest.raises(DataError, match="a batch is a int"):
            stream.read()


def test_columns_and_device():
    stream = Stream(TensorSource({"x": X, "y": Y}, SIZE), columns={"wide": ["x", "y"]}, device="meta")
    sample = stream.read()
    assert sample.wide.shape == (SIZE, 3)
    assert sample.wide.device.type == "meta"
    failing = Stream(TensorSource({"x": X}, SIZE), columns={"g": ["z"]})
    for _ in range(2):
        with pytest.raises(DataError, match="no field 'z'"):
            failing.read()


def test_opening_a_loader_leaves_the_global_states_alone():
    stream = Stream(LoaderSource(DataLoader(Rows(), SIZE, shuffle=True)))
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    stream.read()
    assert torch.equal(torch.rand(4), expected)


def test_close_ends_the_workers():
    stream = Stream(LoaderSource(DataLoader(Rows(), 1, num_workers=1)))
    stream.read()
    assert multiprocessing.active_children()
    stream.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("make", [lambda t: t, lambda t: tuple(t.values())], ids=["dict", "tuple"])
def test_calls_for_each_batch(make):
    stream = Stream(TensorSource(make({"x": torch.zeros(400, 4), "y": torch.zeros(400)}), 2, shuffle=True))
    stream.read(), stream.commit()
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(frame.f_code.co_name) if event == "call" else None)
    for _ in range(100):
        stream.read()
        stream.commit()
    sys.setprofile(None)
    assert calls.count("read") == calls.count("commit") == 100
    assert len(calls) / 100 <= 4.2  # read, the source's generator, Sample.of, commit; a few more where a chunk begins
