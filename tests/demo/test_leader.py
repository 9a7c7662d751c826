from __future__ import annotations

import torch

from plait import efl
from plait.demo import leader


def test_the_leader_knows_left_halves_and_labels():
    for mode in (efl.MODE.TRAIN, efl.MODE.EVAL):
        assert leader.input_fn(efl.Model(), mode).names == ["id", "left", "digit"]


def test_it_keeps_its_own_part_and_what_joins_both(trained):
    assert {name.partition("/")[0] for name in trained.leader.variables()} == {"left", "top"}


def test_split_equals_unsplit_bit_for_bit(trained):
    both = trained.leader.variables() | trained.follower.variables()
    whole = trained.whole.variables()
    assert both.keys() == whole.keys()
    assert [name for name in whole if not torch.equal(both[name], whole[name])] == []
    assert [entry["metrics"] for entry in trained.leader.history] == [
        entry["metrics"] for entry in trained.whole.history
    ]


def test_it_has_learnt(trained):
    accuracies = [entry["metrics"]["accuracy"] for entry in trained.leader.history]
    assert accuracies[-1] > 0.8 > accuracies[0]
