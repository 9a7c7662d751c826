from __future__ import annotations

import dataclasses

import pytest

from plait.federal.hello import Hello, is_older, name_session, read_hello
from plait.federal.wire import FrameError

HELLO = Hello(party="leader", life="8f2c:3", fresh=False, peer="00aa:1", facts={"a": 1}, received=7, window=64)


def test_what_is_said_is_read():
    assert read_hello(HELLO.value()) == HELLO


def test_fields_of_later_versions_do_no_harm():
    assert read_hello({**HELLO.value(), "colour": "red"}) == HELLO


@pytest.mark.parametrize("value", [None, [], "hello", {}])
def test_what_is_no_hello_is_refused(value):
    with pytest.raises(FrameError):
        read_hello(value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("party", ""),
        ("party", 3),
        ("party", "x" * 201),
        ("life", "8f2c"),
        ("life", "8f2c:3\n"),
        ("life", "8f2c:-1"),
        ("life", "x:1"),
        ("life", "a" * 65 + ":1"),
        ("fresh", 1),
        ("peer", "nobody"),
        ("peer", 3),
        ("facts", []),
        ("received", -1),
        ("received", True),
        ("received", 1.5),
        ("received", 1 << 63),
        ("window", None),
    ],
)
def test_a_wrong_field_is_refused(field, value):
    with pytest.raises(FrameError):
        read_hello({**HELLO.value(), field: value})


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Hello) if field.name != "peer"])
def test_a_missing_field_is_refused(field):
    with pytest.raises(FrameError):
        read_hello({name: value for name, value in HELLO.value().items() if name != field})


def test_both_parties_name_the_session_alike_and_every_session_differently():
    lives = [("aa:1", "bb:1"), ("aa:2", "bb:1"), ("aa:1", "bb:2"), ("bb:1", "aa:1")]
    names = [name_session({"leader": one, "follower": other}) for one, other in lives]
    assert names == [name_session({"follower": other, "leader": one}) for one, other in lives]
    assert len(set(names)) == 4
    assert all(0 < name < 1 << 64 for name in names)


@pytest.mark.parametrize(
    ("life", "than", "older"),
    [
        ("aa:1", "aa:2", True),
        ("aa:9", "aa:10", True),
        ("aa:2", "aa:2", False),
        ("aa:3", "aa:2", False),
        ("aa:1", "bb:2", False),
    ],
)
def test_lives_of_one_process_have_an_order(life, than, older):
    assert is_older(life, than) is older
