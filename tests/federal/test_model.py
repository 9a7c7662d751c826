"""`FederalModel`: what it has, what it refuses, and how both parties end when they do not fit together."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import plait
from plait import efl
from plait.errors import ConfigError, FederalError, FunctionError

from .pair import (
    LEFT,
    RIGHT,
    both,
    communicators,
    dense,
    follower,
    follower_eval,
    follower_loss,
    head,
    leader,
    leader_eval,
    leader_loss,
    make,
    outcomes,
    refused,
    trained,
)

TRAIN = efl.procedure_fn.train


class TestAttributes:
    def test_a_model_knows_its_role_and_its_communicator(self):
        one, other = communicators()
        assert efl.FederalModel(communicator=one).federal_role == "leader"
        model = efl.FederalModel(communicator=other)
        assert model.federal_role == "follower"
        assert model.communicator is other

    def test_a_role_and_an_address_make_a_communicator(self):
        model = efl.FederalModel("follower", peer="127.0.0.1:5", job="mine", seed=3)
        assert model.communicator.party == efl.Party(role="follower", peer="127.0.0.1:5", job="mine")
        assert not model.communicator.connected
        assert model.seed == 3

    def test_nothing_says_who_this_is(self, monkeypatch):
        monkeypatch.delenv("PLAIT_PARTY", raising=False)
        with pytest.raises(ConfigError, match="plait party"):
            efl.FederalModel()

    def test_what_was_received_and_which_gradients_came_can_be_fetched(self):
        def last(joined, fields, loss, table):
            model = make(fields, loss, joined=joined)
            trained(model, TRAIN(3))
            found = getattr(model, table)
            with plait.Session() as session:
                value = session.run(found[None]["hidden"])
            return model, found, value

        (lead, recv, hidden), (follow, sent, gradient) = both(
            lambda joined: last(joined, LEFT, leader_loss, "recv_grad_ops"),
            lambda joined: last(joined, RIGHT, follower_loss, "require_grad_ops"),
        )
        assert [list(recv[None]), list(sent[None])] == [["hidden"], ["hidden"]]
        assert lead.require_grad_ops == follow.recv_grad_ops == {}
        assert hidden.shape == gradient.shape == (32, 5)
        assert not hidden.requires_grad
        assert (hidden >= 0).all()
        assert gradient.abs().max() > 0

    def test_send_returns_the_tensor(self):
        def follow(model, sample):
            hidden = dense("right", 4, 5, sample.x)
            assert model.send("hidden", hidden, require_grad=True) is hidden
            return hidden

        both(leader(TRAIN(2)), follower(TRAIN(2), follow))

    def test_a_party_without_a_loss_shows_none(self):
        lead, follow = both(leader(TRAIN(2)), follower(TRAIN(2)))
        assert list(lead.model.metrics()) == ["loss"]
        assert list(follow.model.metrics()) == []

    def test_fit_compiles(self):
        def fitted(fields, loss):
            def run(joined):
                model = make(fields, loss, joined=joined)
                model.fit(TRAIN(2), 1)
                return int(model.global_step)

            return run

        assert both(fitted(LEFT, leader_loss), fitted(RIGHT, follower_loss)) == [2, 2]

    def test_close_may_be_called_at_any_time(self):
        for one in communicators():
            model = efl.FederalModel(communicator=one)
            model.close()
            model.close()


class TestUse:
    """Mistakes of one party, whose errors say what to write instead."""

    @staticmethod
    def fails(loss, kind, match, fields=LEFT, **settings):
        found = outcomes(leader(TRAIN(2), loss, fields=fields, **settings), follower(TRAIN(2)))
        with pytest.raises(kind, match=match):
            raise found[0]
        assert isinstance(found[1], FederalError)
        assert "the leader has ended with an error" in str(found[1])

    @pytest.mark.parametrize("name", ["send", "recv"])
    def test_outside_of_a_function(self, name):
        model = efl.FederalModel("leader", listen="127.0.0.1:0")
        with pytest.raises(FunctionError, match=rf"{name}\(\) was called outside of loss_fn and eval_fn"):
            getattr(model, name)(*["hidden", torch.zeros(1)][: 1 + (name == "send")])

    def test_one_name_twice(self):
        def loss(model, sample):
            model.recv("hidden", require_grad=True)
            return leader_loss(model, sample)

        self.fails(loss, FunctionError, "recv of 'hidden' twice in one call")

    def test_no_tensor(self):
        self.fails(lambda model, sample: model.send("a", 3.0), FunctionError, "got a float: give a tensor")

    def test_a_gradient_that_goes_nowhere(self):
        def loss(model, sample):
            return model.send("a", sample.x, require_grad=True)

        self.fails(loss, FunctionError, "depends on no trainable variable")

    def test_another_mode_or_task(self):
        def other_mode(model, sample):
            return model.send("a", sample.x, mode=efl.MODE.EVAL)

        def other_task(model, sample):
            return model.recv("hidden", task="buy")

        self.fails(other_mode, FunctionError, r"send\(mode=EVAL\) inside a function for TRAIN: leave mode= out")
        self.fails(other_task, FunctionError, r"recv\(task=buy\) inside a function for TRAIN")

    def test_the_mode_and_task_of_the_function_may_be_named(self):
        def lead(model, sample):
            hidden = model.recv("hidden", torch.float32, True, "click", shape=[None, 5], mode=efl.MODE.TRAIN)
            return head(dense("left", 4, 5, sample.x), hidden, sample.y)

        def follow(model, sample):
            return model.send("hidden", dense("right", 4, 5, sample.x), True, efl.MODE.TRAIN, "click")

        parts = both(leader(TRAIN(2), lead, tasks=["click"]), follower(TRAIN(2), follow, tasks=["click"]))
        assert [part.step for part in parts] == [2, 2]
        assert list(parts[0].model.recv_grad_ops) == ["click"]

    def test_a_gradient_of_whole_numbers(self):
        def lead(model, sample):
            return model.recv("bucket", dtype=torch.int64, require_grad=True)

        def follow(model, sample):
            model.send("bucket", sample.x.long())
            return follower_loss(model, sample)

        for error in refused(leader(TRAIN(2), lead), follower(TRAIN(2), follow)):
            assert "'bucket' of the follower" in str(error)
            assert "int64 [*, 4], with gradient" in str(error)

    def test_no_loss_and_nothing_sent(self):
        def loss(model, sample):
            model.recv("hidden", require_grad=True)

        self.fails(loss, FunctionError, "nothing to train by")

    def test_several_losses(self):
        def loss(model, sample):
            found = leader_loss(model, sample)
            return [found, found]

        self.fails(loss, FunctionError, "returned 2 losses, and tensors travel: return their sum")

    def test_a_tensor_that_is_new_after_the_build(self):
        calls = []

        def loss(model, sample):
            calls.append(1)
            name = "hidden" if len(calls) < 3 else "other"
            return head(dense("left", 4, 5, sample.x), model.recv(name, require_grad=True), sample.y)

        self.fails(loss, FunctionError, "'other' is new in a call for TRAIN")


def widths(width, **recv):
    def lead(model, sample):
        hidden = model.recv("hidden", require_grad=True, **recv)
        return dense("top", width, 3, hidden).square().mean()

    return lead


def sender(name="hidden", width=5, require_grad=True, dtype=torch.float32):
    def follow(model, sample):
        hidden = dense("right", 4, width, sample.x).to(dtype)
        model.send(name, hidden, require_grad=require_grad)
        return hidden.square().mean()

    return follow


class TestContract:
    """Both parties end soon, and both show what differs."""

    def test_names(self):
        for error in refused(leader(TRAIN(2)), follower(TRAIN(2), sender("hiden"))):
            assert "'hidden'" in str(error)
            assert "'hiden'" in str(error)

    def test_a_name_that_nobody_receives(self):
        def follow(model, sample):
            model.send("more", sample.x)
            return follower_loss(model, sample)

        for error in refused(leader(TRAIN(2)), follower(TRAIN(2), follow)):
            assert "TRAIN 'more' of the follower" in str(error)
            assert "missing" in str(error)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_dtypes(self, dtype):
        for error in refused(leader(TRAIN(2)), follower(TRAIN(2), sender(dtype=dtype))):
            assert "TRAIN 'hidden' of the follower" in str(error)
            assert "float32" in str(error)
            assert str(dtype).removeprefix("torch.") in str(error)

    def test_shapes(self):
        lead = widths(5, shape=[None, 5])
        for error in refused(leader(TRAIN(2), lead), follower(TRAIN(2), sender(width=6))):
            assert "[*, 5]" in str(error)
            assert "[*, 6]" in str(error)

    def test_numbers_of_dimensions(self):
        lead = widths(5, shape=[None, 5, 1])
        for error in refused(leader(TRAIN(2), lead), follower(TRAIN(2), sender())):
            assert "[*, 5, 1]" in str(error)
            assert "[*, 5]" in str(error)

    def test_sizes_that_are_left_open(self):
        lead = widths(6, shape=[32, None])
        both(leader(TRAIN(2), lead), follower(TRAIN(2), sender(width=6)))

    @pytest.mark.parametrize("wanted", [True, False])
    def test_gradients(self, wanted):
        def lead(model, sample):
            hidden = model.recv("hidden", require_grad=wanted)
            return head(dense("left", 4, 5, sample.x), hidden, sample.y)

        for error in refused(leader(TRAIN(2), lead), follower(TRAIN(2), sender(require_grad=not wanted))):
            assert "with gradient" in str(error)
            assert "without gradient" in str(error)

    def test_batch_sizes(self):
        for error in refused(leader(TRAIN(2), batch=32), follower(TRAIN(2), batch=16)):
            assert "TRAIN rows of a batch" in str(error)
            assert "32" in str(error)
            assert "16" in str(error)

    def test_a_task_that_one_party_does_not_have(self):
        settings = {"num_epochs": 2}
        procedure = efl.procedure_fn.cotrain(5, max_iter=1)
        for error in refused(
            leader(procedure, widths(5), tasks=["buy", "click"], **settings),
            follower(procedure, tasks=["buy"], **settings),
        ):
            assert "TRAIN click" in str(error)

    def test_an_evaluation_that_one_party_does_not_have(self):
        procedure = efl.procedure_fn.train_and_eval(max_iter=1)
        for error in refused(leader(procedure, evaluate=leader_eval), follower(procedure)):
            assert "EVAL" in str(error)

    def test_both_wait_for_each_other(self):
        def crossed(own, others):
            def loss(model, sample):
                found = model.recv(others, require_grad=True)
                model.send(own, dense(own, 9, 5, torch.cat([sample.x, found], 1)), require_grad=True)

            return loss

        for error in refused(leader(TRAIN(2), crossed("a", "b")), follower(TRAIN(2), crossed("b", "a"))):
            assert "both parties wait for each other" in str(error)


class TestFacts:
    """What is compared before anything is built, and at the beginning of `fit`."""

    @pytest.mark.parametrize(
        ("name", "value"), [("job", "other"), ("staleness", 1), ("wire_dtype", "bf16"), ("wire_dtype", "int8")]
    )
    def test_settings(self, name, value):
        joined = communicators(follower={name: value})
        for error in refused(leader(TRAIN(2)), follower(TRAIN(2)), joined):
            assert isinstance(error, FederalError)
            assert name in str(error)
            assert str(value) in str(error)

    def test_protocol(self, monkeypatch):
        joined = communicators()
        connect = joined[0].connect
        monkeypatch.setattr(joined[0], "connect", lambda worker, facts: connect(worker, {**facts, "protocol": 99}))
        for error in refused(leader(TRAIN(2)), follower(TRAIN(2)), joined):
            assert "protocol" in str(error)
            assert "99" in str(error)

    def test_sample_ids_at_one_party(self):
        for error in refused(leader(TRAIN(2), model={"sample_id": "id"}), follower(TRAIN(2))):
            assert "sample ids" in str(error)

    def test_both_are_leaders(self):
        one, other = communicators(follower={"role": "leader"})
        for error in refused(leader(TRAIN(2)), leader(TRAIN(2)), (one, other)):
            assert isinstance(error, FederalError)
            assert "leader" in str(error)

    @pytest.mark.parametrize(
        ("procedures", "words"),
        [
            ((TRAIN(2), TRAIN(3)), ["procedure.max_step", "2", "3"]),
            ((TRAIN(), efl.procedure_fn.eval()), ["procedure.procedure", "train", "eval"]),
            ((efl.procedure_fn.train_and_eval(max_iter=1), TRAIN(2)), ["train_and_eval"]),
            ((TRAIN(2), lambda model: None), ["a function", "train"]),
        ],
        ids=["steps", "kind", "more stages", "a function"],
    )
    def test_procedures(self, procedures, words):
        one, other = procedures
        for error in refused(leader(one, evaluate=leader_eval), follower(other, evaluate=follower_eval)):
            assert isinstance(error, FederalError)
            assert [word for word in words if word not in str(error)] == []

    def test_projects(self):
        fits = [{"project_name": "one"}, {"project_name": "two"}]
        for error in refused(leader(TRAIN(2), fit=fits[0]), follower(TRAIN(2), fit=fits[1])):
            assert "project_name" in str(error)

    def test_checkpoints_at_one_party(self, tmp_path):
        fit = {"checkpoint_dir": tmp_path}
        for error in refused(leader(TRAIN(2), fit=fit), follower(TRAIN(2))):
            assert "checkpoint_dir" in str(error)


class TestErrors:
    @pytest.mark.parametrize("place", [0, 1])
    @pytest.mark.parametrize("call", [1, 5])
    def test_an_exception_in_one_party_ends_the_other_without_its_text(self, place, call):
        calls = []

        def failing(loss):
            def fails(model, sample):
                calls.append(1)
                if len(calls) == call:
                    raise ZeroDivisionError("the label was 4711")
                return loss(model, sample)

            return fails

        losses = [leader_loss, follower_loss]
        losses[place] = failing(losses[place])
        found = refused(leader(TRAIN(20), losses[0]), follower(TRAIN(20), losses[1]))
        assert type(found[place]) is ZeroDivisionError
        role = ["leader", "follower"][place]
        assert type(found[1 - place]) is FederalError
        assert f"the {role} has ended with an error: ZeroDivisionError" in str(found[1 - place])
        assert "4711" not in str(found[1 - place])

    def test_of_an_error_of_one_partys_own_the_other_hears_the_kind(self):
        found = refused(leader(TRAIN(2), optimizer=lambda model, task: None), follower(TRAIN(2)))
        assert "optimizer_fn" in str(found[0])
        assert "FunctionError; its own log says more" in str(found[1])

    def test_a_party_that_goes_away_ends_the_other(self):
        def leaves(joined):
            make(RIGHT, follower_loss, joined=joined).compile()

        found = outcomes(leader(TRAIN(5)), leaves)
        assert isinstance(found[0], FederalError)
        assert "the follower has ended" in str(found[0])

    def test_a_party_that_never_comes_is_named_and_the_wait_ends(self):
        one, _ = communicators(timeout=0.3)
        model = make(LEFT, leader_loss, joined=one)
        with pytest.raises(FederalError, match="the leader waited .* for the follower"):
            model.compile()
        assert threading.active_count() < 20


def test_a_model_of_modules_of_its_own():
    """Variables need not come from plait.layer."""

    def build(fields, loss):
        def run(joined):
            model = make(fields, loss, joined=joined)
            model.net = nn.Linear(4, 5)
            return trained(model, TRAIN(3))

        return run

    threads = set()

    def lead(model, sample):
        threads.add(model.compiled and torch._C._is_multithreading_enabled())
        return (model.net(sample.x) * model.recv("hidden", require_grad=True)).mean()

    def follow(model, sample):
        return model.send("hidden", model.net(sample.x), require_grad=True)

    parts = both(build(LEFT, lead), build(RIGHT, follow))
    assert threads == {False}  # of a GPU there is one, in which one party would wait for the other's
    assert [list(part.variables) for part in parts] == [["net/weight", "net/bias"]] * 2


class TestWhatTheOtherPartyHears:
    def test_a_loss_that_is_also_sent_is_a_loss(self):
        def leads(model, sample):
            loss = leader_loss(model, sample)
            model.send("loss", loss)
            return loss

        def follows(model, sample):
            follower_loss(model, sample)
            model.recv("loss")

        plain = both(leader(TRAIN(5)), follower(TRAIN(5)))
        told = both(leader(TRAIN(5), leads), follower(TRAIN(5), follows))
        for one, other in zip(plain, told, strict=True):
            assert all(torch.equal(one.variables[name], other.variables[name]) for name in one.variables)

    def test_an_error_about_data_is_not_told_in_its_words(self):
        def leads(model, sample):
            if not model.compiled:
                return leader_loss(model, sample)
            raise plait.errors.DataError("a row of alice@secret.example")

        found = refused(leader(TRAIN(5), leads), follower(TRAIN(5)))
        assert "alice" in str(found[0])
        assert "DataError; its own log says more" in str(found[1])
        assert "alice" not in str(found[1])

    def test_tasks_of_cotrain_that_differ_are_shown(self):
        tasks = ("one", "two")
        found = refused(
            leader(efl.procedure_fn.cotrain(4, max_iter=1), tasks=tasks),
            follower(efl.procedure_fn.cotrain(4, max_iter=1, task_select_ratio={"one": 1}), tasks=tasks),
        )
        assert all("TRAIN:two" in str(error) for error in found)
