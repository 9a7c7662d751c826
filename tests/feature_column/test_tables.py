from __future__ import annotations

import copy
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional

from plait.data.recycling import Recycled
from plait.feature_column.tables import Stack, Table, _added, _product


def tables(*sizes, dim=3, trainable=True):
    return [Table(size, dim, "rows", nn.init.normal_, trainable=trainable, sparse=False) for size in sizes]


IDS = torch.tensor([0, 4, 4, 8, 2])
OFFSETS = torch.tensor([0, 2, 2, 5])
SCALE = torch.tensor([1.0, 0.5, 2.0, 3.0, -1.0])
LOOKUPS = {
    "side by side": (IDS[:4].view(2, 2), None, None),
    "sums of rows": (IDS[:4].view(2, 2), None, None),
    "bags": (IDS, OFFSETS, None),
    "bags, scaled": (IDS, OFFSETS, SCALE),
}


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("many", [range(0), range(100)])
def test_one_lookup_equals_torch_on_joined_tables(name, many, monkeypatch):
    monkeypatch.setattr("plait.feature_column.tables._MANY", many)
    ids, offsets, scale = LOOKUPS[name]
    made = tables(4, 5)
    joined = torch.cat([table.weight.detach() for table in made]).requires_grad_()
    found = Stack(made).look_up(ids, offsets, scale, summed=name != "side by side")
    if name == "side by side":
        expected = functional.embedding(ids, joined).flatten(1)
    else:
        expected = functional.embedding_bag(
            ids, joined, offsets, mode="sum", per_sample_weights=scale, include_last_offset=offsets is not None
        )
    gradient = torch.randn_like(expected)
    found.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.cat([table.weight.grad for table in made]), joined.grad)


def test_gradients_add_up_over_backward_passes():
    made = tables(4, 5)
    stack = Stack(made)
    stack.look_up(IDS[:, None]).sum().backward()
    stack.look_up(IDS[:, None]).sum().backward()
    assert made[1].weight.grad[:, 0].tolist() == [4.0, 0.0, 0.0, 0.0, 2.0]


def test_the_memory_of_gradients_is_used_again_once_nobody_holds_them(monkeypatch):
    monkeypatch.setattr("plait.feature_column.tables._MANY", range(100))
    made = tables(4, 5)
    stack = Stack(made)
    variables = [table.weight for table in made]

    def gradients(factor):
        for variable in variables:
            variable.grad = None
        (stack.look_up(IDS[:4].view(2, 2), summed=False).sum() * factor).backward()
        return [variable.grad for variable in variables]

    first = gradients(1)
    place, values = first[0].data_ptr(), [one.tolist() for one in first]
    second = gradients(3)
    assert second[0].data_ptr() != place
    assert [one.tolist() for one in first] == values
    assert torch.equal(second[1], 3 * first[1])
    del first, second
    gradients(2)
    again = gradients(1)
    assert [one.tolist() for one in again] == values
    assert len({gradients(1)[0].data_ptr() for _ in range(5)}) == 1
    copied = copy.deepcopy(stack)
    assert torch.equal(
        copied.look_up(IDS[:4].view(2, 2), summed=False), stack.look_up(IDS[:4].view(2, 2), summed=False)
    )


@pytest.mark.parametrize("many", [range(0), range(100)])
def test_gradients_add_up_over_backward_passes_with_memory_that_is_used_again(many, monkeypatch):
    monkeypatch.setattr("plait.feature_column.tables._MANY", many)
    made = tables(4, 5)
    stack = Stack(made)
    for _ in range(3):
        stack.look_up(IDS[:, None], summed=False).sum().backward()
    assert made[1].weight.grad[:, 0].tolist() == [6.0, 0.0, 0.0, 0.0, 3.0]


@pytest.mark.parametrize("summed", [True, False])
def test_gradients_of_gradients_are_right(summed, monkeypatch):
    monkeypatch.setattr("plait.feature_column.tables._MANY", range(100))
    made = [table.double() for table in tables(2, 3)]
    stack = Stack(made)
    torch.autograd.gradgradcheck(
        lambda *_: stack.look_up(torch.tensor([[0, 4, 1]]), summed=summed).pow(2),
        tuple(table.weight for table in made),
    )


@pytest.mark.parametrize("ids_of", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_rows_are_added_in_their_order(dtype, ids_of, monkeypatch):
    """To the bit what torch does, whoever does it."""
    ids = torch.randint(0, 50, (5000,), dtype=ids_of)
    rows = torch.randn(5000, 7, dtype=dtype)
    expected = torch.zeros(50, 7, dtype=dtype).index_add_(0, ids, rows)
    with torch.no_grad():
        assert torch.equal(_added((50, 7), ids, rows, Recycled()), expected)
        strided = rows.t().contiguous().t()
        assert torch.equal(_added((50, 7), ids, strided, Recycled()), expected)
        monkeypatch.setattr("plait.feature_column.tables._product", lambda: None)
        assert torch.equal(_added((50, 7), ids, rows, Recycled()), expected)


def test_scipy_adds_where_there_are_many(monkeypatch):
    counts = []
    known = _product()
    assert known is not None

    def product(*arguments):
        counts.append(arguments[1])
        known(*arguments)

    monkeypatch.setattr("plait.feature_column.tables._product", lambda: product)
    made = tables(40, 50)
    for rows in (4, 4000):
        Stack(made).look_up(torch.arange(rows * 2).view(rows, 2) % 90, summed=False).sum().backward()
    assert counts == [8000]


@pytest.mark.parametrize("broken", ["missing", "another order of arguments", "another result"])
def test_without_what_scipy_keeps_to_itself_torch_adds(broken, monkeypatch):
    def refuses(*arguments):
        raise ValueError("sizes do not fit")

    module = types.ModuleType("scipy.sparse._sparsetools")
    if broken != "missing":
        module.csc_matvecs = refuses if broken == "another order of arguments" else lambda *arguments: None
    monkeypatch.setitem(sys.modules, "scipy.sparse._sparsetools", module)
    _product.cache_clear()
    try:
        assert _product() is None
    finally:
        _product.cache_clear()


@pytest.mark.parametrize("many", [range(0), range(100)])
def test_gradients_of_other_kinds(many, monkeypatch):
    """Many at once, and zeros that have no memory."""
    monkeypatch.setattr("plait.feature_column.tables._MANY", many)
    made = tables(4, 5)
    weights = [table.weight for table in made]
    found = Stack(made).look_up(IDS[:4].view(2, 2), summed=False)
    basis = torch.eye(found.numel()).view(-1, *found.shape)
    at_once = torch.autograd.grad(found, weights, basis, is_grads_batched=True, retain_graph=True)
    for number, gradient in enumerate(basis):
        single = torch.autograd.grad(found, weights, gradient, retain_graph=True)
        assert all(torch.equal(many[number], one) for many, one in zip(at_once, single, strict=True))
    nothing = torch.autograd.grad(found, weights, torch._efficientzerotensor(found.shape))
    assert all(not one.any() for one in nothing)


def test_as_many_ids_as_rows():
    with torch.no_grad(), pytest.raises(RuntimeError, match="index_add"):
        _added((5, 4), torch.zeros(3000, dtype=torch.int64), torch.ones(2500, 4), Recycled())


def test_ids_must_not_change_before_the_backward_pass():
    ids = torch.arange(6).view(3, 2)
    found = Stack(tables(4, 5)).look_up(ids, summed=False).sum()
    ids.add_(1000)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward()


def test_an_optimizer_that_moves_one_table_moves_what_is_looked_up():
    made = tables(4, 5)
    stack = Stack(made)
    with torch.no_grad():
        made[1].weight.fill_(7.0)
    assert stack.look_up(torch.tensor([[4]])).tolist() == [[7.0, 7.0, 7.0]]


def test_a_table_that_does_not_train_gets_no_gradient():
    made = [*tables(4), *tables(5, trainable=False)]
    Stack(made).look_up(IDS[:, None]).sum().backward()
    assert made[0].weight.grad is not None
    assert made[1].weight.grad is None


def test_a_table_that_is_frozen_and_freed_again_is_so_at_the_next_lookup():
    made = tables(4, 5)
    stack = Stack(made)
    grown = []
    for trained in (True, False, True):
        made[1].weight.requires_grad_(trained)
        before = None if made[1].weight.grad is None else made[1].weight.grad.clone()
        stack.look_up(IDS[:, None]).sum().backward()
        grown.append(before is None or not torch.equal(before, made[1].weight.grad))
    assert grown == [True, False, True]
    for table in made:
        table.weight.requires_grad_(False)
    assert not stack.look_up(IDS[:, None]).requires_grad


@pytest.mark.parametrize("summed", [True, False])
def test_gradients_can_be_asked_for_of_one_table_and_hooks_see_them(summed):
    made = tables(4, 5)
    stack = Stack(made)
    stack.look_up(IDS[:, None], summed=summed).sum().backward()  # what follows finds the history of this one
    seen = []
    made[1].weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad[:, 0].tolist()))
    (alone,) = torch.autograd.grad(stack.look_up(IDS[:, None], summed=summed).sum(), [made[0].weight])
    assert alone[:, 0].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert seen == []
    stack.look_up(IDS[:, None], summed=summed).sum().backward()
    assert seen == [[4.0, 0.0, 0.0, 0.0, 2.0]]


def test_numbers_that_are_kept_are_on_the_cpu_whatever_the_default_device_is():
    stack = Stack(tables(4, 5))
    ids = torch.tensor([[1, 6, 2, 3, 5, 0, 0]])  # a count that no other test has
    with torch.no_grad():
        with torch.device("meta"):
            stack.look_up(ids, summed=False)
        with torch.inference_mode():
            stack.look_up(ids, summed=False)
        found = stack.look_up(ids, summed=False)
    assert torch.equal(found, functional.embedding(ids, torch.cat([t.weight for t in stack.tables])).flatten(1))


@pytest.mark.parametrize("cold", [True, False])
def test_inside_torch_func_nothing_is_kept(cold):
    made = tables(4, 5)
    stack = Stack(made)
    ids = torch.tensor([[1, 6]])
    if not cold:
        stack.look_up(ids, summed=False)
    for table in made:
        table.double()
    stack.pack()
    summed = lambda scale: (stack.look_up(ids, summed=False) * scale).sum()  # noqa: E731
    slope = torch.func.grad(summed)(torch.tensor(2.0, dtype=torch.float64))
    assert slope == stack.look_up(ids, summed=False).sum()
    with torch.no_grad():
        for table in made:
            table.weight.fill_(7.0)
    assert stack.look_up(ids, summed=False).tolist() == [[7.0] * 6]
    values = {"table.rows": made[1].weight.detach()}
    looking = _Looking(made[1], stack, summed=False)
    call = lambda given: torch.func.functional_call(looking, given, (torch.tensor([[4]]),)).sum()  # noqa: E731
    assert torch.func.jvp(call, (values,), (values,))[1] == 21.0


def test_gradients_of_weights_are_of_the_rows_that_were_looked_up():
    made = tables(4, 5)
    scale = SCALE.clone().requires_grad_()
    found = Stack(made).look_up(IDS, OFFSETS, scale).sum()
    expected = torch.cat([table.weight.detach().clone() for table in made])[IDS].sum(1)
    with torch.no_grad():
        for table in made:
            table.weight.mul_(10)
    found.backward()
    torch.testing.assert_close(scale.grad, expected)


def test_where_rows_were_is_known_to_the_stack_itself_alone():
    stack = Stack(tables(4, 5))
    stack.look_up(IDS[:, None])
    assert stack._places
    assert copy.deepcopy(stack)._places == []
    for table in stack.tables:
        table.double()
    stack.pack()
    assert stack._places == []


def test_two_lookups_that_are_open_at_once_have_gradients_of_their_own():
    made = tables(4, 5)
    stack = Stack(made)
    first, second = (stack.look_up(ids[:, None]).sum() for ids in (IDS[:2], IDS[2:]))
    gradients = [torch.autograd.grad(each, [table.weight for table in made]) for each in (second, first)]
    assert [gradient[1][:, 0].tolist() for gradient in gradients] == [[1.0, 0, 0, 0, 1.0], [1.0, 0, 0, 0, 0]]


@pytest.mark.parametrize("how", ["data", "parameter", "functional_call"])
def test_variables_that_were_replaced_are_looked_up_where_they_are(how):
    made = tables(4, 5)
    stack = Stack(made)
    new = torch.full((5, 3), 7.0)
    if how == "data":
        made[1].weight.data = new
    elif how == "parameter":
        made[1].rows = nn.Parameter(new)
    else:
        swapped = torch.func.functional_call(_Looking(made[1], stack), {"table.rows": new}, (torch.tensor([[4]]),))
        assert swapped.tolist() == [[7.0, 7.0, 7.0]]
        assert stack.look_up(torch.tensor([[4]])).tolist() != [[7.0, 7.0, 7.0]]
        return
    found = stack.look_up(torch.tensor([[4]]))
    found.sum().backward()
    assert found.tolist() == [[7.0, 7.0, 7.0]]
    assert made[1].weight.grad[0].tolist() == [1.0, 1.0, 1.0]


class _Looking(nn.Module):
    def __init__(self, table, stack, summed=True):
        super().__init__()
        self.table, self.stack, self.summed = table, stack, summed

    def forward(self, ids):
        return self.stack.look_up(ids, summed=self.summed)


def test_a_copy_has_rows_of_its_own():
    module = _Looking(tables(4)[0], None)
    module.stack = Stack([module.table])
    module(torch.tensor([[1]])).sum().backward()
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.table.weight.fill_(7.0)
    found = other(torch.tensor([[1]]))
    found.sum().backward()
    assert found.tolist() == [[7.0, 7.0, 7.0]]
    assert other.table.weight.grad[1].tolist() == [1.0, 1.0, 1.0]
    assert module.table.weight.grad[1].tolist() == [1.0, 1.0, 1.0]
    assert module(torch.tensor([[1]])).tolist() != [[7.0, 7.0, 7.0]]


def test_weights_that_want_a_gradient_get_one():
    scale = SCALE.clone().requires_grad_()
    Stack(tables(4, 5)).look_up(IDS, OFFSETS, scale).sum().backward()
    assert scale.grad is not None


def test_a_table_alone_is_an_embedding_bag():
    table = tables(4)[0]
    assert isinstance(table, nn.EmbeddingBag)
    assert list(table.state_dict()) == ["rows"]
    assert torch.equal(table(torch.tensor([[1]])), table.weight[1:2])


def test_tables_in_shared_memory_stay_there():
    made = tables(4, 5)
    stack = Stack(made)
    for table in made:
        table.share_memory()
    stack.pack()
    assert made[1].weight.is_shared()
    assert stack._current()[1] is not None
