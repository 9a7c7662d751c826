"""What is noted of a call."""

from __future__ import annotations

import torch

from plait.privacy.rules.call import Call


def noted(**kwargs):
    inputs = torch.randn(4, 3, requires_grad=True)
    outputs = [inputs * 2, torch.zeros(4), inputs.sum(1)]
    return Call((inputs,), kwargs, outputs), outputs


def test_outputs_that_lead_nowhere_are_left_out():
    call, _ = noted()
    assert call.picked == [0, 2]
    assert call.shapes == [torch.Size([4, 3]), torch.Size([4])]
    assert call.input.shape == (4, 3)


def test_an_output_that_changes_in_place_is_known_as_it_was():
    call, outputs = noted()
    outputs[0].mul_(5)
    (found,) = torch.autograd.grad(outputs[0].sum(), call.edges[:1])
    assert found.unique().tolist() == [5]


def test_an_input_that_changes_in_place_is_seen():
    inputs = torch.randn(4, 3)
    call = Call((inputs, "other"), {}, [])
    assert not call.changed
    inputs += 1
    assert call.changed


def test_positions_of_each_microbatch_stand_in_a_row():
    call, _ = noted()
    values = torch.arange(12).view(4, 3, 1).float()
    call.take([values], [0], 4, 2)
    assert call.positions(values, 1).squeeze(2).tolist() == [list(range(6)), list(range(6, 12))]
    call.take([values], [1], 3, 3)
    assert call.positions(values, 1).squeeze(2).tolist() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
