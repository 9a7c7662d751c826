"""`Party`: who this process is, from the program, the environment, and the configuration."""

from __future__ import annotations

import pytest

from plait.errors import ConfigError
from plait.federal.settings import ROLES, VARIABLES, Party, other, split_endpoint

HERE = "127.0.0.1:50051"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in VARIABLES.values():
        monkeypatch.delenv(name, raising=False)


def test_a_leader_and_a_follower():
    leader = Party(role="leader", listen=HERE)
    follower = Party(role="follower", peer="leader.example:1")
    assert (leader.endpoint, leader.peer_role) == (HERE, "follower")
    assert (follower.endpoint, follower.peer_role) == ("leader.example:1", "leader")
    assert [other(role) for role in ROLES] == ["follower", "leader"]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"role": "boss", "listen": HERE}, "role='boss': write 'leader' or 'follower'"),
        ({"role": "leader"}, "listen=None and peer=None: give one of them"),
        ({"role": "leader", "listen": HERE, "peer": HERE}, "give one of them"),
        ({"role": "leader", "listen": "50051"}, "listen='50051': write HOST:PORT"),
        ({"role": "follower", "peer": "host:port"}, "peer='host:port': write HOST:PORT"),
        ({"role": "follower", "peer": "host:70000"}, "write HOST:PORT"),
        ({"role": "leader", "listen": HERE, "job": ""}, "job='': write a name"),
        ({"role": "leader", "listen": HERE, "job": "x" * 201}, "write a name"),
        ({"role": "leader", "listen": HERE, "timeout": 0}, "timeout"),
        ({"role": "leader", "listen": HERE, "window": 1.5}, "window"),
        ({"role": "leader", "listen": HERE, "wire_dtype": "fp8"}, "write None, 'fp16', 'bf16' or 'int8'"),
        ({"role": "leader", "listen": HERE, "staleness": 2}, "staleness=2: write 0 or 1"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_what_cannot_work_says_what_to_write(settings, match):
    with pytest.raises(ConfigError, match=match.replace("(", r"\(")):
        Party(**settings)


class TestWorkers:
    def test_each_pair_has_a_port_of_its_own(self):
        assert Party(role="leader", listen=HERE).of_worker(2).listen == "127.0.0.1:50053"
        assert Party(role="follower", peer=HERE).of_worker(2).peer == "127.0.0.1:50053"

    def test_the_first_has_the_port_itself_and_any_port_stays_any(self):
        party, anywhere = Party(role="leader", listen=HERE), Party(role="leader", listen="127.0.0.1:0")
        assert party.of_worker(0) is party
        assert anywhere.of_worker(3) is anywhere


class TestFinding:
    def test_what_the_program_says(self):
        assert Party.find({"role": "leader", "listen": HERE, "job": None}) == Party(role="leader", listen=HERE)

    def test_what_the_environment_says(self, monkeypatch):
        values = {"role": "follower", "peer": HERE, "job": "mine", "certs": "keys", "insecure": "1", "timeout": "2.5"}
        for name, value in values.items():
            monkeypatch.setenv(VARIABLES[name], value)
        wanted = Party(role="follower", peer=HERE, job="mine", certs="keys", insecure=True, timeout=2.5)
        assert Party.find() == wanted

    @pytest.mark.parametrize("text", ["0", "false", "No"])
    def test_not_insecure(self, monkeypatch, text):
        monkeypatch.setenv(VARIABLES["insecure"], text)
        assert Party.find({"role": "leader", "listen": HERE}).insecure is False

    def test_what_a_file_says(self, tmp_path):
        path = tmp_path / "run.toml"
        path.write_text(f'[federal]\nrole = "leader"\nlisten = "{HERE}"\njob = "file"\n')
        assert Party.find(config=path) == Party(role="leader", listen=HERE, job="file")

    def test_the_program_wins_over_the_environment_and_that_over_the_file(self, tmp_path, monkeypatch):
        path = tmp_path / "run.toml"
        path.write_text(f'[federal]\nrole = "leader"\nlisten = "{HERE}"\njob = "file"\ntimeout = 3.0\nwindow = 7\n')
        monkeypatch.setenv(VARIABLES["job"], "environment")
        monkeypatch.setenv(VARIABLES["timeout"], "4")
        found = Party.find({"timeout": 5.0}, path)
        assert (found.job, found.timeout, found.window) == ("environment", 5.0, 7)

    def test_a_program_that_dials_is_not_told_to_listen(self, tmp_path, monkeypatch):
        monkeypatch.setenv(VARIABLES["listen"], HERE)
        assert Party.find({"role": "follower", "peer": "there:1"}) == Party(role="follower", peer="there:1")

    @pytest.mark.parametrize(("name", "text"), [("timeout", "soon")])
    def test_an_environment_that_says_nonsense(self, monkeypatch, name, text):
        monkeypatch.setenv(VARIABLES[name], text)
        with pytest.raises(ConfigError, match=f"{VARIABLES[name]}='{text}': write seconds"):
            Party.find({"role": "leader", "listen": HERE})

    def test_nothing_says_who_this_is(self):
        with pytest.raises(ConfigError, match=r"plait party --role leader .* FederalModel\(role='leader', listen="):
            Party.find()

    def test_unknown_settings(self, tmp_path):
        with pytest.raises(ConfigError, match="FederalModel has unknown settings port: it takes role, listen"):
            Party.find({"port": 3})
        path = tmp_path / "run.toml"
        path.write_text("[federal]\nport = 3\n")
        with pytest.raises(ConfigError, match=r"\[federal\] of the configuration has unknown settings port"):
            Party.find(config=path)

    def test_a_file_without_a_table(self, tmp_path):
        path = tmp_path / "run.toml"
        path.write_text("federal = 3\n")
        with pytest.raises(ConfigError, match="write a table"):
            Party.find(config=path)


def test_endpoints():
    assert split_endpoint("peer", "[::1]:80") == ("[::1]", 80)
    assert split_endpoint("peer", "host:0") == ("host", 0)
    for wrong in ("host", ":80", "host:", "host:-1", "host:٣", None):
        with pytest.raises(ConfigError, match="write HOST:PORT"):
            split_endpoint("peer", wrong)
