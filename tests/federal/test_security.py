"""Who may connect, and what an altered or foreign connection can do: nothing."""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import random
import shutil
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
import torch

from plait.errors import FederalError
from plait.federal import certificates
from plait.federal.certificates import Credentials
from plait.federal.channel import Channel
from plait.federal.link import Dialer, Listener
from plait.federal.wire import Kind, encode_json

from .links import Post, both, linked, wait_for
from .proxy import Proxy

pytestmark = pytest.mark.alone  # it measures how long things take

REFUSED_SECONDS = 5.0
ROLES = ("leader", "follower")
FRAME = b"a frame that must not arrive"


def read(directory, role) -> Credentials:
    """A party's files as they are: `load` would not let a party start with the wrong ones."""
    return Credentials(*((directory / name).read_bytes() for name in ("ca.pem", f"{role}.pem", f"{role}.key")))


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    directory = tmp_path_factory.mktemp("own")
    certificates.init(directory)
    return directory


@pytest.fixture(scope="module")
def good(own):
    return {role: certificates.load(own, role) for role in ROLES}


@pytest.fixture(scope="module")
def bad(own, good, tmp_path_factory):
    """Credentials that trust the right CA, and show what they should not."""
    other, expired = (tmp_path_factory.mktemp(name) for name in ("other", "expired"))
    certificates.init(other)
    shutil.copytree(own, expired, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        past = dt.datetime.now(dt.timezone.utc) - dt.timedelta(days=40)
        patch.setattr(certificates, "_now", lambda: past)
        for role in ROLES:
            certificates.renew(expired, role, days=30)
    certificates.renew(own, "stranger")
    found = {}
    for role in ROLES:
        foreign = read(other, role)
        found["another CA", role] = Credentials(good[role].ca, foreign.certificate, foreign.key)
        found["expired", role] = read(expired, role)
        found["wrong name", role] = read(own, "stranger")
    return found


WRONG = ["another CA", "expired", "wrong name"]


@contextlib.contextmanager
def parties(leader, follower):
    """A listening leader and a dialling follower with these credentials; both posts, and something to be sent."""
    posts = Post(), Post()
    for post in posts:
        post.put(FRAME)
    listener = Listener(posts[0], "127.0.0.1:0", "follower", leader)
    with contextlib.closing(listener), contextlib.closing(Dialer(posts[1], listener.endpoint, "leader", follower)):
        yield posts


def assert_nothing_passed(posts):
    for post in posts:
        assert not post.got
        assert not post.attached


def wait_for_warning(caplog) -> str:
    wait_for(lambda: any(record.levelno == logging.WARNING for record in caplog.records), REFUSED_SECONDS)
    return caplog.text


def test_the_right_certificates_are_taken(good):
    with parties(good["leader"], good["follower"]) as posts:
        assert posts[0].take() == posts[1].take() == FRAME


@pytest.mark.parametrize("wrong", WRONG)
def test_a_dialler_with_the_wrong_certificate_is_refused(good, bad, wrong, caplog):
    with parties(good["leader"], bad[wrong, "follower"]) as posts:
        wait_for_warning(caplog)
        time.sleep(0.3)
        assert_nothing_passed(posts)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_listener_with_the_wrong_certificate_is_refused(good, bad, wrong, caplog):
    with parties(bad[wrong, "leader"], good["follower"]) as posts:
        assert "the leader at 127.0.0.1:" in wait_for_warning(caplog)
        time.sleep(0.3)
        assert_nothing_passed(posts)


def test_a_wrong_name_is_final_and_both_sides_say_it(good, bad, caplog):
    with parties(good["leader"], bad["wrong name", "follower"]) as posts:
        wait_for(lambda: posts[1].refused, REFUSED_SECONDS)
        assert "refused this party: this party's certificate is for stranger, and only the follower" in posts[1].refused
        assert "was refused: its certificate is for stranger, and only the follower may connect" in caplog.text


def test_a_refused_party_s_waits_say_so(good, bad):
    listening = Post()
    listener = Listener(listening, "127.0.0.1:0", "follower", good["leader"])
    follower = Channel("follower", "leader", timeout=30.0)
    dialer = Dialer(follower, listener.endpoint, "leader", bad["wrong name", "follower"])
    with contextlib.closing(listener), contextlib.closing(dialer):
        begin = time.monotonic()
        with pytest.raises(FederalError, match="certificate is for stranger"):
            follower.open()
        assert time.monotonic() - begin < REFUSED_SECONDS
        follower.close()


def test_a_leader_is_no_follower(good):
    with parties(good["leader"], good["leader"]) as posts:
        wait_for(lambda: "certificate is for leader" in posts[1].refused, REFUSED_SECONDS)
        assert_nothing_passed(posts)


def test_refusals_are_logged_once_a_minute(good, bad, caplog):
    post = Post()
    with contextlib.closing(Listener(post, "127.0.0.1:0", "follower", good["leader"])) as listener:
        for _ in range(3):
            with pytest.raises(grpc.RpcError):
                list(knock(listener.endpoint, ssl(bad["wrong name", "follower"])))
    assert len(caplog.records) == 1


def ssl(shown: Credentials, *, certificate: bool = True) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(shown.ca, *((shown.key, shown.certificate) if certificate else ()))


def knock(endpoint: str, shown: grpc.ChannelCredentials | None, frame: bytes = FRAME) -> Iterator[bytes]:
    """What a client of another making is answered that sends a frame at once."""
    options = [("grpc.ssl_target_name_override", "leader"), ("grpc.use_local_subchannel_pool", 1)]
    channel = (
        grpc.insecure_channel(endpoint, options) if shown is None else grpc.secure_channel(endpoint, shown, options)
    )
    with channel:
        call = channel.stream_stream("/plait.Federal/Exchange")
        yield from call(iter([frame]), timeout=REFUSED_SECONDS)


@pytest.mark.parametrize("who", ["no certificate", "plain text", *WRONG])
def test_a_client_of_another_making_is_refused(good, bad, who):
    post = Post()
    post.put(b"a secret")
    if who == "no certificate":
        shown = ssl(good["follower"], certificate=False)
    else:
        shown = None if who == "plain text" else ssl(bad[who, "follower"])
    with contextlib.closing(Listener(post, "127.0.0.1:0", "follower", good["leader"])) as listener:
        with pytest.raises(grpc.RpcError) as caught:
            list(knock(listener.endpoint, shown))
        code = caught.value.code()
        assert code is (grpc.StatusCode.PERMISSION_DENIED if who == "wrong name" else grpc.StatusCode.UNAVAILABLE)
        assert_nothing_passed([post])


def test_a_plain_dialler_and_a_listener_with_tls(good, caplog):
    with parties(good["leader"], None) as posts:
        assert "this party has no certificates: does the other one ask for them?" in wait_for_warning(caplog)
        assert_nothing_passed(posts)


def test_a_dialler_with_tls_and_a_plain_listener(good, caplog):
    with parties(None, good["follower"]) as posts:
        assert "do both parties have one?" in wait_for_warning(caplog)
        assert_nothing_passed(posts)


def test_a_certificate_of_another_ca_is_said_once_and_then_final(good, bad, caplog):
    with parties(bad["another CA", "leader"], good["follower"]):
        wait_for_warning(caplog)
        time.sleep(1.5)
        said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(said) == 2
        assert "was refused by this party: its certificate is not the leader's" in said[1]


def exchange(own: Channel, turns: int, mine: int, theirs: int) -> None:
    """Send tensors that only this party sends, and see that the other's arrive as they were, each once."""
    for turn in range(turns):
        own.send(mine, turn, tensor_of(mine, turn))
        own.tell("turn", [mine, turn])
        assert torch.equal(own.receive(theirs, turn), tensor_of(theirs, turn))
        assert own.hear("turn") == [theirs, turn]
    assert own.look("turn") is None


def tensor_of(slot: int, turn: int) -> torch.Tensor:
    return torch.randn(3000, generator=torch.Generator().manual_seed(1000 * slot + turn))


@contextlib.contextmanager
def altered(proxy: Proxy, times: int):
    """Alter a byte so many times, at random places."""
    ended, draw = threading.Event(), random.Random(times)

    def run() -> None:
        for count in range(times):
            proxy.flip_after(draw.randrange(50_000))
            while proxy.flipped <= count:
                if ended.wait(0.01):
                    return
            if ended.wait(0.2):  # what is made anew shall get somewhere
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_altered_traffic_breaks_the_connection_and_nothing_arrives_altered_or_twice(good):
    turns = 80
    leader, follower = (Channel(*names, timeout=30.0) for names in (ROLES, ROLES[::-1]))
    with linked(leader, follower, (good["leader"], good["follower"])) as proxy:
        both(leader.open, follower.open)
        proxy.delay = 0.001
        with altered(proxy, 5):
            both(lambda: exchange(leader, turns, 0, 1), lambda: exchange(follower, turns, 1, 0))
        assert proxy.flipped > 1
        assert proxy.accepted > 1


def test_nothing_that_is_logged_shows_what_was_sent(good, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    canary = "canary-7315"
    tensor = torch.frombuffer(bytearray(canary.encode() * 400), dtype=torch.uint8)
    leader, follower = (Channel(*names, timeout=30.0) for names in (ROLES, ROLES[::-1]))
    with linked(leader, follower, (good["leader"], good["follower"])) as proxy:
        both(leader.open, follower.open)
        with altered(proxy, 3):
            for turn in range(60):
                leader.send(0, turn, tensor)
                leader.tell("word", canary)
                assert torch.equal(follower.receive(0, turn), tensor)
                assert follower.hear("word") == canary
        assert proxy.flipped > 0
    listening = Channel(*ROLES)
    with contextlib.closing(Listener(listening, "127.0.0.1:0", "follower")) as listener:
        frame = bytearray(encode_json(Kind.WORD, canary, session=1, topic=canary, checksum=True))
        frame[-3] ^= 1
        with pytest.raises(grpc.RpcError):
            list(knock(listener.endpoint, None, bytes(frame)))
        listening.close()
    assert "a frame was refused" in caplog.text
    captured = capfd.readouterr()
    for text in (caplog.text, captured.out, captured.err):
        assert "canary" not in text
        assert ", ".join(str(byte) for byte in canary.encode()[:4]) not in text
