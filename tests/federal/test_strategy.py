"""`Federal`: checkpoints that both parties agree on, and coming back to them together."""

from __future__ import annotations

import shutil

import pytest

import plait
from plait import efl
from plait.errors import AbortedError, ClusterError, FederalError
from plait.variables.checkpoint import CheckpointDir

from .pair import (
    ADAM,
    assert_same,
    both,
    communicators,
    dense,
    follower,
    follower_eval,
    leader,
    leader_eval,
    leader_loss,
    refused,
    whole,
    whole_eval,
    whole_loss,
)

STEPS, PASSES = 40, 20
SETTINGS = {"optimizer": ADAM, "num_epochs": PASSES}
TRAIN = efl.procedure_fn.train


def run(path, procedure, *, hooks=((), ()), joined=None, fit=None, evaluate=False, **settings):
    """Both parties with checkpoints of their own below `path`."""
    parts = []
    for place, (role, make, evaluation) in enumerate(
        [("leader", leader, leader_eval), ("follower", follower, follower_eval)]
    ):
        keeps = {"checkpoint_dir": path / role, "save_steps": 7, "hooks": hooks[place], **(fit or {})}
        chosen = {"evaluate": evaluation} if evaluate else {}
        parts.append(make(procedure, fit=keeps, **chosen, **{**SETTINGS, **settings}))
    return both(*parts, joined)


def steps_of(path, role):
    return [info.step for info in CheckpointDir(path / role).list()]


def names_of(path, role):
    directory = CheckpointDir(path / role)
    return [directory.read(info)["cluster"]["save"] for info in directory.list()]


def drop(path, role, *places):
    infos = CheckpointDir(path / role).list()
    for place in places:
        shutil.rmtree(infos[place].path)


class AbortAt(plait.train.SessionRunHook):
    """Something outside cuts these runs off, each once."""

    def __init__(self, *runs):
        self.runs, self.count = set(runs), 0

    def after_run(self, run_context, run_values):
        self.count += 1
        if self.count in self.runs:
            raise AbortedError("cut off by the test")


class TestResume:
    def test_parties_that_stopped_go_on_as_if_they_had_not(self, tmp_path):
        run(tmp_path, TRAIN(17))
        assert steps_of(tmp_path, "leader") == steps_of(tmp_path, "follower") == [0, 7, 14, 17]
        assert names_of(tmp_path, "leader") == names_of(tmp_path, "follower")
        parts = run(tmp_path, TRAIN(STEPS))
        assert {part.step for part in parts} == {STEPS}
        assert_same(whole(TRAIN(STEPS), **SETTINGS), *parts)

    def test_one_party_has_a_newer_one(self, tmp_path):
        run(tmp_path, TRAIN(17))
        drop(tmp_path, "follower", -1)
        parts = run(tmp_path, TRAIN(STEPS))
        assert {part.step for part in parts} == {STEPS}
        assert_same(whole(TRAIN(STEPS), **SETTINGS), *parts)

    def test_each_has_one_that_the_other_lacks(self, tmp_path):
        run(tmp_path, TRAIN(17))
        drop(tmp_path, "follower", -1)
        drop(tmp_path, "leader", -2)
        parts = run(tmp_path, TRAIN(STEPS))
        assert_same(whole(TRAIN(STEPS), **SETTINGS), *parts)

    def test_one_that_is_not_whole_is_none(self, tmp_path):
        run(tmp_path, TRAIN(17))
        newest = CheckpointDir(tmp_path / "leader").list()[-1]
        (newest.path / "tensors.safetensors").write_bytes(b"torn")
        with pytest.warns(UserWarning, match="skipped a checkpoint that is not whole"):
            parts = run(tmp_path, TRAIN(STEPS))
        assert_same(whole(TRAIN(STEPS), **SETTINGS), *parts)

    def test_none_in_common(self, tmp_path):
        run(tmp_path, TRAIN(17))
        drop(tmp_path, "follower", 0, 1)
        drop(tmp_path, "leader", 2, 3)
        with pytest.raises(FederalError, match="no checkpoint in common"):
            run(tmp_path, TRAIN(STEPS))

    def test_none_in_common_is_said_at_both(self, tmp_path):
        run(tmp_path, TRAIN(17))
        shutil.rmtree(tmp_path / "follower")
        fits = [{"checkpoint_dir": tmp_path / role} for role in ("leader", "follower")]
        for error in refused(
            leader(TRAIN(STEPS), fit=fits[0], **SETTINGS), follower(TRAIN(STEPS), fit=fits[1], **SETTINGS)
        ):
            assert "no checkpoint in common" in str(error)
            assert "step 17" in str(error)

    def test_two_empty_directories(self, tmp_path):
        assert {part.step for part in run(tmp_path, TRAIN(3))} == {3}

    def test_evaluations_that_were_made_are_not_made_again(self, tmp_path):
        procedure, longer = (efl.procedure_fn.train_and_eval(train_step=9, max_iter=count) for count in (2, 4))
        run(tmp_path, procedure, evaluate=True)
        lead, follow = run(tmp_path, longer, evaluate=True)
        alone = whole(longer, evaluate=whole_eval, **SETTINGS)
        assert_same(alone, lead, follow)
        assert lead.found == alone.found

    def test_the_newest_are_kept_but_never_fewer_than_the_common_one(self, tmp_path):
        run(tmp_path, TRAIN(STEPS), fit={"keep": 2, "save_steps": 3})
        for role in ("leader", "follower"):
            assert steps_of(tmp_path, role)[-1] == STEPS
        assert set(names_of(tmp_path, "leader")) & set(names_of(tmp_path, "follower"))
        assert len(steps_of(tmp_path, "leader")) <= 4

    def test_what_rounding_lost_is_part_of_the_checkpoint(self, tmp_path):
        def joined():
            return communicators(wire_dtype="int8")

        run(tmp_path, TRAIN(17), joined=joined())
        directory = CheckpointDir(tmp_path / "leader")
        lost = directory.read(directory.list()[-1])["cluster"]["feedback"][0]  # of the only worker
        assert [value.shape for value in lost.values()] == [(32, 5)]
        parts = run(tmp_path, TRAIN(STEPS), joined=joined())
        undisturbed = run(tmp_path / "other", TRAIN(STEPS), joined=joined())
        for part, other in zip(parts, undisturbed, strict=True):
            assert_same(other, part)

    def test_another_project_begins_with_the_weights(self, tmp_path):
        run(tmp_path, TRAIN(17))
        parts = run(tmp_path, TRAIN(5), fit={"project_name": "next"})
        assert {part.step for part in parts} == {22}


class TestRecovery:
    @pytest.mark.parametrize("place", [0, 1], ids=["leader", "follower"])
    @pytest.mark.parametrize("runs", [[1], [10], [10, 12, 33], [STEPS]], ids=str)
    def test_an_error_of_one_takes_both_back(self, tmp_path, place, runs):
        hooks = [[], []]
        hooks[place] = [AbortAt(*runs)]
        parts = run(tmp_path, TRAIN(STEPS), hooks=hooks)
        assert {part.step for part in parts} == {STEPS}
        assert_same(whole(TRAIN(STEPS), **SETTINGS), *parts)

    def test_errors_of_both(self, tmp_path):
        parts = run(tmp_path, TRAIN(STEPS), hooks=[[AbortAt(9, 30)], [AbortAt(20, 41)]])
        assert_same(whole(TRAIN(STEPS), **SETTINGS), *parts)

    def test_during_an_evaluation(self, tmp_path):
        procedure = efl.procedure_fn.train_and_eval(train_step=9, max_iter=3)
        lead, follow = run(tmp_path, procedure, hooks=[[AbortAt(15)], [AbortAt(50)]], evaluate=True)
        alone = whole(procedure, evaluate=whole_eval, **SETTINGS)
        assert_same(alone, lead, follow)
        assert lead.found == alone.found

    def test_without_checkpoints_both_end(self):
        fit = {"hooks": [AbortAt(3)]}
        found = refused(leader(TRAIN(STEPS), fit=fit, **SETTINGS), follower(TRAIN(STEPS), **SETTINGS))
        assert isinstance(found[0], ClusterError)
        assert "without checkpoint_dir= there is nothing to go on from" in str(found[0])
        assert "the leader has ended" in str(found[1])


class TestTasks:
    """A task of the leader's alone: it saves while the follower is between steps, or before its first."""

    PROCEDURES = tuple(
        efl.procedure_fn.cotrain(train_step=10, max_iter=6, task_select_ratio=ratio)
        for ratio in ({"joint": 1.0, "local": 3.0}, {"joint": 1.0})
    )

    @staticmethod
    def local(model, sample):
        return dense("left", 4, 5, sample.x).relu().square().mean()

    def parts(self, path, hooks=((), ()), save_steps=2):
        fits = [
            {"checkpoint_dir": path / role, "save_steps": save_steps, "hooks": some}
            for role, some in zip(("leader", "follower"), hooks, strict=True)
        ]
        losses = {"joint": leader_loss, "local": self.local}
        one, other = self.PROCEDURES
        return both(
            leader(one, losses, tasks=["joint", "local"], fit=fits[0], **SETTINGS),
            follower(other, tasks=["joint"], fit=fits[1], **SETTINGS),
        )

    @pytest.mark.parametrize("save_steps", [1, 5])
    @pytest.mark.parametrize("runs", [[5], [8, 21]], ids=str)
    @pytest.mark.parametrize("place", [0, 1], ids=["leader", "follower"])
    def test_both_come_back_to_the_same_moment(self, tmp_path, save_steps, runs, place):
        hooks = [[], []]
        hooks[place] = [AbortAt(*runs)]
        lead, follow = self.parts(tmp_path, hooks, save_steps)
        alone = whole(
            self.PROCEDURES[0], {"joint": whole_loss, "local": self.local}, tasks=["joint", "local"], **SETTINGS
        )
        assert_same(alone, lead, follow)
        assert lead.step == alone.step
        assert names_of(tmp_path, "leader")[-1] == names_of(tmp_path, "follower")[-1]
        assert len(names_of(tmp_path, "leader")) > 2
