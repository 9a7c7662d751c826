"""Columns: what is recorded, what it gives for each sample, where randomness comes from, what is refused."""

from __future__ import annotations

import copy
import functools
import operator
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from plait.data import columns
from plait.data.columns import Column, ColumnFunction, Evaluation, Origin, SkippedSample, applied, derive, root
from plait.data.datasets import Dataset, column_source
from plait.errors import DataError, FunctionError, VariableError
from plait.rng import rng_state

ROWS = 5


def field(number):
    return torch.arange(4.0) + number


def numbers(**settings):
    """x is a row of four numbers, label a number, name a word."""
    fields = {"x": field, "label": torch.tensor, "name": lambda number: f"sample {number}"}
    return Dataset("numbers", ROWS, fields, **settings)


@pytest.fixture
def x():
    return numbers().get(["x"])[0]


def values(column, epoch=0):
    return [value for (value,) in column_source(column).batches(epoch, 0)]


def same(some, others):
    return len(some) == len(others) and all(map(torch.equal, some, others))


# Recording

BOTH_WAYS = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow]
WHOLE = [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift]
COMPARED = [operator.lt, operator.le, operator.gt, operator.ge]


@pytest.mark.parametrize("function", [*BOTH_WAYS, *COMPARED])
@pytest.mark.parametrize("other", [2, 1.5, torch.tensor([1.0, 2.0, 3.0, 4.0])], ids=["int", "float", "tensor"])
def test_operators_both_ways(x, function, other):
    above_zero, expected = x + 1, [field(n) + 1 for n in range(ROWS)]
    assert same(values(function(above_zero, other)), [function(value, other) for value in expected])
    assert same(values(function(other, above_zero)), [function(other, value) for value in expected])


@pytest.mark.parametrize("function", WHOLE)
def test_operators_of_whole_numbers_both_ways(function):
    (label,) = numbers().get(["label"])
    assert same(values(function(label, 2)), [function(torch.tensor(n), 2) for n in range(ROWS)])
    assert values(function(2, label)) == [function(2, n) for n in range(ROWS)]
    table = torch.tensor([3, 1])
    assert same(values(function(table, label)), [function(table, torch.tensor(n)) for n in range(ROWS)])


RECORDED = {
    "neg": lambda x: -x,
    "pos": lambda x: +x,
    "abs": lambda x: abs(x - 2),
    "invert": lambda x: ~(x > 2),
    "matmul": lambda x: x @ torch.ones(4, 2),
    "matmul from the left": lambda x: torch.ones(2, 4) @ x,
    "number": lambda x: x[1],
    "slice": lambda x: x[1:3],
    "step": lambda x: x[::2],
    "None and ...": lambda x: x[None, ..., :2],
    "mask": lambda x: x[x > 3],
    "index of a tensor": lambda x: torch.arange(9.0) [x[0].long()],
    "slice up to a value": lambda x: torch.cat([x, x])[: x[0].long() + 1],
    "method": lambda x: x.reshape(2, 2).permute(1, 0).contiguous(),
    "method with a keyword": lambda x: x.sum(dim=0, keepdim=True),
    "method of two": lambda x: x.where(x > 3, -x),
    "to": lambda x: x.to(torch.float64),
    "function": lambda x: torch.clamp(x, min=1, max=5),
    "function with the column as a keyword": lambda x: torch.add(input=torch.ones(4), other=x),
    "functional": lambda x: F.one_hot(x.long(), 9),
    "functional in Python": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="nearest"),
    "list": lambda x: torch.cat([x, x * 2]),
    "tuple": lambda x: torch.stack((x, x + 1), dim=1),
    "list with a tensor": lambda x: torch.stack([torch.zeros(4), x]),
    "where": lambda x: torch.where(x > 3, x, 0.0),
    "module": lambda x: torch.nn.Flatten(0)(x[None]),
    "equal to a tensor": lambda x: torch.full((4,), 3.0) == x,
    "torch.eq": lambda x: torch.eq(x, 3),
    "part of a tuple": lambda x: x.max(dim=0)[1],
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_what_works_on_a_tensor_works_on_a_column(x, name):
    column = RECORDED[name](x)
    assert type(column) is Column
    assert same(values(column), [RECORDED[name](field(n)) for n in range(ROWS)])


@given(st.lists(st.sampled_from(["neg", "abs", "to", "function", "where"]), max_size=30))
def test_any_chain_of_functions(names):
    column, expected = numbers().get(["x"])[0], field(3)
    for name in names:
        column, expected = RECORDED[name](column), RECORDED[name](expected)
    assert torch.equal(values(column)[3], expected)


def test_augmented_assignment_makes_another_column():
    (label,) = numbers().get(["label"])
    before = label
    label -= 1
    assert values(label) == [-1, 0, 1, 2, 3]
    assert values(before) == [0, 1, 2, 3, 4]


def test_arrays_stand_on_both_sides():
    (array,) = Dataset("arrays", 2, {"a": lambda number: np.full(2, number)}).get(["a"])
    assert [value.tolist() for value in values(np.array([5, 6]) - array)] == [[5, 6], [4, 5]]
    assert [value.tolist() for value in values(array - np.array([5, 6]))] == [[-5, -6], [-4, -5]]
    assert [value.tolist() for value in values(np.float32(2) * array)] == [[0, 0], [2, 2]]
    with pytest.raises(TypeError, match="does not support ufuncs"):
        np.square(array)


def test_map_takes_functions_of_any_kind(x):
    (name,) = numbers().get(["name"])
    assert values(name.map(str.upper))[0] == "SAMPLE 0"
    assert values(x.map(torch.Tensor.sum)) == [6 + 4 * n for n in range(ROWS)]
    assert values(x.map(functools.partial(torch.add, other=1)))[0].tolist() == [1, 2, 3, 4]
    assert values(x.map(torch.nn.ReLU()))[0].tolist() == [0, 1, 2, 3]
    assert x.map(torch.nn.ReLU()).name == "ReLU"


def test_a_second_argument_with_a_default_is_the_functions_own(x):
    def scaled(value, factor=3):
        return value * factor

    assert same(values(x.map(scaled)), [field(n) * 3 for n in range(ROWS)])


def test_functions_run_when_columns_are_read_once_for_each_sample():
    calls = Counter()

    def counted(value):
        calls[int(value[0])] += 1
        return value + 1

    dataset = numbers()
    shared = dataset.get(["x"])[0].map(counted)
    twice, halved = shared * 2, shared / 2
    source = column_source((torch.cat([twice, halved]), twice, halved, shared))
    assert not calls
    for epoch in (1, 2):
        for both, double, half, once in source.batches(0, 0):
            assert torch.equal(both, torch.cat([double, half]))
            assert torch.equal(double, once * 2)
        assert calls == dict.fromkeys(range(ROWS), epoch)


def test_what_nobody_asked_for_is_not_worked_out():
    dataset = numbers()
    x, label = dataset.get(["x", "label"])
    x.map(lambda value: 1 / 0)
    assert len(values(label)) == ROWS


def test_a_list_may_change_after_it_was_recorded(x):
    parts = [x]
    joined = torch.cat(parts)
    parts.append(x)
    assert same(values(joined), [field(n) for n in range(ROWS)])


def test_columns_in_dicts_and_keywords_stand_for_their_values(x):
    made = derive(lambda given, *, scale: given["value"] * scale, [{"value": x}], {"scale": x[1]})
    assert same(values(made), [field(n) * (n + 1) for n in range(ROWS)])


def test_a_long_chain(x):
    column = x
    for _ in range(300):
        column = column + 1
    assert same(values(column), [field(n) + 300 for n in range(ROWS)])


def test_columns_are_named_after_their_functions(x):
    assert repr(x) == "<Column 'x' of numbers>"
    assert [column.name for column in (x + 1, torch.cat([x, x]), x.clamp(0), x.map(field))] == [
        "add", "cat", "clamp", "field",
    ]  # fmt: skip


def test_set_shape_changes_nothing(x):
    assert x.set_shape([4]) is None
    assert same(values(x), [field(n) for n in range(ROWS)])


# Data sets do not mix


@pytest.mark.parametrize(
    "mix",
    [
        lambda one, other: one + other,
        torch.add,
        lambda one, other: torch.cat([one, other]),
        lambda one, other: torch.add(input=one, other=other),
        lambda one, other: one[: other[0].long()],
        lambda one, other: one[other > 1, 0],
    ],
    ids=["operator", "function", "list", "keyword", "slice", "index"],
)
def test_columns_of_different_data_sets_do_not_mix(x, mix):
    with pytest.raises(DataError, match=r"different data sets \(numbers, others\) cannot be put together"):
        mix(x, Dataset("others", ROWS, {"y": field}).get(["y"])[0])


def test_a_function_needs_a_column():
    with pytest.raises(DataError, match=r"\(none\)"):
        derive(torch.add, [1, 2])


# What a column is not


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (len, "has no length"),
        (bool, "is neither true nor false"),
        (list, "cannot be iterated over"),
        (lambda x: [*x], "cannot be iterated over"),
        (lambda x: 3 in x, "cannot be iterated over"),
        (lambda x: x and 1, "is neither true nor false"),
        (lambda x: not x, "is neither true nor false"),
        (torch.tensor, "has no length"),
    ],
)
def test_it_is_no_list_and_no_truth(x, use, words):
    with pytest.raises(DataError, match=rf"column 'x' {words}: .*write column.map\(function\)"):
        use(x)


FACTS = [name for name in dir(torch.Tensor) if name[0] != "_" and not callable(getattr(torch.Tensor, name))]


@pytest.mark.parametrize("name", sorted({*FACTS, "shape", "dtype", "is_cuda", "no_such_method"} - {"name"}))
def test_it_has_no_facts(x, name):
    with pytest.raises(AttributeError, match=rf"column 'x' has no '{name}': .*write column.map\(function\)"):
        getattr(x, name)
    assert not hasattr(x, name)


@pytest.mark.parametrize("other", [1, 1.5, True, "a", np.int64(1), np.ones(2)], ids=repr)
def test_equal_signs_are_refused_where_they_would_say_false(x, other):
    for compare in (operator.eq, operator.ne):
        with pytest.raises(DataError, match=r"write torch.eq\(column, value\)"):
            compare(x, other)
        with pytest.raises(DataError, match=r"write torch.eq\(column, value\)"):
            compare(other, x)


def test_columns_are_keys(x):
    other = x + 1
    assert {x: 1, other: 2}[other] == 2
    assert (x, other) == (x, other)
    assert (x, other) != (other, x)
    assert x != other
    assert x is not None
    assert x != None  # noqa: E711 - it must not raise


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x.normal_(),
        torch.relu_,
        lambda x: F.relu(x, inplace=True),
        torch.nn.ReLU(inplace=True),
        lambda x: torch.add(x, 1, out=torch.ones(4)),
        lambda x: operator.iadd(torch.ones(4), x),
        lambda x: operator.ior(torch.ones(4), x),
        lambda x: operator.setitem(torch.ones(4), slice(None), x),
        lambda x: torch.ones(4).copy_(x),
    ],
    ids=["method", "drawn", "function", "inplace", "module", "out", "+=", "|=", "[:] =", "copy_"],
)
def test_nothing_is_written_into(x, write):
    with pytest.raises(DataError, match="writes into its argument.*write the form that gives a new value"):
        write(x)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda x: x.__setitem__(0, 1), "written into"),
        (int, "no number"),
        (float, "no number"),
        (np.asarray, "no array"),
        (np.fliplr, "no array"),
    ],
)
def test_a_column_is_not_taken_for_a_value(x, use, said):
    with pytest.raises(DataError, match=f"{said}.*column.map"):
        use(x)


@pytest.mark.parametrize("name", ["item", "size", "numpy", "tolist", "dim"])
def test_methods_that_give_no_tensor_are_refused(x, name):
    with pytest.raises(AttributeError, match="column.map"):
        getattr(x, name)


def test_an_augmentation_inside_a_function_draws_from_the_sample():
    noise = ColumnFunction(lambda value, rng: value + rng.integers(1 << 30), "noise")
    (x,) = Dataset("rows", 8, {"x": torch.tensor}, readers=4).get(["x"])
    state = torch.get_rng_state()
    first, again = (values(x.map(lambda value: noise(noise(value)))) for _ in range(2))
    assert torch.get_rng_state().equal(state)
    assert len({int(value) for value in first}) == 8
    single = Dataset("rows", 8, {"x": torch.tensor}, readers=1).get(["x"])[0]
    assert values(single.map(lambda value: noise(noise(value)))) == first == again


def test_a_copy_is_the_same_column_under_another_name(x):
    assert same(values(copy.copy(x + 1)), values(x + 1))
    assert not hasattr(Column.__new__(Column), "name")


# Randomness

DRAWN = {
    "map": lambda x: x.map(lambda value, rng: value + rng.random()),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "rand_like in float64": lambda x: torch.rand_like(x, dtype=torch.float64),
    "bernoulli": lambda x: torch.bernoulli(x / 9),
    "method": lambda x: (x / 9).bernoulli(),
    "binomial": lambda x: torch.binomial(x.clamp(50, 50), x / 9),
    "multinomial": lambda x: torch.multinomial(x + 1, 3),
    "normal": lambda x: torch.normal(x, 1.0),
    "poisson": lambda x: torch.poisson(x * 9),
    "ColumnFunction": ColumnFunction(lambda value, rng: value + rng.random(), "noise"),
}


@pytest.mark.parametrize("name", DRAWN)
def test_draws_depend_on_seed_pass_sample_and_column(name):
    def drawn(seed=1, epoch=0, before=0, **settings):
        (x,) = numbers(seed=seed, **settings).get(["x"])
        for _ in range(before):
            x.map(field)
        return values(DRAWN[name](x), epoch)

    found = drawn()
    assert same(found, drawn(readers=1))
    assert same(found, drawn(readers=3, capacity=2))
    assert not same(found, drawn(seed=2))
    assert not same(found, drawn(epoch=1))
    assert not same(found, drawn(before=1))


def test_each_sample_draws_for_itself():
    (label,) = numbers().get(["label"])
    drawn = values(label.map(lambda value, rng: rng.random()))
    assert len(set(drawn)) == ROWS


def test_draws_do_not_change_with_what_else_is_asked_for_or_with_the_batch():
    def both():
        x, label = numbers(seed=3).get(["x", "label"])
        return DRAWN["map"](x), torch.randn_like(label.to(torch.float32))

    one, other = both()
    alone = values(one)
    assert same(alone, [value for _, value in column_source((other, one)).batches(0, 0)])
    for size in (2, 3, ROWS, 100):
        batches = column_source((both()[0],)).batched(size).batches(0, 0)
        assert torch.equal(torch.cat([batch for (batch,) in batches]), torch.stack(alone))


def test_two_columns_of_the_same_function_draw_apart(x):
    one, other = torch.rand_like(x), torch.rand_like(x)
    assert not any(torch.equal(a, b) for a, b in column_source((one, other)).batches(0, 0))


def test_a_drawn_column_that_is_used_twice_is_drawn_once(x):
    noise = torch.randn_like(x)
    assert all(not value.any() for value in values(noise - noise))


def test_reading_leaves_the_global_random_states_alone(x):
    before = rng_state()
    for make in DRAWN.values():
        values(make(x))
    after = rng_state()
    assert torch.equal(before["torch"], after["torch"])
    assert before["python"] == after["python"]
    assert torch.equal(before["numpy"][1], after["numpy"][1])
    assert before["numpy"][2:] == after["numpy"][2:]


REFUSED = {
    "dropout": F.dropout,
    "module": torch.nn.Dropout(),
    "dropout in evaluation": torch.nn.Dropout().eval(),
    "alpha_dropout": F.alpha_dropout,
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": F.gumbel_softmax,
    "randint_like": lambda x: torch.randint_like(x, 3),
    "fractional pooling": lambda x: F.fractional_max_pool2d(x, 1, output_size=1),
    "and its places": lambda x: F.fractional_max_pool2d(x, 1, output_size=1, return_indices=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "low rank": torch.svd_lowrank,
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_draw_from_the_global_generator_are_refused(x, name):
    with pytest.raises(DataError, match=r"global generator.*write column.map\(lambda value, rng: \.\.\.\)"):
        REFUSED[name](x)


def test_no_drawing_function_of_torch_is_forgotten():
    """Those that torch itself marks as drawing, and that may be given a tensor."""
    without_tensor = {"rand", "randint", "randn", "randperm"}
    seeded = {name for name in dir(torch.ops.aten) if name[0] != "_" and name[-1] != "_" and _draws(name)}
    public = {name for name in seeded if any(hasattr(place, name) for place in (torch, torch.Tensor, F))}
    known = columns._DRAWS | columns._SEEDED | {function.__name__ for function in columns._LIKE}
    assert {"bernoulli", "dropout", "rand_like", "lstm"} <= public
    assert public - without_tensor - known - {"miopen_rnn"} == set()


def _draws(name):
    packet = getattr(torch.ops.aten, name)
    overloads = packet.overloads() if hasattr(packet, "overloads") else []
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in overloads)


class TestColumnFunction:
    noise = ColumnFunction(lambda value, rng: value + rng.random(), "noise")

    def test_of_a_column_it_is_a_column(self, x):
        assert self.noise(x).name == "noise"
        one, other = (numbers().get(["x"])[0] for _ in range(2))
        assert same(values(self.noise(one)), values(applied(self.noise, other)))

    def test_of_a_value_it_draws_after_torchs_seed(self):
        found = []
        for seed in (1, 1, 2):
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                found.append(float(self.noise(0.0)))
        assert found[0] == found[1] != found[2]

    def test_applied_takes_plain_functions_too(self, x):
        assert same(values(applied(torch.neg, x)), [-field(n) for n in range(ROWS)])
        assert same(values(applied(lambda value, rng: value, x)), values(x))


# Errors of the user's functions


def fails_at_three(value):
    if value[0] == 3:
        raise KeyError("three")
    return value


def test_an_error_names_the_function_and_the_sample(x):
    words = r"^'fails_at_three', applied to a column of numbers, failed for sample 3: KeyError: 'three'$"
    with pytest.raises(FunctionError, match=words) as caught:
        values(x.map(fails_at_three))
    assert isinstance(caught.value.__cause__, KeyError)


def test_so_does_one_of_torch(x):
    with pytest.raises(FunctionError, match=r"^'matmul', applied to .*, failed for sample 0: RuntimeError: "):
        values(x @ torch.ones(5, 5))


def test_an_error_in_a_field_names_it():
    dataset = Dataset("numbers", 2, {"x": lambda number: [1][number]})
    with pytest.raises(FunctionError, match="^'x', a field of numbers, failed for sample 1: IndexError: "):
        values(dataset.get(["x"])[0])


def test_an_error_of_a_batch_names_its_first_sample():
    (x,) = numbers(batch_size=2).get(["x"])
    with pytest.raises(FunctionError, match="failed for the batch that begins with sample 2: ZeroDivisionError"):
        values(x.map(lambda batch: 1 / 0 if batch[0, 0] == 2 else batch))


@pytest.mark.parametrize("error", [VariableError("mine"), SkippedSample("mine")], ids=["plait's", "skipped"])
def test_our_own_errors_stay_what_they_are(error):
    def fails(value):
        raise error

    column = derive(fails, [root(Origin("rows"), "x", torch.tensor)])
    with pytest.raises(type(error), match="^mine$"):
        Evaluation([column])(3, (0, 0, 3))


def test_a_function_may_end_an_iterator(x):
    with pytest.raises(FunctionError, match="failed for sample 0: StopIteration"):
        values(x.map(lambda value: next(iter([]))))
