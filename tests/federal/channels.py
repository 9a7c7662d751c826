"""Pairs of channels for tests: joined in this process, always ended, every wait bounded."""

from __future__ import annotations

import contextlib
import threading

from plait.federal.channel import Channel
from plait.federal.loopback import join

DEADLINE = 30.0


def together(*functions):
    """Run functions at the same time, each in a thread; their results, or the first error."""
    results, errors = [None] * len(functions), []

    def call(place):
        try:
            results[place] = functions[place]()
        except BaseException as error:  # noqa: BLE001  it is raised again where the test runs
            errors.append(error)

    threads = [threading.Thread(target=call, args=(place,), daemon=True) for place in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert not any(thread.is_alive() for thread in threads), "a function did not end"
    if errors:
        raise errors[0]
    return results


def error_of(function, kind=Exception):
    """The error that a function raises."""
    try:
        function()
    except kind as error:
        return error
    raise AssertionError("nothing was raised")


def make(own="leader", peer="follower", facts=None, *, timeout=10.0, heartbeat=0.1, **settings):
    return Channel(own, peer, facts, timeout=timeout, heartbeat=heartbeat, **settings)


@contextlib.contextmanager
def joined(one, other, meddle=None):
    """Two channels on one link, all ended afterwards."""
    link = join(one, other, meddle=meddle)
    try:
        yield link
    finally:
        link.restore()
        together(one.close, other.close)
        link.close()


@contextlib.contextmanager
def pair(meddle=None, *, opened=True, **settings):
    """A leader and a follower, in a session, and their link."""
    leader, follower = make(**settings), make("follower", "leader", **settings)
    with joined(leader, follower, meddle) as link:
        if opened:
            together(leader.open, follower.open)
        yield leader, follower, link
