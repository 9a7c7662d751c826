from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import plait
from plait import efl
from plait.errors import VariableError
from plait.variables.store import AUTO_REUSE, VariableStore, may_look_at, variable_name

LINEAR = lambda: nn.Linear(2, 3)


def made(*names: str, seed: int = 0) -> VariableStore:
    store = VariableStore(seed)
    with store.building(None):
        for name in names:
            store.get(name, "layer", LINEAR, None)
    return store


def values(store: VariableStore) -> dict[str, torch.Tensor]:
    return {variable_name(path): value.detach() for path, value in store.root.named_parameters()}


def test_a_variable_is_called_by_its_path_with_slashes():
    assert variable_name("_scoped.tower.fc1.weight") == "tower/fc1/weight"
    assert variable_name("tower.fc1.weight") == "tower/fc1/weight"
    assert list(values(made("tower/fc1"))) == ["tower/fc1/weight", "tower/fc1/bias"]


@pytest.mark.parametrize("scope", ["train", "type", "forward", "parameters", "training", "_modules", "state_dict"])
def test_a_scope_may_have_a_name_that_modules_use(scope):
    model = efl.Model()
    with model.scope(), plait.variable_scope(scope):
        plait.layer("fc", nn.Linear, 2, 3)
        plait.get_variable("w", [2])
    assert set(model.variables()) == {f"{scope}/fc/weight", f"{scope}/fc/bias", f"{scope}/w"}
    model.train()
    assert model.state_dict()


@pytest.mark.parametrize("name", ["train", "forward", "type", "add_module"])
def test_a_layer_and_a_variable_may_have_a_name_that_modules_use(name):
    model = efl.Model()
    with model.scope():
        plait.layer(name, nn.Linear, 2, 3)
        with plait.variable_scope("inner"):
            plait.get_variable(name, [2])
    assert set(model.variables()) == {f"{name}/weight", f"{name}/bias", f"inner/{name}"}


def test_initial_values_do_not_depend_on_the_order_of_creation():
    first, second = values(made("a", "b")), values(made("b", "c", "a"))
    for name in first:
        assert torch.equal(first[name], second[name])


def test_initial_values_do_not_depend_on_other_draws_and_leave_the_random_states():
    torch.manual_seed(1)
    before = values(made("a"))
    torch.manual_seed(2)
    random.seed(2)
    torch.rand(5)
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    after = values(made("a"))
    assert torch.equal(before["a/weight"], after["a/weight"])
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


@pytest.mark.parametrize(
    ("one", "other"),
    [(made("a"), made("a", seed=1)), (made("a"), made("b"))],
    ids=["another seed", "another name"],
)
def test_initial_values_depend_on_the_seed_and_on_the_name(one, other):
    assert not torch.equal(*(next(iter(values(store).values())) for store in (one, other)))


def test_a_found_thing_is_the_very_same():
    store = made("a")
    assert store.get("a", "layer", LINEAR, None) is store.root.a


def test_twice_in_one_call_is_an_error_that_says_how_to_share():
    with pytest.raises(VariableError, match=r"'tower/a' is made twice.*'tower', reuse=plait.AUTO"):
        made("tower/a", "tower/a")


@pytest.mark.parametrize("reuse", [True, AUTO_REUSE])
def test_twice_is_shared_where_the_scope_says_reuse(reuse):
    store = made("a")
    with store.building("another"):
        assert store.get("a", "layer", LINEAR, reuse) is store.get("a", "layer", LINEAR, reuse)


def test_another_task_may_not_make_it_but_the_same_task_may_in_its_next_function():
    store = VariableStore()
    with store.building("click"):
        kept = store.get("a", "layer", LINEAR, None)
    with store.building("click"):
        assert store.get("a", "layer", LINEAR, None) is kept
    with store.building("buy"), pytest.raises(VariableError, match=r"'a' of task 'click' is made by 'buy'.*AUTO_REUSE"):
        store.get("a", "layer", LINEAR, None)


def test_reuse_of_what_does_not_exist_names_what_is_near():
    store = made("tower/first")
    with store.building(None), pytest.raises(VariableError, match=r"reuse=True.*no layer 'tower/frist'.*tower/first"):
        store.get("tower/frist", "layer", LINEAR, True)


def test_what_is_new_after_the_build_is_an_error():
    with pytest.raises(VariableError, match=r"variable 'late' is new after compile\(\).*first call"):
        made("a").get("late", "variable", LINEAR, None)


@pytest.mark.parametrize("name", ["", "a.b", "a//b", "/a", "a/"])
def test_a_name_that_is_none_says_what_one_is(name):
    with pytest.raises(VariableError, match="no name for a variable: use words joined by '/'"):
        made(name)


def test_a_scope_and_a_layer_may_not_share_a_name():
    with pytest.raises(VariableError, match="'a' is already the name of something else"):
        made("a/b", "a")


def test_buffers_made_in_the_build_are_kept_with_their_first_values():
    store = VariableStore()
    with store.building(None):
        norm = store.get("norm", "layer", lambda: nn.BatchNorm1d(2), None)
    norm.running_mean.fill_(7)
    kept = {id(buffer): first for buffer, first in store.fresh_buffers}
    assert torch.equal(kept[id(norm.running_mean)], torch.zeros(2))


def test_other_tensors_in_the_place_of_variables_for_a_while():
    store = VariableStore()
    with store.building(None):
        own = store.get("w", "variable", lambda: nn.Parameter(torch.zeros(1)), None)
        layer = store.get("fc", "layer", LINEAR, None)
    other = torch.ones(1)
    with store.replaced({"w": other, "fc": other, "nowhere": other}):
        assert store.get("w", "variable", LINEAR, None) is other
        assert store.get("fc", "layer", LINEAR, None) is layer
    assert store.get("w", "variable", LINEAR, None) is own


def test_a_whole_number_variable_is_the_one_that_was_moved():
    model = efl.Model()
    with model.scope():
        plait.get_variable("seen", [2], dtype=torch.int64, trainable=False)
        plait.get_variable("w", [2])
    model._store.move(torch.device("meta"))
    with model.scope():
        seen, weight = plait.get_variable("seen", [2], dtype=torch.int64, trainable=False), plait.get_variable("w", [2])
    assert seen.device.type == weight.device.type == "meta"
    assert any(seen is buffer for buffer in model.buffers())


def test_values_elsewhere_are_looked_at_in_a_first_call_only():
    near, far = torch.ones(2), torch.ones(2, device="meta")
    model = efl.Model()
    assert (may_look_at(near), may_look_at(far)) == (True, False)
    seen = []

    def loss(model, sample):
        seen.append(may_look_at(far))
        return plait.layer("fc", nn.Linear, 2, 1)(sample["x"]).mean()

    model.input_fn(lambda model, mode: [{"x": torch.ones(4, 2)}] * 2).loss_fn(loss)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(lambda params: torch.optim.SGD(params, lr=0.1)))
    model.compile(session_config={"device": "cpu"}).fit(efl.procedure_fn.train())
    assert seen == [True, False, False]
