from __future__ import annotations

import copy

import pytest
import torch

import plait
from plait import efl
from plait.errors import ConfigError, DataError, VariableError
from plait.feature_column import (
    DenseFeatures,
    categorical_column_with_hash_bucket,
    categorical_column_with_identity,
    embedding_column,
    indicator_column,
    input_layer,
    linear_model,
    numeric_column,
    shared_embedding_columns,
)

A = categorical_column_with_identity("a", 4)
B = categorical_column_with_identity("b", 5)
X = numeric_column("x")
BATCH = {"a": torch.tensor([1, 3]), "b": torch.tensor([4, 0]), "x": torch.tensor([0.5, 1.5])}


def test_columns_stand_in_the_order_of_their_names():
    module = DenseFeatures([X, embedding_column(B, 2), numeric_column("y"), embedding_column(A, 2)])
    each = {}
    found = module({**BATCH, "y": torch.tensor([7.0, 8.0])}, cols_to_output_tensors=each)
    assert [column.name for column in module.columns] == ["a_embedding", "b_embedding", "x", "y"]
    assert found.shape == (2, 6)
    assert torch.equal(found[:, :2], module.get_parameter("a_embedding.embedding_weights")[BATCH["a"]])
    assert torch.equal(found[:, 2:4], module.get_parameter("b_embedding.embedding_weights")[BATCH["b"]])
    assert found[:, 4:].tolist() == [[0.5, 7.0], [1.5, 8.0]]
    assert torch.equal(torch.cat([each[column] for column in module.columns], 1), found)


def test_columns_of_one_width_that_are_apart_are_still_looked_up_at_once():
    module = DenseFeatures([embedding_column(A, 2), numeric_column("aa"), embedding_column(B, 2)])
    assert len(module._stacks) == 1
    found = module({**BATCH, "aa": torch.tensor([7.0, 8.0])})
    assert torch.equal(found[:, 3:], module.get_parameter("b_embedding.embedding_weights")[BATCH["b"]])
    assert found[:, 2].tolist() == [7.0, 8.0]


def test_a_columns_first_values_do_not_depend_on_the_others():
    torch.manual_seed(1)
    alone = DenseFeatures([embedding_column(A, 2)])
    torch.manual_seed(1)
    both = DenseFeatures([embedding_column(A, 2), embedding_column(B, 2)])
    assert torch.equal(alone.get_parameter(WEIGHTS), both.get_parameter(WEIGHTS))
    assert not torch.equal(alone.get_parameter(WEIGHTS), DenseFeatures([embedding_column(A, 2)]).get_parameter(WEIGHTS))


WEIGHTS = "a_embedding.embedding_weights"


def test_a_module_can_be_moved_copied_and_loaded():
    module = DenseFeatures([embedding_column(A, 2), embedding_column(B, 2)])
    wide = copy.deepcopy(module).double()
    assert module(BATCH).dtype is torch.float32
    torch.testing.assert_close(wide(BATCH), module(BATCH).double())
    assert wide._stacks[0]._current()[1] is not None, "the tables lie together again"
    other = DenseFeatures([embedding_column(A, 2), embedding_column(B, 2)])
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(BATCH), module(BATCH))


def test_what_does_not_train_has_no_gradient():
    module = DenseFeatures([embedding_column(A, 2, trainable=False), embedding_column(B, 2)])
    assert [value.requires_grad for value in module.parameters()] == [False, True]
    assert not any(
        value.requires_grad for value in DenseFeatures([embedding_column(A, 2)], trainable=False).parameters()
    )


def test_sparse_gradients_are_rows():
    module = DenseFeatures([embedding_column(A, 2, sparse=True), embedding_column(B, 2)])
    module(BATCH).sum().backward()
    assert [value.grad.is_sparse for value in module.parameters()] == [True, False]


def test_shared_columns_have_one_table():
    module = DenseFeatures(shared_embedding_columns([A, categorical_column_with_identity("c", 4)], 2))
    found = module({"a": torch.tensor([1]), "c": torch.tensor([1])})
    assert [name for name, _ in module.named_parameters()] == ["a_c_shared_embedding.embedding_weights"]
    assert found[0, :2].tolist() == found[0, 2:].tolist()


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ([], "no columns"),
        ([A], "wrap it in indicator_column"),
        ([X, X], "of one name: 'x'"),
        (["x"], "no column that it takes"),
        (
            [
                *shared_embedding_columns([A], 2, shared_embedding_collection_name="t"),
                *shared_embedding_columns([B], 2, shared_embedding_collection_name="t"),
            ],
            "share the table 't'",
        ),
    ],
)
def test_what_cannot_be_is_refused(columns, words):
    with pytest.raises(ConfigError, match=words):
        DenseFeatures(columns)


def test_batches_of_different_lengths_are_refused():
    with pytest.raises(DataError, match="do not fit side by side"):
        DenseFeatures([X, numeric_column("y")])({"x": torch.ones(2), "y": torch.ones(3)})


def test_names_of_columns_become_names_of_variables():
    column = embedding_column(categorical_column_with_hash_bucket("user.name/first", 3), 2)
    assert list(dict(DenseFeatures([column]).named_modules()))[1:] == ["user_name_first_embedding"]


# In a model


def model_of(loss_fn, columns=None, rows=8):
    """A model that has taken a few steps."""
    ids = torch.arange(rows)
    data = {"a": ids % 4, "b": ids % 5, "x": ids.float(), "y": (ids % 2).float()}
    model = efl.Model()
    source = plait.data.TensorSource(data, batch_size=4, num_epochs=2)
    model.input_fn(lambda model, mode: efl.Sample(source, columns))
    model.loss_fn(loss_fn)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(lambda params: torch.optim.SGD(params, lr=0.1)))
    model.compile()
    before = {name: value.detach().clone() for name, value in model.variables().items()}
    model.fit(efl.procedure_fn.train(max_step=3))
    assert all(not torch.equal(value, before[name]) for name, value in model.variables().items())
    return model


def test_variables_in_a_model_have_tensorflows_names():
    filled, outputs = {}, {}

    def loss(model, sample):
        deep = input_layer(
            sample, [X, embedding_column(A, 2)], ["mine"], cols_to_vars=filled, cols_to_output_tensors=outputs
        )
        with plait.variable_scope("tower"):
            tower = input_layer(sample, [embedding_column(A, 2)])
        other = input_layer(sample, [embedding_column(B, 2)])
        return (deep.sum() + tower.sum() + other.sum() + linear_model(sample, [A, X]).sum() - sample["y"].sum()) ** 2

    model = model_of(loss)
    assert list(model.variables()) == [
        "input_layer/a_embedding/embedding_weights",
        "tower/input_layer/a_embedding/embedding_weights",
        "input_layer_1/b_embedding/embedding_weights",
        "linear_model/bias_weights",
        "linear_model/a/weights",
        "linear_model/x/weights",
    ]
    assert filled[X] == []
    assert filled[embedding_column(A, 2)][0] is model.variables()["input_layer/a_embedding/embedding_weights"]
    assert set(outputs) == {X, embedding_column(A, 2)}
    with model.scope():
        assert len(plait.get_collection("mine")) == 1


def test_the_same_columns_twice_need_a_scope_that_says_so():
    def loss(model, sample):
        return (input_layer(sample, [embedding_column(A, 2)]) + input_layer(sample, [embedding_column(A, 2)])).sum()

    with pytest.raises(VariableError, match="made twice"):
        model_of(loss)


def test_columns_without_variables_need_no_model():
    assert input_layer(BATCH, [X, indicator_column(A)]).shape == (2, 5)
    with pytest.raises(VariableError, match="no model"):
        input_layer(BATCH, [embedding_column(A, 2)])


def test_a_sample_has_groups_of_columns():
    seen = []

    def loss(model, sample):
        seen.append((sample["plain"], sample["deep"], sample.deep))
        return (sample["deep"].sum() - sample["y"].sum()) ** 2

    model = model_of(loss, {"plain": [indicator_column(A), X, "b"], "deep": [X, embedding_column(A, 2)]})
    assert list(model.variables()) == ["deep/input_layer/a_embedding/embedding_weights"]
    plain, deep, again = seen[0]
    assert plain.shape == (4, 6)
    assert deep[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0], "columns stay in the order given"
    assert torch.equal(deep, again)


def test_a_group_with_variables_has_only_columns():
    with pytest.raises(DataError, match="group 'deep' has columns with variables beside 'x'"):
        model_of(lambda model, sample: sample["deep"].sum(), {"deep": ["x", embedding_column(A, 2)]})


def test_a_group_that_is_still_to_be_computed_is_left_alone():
    sample = efl.Sample.of(BATCH).grouped({"deep": [embedding_column(A, 2)]})
    moved = sample.map(torch.clone).to("cpu")
    assert repr(moved).endswith("deep: computed in a step)")
    with plait.Model().scope():
        assert moved["deep"].shape == moved[3].shape == (2, 2)


@pytest.mark.parametrize(
    ("columns", "words"), [([X], "groups of columns"), ({"deep": [A]}, "wrap columns of ids in indicator_column")]
)
def test_groups_that_cannot_be_are_refused(columns, words):
    with pytest.raises(DataError, match=words):
        efl.Sample(BATCH, columns)
