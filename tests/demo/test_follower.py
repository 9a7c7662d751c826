from __future__ import annotations

import torch

from plait import efl
from plait.demo import centralised, follower


def test_the_follower_knows_right_halves_and_no_label():
    for mode in (efl.MODE.TRAIN, efl.MODE.EVAL):
        assert follower.input_fn(efl.Model(), mode).names == ["id", "right"]


def test_it_keeps_its_own_part_only_and_measures_nothing(trained):
    assert {name.partition("/")[0] for name in trained.follower.variables()} == {"right"}
    assert [entry["metrics"] for entry in trained.follower.history] == [{}, {}, {}]


def test_the_leaders_gradients_have_moved_all_of_it(trained):
    before = centralised.train_centralised(0).variables()
    after = trained.follower.variables()
    assert [name for name in after if torch.equal(after[name], before[name])] == []
