"""Wrong messages to a parameter server are refused, with what is wrong, and change nothing."""

from __future__ import annotations

import pytest
import torch

from .asking import DENSE, ROWS, SPEC, ask, bare, made, push, state, told

NO_IDS, NO_ROWS = torch.empty(0, dtype=torch.int64), torch.empty(0, 2)
GOOD = {"g": 1, "w": 0, "s": 0, "p": [0], "r": [0.1], "t": [0]}
THREE = (DENSE, NO_IDS, NO_ROWS)
BEGIN = {"g": 2, "mode": "sync", "replicas": 2, "version": 0, "spec": SPEC.to_json()}
WRONG = {
    "unknown kind": ("dance", (), {}, "a server does not know 'dance'"),
    "beat of nobody": ("beat", (), {"worker": 9}, "'beat' has worker=9: send a whole number"),
    "beat without a worker": ("beat", (), {}, "'beat' has worker=None"),
    "bye of a server": ("bye", (), {"worker": 2}, "'bye' has worker=2"),
    "join as text": ("join", (), {"worker": "0", "mode": "sync", "generation": 0}, "'join' has worker='0'"),
    "join without a count": ("join", (), {"worker": 0, "mode": "sync"}, "'join' has generation=None"),
    "join of a strange age": ("join", (), {"worker": 0, "mode": "sync", "generation": "x"}, "has generation='x'"),
    "begin in no mode": ("begin", (DENSE,), {**BEGIN, "mode": "ring"}, "mode 'ring': a server trains in sync"),
    "begin without a spec": ("begin", (DENSE,), {**BEGIN, "spec": None}, "the description of a model is None"),
    "begin with other values": ("begin", (DENSE[:1],), BEGIN, "got the values as"),
    "begin without replicas": ("begin", (DENSE,), {**BEGIN, "replicas": None}, "'begin' has replicas=None"),
    "begin with no replica": ("begin", (DENSE,), {**BEGIN, "replicas": 0}, "a step takes the gradients of 1 to 2"),
    "begin with too many": ("begin", (DENSE,), {**BEGIN, "replicas": 3}, "'begin' has replicas=3"),
    "begin of no version": ("begin", (DENSE,), {**BEGIN, "version": -1}, "'begin' has version=-1"),
    "rows of no table": ("rows", (torch.arange(1), ROWS[:1]), {"g": 1, "table": 7}, "there is no table 7"),
    "rows without values": ("rows", (torch.arange(1),), {"g": 1, "table": 0}, "'rows' came with 1 tensors: send 2"),
    "rows of another age": ("rows", (torch.arange(1), ROWS[:1]), {"g": 9, "table": 0}, "generation 9 is not this"),
    "rows of a wrong shape": ("rows", (torch.arange(2), ROWS[:1]), {"g": 1, "table": 0}, "table 't' got"),
    "load from nowhere": ("load", (), {"g": 1}, "'load' has path=None: send an absolute one"),
    "load from a place": ("load", (), {"g": 1, "path": "here"}, "'load' has path='here'"),
    "load what is not there": ("load", (), {"g": 1, "path": "/not/there"}, "/not/there"),
    "ready too late": ("ready", (), {"g": 0}, "generation 0 is not this server's, 1"),
    "dense of another age": ("dense", (), {"g": None}, "generation None is not this server's, 1"),
    "pull of no table": ("pull", (torch.arange(1),), {"g": 1, "t": 3, "v": 0}, "there is no table 3"),
    "pull without a table": ("pull", (torch.arange(1),), {"g": 1, "v": 0}, "'pull' has t=None"),
    "pull without ids": ("pull", (), {"g": 1, "t": 0, "v": 0}, "'pull' came with 0 tensors: send 1"),
    "pull of no version": ("pull", (torch.arange(1),), {"g": 1, "t": 0}, "'pull' has v=None"),
    "pull of floats": ("pull", (torch.ones(1),), {"g": 1, "t": 0, "v": 0}, "send a list of int64"),
    "push of nobody": ("push", THREE, {**GOOD, "w": 2}, "'push' has w=2"),
    "push of no step": ("push", THREE, {**GOOD, "s": -1}, "'push' has s=-1"),
    "push of a true step": ("push", THREE, {**GOOD, "s": True}, "'push' has s=True"),
    "push of another age": ("push", THREE, {**GOOD, "g": 2}, "generation 2 is not this server's, 1"),
    "push without rates": ("push", THREE, {**GOOD, "r": None}, "a push has p and r"),
    "push with odd rates": ("push", THREE, {**GOOD, "r": ["x"]}, "a push has p and r"),
    "push with many rates": ("push", THREE, {**GOOD, "r": [1.0, 2.0]}, "2 learning rates came for 1 optimizers"),
    "push with a negative rate": ("push", THREE, {**GOOD, "r": [-1.0]}, "the learning rate of SGD is -1.0"),
    "push of odd variables": ("push", THREE, {**GOOD, "p": ["w"]}, "a push has p and r"),
    "push of odd tables": ("push", THREE, {**GOOD, "t": 0}, "a push has t: the numbers of tables"),
    "push of a table twice": ("push", (DENSE, *THREE[1:], *THREE[1:]), {**GOOD, "t": [0, 0]}, "cannot hold rows of 2"),
    "push of too few tensors": ("push", (DENSE,), GOOD, "a push of 1 tensors cannot hold rows of 1 tables"),
    "push of other shapes": ("push", (DENSE[:2], *THREE[1:]), GOOD, "got a push as"),
    "push of no such table": ("push", THREE, {**GOOD, "t": [5]}, "there is no table 5"),
    "push of wrong rows": ("push", (DENSE, torch.arange(2), NO_ROWS), GOOD, "table 't' got"),
    "leave of nobody": ("leave", (), {"g": 1, "stop": True}, "'leave' has w=None"),
    "leave of another age": ("leave", (), {"g": 5, "w": 0}, "generation 5 is not this"),
    "hold of another age": ("hold", (), {"g": 5}, "generation 5 is not this"),
    "save to nowhere": ("save", (), {"g": 1, "upto": {}}, "'save' has path=None: send an absolute one"),
    "gather without a name": ("gather", (), {"member": 0}, "a gather needs a name and a group"),
}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_message_is_refused_and_changes_nothing(name, mode):
    kind, tensors, head, words = WRONG[name]
    if mode == "async" and name == "pull of no version":
        return  # it has a meaning in sync only
    server = made(mode)
    waiting = push(server, 1, 0, (1.0, 1.0, 1.0)) if mode == "sync" else None
    before = state(server)
    asked = ask(server, kind, tensors, **head)
    assert asked.answered
    assert asked.text is not None, "it was taken"
    assert words in asked.text
    assert state(server) == before
    assert waiting is None or not waiting.answered


@pytest.mark.parametrize("upto", [None, [1], {"a": 1}, {"0": "x"}])
def test_a_save_up_to_nobody_knows_where_is_refused(upto, tmp_path):
    server = made("async")
    told(server, "hold", g=1)
    asked = ask(server, "save", g=1, path=str(tmp_path), upto=upto)
    assert "send a step for each worker" in asked.text


@pytest.mark.parametrize("kind", ["rows", "load", "ready", "dense", "pull", "push", "leave", "hold", "save"])
def test_before_it_begins_nothing_is_taken(kind):
    server = bare()
    tensors = (torch.arange(1), ROWS[:1]) if kind == "rows" else (torch.arange(1),) if kind == "pull" else ()
    asked = ask(server, kind, tensors, g=0, table=0, path="/a", w=0, s=0, v=0, t=0)
    assert asked.code == "stale"
