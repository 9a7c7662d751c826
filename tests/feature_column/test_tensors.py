"""Features that are tensors of other kinds, and passes over columns that are not the usual ones."""

from __future__ import annotations

import contextlib
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map

from plait.errors import DataError
from plait.feature_column import (
    CategoricalColumn,
    DenseFeatures,
    LinearModel,
    categorical_column_with_hash_bucket,
    categorical_column_with_identity,
    embedding_column,
    rows,
    weighted_categorical_column,
)
from plait.feature_column.inputs import Ids

pytestmark = pytest.mark.usefixtures("ways")

A, B = (categorical_column_with_identity(key, 10) for key in "ab")
IDS = torch.tensor([1, 2, 3])


def counting(column, width=4):
    """An embedding whose rows are their ids."""

    def fill(table):
        return table.copy_(torch.arange(float(len(table)))[:, None].expand_as(table))

    return embedding_column(column, width, combiner="sum", initializer=fill)


def rows_of(features, *columns):
    return DenseFeatures([counting(column) for column in columns or (A, B)])(features)[:, ::4].tolist()


class Wrapped(torch.Tensor):
    """What says that it is on the CPU, and has no memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        inner = lambda value: value.inner if isinstance(value, cls) else value  # noqa: E731
        return function(*tree_map(inner, args), **tree_map(inner, kwargs or {}))


def masked():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.masked.masked_tensor(IDS, torch.tensor([True, True, False]))


STRANGE = {
    "masked": (masked, TypeError),
    "fake": (lambda: FakeTensorMode().from_tensor(IDS), AssertionError),
    "functional": (lambda: torch._to_functional_tensor(IDS.clone()), RuntimeError),
    "meta": (lambda: IDS.to("meta"), NotImplementedError),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STRANGE)
def test_of_what_has_no_memory_torch_has_the_word(name):
    make, error = STRANGE[name]
    with pytest.raises(error):
        rows_of({"a": make(), "b": IDS})


def test_what_has_its_memory_inside_is_looked_up():
    assert rows_of({"a": Wrapped(IDS), "b": IDS}) == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def test_zeros_without_memory():
    zeros = torch._efficientzerotensor(3, dtype=torch.int64)
    assert rows_of({"a": zeros, "b": IDS}) == [[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]]


def test_variables_without_memory():
    module = DenseFeatures([counting(A), counting(B)])
    module({"a": IDS, "b": IDS})
    for variable in module.parameters():
        variable.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        module({"a": IDS, "b": IDS})


@pytest.mark.filterwarnings("ignore")  # torch calls nested ones a prototype
@pytest.mark.parametrize("model", [DenseFeatures, LinearModel])
@pytest.mark.parametrize("kind", [torch.Tensor.to_sparse, lambda ids: torch.nested.nested_tensor([ids, ids[:1], ids])])
def test_ragged_tensors_are_refused_in_words(model, kind):
    value = kind(IDS)
    columns = [counting(A), counting(B)] if model is DenseFeatures else [A, B]
    for features in ({"a": IDS, "b": value}, {"a": value, "b": IDS}):
        with pytest.raises(DataError, match=r"give \(values, offsets\) instead"):
            model(columns)(features)


class Own(CategoricalColumn):
    """A column as a user may write it, whose ids are of another type."""

    name, num_buckets = "own", 10

    def ids(self, inputs):
        return Ids(inputs.raw("own"))


def test_ids_of_another_type_are_the_same_ids():
    wide = torch.tensor([3, 0, 5, 0, 7, 0, 8, 0], dtype=torch.int32)
    assert rows_of({"own": wide[:4]}, Own()) == [[3.0], [0.0], [5.0], [0.0]]
    assert rows_of({"own": wide[:3], "a": IDS}, A, Own()) == [[1.0, 3.0], [2.0, 0.0], [3.0, 5.0]]


def test_weights_count():
    weighted = weighted_categorical_column(A, "weight")
    features = {"a": IDS, "weight": torch.tensor([2.0, 0.5, -1.0])}
    assert rows_of(features, weighted) == [[2.0], [1.0], [-3.0]]
    assert rows_of({**features, "b": IDS}, B, weighted) == [[2.0, 1.0], [1.0, 2.0], [-3.0, 3.0]]  # by their names


@pytest.mark.parametrize("model", [DenseFeatures, LinearModel])
def test_an_empty_batch(model):
    words = categorical_column_with_hash_bucket("word", 10)
    columns = [counting(A), counting(words)] if model is DenseFeatures else [A, words]
    found = model(columns)({"a": IDS[:0], "word": []})
    assert found.shape == (0, 8 if model is DenseFeatures else 1)


class _Called(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, a, b):
        return self.model({"a": a, "b": b})


@pytest.mark.filterwarnings("ignore")  # of the tracer
@pytest.mark.parametrize("columns", [[A], [A, B]])
@pytest.mark.parametrize("model", [DenseFeatures, LinearModel])
def test_a_trace_takes_other_batches(model, columns):
    made = _Called(model([counting(column) for column in columns] if model is DenseFeatures else columns))
    torch.nn.init.normal_(next(made.parameters()))
    traced = torch.jit.trace(made, (IDS, IDS), check_trace=False)
    longer = torch.tensor([4, 0, 9, 9, 1])
    assert torch.equal(traced(longer, IDS[:1].expand(5)), made(longer, IDS[:1].expand(5)))


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_places_that_a_hook_has_changed_are_for_torch_alone(kind, monkeypatch):
    """Which refuses them, or, in some versions, does not look."""
    asked = []
    if rows.loops is not None:
        monkeypatch.setattr(rows, "loops", SimpleNamespace(fetch=rows.loops.fetch, add=asked.append))
    module = DenseFeatures([counting(A), counting(B)])
    other = lambda saved: saved.to("meta") if kind == "meta" else FakeTensorMode().from_tensor(saved)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, other):
        total = module({"a": IDS, "b": IDS}).sum()
    with contextlib.suppress(RuntimeError, AssertionError, NotImplementedError):
        total.backward()
    assert asked == []
