from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from plait import efl
from plait.errors import FunctionError, TaskError, VariableError
from plait.optim.assign import in_scope, make_optimizer

SGD = functools.partial(torch.optim.SGD, lr=0.1)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)


class Towers(efl.Model):
    """Three modules; the loss uses those that are named."""

    def __init__(self, used=("left", "right", "head"), tasks=(None,)):
        super().__init__()
        for name in ("left", "right", "head"):
            setattr(self, name, nn.Linear(2, 2))
        for task in tasks:
            self.input_fn(lambda model, mode: [{"x": torch.ones(2, 2)}], task=task)
            self.loss_fn(lambda model, sample: sum(getattr(model, n)(sample.x).mean() for n in used), task=task)

    def built(self, optimizer_fn, task=None):
        return self.optimizer_fn(optimizer_fn, task=task).compile()


def names(model, variables):
    by_id = {id(value): name for name, value in model.variables().items()}
    return [by_id[id(variable)] for variable in variables]


@pytest.mark.parametrize(
    ("name", "scope", "expected"),
    [
        ("tower/fc/weight", "tower", True),
        ("tower/fc/weight", "tower/", True),
        ("tower/fc/weight", "tower/fc", True),
        ("tower/fc/weight", "tow", False),
        ("tower2/fc/weight", "tower", False),
        ("w", "w", True),
        ("anything", "", True),
    ],
)
def test_a_scope_holds_what_lies_below_it(name, scope, expected):
    assert in_scope(name, scope) is expected


def test_each_scope_gets_its_own_optimizer():
    model = Towers().built(efl.optimizer_fn.scope_optimizer({"left": SGD, "right": ADAM, "head": SGD}))
    given = model.opt_to_vars()
    found = [(type(opt).__name__, names(model, variables), scope) for opt, (variables, scope) in given.items()]
    assert found == [
        ("SGD", ["left/weight", "left/bias"], "left"),
        ("Adam", ["right/weight", "right/bias"], "right"),
        ("SGD", ["head/weight", "head/bias"], "head"),
    ]


def test_a_scope_that_matches_nothing_names_what_there_is():
    with pytest.raises(VariableError, match="no trainable variable is in scope 'lef': the model has head, left, right"):
        Towers().built(efl.optimizer_fn.scope_optimizer({"lef": SGD}))


def test_a_variable_in_two_scopes_is_an_error_that_names_all_three():
    with pytest.raises(VariableError, match="'left/weight' is in two scopes, 'left' and 'left/weight': leave one out"):
        Towers().built(efl.optimizer_fn.scope_optimizer({"left": SGD, "left/weight": ADAM}))


def test_a_variable_that_the_loss_moves_and_no_scope_has_is_an_error():
    with pytest.raises(VariableError, match=r"'right/weight' \(and 3 more\) is moved by the loss.*add its scope"):
        Towers().built(efl.optimizer_fn.scope_optimizer({"left": SGD}))


def test_a_variable_that_the_loss_does_not_use_needs_no_scope():
    model = Towers(used=("left",)).built(efl.optimizer_fn.scope_optimizer({"left": SGD}))
    assert len(model.opt_to_vars()) == 1


def test_a_frozen_variable_needs_no_scope_and_does_not_move():
    model = Towers()
    model.right.requires_grad_(False)
    model.head.requires_grad_(False)
    before = model.right.weight.clone()
    model.built(efl.optimizer_fn.scope_optimizer({"left": SGD})).fit(efl.procedure_fn.train())
    assert torch.equal(model.right.weight, before)
    assert names(model, next(iter(model.opt_to_vars().values()))[0]) == ["left/weight", "left/bias"]


def test_a_scope_of_frozen_variables_matches_nothing():
    model = Towers()
    model.left.requires_grad_(False)
    with pytest.raises(VariableError, match="no trainable variable is in scope 'left'"):
        model.built(efl.optimizer_fn.scope_optimizer({"left": SGD, "right": SGD, "head": SGD}))


def test_optimizer_setter_takes_all_variables_without_a_scope():
    model = Towers().built(efl.optimizer_fn.optimizer_setter(ADAM))
    ((variables, scope),) = model.opt_to_vars().values()
    assert (len(variables), scope) == (6, None)


@pytest.mark.parametrize(("other", "count"), [(SGD, 1), (ADAM, 2)], ids=["same factory", "another"])
def test_tasks_that_get_the_same_factory_share_one_optimizer(other, count):
    model = Towers(tasks=("a", "b"))
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(SGD), task="a")
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(other), task="b")
    model.compile()
    assert len(model.optimizers()) == count


def test_scopes_with_the_same_factory_share_per_scope_between_tasks():
    model = Towers(tasks=("a", "b"))
    for task in ("a", "b"):
        model.optimizer_fn(efl.optimizer_fn.scope_optimizer({"left": SGD, "right": SGD, "head": SGD}), task=task)
    model.compile()
    assert len(model.optimizers()) == 3
    assert list(model.opt_to_vars("a")) == list(model.opt_to_vars("b"))


def test_an_optimizer_that_has_its_parameters_is_used_as_it_is():
    model = Towers()
    mine = torch.optim.SGD(model.parameters(), lr=0.5)
    model.built(efl.optimizer_fn.optimizer_setter(mine))
    assert list(model.opt_to_vars()) == [mine]


def test_an_optimizer_that_lacks_a_variable_is_an_error_not_a_silent_standstill():
    model = Towers()
    mine = torch.optim.SGD(model.left.parameters(), lr=0.5)
    with pytest.raises(VariableError, match="'right/weight' .* is moved by the loss .* no optimizer has it"):
        model.built(efl.optimizer_fn.optimizer_setter(mine))


def test_one_optimizer_may_serve_two_scopes():
    model = Towers()
    mine = torch.optim.SGD(model.parameters(), lr=0.5)
    model.built(efl.optimizer_fn.scope_optimizer({"left": mine, "right": mine, "head": mine}))
    ((opt, (variables, scope)),) = model.opt_to_vars().items()
    assert (opt is mine, len(variables), scope) == (True, 6, None)


@pytest.mark.parametrize("made", [SGD, lambda variables: torch.optim.SGD(variables, lr=0.2)])
def test_an_optimizer_fn_of_ones_own_may_return_factories(made):
    model = Towers(used=("left",))
    model.built(lambda model, task: {made: (list(model.left.parameters()), "left")})
    ((opt, (variables, scope)),) = model.opt_to_vars().items()
    assert isinstance(opt, torch.optim.SGD)
    assert (names(model, variables), scope) == (["left/weight", "left/bias"], "left")


def test_an_optimizer_fn_of_ones_own_may_return_optimizers_and_gets_the_task():
    asked = []

    def optimizer_fn(model, task):
        asked.append(task)
        return {torch.optim.SGD(model.parameters(), lr=0.1): (list(model.parameters()), None)}

    model = Towers(tasks=("click",)).built(optimizer_fn, task="click")
    start = model.left.weight.detach().clone()
    model.fit(efl.procedure_fn.train())
    assert asked == ["click"]
    assert not torch.equal(model.left.weight, start)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, r"optimizer_fn of task None returned NoneType None: return \{optimizer: \(vars, scope\)\}"),
        ({}, "returned dict {}: return"),
        ([1], "returned list .1.: return"),
    ],
)
def test_an_optimizer_fn_that_returns_no_assignment_is_an_error(given, words):
    with pytest.raises(FunctionError, match=words):
        Towers().built(lambda model, task: given)


def test_an_assignment_without_a_pair_is_an_error_that_shows_one():
    with pytest.raises(FunctionError, match=r"optimizer_fn of task None.*\(vars, scope\)"):
        Towers().built(lambda model, task: {SGD: list(model.parameters())})


@pytest.mark.parametrize("opt", ["sgd", 0.1, None])
def test_what_is_no_optimizer_is_an_error_that_shows_a_factory(opt):
    with pytest.raises(TaskError, match=r"an optimizer was expected, got .*functools.partial\(torch.optim.SGD"):
        make_optimizer(opt, [])


def test_a_factory_that_makes_no_optimizer_is_an_error():
    with pytest.raises(TaskError, match="returned list: return a torch.optim.Optimizer"):
        make_optimizer(list, [torch.zeros(1, requires_grad=True)])


def test_without_any_variable_it_says_how_to_get_one():
    model = efl.Model()
    with pytest.raises(VariableError, match=r"no variable to train: assign a module .* plait.layer"):
        efl.optimizer_fn.optimizer_setter(SGD)(model, None)


def test_the_spelling_of_the_documents_heading_works():
    assert efl.optimizer_fn.optimzier_setter is efl.optimizer_fn.optimizer_setter


def test_an_optimizers_tensors_follow_its_variables():
    variable = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = torch.optim.Adagrad([variable], lr=0.1)
    optimizer.state[variable].update(sum=torch.zeros(2), step=torch.tensor(0.0))  # as if it had been made on the CPU
    assert make_optimizer(optimizer, [variable]) is optimizer
    assert optimizer.state[variable]["sum"].device.type == "meta"
    assert optimizer.state[variable]["step"].device.type == "cpu"
