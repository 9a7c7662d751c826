"""Descriptions come back as they went, and nothing wrong gets in."""

from __future__ import annotations

import copy
import json

import pytest

from plait.cluster.ps.spec import ModelSpec, OptimizerSpec, TableSpec, VariableSpec
from plait.errors import ClusterError

SPEC = ModelSpec(
    optimizers=(OptimizerSpec(kind="Adam", options={"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}),),
    variables=(
        VariableSpec(name="dense/weight", shape=(3, 4), dtype="float32", optimizer=0),
        VariableSpec(name="steps", shape=(), dtype="int64", optimizer=None),
    ),
    tables=(
        TableSpec(name="users", dim=8, dtype="float32", rows=None, optimizer=0),
        TableSpec(name="items", dim=4, dtype="float64", rows=100, optimizer=None),
    ),
)


def tree() -> dict:
    return json.loads(json.dumps(SPEC.to_json()))


def test_a_description_survives_json():
    back = ModelSpec.from_json(tree())
    assert back.to_json() == SPEC.to_json()
    assert back.variables == SPEC.variables
    assert back.tables == SPEC.tables


def test_a_scalar_has_one_element():
    assert SPEC.variables[1].numel == 1
    assert SPEC.variables[0].numel == 12


WRONG = [
    ([], None, "description of a model"),
    ([], {}, "optimizers, variables, tables"),
    (["variables"], {}, "list of at most"),
    (["variables", 0], [], "description of a variable"),
    (["variables", 0, "name"], "", "name of a variable"),
    (["variables", 0, "name"], "a" * 5000, "printable"),
    (["variables", 0, "name"], "steps", "two variables or tables are called 'steps'"),
    (["variables", 0, "shape"], "3", "shape of variable 'dense/weight'"),
    (["variables", 0, "shape"], [-1], "from 0 to"),
    (["variables", 0, "shape"], [True], "whole number"),
    (["variables", 0, "shape"], [2**39, 2**39], "number of elements"),
    (["variables", 0, "shape"], [1] * 65, "list of whole numbers"),
    (["variables", 0, "dtype"], "int64", "float64, float32"),
    (["variables", 0, "dtype"], "object", "dtype of 'dense/weight'"),
    (["variables", 0, "optimizer"], 1, "names optimizer 1, there are 1"),
    (["variables", 0, "optimizer"], -1, "from 0"),
    (["tables", 0, "dim"], 0, "dim of table 'users' is 0"),
    (["tables", 0, "dim"], 10**9, "dim of table 'users'"),
    (["tables", 0, "rows"], 0, "rows of table 'users' is 0"),
    (["tables", 0, "rows"], 2**41, "rows of table 'users'"),
    (["tables", 1, "rows"], 2**39, "number of elements of table 'items'"),
    (["tables", 0, "dtype"], "int64", "dtype of 'users'"),
    (["tables", 0, "initializer"], {"kind": "zeros"}, "kind, scale, seed"),
    (["tables", 0, "initializer", "kind"], "evil", "zeros, uniform"),
    (["tables", 0, "initializer", "kind"], [], "zeros, uniform"),
    (["tables", 0, "initializer", "scale"], float("nan"), "scale"),
    (["tables", 0, "initializer", "seed"], 10**200, "a very large number"),
    (["optimizers", 0, "kind"], 3, "kind of an optimizer"),
    (["optimizers", 0, "options"], [], "dict of plain values"),
    (["optimizers", 0, "options"], {str(n): 0 for n in range(100)}, "dict of plain values"),
    (["optimizers", 0, "options", "betas"], [[1]], "option 'betas'"),
    (["optimizers", 0, "options", "betas"], [0] * 9, "option 'betas'"),
    (["optimizers", 0, "options", "eps"], "e" * 100, "option 'eps'"),
]


@pytest.mark.parametrize(("path", "value", "text"), WRONG)
def test_what_is_wrong_is_named(path, value, text):
    wrong = {"root": copy.deepcopy(tree())}
    place = wrong
    for key in ["root", *path][:-1]:
        place = place[key]
    place[["root", *path][-1]] = value
    with pytest.raises(ClusterError) as caught:
        ModelSpec.from_json(wrong["root"])
    assert text in str(caught.value)
    assert len(str(caught.value)) < 1000
