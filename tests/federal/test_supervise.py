from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest

from plait.federal import supervise
from plait.federal.supervise import RECOVERABLE_EXIT, Keeper, Member, may_start_again


@dataclasses.dataclass
class Actor:
    """A process that ends as it is told: a code for each start, None to run until it gets a signal."""

    world: World
    kind: str
    codes: list
    deaf: bool = False
    index: int = 0
    log: Path = Path("log")
    began: int = 0
    code: int | None = 0
    ended: float = 0.0

    def start(self, environ, note=""):
        self.code = None
        self.world.events.append(f"{self.kind} starts" + f" ({note})" * bool(note))
        self.next = self.codes.pop(0)

    def tell(self, number):
        if self.code is None:
            self.world.events.append(f"{self.kind} gets {number.name}")
            if not self.deaf or number == signal.SIGKILL:
                self.end(-number)

    def end(self, code):
        self.code, self.ended = code, self.world.now
        self.world.now += 0.001


class World:
    def __init__(self, **codes):
        self.events, self.caught, self.now = [], [], 0.0
        self.actors = {kind: Actor(self, kind, list(given)) for kind, given in codes.items()}
        self.members = [Member([actor], lambda _: [{}], name=actor.kind) for actor in self.actors.values()]

    def wait(self, seconds):
        self.now += max(seconds, 0.001)
        for actor in self.actors.values():
            if actor.code is None and actor.next is not None:
                actor.end(actor.next)

    def keep(self, restarts=1):
        say = self.events.append
        keeper = Keeper(self.members, restarts, program="us", wait=self.wait, say=say, caught=self.caught)
        return keeper.run()


@pytest.fixture
def world_of(monkeypatch):
    """A world with these parties, whose time goes on when somebody waits."""

    def make(**codes):
        world = World(**codes)
        monkeypatch.setattr("time.monotonic", lambda: world.now)
        return world

    return make


def test_two_that_end_well(world_of):
    world = world_of(leader=[0], follower=[0])
    assert world.keep() is None
    assert world.events == ["leader starts", "follower starts"]


def test_one_that_is_killed_is_started_again_and_the_other_is_left_alone(world_of):
    world = world_of(leader=[None], follower=[-9, 0])
    waits = []

    def wait(seconds, real=world.wait):
        waits.append(seconds)
        real(seconds)
        if len(waits) == 15:
            world.actors["leader"].end(0)

    world.wait = wait
    assert world.keep() is None
    again = "follower starts (us: restart 1 of 1: the follower ended with SIGKILL)"
    assert world.events == ["leader starts", "follower starts", again]


def test_one_that_has_ended_well_is_started_again_for_the_other(world_of):
    world = world_of(leader=[0, 0], follower=[RECOVERABLE_EXIT, 0])
    assert world.keep() is None
    cause = "us: restart 1 of 1: the follower ended with exit code 75"
    assert world.events[2:] == [f"leader starts ({cause})", f"follower starts ({cause})"]


def test_an_error_of_one_ends_the_other_after_a_while(world_of):
    world = world_of(leader=[3], follower=[None])
    failure = world.keep()
    assert (failure.child.kind, failure.code) == ("leader", 3)
    assert world.events == ["leader starts", "follower starts", "follower gets SIGTERM"]
    assert supervise.LAST_SECONDS <= world.now < supervise.LAST_SECONDS + 1


def test_the_first_that_failed_counts_not_the_one_that_fell_over_it(world_of):
    world = world_of(follower=[2], leader=[None])

    def wait(seconds, real=world.wait):
        real(seconds)
        if world.actors["follower"].code == 2 and world.actors["leader"].code is None:
            world.actors["leader"].end(1)

    world.wait = wait
    failure = world.keep()
    assert (failure.child.kind, failure.code) == ("follower", 2)
    assert world.now < 1
    assert "leader gets SIGTERM" not in world.events


def test_restarts_are_used_up(world_of):
    world = world_of(leader=[None], follower=[-9, -11])
    failure = world.keep()
    assert (failure.child.kind, failure.code) == ("follower", -11)


def test_one_that_came_back_when_the_other_had_ended_is_started_again_with_it(world_of):
    world = world_of(leader=[None, 0], follower=[-9, 1, 0])

    def wait(seconds, real=world.wait):
        failed = world.actors["follower"].code == 1
        real(seconds)
        if failed and world.actors["leader"].code is None:  # it ends well a moment later
            world.actors["leader"].end(0)

    world.wait = wait
    assert world.keep(restarts=2) is None
    cause = "of 2: the follower ended with exit code 1"
    assert world.events[-2:] == [f"leader starts (us: restart 1 {cause})", f"follower starts (us: restart 2 {cause})"]


def test_both_killed_at_once_are_both_started_again(world_of):
    world = world_of(leader=[-9, 0], follower=[-9, 0])
    assert world.keep() is None
    assert sum("restart 1 of 1" in event for event in world.events) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_goes_on_to_both(world_of, number):
    world = world_of(leader=[None], follower=[None])
    world.caught.append(number)
    assert world.keep() is None
    assert world.events[2:] == [f"leader gets {number.name}", f"follower gets {number.name}"]


def test_one_that_does_not_hear_is_killed_in_the_end(world_of):
    world = world_of(leader=[None])
    world.actors["leader"].deaf = True
    world.caught.append(signal.SIGINT)
    world.keep()
    assert world.events[1:] == ["leader gets SIGINT", "leader gets SIGTERM", "leader gets SIGKILL"]
    assert 20 <= world.now < 21


def test_a_second_signal_kills_at_once(world_of):
    world = world_of(leader=[None])
    world.actors["leader"].deaf = True
    world.caught += [signal.SIGINT]

    def wait(seconds, real=world.wait):
        real(seconds)
        world.caught[1:] = [signal.SIGINT]

    world.wait = wait
    world.keep()
    assert world.events[-1] == "leader gets SIGKILL"
    assert world.now < 1


@pytest.mark.parametrize(("code", "again"), [(0, False), (1, False), (3, False), (75, True), (-9, True), (-15, True)])
def test_what_is_worth_another_start(code, again):
    assert may_start_again(code) is again
