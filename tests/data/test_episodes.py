"""Episodes: which rows and labels a task has, and that each is a pure function of its place."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data import Source, Stream
from plait.data.episodes import EpisodeSource, TensorClass, tensor_classes
from plait.errors import ConfigError, DataError

CLASSES, EACH = 7, 6
IMAGES = torch.arange(CLASSES * EACH * 4.0).reshape(-1, 2, 2)
LABELS = torch.arange(CLASSES * EACH) % CLASSES
CLASS_OF = {int(image[0, 0]): int(label) for image, label in zip(IMAGES, LABELS, strict=True)}
"""The class of an image, known by its first value."""


def source(**settings):
    return EpisodeSource(tensor_classes(IMAGES, LABELS), **{"ways": 3, "shots": 2, "queries": 1, **settings})


def batch(of, epoch=0, start=0):
    return next(of.batches(epoch, start))


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def check_task(support_x, support_y, query_x, query_y, ways, shots, queries):
    assert support_y.tolist() == [way for way in range(ways) for _ in range(shots)]
    assert query_y.tolist() == [way for way in range(ways) for _ in range(queries)]
    meant = {}
    for image, label in zip([*support_x, *query_x], [*support_y.tolist(), *query_y.tolist()], strict=True):
        assert meant.setdefault(label, CLASS_OF[int(image[0, 0])]) == CLASS_OF[int(image[0, 0])]
    assert len(set(meant.values())) == ways  # different labels are different classes
    seen = [int(image[0, 0]) for image in [*support_x, *query_x]]
    assert len(set(seen)) == len(seen)  # no image is both learnt from and asked about


@settings(max_examples=30, deadline=None)
@given(st.integers(1, CLASSES), st.integers(1, 3), st.integers(0, 3), st.integers(0, 2**40))
def test_a_task_has_its_ways_shots_and_queries(ways, shots, queries, seed):
    found = batch(source(ways=ways, shots=shots, queries=queries, seed=seed))
    parts = [found[name] for name in ("support_x", "support_y", "query_x", "query_y")]
    check_task(*parts, ways, shots, queries)
    assert torch.equal(found["x"], torch.cat([found["support_x"], found["query_x"]]))
    assert torch.equal(found["y"], torch.cat([found["support_y"], found["query_y"]]))
    assert found["support_x"].shape == (ways * shots, 2, 2)
    assert found["query_x"].shape == (ways * queries, 2, 2)


def test_several_tasks_are_those_of_single_batches_in_order():
    joined, single = batch(source(tasks=3), 1, 2), [batch(source(), 1, number) for number in (6, 7, 8)]
    assert joined["support_x"].shape == (3, 6, 2, 2)
    assert joined["query_y"].shape == (3, 3)
    for name in ("support_x", "support_y", "query_x", "query_y"):
        assert torch.equal(joined[name], torch.stack([one[name] for one in single]))
    for name in ("x", "y"):
        assert torch.equal(joined[name], torch.cat([one[name] for one in single]))


def test_every_task_is_a_pure_function_of_seed_epoch_and_number():
    whole = list(source(length=5).batches(2, 0))
    assert len(whole) == 5
    np.random.seed(7)  # noqa: NPY002 - the global state is meant
    torch.manual_seed(7)
    assert all(same(a, b) for a, b in zip(whole[3:], source(length=5).batches(2, 3), strict=True))
    assert same(batch(source(length=9), 2, 4), whole[4])
    assert not same(batch(source(), 2, 0), batch(source(), 3, 0))
    assert not same(batch(source(), 2, 0), batch(source(), 2, 1))
    assert not same(batch(source(), 2, 0), batch(source(seed=1), 2, 0))


def test_drawing_leaves_global_random_states_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002 - the global state is meant
    batch(source())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002 - same


def test_it_is_a_source_that_a_stream_resumes():
    assert isinstance(source(), Source)
    stream = Stream(source(length=4))
    for _ in range(2):
        stream.read()
        stream.commit()
    resumed = Stream(source(length=4))
    resumed.load_state_dict(stream.state_dict())
    assert torch.equal(resumed.read()["x"], stream.read()["x"])
    other = Stream(source(length=4, shots=1))
    with pytest.raises(DataError, match="shots"):
        other.load_state_dict(stream.state_dict())


def test_every_class_comes_about_as_often_as_any_other():
    drawn = [CLASS_OF[int(image[0, 0])] for one in source(shots=1, queries=0).batches(0, 0) for image in one["x"]]
    counts = np.bincount(drawn, minlength=CLASSES)
    assert counts.sum() == 3000
    assert counts.min() > 350  # of 429 that are expected; the deviation is 16


def test_classes_of_lists_of_arrays():
    class Numbers:
        def __init__(self, first):
            self.first = first

        def __len__(self):
            return 4

        def sample(self, num_images, rng):
            return [np.full((1, 2), self.first + one, np.float32) for one in rng.permutation(4)[:num_images]]

    found = batch(EpisodeSource([Numbers(0), Numbers(10)], ways=2, shots=3, queries=1))
    assert found["x"].shape == (8, 1, 2)
    assert found["x"].dtype == torch.float32
    assert len(set(found["x"][:, 0, 0].tolist())) == 8


def test_tensor_classes_hold_the_rows_of_their_label():
    classes = tensor_classes(IMAGES.numpy(), LABELS.numpy() * 2 - 3)
    assert [len(one) for one in classes] == [EACH] * CLASSES
    rows = TensorClass.sample(classes[2], EACH, np.random.default_rng(0))
    assert sorted(CLASS_OF[int(image[0, 0])] for image in rows) == [2] * EACH


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (LABELS.float(), r"labels is float32\[42\]; give whole numbers"),
        (LABELS[:5], "42 images and 5 labels"),
        (LABELS.reshape(2, -1), r"labels is int64\[2, 21\]"),
        ([1, 2], "labels is a list"),
    ],
)
def test_wrong_labels(labels, words):
    with pytest.raises(DataError, match=words):
        tensor_classes(IMAGES, labels)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"ways": 8}, DataError, "7 classes for ways=8"),
        ({"shots": 6}, DataError, "class 0 has 6 samples, and a task needs shots=6 and queries=1"),
        ({"ways": 0}, ConfigError, "ways is 0"),
        ({"queries": -1}, ConfigError, "queries is -1"),
        ({"tasks": 0}, ConfigError, "tasks is 0"),
        ({"length": 0}, ConfigError, "length is 0"),
        ({"num_epochs": 0}, ConfigError, "num_epochs is 0"),
    ],
)
def test_wrong_settings(settings, error, words):
    with pytest.raises(error, match=words):
        source(**settings)


class Odd:
    """A class whose `sample` gives what it was made with."""

    def __init__(self, given):
        self.given = given

    def __len__(self):
        return 9

    def sample(self, num_images, rng):
        return self.given


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([np.zeros(2)] * 3, r"sample\(2\) of class 0 gave 3 samples"),
        ([np.zeros(2), np.zeros(3)], "sample.. of class 0 gave a list: .*return a list of arrays of one shape"),
        (None, "gave a NoneType"),
        (["a", "b"], "gave a list"),
    ],
)
def test_a_class_that_samples_wrongly(given, words):
    with pytest.raises(DataError, match=words):
        batch(EpisodeSource([Odd(given)], ways=1, shots=1, queries=1))


def test_classes_of_different_shapes():
    classes = [Odd([np.zeros(2)] * 2), Odd([np.zeros(3)] * 2)]
    with pytest.raises(DataError, match=r"samples of different shapes: \[[23]\], \[[23]\]; give them one shape"):
        batch(EpisodeSource(classes, ways=2, shots=1, queries=1))


def test_a_directory_is_no_list_of_classes():
    with pytest.raises(DataError, match=r"read_classes\('omniglot'\)"):
        EpisodeSource("omniglot")
