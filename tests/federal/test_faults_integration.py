"""Parties are killed, stand still, are cut off from each other: training goes on, and ends where it would have."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from plait import efl
from plait.data import TensorSource
from plait.federal.settings import ROLES, VARIABLES, other
from plait.variables.checkpoint import CheckpointDir

from .parties import PROGRAM, Starter, Two, at_random
from .programs.party import BATCH, CANARIES, FIRST_LABEL, ROWS, follower, leader, rows

TIMES = 20
"""How often each fault happens, in the long tests."""


@pytest.fixture(scope="module")
def starter():
    found = Starter()
    yield found
    found.close()


@pytest.fixture(scope="module")
def undisturbed(starter, tmp_path_factory):
    """What a training with these options comes to when nothing happens."""
    found = {}

    def of(*options):
        if options not in found:
            with Two(starter, tmp_path_factory.mktemp("undisturbed"), *options) as two:
                two.start()
                two.end()
                found[options] = two.outcome()
        return found[options]

    return of


def assert_same(found, wanted):
    assert [name for name in wanted if found.get(name) != wanted[name]] == []
    assert found.keys() == wanted.keys()


def assert_nothing_seen(*texts):
    """No value of the data, no label and no id; `plait` logs everything here, DEBUG too."""
    for text in texts:
        assert [line for line in text.splitlines() if any(canary in line for canary in CANARIES)] == []


# ---- kills at moments that matter

EARLY = ["open", "opened", "build", "build:1", "built", "agreed", "newest", "named", "write", "saved"]
LATER = ["step:3", "newest", "update:5", "evaluation:1", "named:1", "write:4", "saved:1", "last", "done", "end"]


@pytest.mark.parametrize(
    ("role", "moments"),
    [
        pytest.param("leader", EARLY, marks=pytest.mark.slow),
        ("follower", EARLY),
        ("leader", LATER),
        pytest.param("follower", LATER, marks=pytest.mark.slow),
    ],
    ids=["leader-early", "follower-early", "leader-later", "follower-later"],
)
def test_a_kill_at_any_of_these_moments_changes_no_bit(starter, undisturbed, tmp_path, role, moments):
    """The party kills itself at each of them in turn; see `Kill` in programs/party.py for what they are."""
    with Two(starter, tmp_path) as two:
        two.start(role, kill_at=moments[0])
        two.start(other(role))
        two.end({role: moments[1:]})
        assert two.restarts[role] >= len(moments)
        assert_same(two.outcome(), undisturbed())
        assert_nothing_seen(two.log("leader"), two.log("follower"))


@pytest.mark.slow
def test_both_are_killed_at_such_moments(starter, undisturbed, tmp_path):
    moments = {"leader": ["write:2", "built", "evaluation", "done"], "follower": ["newest", "step:9", "write:5", "end"]}
    with Two(starter, tmp_path) as two:
        two.start("leader", kill_at="opened")
        two.start("follower", kill_at="saved")
        two.end(moments)
        assert_same(two.outcome(), undisturbed())


LATE, ROUNDED = ("--one-way", "--staleness", 1), ("--wire-dtype", "int8")


@pytest.mark.parametrize(
    ("role", "options"),
    [
        ("leader", LATE),
        pytest.param("follower", LATE, marks=pytest.mark.slow),
        pytest.param("leader", ROUNDED, marks=pytest.mark.slow),
        ("follower", ROUNDED),
    ],
    ids=["leader-late", "follower-late", "leader-rounded", "follower-rounded"],
)
def test_what_was_rounded_off_or_is_late_is_not_lost(starter, undisturbed, tmp_path, role, options):
    moments = ["step:4", "saved:1", "evaluation:2"]
    with Two(starter, tmp_path, *options) as two:
        two.start(role, kill_at="update:9")
        two.start(other(role))
        two.end({role: moments})
        assert_same(two.outcome(), undisturbed(*options))


@pytest.mark.parametrize("role", [pytest.param("leader", marks=pytest.mark.slow), "follower"])
def test_a_kill_in_a_second_fit_lets_both_begin_again(starter, undisturbed, tmp_path, role):
    """The other one cannot go back to its first: it ends with the code that asks for another start."""
    options = ("--fits", 2, "--passes", 3)
    with Two(starter, tmp_path, *options) as two:
        two.start(role, kill_at="step:40")
        two.start(other(role))
        two.end({role: ["step:8"]})
        assert_same(two.outcome(), undisturbed(*options))
        assert "asks its launcher to start it again" in two.log(other(role))


# ---- faults at random moments


def kill_leader(two, _):
    two.kill("leader")


def kill_follower(two, _):
    two.kill("follower")


def kill_both(two, _):
    two.kill("leader", "follower")


def stop_leader(two, _, seconds=10.0):
    two.stop("leader", seconds)


def stop_follower(two, _, seconds=10.0):
    two.stop("follower", seconds)


def cut(two, _):
    two.proxy.cut()


def reset(two, _):
    two.proxy.reset()


def refuse(two, _):
    two.proxy.refuse(0.5)
    two.proxy.cut()


def delay(two, draws):
    two.proxy.delay = draws.uniform(0.01, 0.1)
    two.make_steps(3)
    two.proxy.delay = 0.0


def throttle(two, draws):
    two.proxy.throttle = draws.uniform(30e3, 300e3)
    two.make_steps(3)
    two.proxy.throttle = 0.0


def cut_in_half(two, draws):
    """Somewhere in a message of some 2,000 bytes."""
    before = two.proxy.accepted
    two.proxy.cut_after(draws.randint(1, 6000))
    two.wait_for(lambda: two.proxy.accepted > before)


def alter(two, draws):
    before = two.proxy.flipped
    two.proxy.flip_after(draws.randint(1, 6000))
    two.wait_for(lambda: two.proxy.flipped > before)


FAULTS = [
    kill_leader,
    kill_follower,
    kill_both,
    stop_leader,
    stop_follower,
    cut,
    reset,
    refuse,
    delay,
    throttle,
    cut_in_half,
    alter,
]
SHORT, LONG = ("--passes", 30, "--pause", 0.002), ("--passes", 60, "--pause", 0.002)


def test_one_training_survives_all_faults(starter, undisturbed, tmp_path):
    draws = random.Random(1)
    faults = draws.sample(FAULTS, len(FAULTS))
    with Two(starter, tmp_path, *SHORT) as two:
        two.start()
        for fault, _ in zip(faults, at_random(two, len(faults), draws), strict=True):
            seconds = {"seconds": 2.0} if fault in (stop_leader, stop_follower) else {}
            fault(two, draws, **seconds)
        two.end()
        assert two.restarts == {"leader": 2, "follower": 2}
        assert_same(two.outcome(), undisturbed(*SHORT))
        assert_nothing_seen(two.log("leader"), two.log("follower"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_twenty_times_at_random_moments(starter, undisturbed, tmp_path, fault):
    draws = random.Random(fault.__name__)
    with Two(starter, tmp_path, *LONG, timeout=120.0) as two:
        two.start()
        for _ in at_random(two, TIMES, draws):
            fault(two, draws)
        two.end()
        assert_same(two.outcome(), undisturbed(*LONG))
        assert_nothing_seen(two.log("leader"), two.log("follower"))


# ---- a party that does not come back


@pytest.mark.parametrize("lost", [pytest.param("leader", marks=pytest.mark.slow), "follower"])
def test_a_party_that_never_comes_back_is_waited_for_no_longer_than_was_said(starter, undisturbed, tmp_path, lost):
    left = other(lost)
    with Two(starter, tmp_path, "--pause", 0.002, timeout=3.0) as two:
        two.start()
        two.make_steps(30)
        two.signal(lost, signal.SIGKILL)
        begin = time.monotonic()
        two.wait_for(two.ended, 20.0)
        assert two.code(left) == 1
        assert 2.0 < time.monotonic() - begin < 10.0
        said = two.log(left).splitlines()[-1]
        clock = r"\d\d:\d\d:\d\d"
        waited = rf"the {left} waited 3\S* s for the {lost} \(for .+, since {clock}; last heard at {clock}\)"
        assert re.search(waited, said)
        directory = CheckpointDir(tmp_path / f"{left}-checkpoints" / "0")
        assert all(directory.read(info)["format"] for info in directory.list())
    with Two(starter, tmp_path, "--pause", 0.002) as two:
        two.start()
        two.end()
        assert_same(two.outcome(), undisturbed("--pause", 0.002))
        assert "going on at global step" in two.log(left)


# ---- nothing is given away


def test_errors_of_both_parties_give_nothing_away(starter, tmp_path):
    with Two(starter, tmp_path, "--wrong-row", 100) as two:
        two.start()
        two.wait_for(two.ended, 20.0)
        assert [two.code(role) for role in ROLES] == [1, 1]
        assert "is of other samples" in two.log("leader")
        assert "is of other samples" in two.log("follower")
        assert_nothing_seen(two.log("leader"), two.log("follower"))


def test_an_error_of_a_users_function_stays_in_its_party(starter, tmp_path):
    with Two(starter, tmp_path, "--fail-at", 12) as two:
        two.start()
        two.wait_for(two.ended, 20.0)
        assert [two.code(role) for role in ROLES] == [1, 1]
        assert CANARIES[0] in two.log("leader").splitlines()[-1]
        assert "the leader has ended with an error: ArithmeticError" in two.log("follower")
        assert_nothing_seen(two.log("follower"))


# ---- several workers a party


class Joined:
    """Both parties in one process: what one sends, the other receives."""

    def __init__(self, sample):
        self.sample, self.sent = sample, {}

    def send(self, name, tensor, **_):
        self.sent[name] = tensor
        return tensor

    def recv(self, name, **_):
        if name == "hidden":
            follower(self, efl.Sample({"x": self.sample.x2}), train=True, dropout=0.0)
        return self.sent[name]


def joined_variables(passes):
    """Of one process that has both parties' columns and functions, and in each step the batches of two workers."""
    model = efl.Model()
    ours, theirs = rows("leader", ROWS, 0), rows("follower", ROWS, 0)
    source = TensorSource({**ours, "x2": theirs["x"]}, 2 * BATCH, shuffle=True, seed=2, num_epochs=passes)

    def loss_fn(_, sample):
        logits = leader(Joined(sample), sample, train=True, dropout=0.0)
        return torch.nn.functional.cross_entropy(logits, sample.y - FIRST_LABEL)

    model.input_fn(lambda *_: source).loss_fn(loss_fn)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(lambda parameters: torch.optim.Adam(parameters, lr=0.01)))
    model.compile().fit(efl.procedure_fn.train())
    return {name: value.detach() for name, value in model.variables().items()}


@pytest.mark.slow
def test_two_workers_a_party_equal_one_process_and_survive_the_loss_of_a_party(tmp_path):
    passes, log = 6, tmp_path / "output.txt"
    command = ["federate", "--workers", "2", "--log-dir", str(tmp_path / "logs"), str(PROGRAM), str(PROGRAM)]
    command += [str(tmp_path), "--passes", str(passes), "--dropout", "0", "--pause", "0.02"]
    with log.open("wb") as file:
        both = subprocess.Popen(
            [sys.executable, "-c", "from plait.cli import main; main()", *command],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", VARIABLES["timeout"]: "60"},
        )
    try:
        until = time.monotonic() + 90
        while both.poll() is None and lines_of(tmp_path / "leader.steps") < 20 and time.monotonic() < until:
            time.sleep(0.01)
        killed = [pid for pid in descendants(both.pid) if is_party(pid, "follower")]
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert both.wait(90) == 0, log.read_text()[-6000:]
    finally:
        both.terminate()
        both.wait(30)
    assert len(killed) == 2
    text = log.read_text(errors="replace")
    assert "restart 1 of 3: the follower ended with SIGKILL" in text
    found = {**load_file(tmp_path / "leader.safetensors"), **load_file(tmp_path / "follower.safetensors")}
    wanted = joined_variables(passes)
    for name, value in wanted.items():
        torch.testing.assert_close(found[f"variable {name}"], value, rtol=1e-3, atol=1e-4)
    assert_nothing_seen(text)


def lines_of(file):
    return file.read_bytes().count(b"\n") if file.exists() else 0


def is_party(pid, role):
    with contextlib.suppress(OSError):
        return f"{VARIABLES['role']}={role}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def descendants(pid):
    found, todo = [], [pid]
    while todo:
        for file in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children = [int(child) for child in file.read_text().split()]
                found += children
                todo += children
    return found
