from __future__ import annotations

import numpy as np
import pytest
import torch

from plait import mox
from plait.errors import FunctionError
from plait.mox.outputs import OutputHook


def hook_over(values, every, got):
    """A hook whose steps say one value after the other."""
    specs = iter([mox.ModelSpec(output_info={"v": value}) for value in values])
    return OutputHook(lambda: [next(specs)], got.append, every)


def test_it_hands_over_every_so_many_steps_and_the_rest_at_the_end():
    got = []
    hook = hook_over([torch.tensor([n]) for n in range(5)], 2, got)
    for _ in range(5):
        hook.after_run(None, None)
    assert [[step["v"].tolist() for step in steps] for steps in got] == [[[0], [1]], [[2], [3]]]
    hook.end(None)
    hook.end(None)
    assert [step["v"].tolist() for step in got[2]] == [[4]]
    assert len(got) == 3


def test_what_is_collected_survives_a_restart():
    got = []
    first = hook_over([torch.tensor(1.5), torch.tensor(2.5)], 3, got)
    first.after_run(None, None)
    first.after_run(None, None)
    second = hook_over([3.5], 3, got)
    second.load_state_dict(first.state_dict())
    second.after_run(None, None)
    assert [step["v"].item() for step in got[0]] == [1.5, 2.5, 3.5]


def test_outputs_are_copies():
    got, value = [], torch.zeros(2)
    hook = hook_over([value], 0, got)
    hook.after_run(None, None)
    value += 1
    hook.end(None)
    assert isinstance(got[0][0]["v"], np.ndarray)
    assert got[0][0]["v"].tolist() == [0, 0]


def test_a_spec_without_output_info_is_an_error():
    with pytest.raises(FunctionError, match="no output_info: add it"):
        OutputHook(lambda: [mox.ModelSpec()], print, 0).after_run(None, None)
