from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from plait.feature_column.tables import Stack, Table


def tables(*sizes, dim=3, trainable=True):
    return [Table(size, dim, "rows", nn.init.normal_, trainable=trainable, sparse=False) for size in sizes]


def beside(stack, ids):
    """Rows side by side of places in the whole stack: each column's table is all of it."""
    count = ids.shape[1]
    return stack.side_by_side([*ids.unbind(1)], torch.zeros(count).long(), torch.full((count,), sum(stack.sizes)))


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
@pytest.mark.usefixtures("ways")
def test_one_lookup_equals_torch_on_joined_tables(name):
    ids, offsets, scale = LOOKUPS[name]
    made = tables(4, 5)
    joined = torch.cat([table.weight.detach() for table in made]).requires_grad_()
    stack = Stack(made)
    found = beside(stack, ids) if name == "side by side" else stack.look_up(ids, offsets, scale)
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


@pytest.mark.usefixtures("ways")
def test_the_memory_of_gradients_is_used_again_once_nobody_holds_them():
    made = tables(4, 5)
    stack = Stack(made)
    variables = [table.weight for table in made]

    def gradients(factor):
        for variable in variables:
            variable.grad = None
        (beside(stack, IDS[:4].view(2, 2)).sum() * factor).backward()
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
    assert torch.equal(beside(copied, IDS[:4].view(2, 2)), beside(stack, IDS[:4].view(2, 2)))


@pytest.mark.usefixtures("ways")
def test_gradients_add_up_over_backward_passes_with_memory_that_is_used_again():
    made = tables(4, 5)
    stack = Stack(made)
    for _ in range(3):
        beside(stack, IDS[:, None]).sum().backward()
    assert made[1].weight.grad[:, 0].tolist() == [6.0, 0.0, 0.0, 0.0, 3.0]


@pytest.mark.parametrize("look_up", [beside, Stack.look_up])
def test_gradients_of_gradients_are_right(look_up):
    made = [table.double() for table in tables(2, 3)]
    stack = Stack(made)
    torch.autograd.gradgradcheck(
        lambda *_: look_up(stack, torch.tensor([[0, 4, 1]])).pow(2),
        tuple(table.weight for table in made),
    )


@pytest.mark.usefixtures("ways")
def test_gradients_of_other_kinds():
    """Many at once, zeros that have no memory, and what is less than nothing by a flag."""
    made = tables(4, 5)
    weights = [table.weight for table in made]
    found = beside(Stack(made), IDS[:4].view(2, 2))
    basis = torch.eye(found.numel()).view(-1, *found.shape)
    at_once = torch.autograd.grad(found, weights, basis, is_grads_batched=True, retain_graph=True)
    for number, gradient in enumerate(basis):
        single = torch.autograd.grad(found, weights, gradient, retain_graph=True)
        assert all(torch.equal(many[number], one) for many, one in zip(at_once, single, strict=True))
    nothing = torch.autograd.grad(found, weights, torch._efficientzerotensor(found.shape), retain_graph=True)
    assert all(not one.any() for one in nothing)
    gradient = torch.randn_like(found)
    turned = torch.autograd.grad(found, weights, torch._neg_view(gradient), retain_graph=True)
    plain = torch.autograd.grad(found, weights, -gradient)
    assert all(torch.equal(one, other) for one, other in zip(turned, plain, strict=True))


@pytest.mark.usefixtures("ways")
def test_ids_may_change_before_the_backward_pass():
    made = tables(4, 5)
    ids = torch.tensor([[1, 6], [1, 4]])
    found = beside(Stack(made), ids).sum()
    ids.add_(1000)
    found.backward()
    assert made[0].weight.grad[:, 0].tolist() == [0.0, 2.0, 0.0, 0.0]
    assert made[1].weight.grad[:, 0].tolist() == [1.0, 0.0, 1.0, 0.0, 0.0]


def test_ids_of_sums_must_not_change_before_the_backward_pass():
    ids = torch.arange(6).view(3, 2)
    found = Stack(tables(4, 5)).look_up(ids).sum()
    ids.add_(1000)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward()


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("trainable", [True, False])
def test_an_id_outside_of_its_table_is_no_row_of_the_next(trainable):
    stack = Stack(tables(4, 5, trainable=trainable))
    starts, sizes = torch.tensor([0, 4]), torch.tensor([4, 5])
    good = torch.tensor([0, 3])
    for ids in ([torch.tensor([0, 4]), good], [good, torch.tensor([5, 0])], [good, torch.tensor([0, -1])]):
        assert stack.side_by_side(ids, starts, sizes) is None
    assert stack.side_by_side([good, good], starts, sizes) is not None


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


@pytest.mark.parametrize("look_up", [beside, Stack.look_up])
def test_gradients_can_be_asked_for_of_one_table_and_hooks_see_them(look_up):
    made = tables(4, 5)
    stack = Stack(made)
    look_up(stack, IDS[:, None]).sum().backward()  # what follows finds the history of this one
    seen = []
    made[1].weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad[:, 0].tolist()))
    (alone,) = torch.autograd.grad(look_up(stack, IDS[:, None]).sum(), [made[0].weight])
    assert alone[:, 0].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert seen == []
    look_up(stack, IDS[:, None]).sum().backward()
    assert seen == [[4.0, 0.0, 0.0, 0.0, 2.0]]


@pytest.mark.usefixtures("ways")
def test_the_default_device_and_inference_do_not_matter():
    stack = Stack(tables(4, 5))
    ids = torch.tensor([[1, 6, 2, 3, 5, 0, 0]])
    starts, sizes = torch.zeros(7).long(), torch.full((7,), 9)
    expected = functional.embedding(ids, torch.cat([t.weight for t in stack.tables])).flatten(1)
    for mode in (torch.no_grad(), torch.device("meta"), torch.inference_mode()):
        with mode:
            assert torch.equal(stack.side_by_side([*ids.unbind(1)], starts, sizes), expected)


@pytest.mark.parametrize("cold", [True, False])
def test_inside_torch_func_nothing_is_kept(cold):
    made = tables(4, 5)
    stack = Stack(made)
    ids = torch.tensor([[1, 6]])
    if not cold:
        beside(stack, ids)
    for table in made:
        table.double()
    stack.pack()
    summed = lambda scale: (beside(stack, ids) * scale).sum()  # noqa: E731
    slope = torch.func.grad(summed)(torch.tensor(2.0, dtype=torch.float64))
    assert slope == beside(stack, ids).sum()
    with torch.no_grad():
        for table in made:
            table.weight.fill_(7.0)
    assert beside(stack, ids).tolist() == [[7.0] * 6]
    values = {"table.rows": made[1].weight.detach()}
    looking = _Looking(made[1], stack, beside)
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
    def __init__(self, table, stack, look_up=Stack.look_up):
        super().__init__()
        self.table, self.stack, self.look_up = table, stack, look_up

    def forward(self, ids):
        return self.look_up(self.stack, ids)


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
