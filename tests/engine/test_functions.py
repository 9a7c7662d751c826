"""The Protocols of user functions: what fits them, and that they say what each argument is."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from plait.engine import functions

PROTOCOLS = [getattr(functions, name) for name in functions.__all__ if name != "takes"]

USE = """
from __future__ import annotations
import functools
from typing import Any
import torch
from plait import efl
from plait.data import Sample
from plait.engine.functions import EvalFn, InputFn, LossFn, OptimizerFn, ProcedureFn, StageFn
from plait.engine.model import Model
from plait.engine.task import MODE

def reader(model: Model, mode: MODE) -> list[dict[str, torch.Tensor]]:
    return []

def loss(model: Model, sample: Sample) -> torch.Tensor:
    return torch.zeros(())

class Loss:
    def __call__(self, m: Model, s: Sample) -> torch.Tensor:
        return torch.zeros(())

def stage(sess: Any, ctx: Any) -> int:
    return 1

inputs: list[InputFn] = [reader, lambda model, mode: None]
losses: list[LossFn] = [loss, Loss(), lambda model, sample: torch.zeros(())]
evaluations: list[EvalFn] = [loss, lambda model, sample: None]
procedures: list[ProcedureFn] = [efl.procedure_fn.train(), efl.procedure_fn.cotrain(max_iter=1), lambda model: None]
"""


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda p: p.__name__)
def test_each_says_what_it_is_for_and_documents_its_call(protocol):
    assert inspect.getdoc(protocol)
    text = inspect.getdoc(protocol.__call__) or ""
    parameters = [
        name for name in inspect.signature(protocol.__call__).parameters if name not in ("self", "args", "kwargs")
    ]
    assert "Args:" in text
    for name in parameters:
        assert f"{name}:" in text, f"{protocol.__name__} does not say what {name} is"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("InputFn", ["model", "mode"]),
        ("LossFn", ["model", "sample"]),
        ("EvalFn", ["model", "sample"]),
        ("OptimizerFn", ["model", "task"]),
        ("ProcedureFn", ["model"]),
    ],
)
def test_they_are_called_by_position_as_documented(name, parameters):
    found = inspect.signature(getattr(functions, name).__call__).parameters
    assert [key for key in found if key != "self"] == parameters
    assert all(found[key].kind is inspect.Parameter.POSITIONAL_ONLY for key in parameters)


@pytest.mark.slow
def test_functions_lambdas_and_objects_satisfy_them(tmp_path):
    (tmp_path / "use.py").write_text(USE)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"), str(tmp_path / "use.py")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_how_many_arguments_a_function_takes():
    assert functions.takes(lambda: 1, 0)
    assert not functions.takes(lambda x: 1, 0)
    assert functions.takes(lambda x, *rest: 1, 2)
    assert functions.takes(dict.fromkeys, 2)
