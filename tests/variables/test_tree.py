from __future__ import annotations

import math

import pytest
import torch

from plait.errors import CheckpointError
from plait.variables.tree import join_tree, snapshot, split_tree


def test_tensors_are_named_by_their_path():
    weight, moment = torch.ones(2), torch.zeros(3)
    tree = {"variables": {"tower/fc1/weight": weight}, "optimizers": [{"m": moment}], "step": 3}
    state, tensors = split_tree(tree)
    assert set(tensors) == {"variables/tower/fc1/weight", "optimizers/0/m"}
    assert state["variables"] == {"tower/fc1/weight": {"$tensor": "variables/tower/fc1/weight"}}
    assert join_tree(state, tensors) == tree


def test_values_survive_and_tuples_become_lists():
    tree = {"none": None, "bool": True, "int": 2**70, "text": "中\n", "tuple": (1, (2.5,)), "empty": {}, "list": []}
    state, tensors = split_tree(tree)
    assert not tensors
    assert join_tree(state, tensors) == {**tree, "tuple": [1, [2.5]]}


def test_infinite_and_undefined_floats_survive():
    state, _ = split_tree([math.inf, -math.inf, math.nan])
    assert state[:2] == [math.inf, -math.inf]
    assert math.isnan(state[2])


def test_a_collision_names_both_paths():
    tree = {"a": {"b/c": torch.ones(1)}, "a/b": {"c": torch.ones(1)}}
    with pytest.raises(CheckpointError) as caught:
        split_tree(tree)
    assert "['a']['b/c']" in str(caught.value)
    assert "['a/b']['c']" in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a": [1, {2}]}, r"\['a'\]\[1\] is a set"),
        ({"a": b"x"}, r"\['a'\] is a bytes"),
        ({"a": {3: 1}}, r"\['a'\] has the key 3; .*'3'"),
        ({"a": {"$tensor": "x"}}, r"\['a'\] has the key '\$tensor'"),
        ({"__metadata__": torch.ones(1)}, "__metadata__"),
        ({"a": torch.eye(2).to_sparse()}, r"\['a'\] is torch.sparse_coo"),
        ({"a": torch.ones(2, device="meta")}, r"\['a'\] .* on meta"),
    ],
)
def test_what_cannot_be_saved_is_named(tree, words):
    with pytest.raises(CheckpointError, match=words):
        split_tree(tree)
    with pytest.raises(CheckpointError, match=words):
        split_tree(snapshot(tree))


def test_a_tree_that_contains_itself_is_an_error():
    tree: dict[str, object] = {}
    tree["again"] = tree
    with pytest.raises(CheckpointError, match="contains itself"):
        split_tree(tree)


@pytest.mark.parametrize("name", ["gone", 3, None, ["a"]])
def test_an_unknown_tensor_is_an_error(name):
    with pytest.raises(CheckpointError, match="not saved with it"):
        join_tree({"a": {"$tensor": name}}, {})


def test_a_snapshot_shares_nothing():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    inner = [1, 2]
    tree = {"w": weight, "view": weight.detach().t(), "same": weight, "l": (inner, None)}
    copy = snapshot(tree)
    with torch.no_grad():
        weight.zero_()
    inner.append(3)
    assert all(torch.equal(copy[name].flatten(), torch.ones(6)) for name in ("w", "view", "same"))
    assert copy["l"] == ([1, 2], None)
    assert copy["view"].shape == (3, 2)
    assert copy["view"].is_contiguous()
    assert not copy["w"].requires_grad
    assert copy["w"].data_ptr() != copy["same"].data_ptr()


def test_a_snapshot_resolves_lazy_views():
    copy = snapshot({"c": torch.tensor([1 + 2j]).conj()})["c"]
    assert not copy.is_conj()
    assert copy.tolist() == [1 - 2j]
